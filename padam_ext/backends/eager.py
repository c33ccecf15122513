"""The eager backend: reference.py's foreach form on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from padam_ext.backends.step import BucketStep, Options
from padam_ext.buckets import GRAD, Bound, Bucket
from padam_ext.reference import padam_step_foreach
from padam_ext.slots import SLOTS
from padam_ext.step_control import StepControl
from padam_ext.step_counts import StepCounts


class EagerStep(BucketStep):
    """The step of one bucket, group after group."""

    def __init__(self, bucket: Bucket, counts: StepCounts) -> None:
        """Notes which tensors belong to which group."""
        super().__init__(bucket, counts)
        self._members: dict[int, list[int]] = {}
        for i, (group, record) in enumerate(zip(bucket.group_indices, bucket.records, strict=True)):
            if record.numel > 0:
                self._members.setdefault(group, []).append(i)

    def sum_of_squares(self, bound: Bound) -> Tensor:
        """The sum of all gradients' squares, float64 of one element."""
        grads = [bound.tensor(GRAD, i) for i in range(len(self.bucket.records))]
        # In float32 torch loses digits of long sums, on the CPU a percent of a large one.
        norms = torch._foreach_norm(grads, 2, dtype=torch.float64)
        return torch.stack(list(norms)).square().sum().reshape(1)

    def step(self, bound: Bound, options: Options, control: StepControl) -> None:
        """Steps every tensor of the bucket. The host waits for what only the device knows."""
        if control.on_host().skip != 0:
            return
        factor = control.as_tensors().grad_factor
        if isinstance(factor, Tensor):
            factor = factor.to(self.bucket.device, self.bucket.signature.compute_dtype)
        steps = self._counts.add(bound.inputs)
        try:
            bound.load()
            for group, members in self._members.items():
                columns = {
                    f"{name}s": [bound.tensor(slot, i) for i in members]
                    for slot, name in enumerate(SLOTS)
                    if self.bucket.signature.dtypes[slot] is not None
                }
                padam_step_foreach(
                    **columns,
                    steps=[steps[i] if isinstance(steps, list) else steps for i in members],
                    options=options[group].on_host(),
                    grad_factor=factor,
                )
        except BaseException:
            self._counts.take_back(bound.inputs)
            raise
        bound.store()
