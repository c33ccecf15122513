"""Step counters: where they are, how a step counts, and how one that failed is taken back.

A counter is the tensor `state[param]["step"]`. It stays the same tensor, at the same address, for
as long as the parameter has a state, but for one move: to the device, once the device has to decide
whether a step counts.
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
        addresses: int64 [tensor], of float32 counters; 0 for a counter that is none.
    """

    def __init__(self, bucket: Bucket, inputs: StepInputs, *, on_device: bool) -> None:
        """Finds the counters; `place_counters` has seen to it that they are in one place."""
        self._bucket = bucket
        self.on_device = on_device
        counters = [bucket.counter(i, inputs) for i in range(len(bucket.records))]
        direct = [counter.dtype == torch.float32 for counter in counters]
        self.addresses = array(
            "q",
            [address_of(c) if d else 0 for c, d in zip(counters, direct, strict=True)],
        )
        # Supplied by the user, in a dtype that kernels do not count in.
        self._others = not all(direct)

    def add(self, inputs: StepInputs) -> Steps:
        """Counts a step on the host; the number of this update, of all tensors or of each."""
        if native.module is None or self._others:
            counters = self._tensors(inputs)
            torch._foreach_add_(counters, 1)
            values = [float(counter) for counter in counters]
            return values[0] if len(set(values)) == 1 else values
        smallest, largest = native.module.add_to_steps(self.addresses, 1)
        if smallest == largest:
            return float(smallest)
        return [float(counter) for counter in self._tensors(inputs)]

    def take_back(self, inputs: StepInputs, amount: float | Tensor = 1) -> None:
        """Undoes that, for a step that could not be made: a device's amount is in a tensor."""
        counters = self._tensors(inputs)
        if isinstance(amount, Tensor):
            torch._foreach_sub_(counters, [amount.to(torch.float32)] * len(counters))
        else:
            torch._foreach_sub_(counters, amount)

    def _tensors(self, inputs: StepInputs) -> list[Tensor]:
        return [self._bucket.counter(i, inputs) for i in range(len(self._bucket.records))]


def place_counters(bucket: Bucket, inputs: StepInputs, *, on_device: bool) -> bool:
    """Has all counters of a bucket where steps are counted; whether any had to move.

    Counters on the device stay there if its kernels can count at all.
    """
    params = [inputs.params[position] for position in bucket.positions]
    states = [inputs.state[param] for param in params]
    target = bucket.device if on_device else torch.device("cpu")
    moving = [state for state in states if not _is_at(state["step"], target, on_device)]
    if not moving:
        return False
    if on_device:
        # One copy for all of them, of which each counter is a view.
        values = [state["step"].reshape(()).to(torch.float32) for state in moving]
        if len({value.device for value in values}) > 1:
            values = [value.to(target) for value in values]
        counters = torch.stack(values).to(target).unbind()
    else:
        counters = tuple(state["step"].cpu() for state in moving)
    for state, counter in zip(moving, counters, strict=True):
        state["step"] = counter
    return True


def _is_at(counter: Tensor, target: torch.device, on_device: bool) -> bool:
    return counter.device == target and (counter.dtype == torch.float32 or not on_device)
