"""The cpu backend: the native module's fused step over one launch table."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from padam_ext import native
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

    def __call__(self, live: Live, options: Sequence[Hyperparameters]) -> None:
        """Steps every tensor of the bucket with this step's gradients and options."""
        bucket, table = self._bucket, self._table
        copies = table.update(bucket, live, options)  # held until the kernel has run
        bucket.load_staged()
        native.module.step_cpu(
            addresses=table.addresses,
            numels=table.numels,
            rows=table.rows,
            constants=table.constants,
            param_dtype=table.param_dtype,
            grad_dtype=table.grad_dtype,
            num_threads=torch.get_num_threads(),
            simd_level=self._simd_level,
        )
        del copies
        bucket.store_staged()
