"""Step counters: where they are, how a step counts, and how one that failed is taken back.

A counter is the tensor `state[param]["step"]`. It stays the same tensor, at the same address, until
it has to move: to the device, once the device decides whether a step counts, or back to the CPU, if
the backend changes to one that counts there.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from padam_ext import native
from padam_ext.buckets import Bucket, address_of
from padam_ext.gather import StepInputs
from padam_ext.rows import Steps


class StepCounts:
    """The counters of a bucket's tensors.

    Attributes:
        on_device: whether the device counts, by the prepare kernel.
        addresses: int64 [tensor], of the float32 numbers that kernels add to.
    """

    def __init__(self, bucket: Bucket, *, on_device: bool) -> None:
        """Takes the counters, which `place_counters` must have put where steps are counted."""
        self._bucket = bucket
        self.on_device = on_device
        self.addresses = array("q", [record.counter_address for record in bucket.records])
        # What kernels add to for counters that the user supplied in another dtype.
        self._stand_ins = {
            i: torch.zeros((), dtype=torch.float32, device=bucket.records[i].counter_device)
            for i, address in enumerate(self.addresses)
            if address == 0
        }
        for i, stand_in in self._stand_ins.items():
            self.addresses[i] = address_of(stand_in)

    def add(self, inputs: StepInputs) -> Steps:
        """Counts a step on the host; the number of this update, of all tensors or of each."""
        if native.module is None or self._stand_ins:
            counters = self._counters(inputs)
            torch._foreach_add_(counters, 1)
            each = [float(counter) for counter in counters]
            return each[0] if len(set(each)) == 1 else each
        values = array("f", native.module.add_to_steps(self.addresses, 1))
        return values[0] if len(values) == 1 else values.tolist()

    def load(self, inputs: StepInputs) -> None:
        """Before the device counts: copies counters that have stand-ins into them."""
        for i, stand_in in self._stand_ins.items():
            stand_in.copy_(self._bucket.counter(i, inputs).reshape(()))

    def store(self, inputs: StepInputs) -> None:
        """Copies the stand-ins back into those counters."""
        for i, stand_in in self._stand_ins.items():
            counter = self._bucket.counter(i, inputs)
            counter.copy_(stand_in.reshape(counter.shape))

    def take_back(self, inputs: StepInputs) -> None:
        """Undoes the host's count of a step that could not be made."""
        torch._foreach_sub_(self._counters(inputs), 1)

    def take_back_on_device(self, inputs: StepInputs, skip: Tensor) -> None:
        """Undoes the device's count. Counters with a stand-in were not yet changed."""
        for i, counter in enumerate(self._counters(inputs)):
            if i not in self._stand_ins:
                counter.sub_((1 - skip).to(torch.float32))

    def _counters(self, inputs: StepInputs) -> list[Tensor]:
        return [self._bucket.counter(i, inputs) for i in range(len(self._bucket.records))]


def place_counters(bucket: Bucket, inputs: StepInputs, *, on_device: bool) -> bool:
    """Moves all counters of a bucket to where steps are counted; returns whether any moved."""
    target = bucket.device if on_device else torch.device("cpu")
    moving = [i for i, record in enumerate(bucket.records) if record.counter_device != target]
    if not moving:
        return False
    counters = tuple(bucket.counter(i, inputs) for i in moving)
    if on_device:
        # One copy for all of them, of which each counter is a view.
        values = [counter.reshape(()).to(torch.float32) for counter in counters]
        if len({value.device for value in values}) > 1:
            values = [value.to(target) for value in values]
        counters = torch.stack(values).to(target).unbind()
    else:
        counters = tuple(counter.cpu() for counter in counters)
    for i, counter in zip(moving, counters, strict=True):
        inputs.state[inputs.params[bucket.positions[i]]]["step"] = counter
        bucket.records[i].take_counter(counter)
    return True
