"""The cpu backend: the native module's fused step over one launch table."""

from __future__ import annotations

import torch
from torch import Tensor

from padam_ext import native
from padam_ext.backends.step import BucketStep, Options
from padam_ext.buckets import GRAD, Bound, Bucket
from padam_ext.constants import RowOptions
from padam_ext.launch_table import LaunchTable
from padam_ext.slots import dtype_code
from padam_ext.step_control import StepControl
from padam_ext.step_counts import StepCounts


class CpuStep(BucketStep):
    """The fused step of one bucket on the CPU: all its tensors in one call."""

    def __init__(self, bucket: Bucket, counts: StepCounts) -> None:
        """Builds the bucket's launch table."""
        super().__init__(bucket, counts)
        self._table = LaunchTable(bucket)
        self._simd_level = native.simd_level()

    def bind(self, bound: Bound) -> None:
        """Takes over the addresses of this step."""
        self._table.bind(bound)

    def sum_of_squares(self, bound: Bound) -> Tensor:
        """The sum of all gradients' squares, float64 of one element."""
        table = self._table
        total = native.module.sum_of_squares_cpu(
            addresses=table.addresses,
            numels=table.numels,
            grad_dtype=dtype_code(self.bucket.signature.dtypes[GRAD]),
            num_threads=torch.get_num_threads(),
            simd_level=self._simd_level,
        )
        return torch.tensor([total], dtype=torch.float64, device="cpu")

    def step(self, bound: Bound, options: Options, control: StepControl) -> None:
        """Steps every tensor of the bucket, unless the step is to be skipped."""
        grad_factor, skip = control.on_host()
        if skip != 0:
            return
        table = self._table
        on_host = {i: RowOptions.of(group.on_host()) for i, group in options.items()}
        slot_dtypes, compute_dtype = self.bucket.signature.codes
        steps = self._counts.add(bound.inputs)
        try:
            table.rows.set(on_host, steps)
            bound.load()
            native.module.step_cpu(
                addresses=table.addresses,
                numels=table.numels,
                salts=table.salts,
                rows=table.rows.of_tensors,
                constants=table.rows.constants,
                slot_dtypes=slot_dtypes,
                compute_dtype=compute_dtype,
                grad_factor=grad_factor,
                num_threads=torch.get_num_threads(),
                simd_level=self._simd_level,
            )
        except BaseException:
            self._counts.take_back(bound.inputs)
            raise
        bound.store()
