"""The backends: which there are, which can run here, and which one takes a bucket."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from padam_ext import cuda_step, native, triton_step
from padam_ext.constants import Control
from padam_ext.cpu import CpuStep
from padam_ext.eager import EagerStep
from padam_ext.gather import Live
from padam_ext.grouping import Bucket
from padam_ext.hyperparameters import Hyperparameters


class BucketStep(Protocol):
    """Steps one bucket. `take_grads` comes first, for all buckets, before anything is changed."""

    def take_grads(self, live: Live) -> None:
        """Takes over this step's gradients."""

    def sum_of_squares(self) -> Tensor:
        """The sum of all gradients' squares, float64 of one element on the bucket's device."""

    def step(self, options: Sequence[Hyperparameters], control: Control) -> None:
        """Steps every tensor, with one set of options for each param group."""


@dataclass(frozen=True)
class Backend:
    """One way to compute the step.

    Attributes:
        name: what `FusedPadam(backend=...)` and `available_backends()` call it.
        make_step: builds the step of a bucket.
        device_types: types of devices whose tensors "auto" gives it; None for all.
        unavailable_reason: tells why it cannot run on this machine, and what to do; None if it can.
        broken_reason: tells why it fails on a device that it should take; None if it works.
        counts_on_device: whether it can leave it to the device to decide that a step is skipped,
            so that step counts must be there. Its steps then are DeviceSteps.
        takes: types of devices whose tensors it can take, if not those that "auto" gives it.
    """

    name: str
    make_step: Callable[[Bucket], BucketStep]
    device_types: frozenset[str] | None
    unavailable_reason: Callable[[], str | None] = lambda: None
    broken_reason: Callable[[torch.device], str | None] = lambda device: None
    counts_on_device: bool = False
    takes: Callable[[], frozenset[str]] | None = None

    def is_for(self, device: torch.device) -> bool:
        """Whether "auto" gives it tensors of a device."""
        return self.device_types is None or device.type in self.device_types

    def reason_against(self, device: torch.device) -> str | None:
        """Why this backend cannot take tensors of a device; None if it can."""
        if (reason := self.unavailable_reason()) is not None:
            return reason
        types = self.device_types if self.takes is None else self.takes()
        if types is not None and device.type not in types:
            return f"it takes tensors on {', '.join(sorted(types))} only"
        return self.broken_reason(device)


# In the order in which "auto" tries them. Eager takes everything.
BACKENDS = (
    Backend(
        "triton",
        triton_step.make_step,
        triton_step.DEVICE_TYPES,
        triton_step.unavailable_reason,
        triton_step.broken_reason,
        counts_on_device=True,
        takes=triton_step.takes,
    ),
    Backend(
        "cuda",
        cuda_step.make_step,
        cuda_step.DEVICE_TYPES,
        cuda_step.unavailable_reason,
        cuda_step.broken_reason,
        counts_on_device=True,
    ),
    Backend("cpu", CpuStep, frozenset({"cpu"}), lambda: native.unavailable_reason),
    Backend("eager", EagerStep, None),
)
NAMES = ("auto", *(backend.name for backend in BACKENDS))

_warned: set[str] = set()
_INSIDE = tuple(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__))


def available_backends() -> tuple[str, ...]:
    """Names of the backends that can run on this machine, best first.

    `python -m padam_ext` prints the reason for each that cannot.
    """
    return tuple(backend.name for backend in BACKENDS if backend.unavailable_reason() is None)


def check_name(name: object) -> None:
    """Refuses a name that is no backend's, or that of one that cannot run on this machine.

    Raises:
        ValueError: with the name and those there are.
        RuntimeError: says why it cannot run, and what to do.
    """
    if not isinstance(name, str) or name not in NAMES:
        raise ValueError(f"backend must be one of {NAMES}, got {name!r}")
    for backend in BACKENDS:
        if name == backend.name and (reason := backend.unavailable_reason()) is not None:
            raise RuntimeError(
                f"backend={name!r} cannot run here: {reason}. "
                'backend="auto" takes the best that can.'
            )


def choose(name: str, device: torch.device) -> Backend:
    """The backend for tensors of one device.

    With "auto", falling back to eager is told once per process and device type.

    Raises:
        RuntimeError: the backend asked for by name cannot take these tensors; says why.
    """
    reasons: list[str] = []
    for backend in BACKENDS:
        if not (backend.is_for(device) if name == "auto" else name == backend.name):
            continue
        reason = backend.reason_against(device)
        if reason is None:
            if backend.name == "eager" and name == "auto":
                _warn_once(device, reasons)
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise RuntimeError(
        f"backend={name!r} cannot step tensors on {device}: {'; '.join(reasons)}. "
        'backend="auto" takes the best that can.'
    )


def _warn_once(device: torch.device, reasons: Sequence[str]) -> None:
    if device.type in _warned:
        return
    _warned.add(device.type)
    warnings.warn(
        f"FusedPadam steps tensors on {device.type} with plain PyTorch operations, which is "
        f"slower ({'; '.join(reasons) or 'no kernel takes them'}). "
        'backend="eager" silences this.',
        stacklevel=_level_of_the_caller(),
    )


def _level_of_the_caller() -> int:
    """The stacklevel, for the function that asks, of the first code outside this package and torch.

    torch wraps a step in functions of its own, as many as it has use for.
    """
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    return level
