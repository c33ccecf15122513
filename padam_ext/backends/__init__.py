"""The backends: the ways to compute a step, each in a module of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from padam_ext import native
from padam_ext.backends import cuda, triton
from padam_ext.backends.cpu import CpuStep
from padam_ext.backends.eager import EagerStep
from padam_ext.backends.step import BucketStep
from padam_ext.buckets import Bucket
from padam_ext.step_counts import StepCounts


@dataclass(frozen=True)
class Backend:
    """One way to compute the step.

    Attributes:
        name: what `FusedPadam(backend=...)` and `available_backends()` call it.
        make_step: builds the step of a bucket.
        device_types: types of devices whose tensors "auto" gives it; None for all.
        unavailable_reason: tells why it cannot run on this machine, and what to do; None if it can.
        needs_trial: whether it is first tried on each device, with a small step.
        counts_on_device: whether the device itself can decide to skip a step, and count steps. Its
            steps are then DeviceSteps.
        takes: types of devices whose tensors it can take, if they differ from device_types.
    """

    name: str
    make_step: Callable[[Bucket, StepCounts], BucketStep]
    device_types: frozenset[str] | None
    unavailable_reason: Callable[[], str | None] = lambda: None
    needs_trial: bool = False
    counts_on_device: bool = False
    takes: Callable[[], frozenset[str]] | None = None

    def is_for(self, device: torch.device) -> bool:
        """Whether "auto" gives it tensors of a device."""
        return self.device_types is None or device.type in self.device_types

    def reason_against(self, device: torch.device) -> str | None:
        """Why this backend cannot take tensors of a device; None if it can, trials aside."""
        if (reason := self.unavailable_reason()) is not None:
            return reason
        types = self.device_types if self.takes is None else self.takes()
        if types is not None and device.type not in types:
            return f"it takes tensors on {', '.join(sorted(types))} only"
        return None


# In the order in which "auto" tries them. Eager takes everything.
BACKENDS = (
    Backend(
        "triton",
        triton.make_step,
        triton.DEVICE_TYPES,
        triton.unavailable_reason,
        needs_trial=True,
        counts_on_device=True,
        takes=triton.takes,
    ),
    Backend(
        "cuda",
        cuda.make_step,
        cuda.DEVICE_TYPES,
        cuda.unavailable_reason,
        needs_trial=True,
        counts_on_device=True,
    ),
    Backend("cpu", CpuStep, frozenset({"cpu"}), lambda: native.unavailable_reason),
    Backend("eager", EagerStep, None),
)
