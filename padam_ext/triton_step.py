"""The triton backend: all tensors of a bucket in one launch of kernels/multi_tensor_padam.py."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch.utils._python_dispatch import _disable_current_modes

from padam_ext.device_table import DeviceTable
from padam_ext.gather import Live
from padam_ext.grouping import Bucket
from padam_ext.hyperparameters import Hyperparameters
from padam_ext.launch_table import LaunchTable

DEVICE_TYPES = frozenset({"cuda", "xpu"})  # torch calls ROCm's devices cuda, too
_OLDEST = (3, 5)


class TritonStep:
    """The fused step of one bucket on its device."""

    def __init__(self, bucket: Bucket) -> None:
        """Makes the launch table and its copy on the device."""
        # Imported here, since `import padam_ext` must not need Triton.
        from padam_ext.kernels import multi_tensor_padam

        self._launch = multi_tensor_padam.launch
        self._bucket = bucket
        self._table = LaunchTable(bucket)
        moment_dtype = bucket.exp_avgs[0].dtype
        self._device_table = DeviceTable(
            self._table,
            bucket.device,
            moment_dtype,
            multi_tensor_padam.block_of(moment_dtype),
            _num_processors(bucket.device),
        )

    def __call__(self, live: Live, options: Sequence[Hyperparameters]) -> None:
        """Steps every tensor of the bucket with this step's gradients and options."""
        bucket, table = self._bucket, self._table
        with _on(bucket.device):
            copies = table.update(bucket, live, options)  # held until the kernel is in the queue
            self._device_table.update(table)
            bucket.load_staged()
            self._launch(self._device_table, bucket.param_dtype, bucket.grad_dtype, table.root)
            del copies
            bucket.store_staged()


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


def broken_reason(device: torch.device) -> str | None:
    """Why a small step fails on a device, as it does where Triton finds no C compiler."""
    if device in _works_on:
        return None
    try:
        with _disable_current_modes():  # a real step, whatever is being traced or faked
            moved = _trial_step(device)
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        return f"Triton fails on {device} with {type(error).__name__}: {first_line}"
    if not moved:
        return f"Triton computes something else than Padam on {device}"
    _works_on.add(device)
    return None


_works_on: set[torch.device] = set()


def _trial_step(device: torch.device) -> bool:
    param, grad, m, v, h = (
        torch.ones(1, dtype=torch.float32, device=device) for _ in range(5)
    )  # fmt: skip
    bucket = Bucket(device, torch.float32, torch.float32, [0], [0], [param])
    bucket.exp_avgs, bucket.exp_avg_sqs, bucket.max_exp_avg_sqs = [m], [v], [h]
    bucket.steps = [torch.tensor(0.0, dtype=torch.float32, device="cpu")]
    options = Hyperparameters(0.1, 0.9, 0.999, 1e-8, 0.0, 0.125, True, "none", False, False)
    TritonStep(bucket)(Live([param], [grad], [0]), [options])
    return bool(param.item() < 1)


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


def _num_processors(device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    properties = torch.get_device_module(device).get_device_properties(device)
    for name in ("multi_processor_count", "gpu_subslice_count"):  # CUDA and ROCm; XPU
        if hasattr(properties, name):
            return int(getattr(properties, name))
    return 64


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device the current one, since Triton launches there."""
    if device.type == "cpu":
        return nullcontext()
    guard: AbstractContextManager[object] = torch.get_device_module(device).device(device)
    return guard
