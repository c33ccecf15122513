"""The eager backend: reference.py's foreach form on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from padam_ext.constants import Control
from padam_ext.gather import Live
from padam_ext.grouping import Bucket
from padam_ext.hyperparameters import Hyperparameters
from padam_ext.reference import padam_step_foreach


class EagerStep:
    """The step of one bucket, group after group."""

    def __init__(self, bucket: Bucket) -> None:
        """Notes which tensors belong to which group."""
        self._bucket = bucket
        self._members: dict[int, list[int]] = {}
        self._grads: list[Tensor] = []
        for i, (group, param) in enumerate(zip(bucket.group_indices, bucket.params, strict=True)):
            if param.numel() > 0:
                self._members.setdefault(group, []).append(i)

    def take_grads(self, live: Live) -> None:
        """Takes over this step's gradients."""
        self._grads = [self._bucket.gradient(i, live) for i in range(len(self._bucket.params))]

    def sum_of_squares(self) -> Tensor:
        """The sum of all gradients' squares, float64 of one element."""
        # In float32 torch loses digits of long sums, on the CPU a percent of a large one.
        norms = torch._foreach_norm(self._grads, 2, dtype=torch.float64)
        return torch.stack(list(norms)).square().sum()

    def step(self, options: Sequence[Hyperparameters], control: Control) -> None:
        """Steps every tensor of the bucket. The host waits for what only the device knows."""
        bucket, grads = self._bucket, self._grads
        options = [group.on_host() for group in options]
        self._grads = []
        if control.skip != 0:
            return
        factor = control.grad_factor
        if isinstance(factor, Tensor):
            factor = factor.to(bucket.device, bucket.exp_avgs[0].dtype)
        torch._foreach_add_(bucket.steps, 1)
        bucket.load_staged()
        for group, members in self._members.items():
            amsgrad = options[group].amsgrad
            maxima = [h for i in members if (h := bucket.max_exp_avg_sqs[i]) is not None]
            padam_step_foreach(
                [bucket.params[i] for i in members],
                [grads[i] for i in members],
                [bucket.exp_avgs[i] for i in members],
                [bucket.exp_avg_sqs[i] for i in members],
                maxima if amsgrad else None,
                [bucket.steps[i].item() for i in members],
                options[group],
                factor,
            )
        bucket.store_staged()
