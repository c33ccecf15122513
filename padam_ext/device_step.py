"""The step of a bucket on a device: launch table, its copy there, one launch.

What the backends for devices share; each brings the function that launches its kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes

from padam_ext.device_table import DeviceTable
from padam_ext.gather import Live
from padam_ext.grouping import Bucket
from padam_ext.hyperparameters import Hyperparameters
from padam_ext.launch_table import LaunchTable

# Puts the step of a whole table into the current stream of the current device.
Launch = Callable[[DeviceTable, LaunchTable], None]


class DeviceStep:
    """The fused step of one bucket on its device."""

    def __init__(self, bucket: Bucket, block: int, launch: Launch) -> None:
        """Makes the launch table and its copy on the device.

        Args:
            bucket: what to step.
            block: elements that a program of the kernel steps at a time.
            launch: launches the kernel.
        """
        self._launch = launch
        self._bucket = bucket
        self._table = LaunchTable(bucket)
        self._device_table = DeviceTable(
            self._table,
            bucket.device,
            bucket.exp_avgs[0].dtype,
            block,
            _num_processors(bucket.device),
        )

    def __call__(self, live: Live, options: Sequence[Hyperparameters]) -> None:
        """Steps every tensor of the bucket with this step's gradients and options."""
        bucket, table = self._bucket, self._table
        with _on(bucket.device):
            copies = table.update(bucket, live, options)  # held until the kernel is in the queue
            try:
                self._device_table.update(table)
                bucket.load_staged()
                if self._device_table.num_chunks > 0:  # else all tensors are empty
                    self._launch(self._device_table, table)
            except BaseException:
                table.take_back_step(bucket)
                raise
            del copies
            bucket.store_staged()


class Trial:
    """Finds out whether a backend's step works on a device; if so, once and for all."""

    def __init__(self, name: str, make_step: Callable[[Bucket], DeviceStep]) -> None:
        """Takes the backend's name, for messages, and the function that makes its steps."""
        self._name = name
        self._make_step = make_step
        self._works_on: set[torch.device] = set()

    def broken_reason(self, device: torch.device) -> str | None:
        """Why a small step fails on a device; None if it works."""
        if device in self._works_on:
            return None
        try:
            with _disable_current_modes():  # a real step, whatever is being traced or faked
                moved = self._step_moves(device)
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            return f"{self._name} fails on {device} with {type(error).__name__}: {first_line}"
        if not moved:
            return f"{self._name} computes something else than Padam on {device}"
        self._works_on.add(device)
        return None

    def _step_moves(self, device: torch.device) -> bool:
        param, grad, m, v, h = (
            torch.ones(1, dtype=torch.float32, device=device) for _ in range(5)
        )  # fmt: skip
        bucket = Bucket(device, torch.float32, torch.float32, [0], [0], [param])
        bucket.exp_avgs, bucket.exp_avg_sqs, bucket.max_exp_avg_sqs = [m], [v], [h]
        bucket.steps = [torch.tensor(0.0, dtype=torch.float32, device="cpu")]
        options = Hyperparameters(0.1, 0.9, 0.999, 1e-8, 0.0, 0.125, True, "none", False, False)
        self._make_step(bucket)(Live([param], [grad], [0]), [options])
        return bool(param.item() < 1)


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
