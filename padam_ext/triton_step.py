"""The triton backend: all tensors of a bucket in one launch of kernels/multi_tensor_padam.py."""

from __future__ import annotations

import os
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from padam_ext.device_step import DeviceStep, Kernels, Trial
from padam_ext.device_table import DeviceTable
from padam_ext.grouping import PARAM_DTYPES, Bucket
from padam_ext.launch_table import LaunchTable

DEVICE_TYPES = frozenset({"cuda", "xpu"})  # torch calls ROCm's devices cuda, too
_OLDEST = (3, 5)


def make_step(bucket: Bucket) -> DeviceStep:
    """The fused step of one bucket."""
    # Imported here, since `import padam_ext` must not need Triton.
    from padam_ext.kernels.chunks import block_of

    block = block_of(bucket.exp_avgs[0].dtype)
    return DeviceStep(bucket, Kernels(block, _launch_step, _launch_norm))


def _launch_step(device_table: DeviceTable, table: LaunchTable) -> None:
    from padam_ext.kernels import multi_tensor_padam

    multi_tensor_padam.launch(
        device_table,
        PARAM_DTYPES[table.param_dtype],
        PARAM_DTYPES[table.grad_dtype],
        table.rows.root,
    )


def _launch_norm(device_table: DeviceTable, table: LaunchTable) -> None:
    from padam_ext.kernels import multi_tensor_norm

    multi_tensor_norm.launch(device_table, PARAM_DTYPES[table.grad_dtype])


def takes() -> frozenset[str]:
    """Types of devices whose tensors it can take: interpreted, only memory that the CPU reads."""
    return frozenset({"cpu"}) if _interpreted() else DEVICE_TYPES


def unavailable_reason() -> str | None:
    """Why it cannot run on this machine, and what to do; None if it can."""
    if (problem := _installation_problem()) is not None:
        return problem
    if _interpreted() or torch.cuda.is_available() or torch.xpu.is_available():
        return None
    return "torch sees no GPU here (for tests, TRITON_INTERPRET=1 runs the kernel on the CPU)"


# A step fails, for instance, where Triton finds no C compiler.
_trial = Trial("Triton", make_step)
broken_reason = _trial.broken_reason


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
