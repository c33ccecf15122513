"""The eager backend: reference.py's foreach form on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from padam_ext import codecs, runtime
from padam_ext.backends.step import BucketStep, Options
from padam_ext.buckets import GRAD, Bound, Bucket
from padam_ext.layout import in_memory_order
from padam_ext.random_bits import Draws, draw, step_key
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
        """The sum of all gradients' squares, of one element."""
        grads = [bound.tensor(GRAD, i) for i in range(len(self.bucket.records))]
        # In float32 torch loses digits of long sums, on the CPU a percent of a large one.
        norms = torch._foreach_norm(grads, 2, dtype=runtime.widest_float(self.bucket.device))
        return torch.stack(list(norms)).square().sum().reshape(1)

    def step(self, bound: Bound, options: Options, control: StepControl) -> None:
        """Steps every tensor of the bucket. The host waits for what only the device knows."""
        if control.on_host().skip != 0:
            return
        factor = control.as_tensors().grad_factor
        if isinstance(factor, Tensor):
            factor = factor.to(self.bucket.device, self.bucket.signature.compute_dtype)
        signature = self.bucket.signature
        steps = self._counts.add(bound.inputs)
        try:
            bound.load()
            for group, members in self._members.items():
                its_steps = [steps[i] if isinstance(steps, list) else steps for i in members]
                stored = [self._stored(bound, i) for i in members]
                values = [codecs.decode(one, signature) for one in stored]
                padam_step_foreach(
                    **{f"{name}s": [one[name] for one in values] for name in values[0]},
                    steps=its_steps,
                    options=options[group].on_host(),
                    grad_factor=factor,
                    packed_maximum=signature.has("packed_mvh"),
                )
                for i, step, its_slots, its_values in zip(
                    members, its_steps, stored, values, strict=True
                ):
                    draws = self._draw(i, step, options[group].seed)
                    codecs.encode(its_slots, its_values, signature, draws)
        except BaseException:
            self._counts.take_back(bound.inputs)
            raise
        bound.store()

    def _stored(self, bound: Bound, index: int) -> dict[str, Tensor]:
        """The tensors of one parameter by slot, as kernels walk them where random numbers are."""
        signature = self.bucket.signature
        tensors = {
            name: bound.tensor(slot, index)
            for slot, name in enumerate(SLOTS)
            if signature.dtypes[slot] is not None
        }
        if not signature.draws:
            return tensors
        return {name: in_memory_order(tensor) for name, tensor in tensors.items()}

    def _draw(self, index: int, step: float, seed: int) -> Draws | None:
        """A parameter's random numbers in a step."""
        if not self.bucket.signature.draws:
            return None
        record = self.bucket.records[index]
        return draw(record.numel, step_key(seed, record.salt, int(step)), self.bucket.device)
