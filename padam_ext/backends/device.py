"""The step of a bucket on a device: launch table, one copy of it, up to three launches.

What the backends for devices share; each brings the functions that launch its kernels.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from padam_ext import runtime
from padam_ext.backends.device_table import DeviceTable
from padam_ext.backends.step import BucketStep, Options
from padam_ext.buckets import Bound, Bucket
from padam_ext.constants import UNKNOWN_STEP, RowOptions
from padam_ext.control import ControlInputs, PrepareInputs
from padam_ext.launch_table import LaunchTable
from padam_ext.options import Hyperparameters
from padam_ext.rows import Steps
from padam_ext.step_control import StepControl
from padam_ext.step_counts import StepCounts


class Kernels(NamedTuple):
    """What a backend brings. Launches go into the current stream of the table's device."""

    block: int  # elements that a program steps at a time
    sum_of_squares: Callable[[DeviceTable], None]  # of each chunk's gradient, into partial_sums
    prepare: Callable[[DeviceTable, PrepareInputs], None]  # control, counters, late rows
    step: Callable[[DeviceTable, int], None]  # with the root that all rows share


# What has run in this process of the kernels for one device and signature: the first run of one
# loads it, which no capture allows.
_loaded: defaultdict[object, set[tuple[object, ...]]] = defaultdict(set)


class DeviceStep(BucketStep):
    """The fused step of one bucket on its device."""

    def __init__(self, bucket: Bucket, counts: StepCounts, kernels: Kernels) -> None:
        """Makes the launch table and its copy on the device."""
        super().__init__(bucket, counts)
        self._kernels = kernels
        self._table = LaunchTable(bucket)
        self._device_table = DeviceTable(
            self._table, counts, bucket.device, kernels.block, runtime.num_processors(bucket.device)
        )
        self._loaded = _loaded[kernels.step, bucket.device, bucket.signature]
        self._counted_on_host = False
        self._kept: list[Options] = []  # whose tensors the prepare kernel reads

    def prepare_capture(self) -> None:
        """Gets ready for a step that goes into a CUDA graph."""
        self._device_table.prepare_capture()

    def bind(self, bound: Bound) -> None:
        """Takes over the addresses of this step."""
        with runtime.on(self.bucket.device):
            self._device_table.begin_step()
        self._table.bind(bound)

    def begin(self, bound: Bound, options: Options, inputs: ControlInputs) -> None:
        """Counts, if the host does, and brings all that the step needs to the device."""
        table, rows = self._device_table, self._table.rows
        here = {i: _options_on(self.bucket.device, group) for i, group in options.items()}
        self._kept = [here]
        steps: Steps = UNKNOWN_STEP
        if not self._counts.on_device:
            steps = self._counts.add(bound.inputs)
            self._counted_on_host = True
        rows.set({i: RowOptions.of(group) for i, group in here.items()}, steps)
        most = math.inf if inputs.max_grad_norm is None else float(inputs.max_grad_norm)
        with runtime.on(self.bucket.device):
            table.update(
                self._table,
                (most, float(inputs.skip_nonfinite)),
                prepared=self._needs_prepare(inputs),
            )
            table.copy_changed()
        if runtime.capturing():
            self._check_loaded(inputs)

    def sum_of_squares(self, bound: Bound) -> Tensor:
        """The sum of each chunk's squares, float64 [chunk] on the device."""
        with runtime.on(self.bucket.device):
            partial_sums = self._device_table.make_partial_sums()
            if self._device_table.num_chunks > 0:
                self._kernels.sum_of_squares(self._device_table)
                self._loaded.add(("norm",))
            return partial_sums

    def step(self, bound: Bound, options: Options, control: StepControl) -> None:
        """Steps every tensor of the bucket."""
        table = self._device_table
        is_prepared = False
        with runtime.on(self.bucket.device):
            try:
                bound.load()
                if self._counts.on_device:
                    self._counts.load(bound.inputs)
                if self._needs_prepare(control.inputs):
                    self._kernels.prepare(table, control.on_device(self.bucket.device))
                    is_prepared = True
                    self._loaded.add(("prepare", *_dtypes(control.inputs)))
                if table.num_chunks > 0:  # else all tensors are empty
                    self._kernels.step(table, self._table.rows.root)
                    self._loaded.add(("step", self._table.rows.root))
            except BaseException:
                if self._counts.on_device and is_prepared:
                    self._counts.take_back_on_device(bound.inputs, table.prepared_control[1])
                self.cancel(bound)
                raise
            bound.store()
            if self._counts.on_device:
                self._counts.store(bound.inputs)
        self._counted_on_host = False
        self._kept = []

    def cancel(self, bound: Bound) -> None:
        """Takes back the host's count of a step that cannot be made."""
        if self._counted_on_host:
            self._counts.take_back(bound.inputs)
        self._counted_on_host = False
        self._kept = []

    def _check_loaded(self, inputs: ControlInputs) -> None:
        """Refuses a capture in which a kernel would run for the first time."""
        needed: list[tuple[object, ...]] = []
        if self._device_table.num_chunks > 0:
            needed.append(("step", self._table.rows.root))
            if inputs.needs_norm:
                needed.append(("norm",))
        if self._needs_prepare(inputs):
            needed.append(("prepare", *_dtypes(inputs)))
        if not self._loaded.issuperset(needed):
            raise RuntimeError(
                "a step of FusedPadam is being captured into a CUDA graph, but with other options "
                "than all steps before: its kernel would have to be loaded, which a capture does "
                "not allow. Make a step with these options (partial, clipping, GradScaler) before "
                "the capture"
            )

    def _needs_prepare(self, inputs: ControlInputs) -> bool:
        return self._counts.on_device or self._table.rows.num_late > 0 or inputs.needs_device


def _dtypes(inputs: ControlInputs) -> tuple[torch.dtype | None, ...]:
    """Those by which there are several prepare kernels."""
    return tuple(None if value is None else value.dtype for value in inputs[:2])


def _options_on(device: torch.device, options: Hyperparameters) -> Hyperparameters:
    """With tensors on a device, to which those from elsewhere are copied."""
    moved = {}
    for name in ("lr", "weight_decay"):
        value = getattr(options, name)
        if not isinstance(value, Tensor) or value.device == device:
            continue
        if runtime.capturing():
            raise RuntimeError(
                f"{name} is a tensor on {value.device}, which a CUDA graph on {device} cannot "
                f"read again: create it on {device}"
            )
        moved[name] = runtime.moved_to(value, device)
    return options.with_numbers(moved) if moved else options
