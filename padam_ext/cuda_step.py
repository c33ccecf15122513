"""The cuda backend: all tensors of a bucket in one launch of csrc/padam_cuda.cu."""

from __future__ import annotations

from typing import Any

import torch

from padam_ext import native
from padam_ext.device_step import DeviceStep, Kernels, Trial
from padam_ext.device_table import DeviceTable
from padam_ext.grouping import PARAM_DTYPES, Bucket
from padam_ext.launch_table import LaunchTable

DEVICE_TYPES = frozenset({"cuda"})


def make_step(bucket: Bucket) -> DeviceStep:
    """The fused step of one bucket."""
    block = native.module.block_of(PARAM_DTYPES.index(bucket.param_dtype))
    return DeviceStep(bucket, Kernels(block, _launch_step, _launch_norm))


def _launch_step(device_table: DeviceTable, table: LaunchTable) -> None:
    native.module.step_cuda(native_table(device_table, table), *_place(device_table))


def _launch_norm(device_table: DeviceTable, table: LaunchTable) -> None:
    native.module.sum_of_squares_cuda(native_table(device_table, table), *_place(device_table))


def _place(device_table: DeviceTable) -> tuple[int, int]:
    """The device's index and its current stream."""
    device = device_table.addresses.device
    return device.index, torch.cuda.current_stream(device).cuda_stream


def native_table(device_table: DeviceTable, table: LaunchTable) -> Any:
    """The table as csrc/device_table.h has it: addresses in the device's memory."""
    return native.module.DeviceTable(
        addresses=device_table.addresses.data_ptr(),
        numels=device_table.numels.data_ptr(),
        rows=device_table.rows.data_ptr(),
        constants=device_table.constants.data_ptr(),
        chunk_tensors=device_table.chunk_tensors.data_ptr(),
        chunk_first_blocks=device_table.chunk_first_blocks.data_ptr(),
        num_tensors=len(device_table.numels),
        num_chunks=device_table.num_chunks,
        blocks_per_chunk=device_table.blocks_per_chunk,
        partial_sums=0
        if device_table.partial_sums is None
        else device_table.partial_sums.data_ptr(),
        param_dtype=table.param_dtype,
        grad_dtype=table.grad_dtype,
    )


def unavailable_reason() -> str | None:
    """Why it cannot run on this machine, and what to do; None if it can."""
    if not hasattr(native.module, "step_cuda"):
        return (
            "the native module was not built with CUDA; reinstall padam_ext with "
            "PADAM_EXT_BUILD=cuda, which says what is missing"
        )
    if torch.version.hip is not None:
        return "it is for NVIDIA's GPUs, and this torch is for AMD's"
    if torch.version.cuda is None:
        return "this torch is for the CPU only"
    return None if torch.cuda.is_available() else "torch sees no NVIDIA GPU here"


# A step fails, for instance, on a GPU whose architecture was not compiled in, or where the driver
# is too old for the CUDA toolkit that the module was built with.
_trial = Trial("the CUDA kernel", make_step)
broken_reason = _trial.broken_reason
