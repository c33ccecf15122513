"""The cpu backend: the native module's fused step over one launch table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from padam_ext import native
from padam_ext.constants import Control
from padam_ext.gather import Live
from padam_ext.grouping import Bucket
from padam_ext.hyperparameters import Hyperparameters
from padam_ext.launch_table import LaunchTable


class CpuStep:
    """The fused step of one bucket on the CPU: all its tensors in one call."""

    def __init__(self, bucket: Bucket) -> None:
        """Builds the bucket's launch table."""
        self._bucket = bucket
        self._table = LaunchTable(bucket)
        self._simd_level = native.simd_level()
        self._copies: list[Tensor] = []

    def take_grads(self, live: Live) -> None:
        """Takes over this step's gradients."""
        self._copies = self._table.take_grads(self._bucket, live)

    def sum_of_squares(self) -> Tensor:
        """The sum of all gradients' squares, float64 of one element."""
        table = self._table
        total = native.module.sum_of_squares_cpu(
            addresses=table.addresses,
            numels=table.numels,
            grad_dtype=table.grad_dtype,
            num_threads=torch.get_num_threads(),
            simd_level=self._simd_level,
        )
        return torch.tensor(total, dtype=torch.float64, device="cpu")

    def step(self, options: Sequence[Hyperparameters], control: Control) -> None:
        """Steps every tensor of the bucket, unless the step is to be skipped."""
        bucket, table = self._bucket, self._table
        control = control.on_host()
        if control.skip != 0:
            self._copies = []
            return
        table.update(bucket, [group.on_host() for group in options], control)
        bucket.load_staged()
        native.module.step_cpu(
            addresses=table.addresses,
            numels=table.numels,
            rows=table.rows.of_tensors,
            constants=table.rows.constants,
            param_dtype=table.param_dtype,
            grad_dtype=table.grad_dtype,
            num_threads=torch.get_num_threads(),
            simd_level=self._simd_level,
        )
        self._copies = []
        bucket.store_staged()
