"""The step of a bucket on a device: launch table, its copy there, one launch.

What the backends for devices share; each brings the function that launches its kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from padam_ext.constants import NO_CONTROL, Control
from padam_ext.device_table import DeviceTable, capturing
from padam_ext.gather import Live
from padam_ext.grouping import Bucket
from padam_ext.hyperparameters import Hyperparameters
from padam_ext.launch_table import LaunchTable

# Puts work on a whole table into the current stream of the current device.
Launch = Callable[[DeviceTable, LaunchTable], None]


class Kernels(NamedTuple):
    """What a backend brings."""

    block: int  # elements that a program steps at a time
    step: Launch
    sum_of_squares: Launch  # of each chunk's gradient, into the table's partial_sums


class DeviceStep:
    """The fused step of one bucket on its device."""

    def __init__(self, bucket: Bucket, kernels: Kernels) -> None:
        """Makes the launch table and its copy on the device."""
        self._kernels = kernels
        self._bucket = bucket
        self._copies: list[Tensor] = []
        self._table = LaunchTable(bucket)
        self._device_table = DeviceTable(
            self._table,
            bucket.device,
            bucket.exp_avgs[0].dtype,
            kernels.block,
            _num_processors(bucket.device),
        )

    def prepare_capture(self) -> None:
        """Gets ready for a step that goes into a CUDA graph."""
        self._device_table.prepare_capture()

    def take_grads(self, live: Live) -> None:
        """Takes over this step's gradients."""
        with _on(self._bucket.device):
            self._device_table.begin_step()
            self._copies = self._table.take_grads(self._bucket, live)

    def sum_of_squares(self) -> Tensor:
        """The sum of all gradients' squares, float64 of one element on the device."""
        with _on(self._bucket.device):
            partial_sums = self._device_table.make_partial_sums()
            self._device_table.update_addresses(self._table)
            if self._device_table.num_chunks > 0:
                self._kernels.sum_of_squares(self._device_table, self._table)
            return partial_sums.sum(dtype=torch.float64)

    def step(self, options: Sequence[Hyperparameters], control: Control) -> None:
        """Steps every tensor of the bucket."""
        bucket, table = self._bucket, self._table
        with _on(bucket.device):
            control = Control(*(_to(value, bucket.device) for value in control))
            table.update(bucket, [_options_on(bucket.device, group) for group in options], control)
            try:
                self._device_table.update(table)
                bucket.load_staged()
                if self._device_table.num_chunks > 0:  # else all tensors are empty
                    self._kernels.step(self._device_table, table)
            except BaseException:
                table.take_back_step(bucket, control)
                raise
            self._copies = []  # of no use any more, now that the kernel is in the queue
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
        step = self._make_step(bucket)
        step.take_grads(Live([param], [grad], [0]))
        step.step([options], NO_CONTROL)
        return bool(param.item() < 1)


def _num_processors(device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    properties = torch.get_device_module(device).get_device_properties(device)
    for name in ("multi_processor_count", "gpu_subslice_count"):  # CUDA and ROCm; XPU
        if hasattr(properties, name):
            return int(getattr(properties, name))
    return 64


def _to(value: float | Tensor, device: torch.device) -> float | Tensor:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def _options_on(device: torch.device, options: Hyperparameters) -> Hyperparameters:
    if capturing():
        for name, value in (("lr", options.lr), ("weight_decay", options.weight_decay)):
            if isinstance(value, Tensor) and value.device != device:
                raise RuntimeError(
                    f"{name} is a tensor on {value.device}, which a CUDA graph on {device} cannot "
                    f"read anew: make it one on {device}"
                )
    return options.to(device)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device the current one, since Triton launches there."""
    if device.type == "cpu":
        return nullcontext()
    guard: AbstractContextManager[object] = torch.get_device_module(device).device(device)
    return guard
