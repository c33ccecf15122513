"""The cuda backend: all tensors of a bucket in one launch of csrc/padam_cuda.cu."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from padam_ext import native, runtime
from padam_ext.backends.device import DeviceStep, Kernels
from padam_ext.backends.device_table import DeviceTable
from padam_ext.buckets import Bucket
from padam_ext.control import PrepareInputs
from padam_ext.slots import dtype_code
from padam_ext.step_counts import StepCounts

DEVICE_TYPES = frozenset({"cuda"})


def make_step(bucket: Bucket, counts: StepCounts) -> DeviceStep:
    """The fused step of one bucket."""
    block = native.module.block_of(dtype_code(bucket.signature.compute_dtype))
    return DeviceStep(bucket, counts, Kernels(block, _launch_norm, _launch_prepare, _launch_step))


def _launch_norm(table: DeviceTable) -> None:
    native.module.sum_of_squares_cuda(native_table(table), *_place(table))


def _launch_prepare(table: DeviceTable, inputs: PrepareInputs) -> None:
    native.module.prepare_cuda(native_table(table), native_inputs(inputs), *_place(table))


def _launch_step(table: DeviceTable, root: int) -> None:  # each row says its root itself
    native.module.step_cuda(native_table(table), *_place(table))


def _place(table: DeviceTable) -> tuple[int, int]:
    """The device's index and its current stream."""
    device = table.addresses.device
    return device.index, torch.cuda.current_stream(device).cuda_stream


def native_table(table: DeviceTable) -> Any:
    """The table as csrc/device_table.h has it: addresses in the device's memory."""
    slot_dtypes, compute_dtype = table.signature.codes
    return native.module.DeviceTable(
        addresses=table.addresses.data_ptr(),
        numels=table.numels.data_ptr(),
        salts=table.salts.data_ptr(),
        rows=table.rows.data_ptr(),
        constants=table.constants.data_ptr(),
        control=table.control.data_ptr(),
        limits=table.limits.data_ptr(),
        prepared_control=table.prepared_control.data_ptr(),
        row_sources=table.row_sources.data_ptr(),
        counters=table.counters.data_ptr(),
        chunk_tensors=table.chunk_tensors.data_ptr(),
        chunk_first_blocks=table.chunk_first_blocks.data_ptr(),
        num_tensors=len(table.numels),
        num_chunks=table.num_chunks,
        blocks_per_chunk=table.blocks_per_chunk,
        partial_sums=_address(table.partial_sums),
        num_late_rows=table.num_late_rows,
        counts_on_device=table.counts_on_device,
        slot_dtypes=slot_dtypes,
        compute_dtype=compute_dtype,
    )


def native_inputs(inputs: PrepareInputs) -> Any:
    """What the prepare kernel reads and writes, as csrc/prepare.h has it."""
    return native.module.PrepareInputs(
        sums=_address(inputs.sums),
        num_sums=0 if inputs.sums is None else len(inputs.sums),
        grad_scale=_address(inputs.grad_scale),
        grad_scale_is_double=_is_double(inputs.grad_scale),
        found_inf=_address(inputs.found_inf),
        found_inf_is_double=_is_double(inputs.found_inf),
        norm=_address(inputs.norm),
        norm_is_double=_is_double(inputs.norm),
        skipped=_address(inputs.skipped),
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _is_double(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype == torch.float64


def unavailable_reason() -> str | None:
    """Why it cannot run on this machine, and what to do; None if it can."""
    # What is wrong with torch comes first: to build this package anew would not help.
    if torch.version.hip is not None:
        return "it is for NVIDIA's GPUs, and this torch is for AMD's"
    if torch.version.cuda is None:
        return runtime.cpu_only_reason() or "this torch is not for CUDA"
    if native.module is None:
        return native.unavailable_reason
    if not hasattr(native.module, "step_cuda"):
        return (
            "the native module was not built with CUDA; reinstall padam_ext with "
            "PADAM_EXT_BUILD=cuda, which says what is missing"
        )
    return None if torch.cuda.is_available() else "torch sees no NVIDIA GPU here"
