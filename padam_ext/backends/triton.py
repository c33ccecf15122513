"""The triton backend: all tensors of a bucket in one launch of kernels/multi_tensor_padam.py."""

from __future__ import annotations

import os
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from padam_ext import runtime
from padam_ext.backends.device import DeviceStep, Kernels
from padam_ext.backends.device_table import DeviceTable
from padam_ext.buckets import Bucket
from padam_ext.control import PrepareInputs
from padam_ext.step_counts import StepCounts

DEVICE_TYPES = frozenset({"cuda", "xpu"})  # torch calls ROCm's devices cuda, too
_OLDEST = (3, 5)


def make_step(bucket: Bucket, counts: StepCounts) -> DeviceStep:
    """The fused step of one bucket."""
    # Imported here, since `import padam_ext` must not need Triton.
    from padam_ext.kernels.chunks import block_of

    block = block_of(bucket.signature.compute_dtype)
    return DeviceStep(bucket, counts, Kernels(block, _launch_norm, _launch_prepare, _launch_step))


def _launch_norm(table: DeviceTable) -> None:
    from padam_ext.kernels import multi_tensor_norm

    multi_tensor_norm.launch(table, table.signature)


def _launch_prepare(table: DeviceTable, inputs: PrepareInputs) -> None:
    from padam_ext.kernels import prepare_step

    prepare_step.launch(table, inputs)


def _launch_step(table: DeviceTable, root: int) -> None:
    from padam_ext.kernels import multi_tensor_padam

    multi_tensor_padam.launch(table, table.signature, root)


def takes() -> frozenset[str]:
    """Types of devices whose tensors it can take; only the CPU under TRITON_INTERPRET."""
    return frozenset({"cpu"}) if _interpreted() else DEVICE_TYPES


def unavailable_reason() -> str | None:
    """Why it cannot run on this machine, and what to do; None if it can."""
    if not _interpreted() and (problem := runtime.cpu_only_reason()) is not None:
        return problem
    if (problem := _installation_problem()) is not None:
        return problem
    if _interpreted() or torch.cuda.is_available() or torch.xpu.is_available():
        return None
    return "torch sees no GPU here (for tests, TRITON_INTERPRET=1 runs the kernel on the CPU)"


@cache
def _installation_problem() -> str | None:
    try:
        missing = find_spec("triton") is None
    except ValueError:  # a stand-in that some library has put in its place
        missing = True
    if missing:
        return "Triton is not installed; pip install triton"
    try:
        found = re.match(r"(\d+)\.(\d+)", version("triton"))
    except PackageNotFoundError:  # a build of another name, which came with torch
        return None
    if found and (int(found[1]), int(found[2])) < _OLDEST:
        return f"it needs Triton {_OLDEST[0]}.{_OLDEST[1]} or later; pip install -U triton"
    return None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
