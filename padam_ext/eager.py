"""The eager backend: reference.py's foreach form on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
        for i, (group, param) in enumerate(zip(bucket.group_indices, bucket.params, strict=True)):
            if param.numel() > 0:
                self._members.setdefault(group, []).append(i)

    def __call__(self, live: Live, options: Sequence[Hyperparameters]) -> None:
        """Steps every tensor of the bucket with this step's gradients and options."""
        bucket = self._bucket
        grads = [bucket.gradient(i, live) for i in range(len(bucket.params))]
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
            )
        bucket.store_staged()
