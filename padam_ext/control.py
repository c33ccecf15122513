"""Control: what a step does with all gradients, and whether there is a step at all.

One factor unscales and clips them, and a step may be skipped. On a device the prepare kernel works
both out, from the same inputs; this module does so for backends without that kernel. Gradients are
never written to.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from padam_ext.runtime import moved_to, widened


class Control(NamedTuple):
    """What a step does with all gradients, as numbers or as tensors of one element on a device."""

    grad_factor: float | Tensor = 1.0  # what gradients are multiplied by
    skip: float | Tensor = 0.0  # 1 for a step that changes nothing, else 0

    def on_host(self) -> Control:
        """With numbers only, for which the host waits if they are still being computed."""
        return Control(float(self.grad_factor), float(self.skip))


class ControlInputs(NamedTuple):
    """What control is worked out from.

    Attributes:
        grad_scale: what gradients have been multiplied by, if they are still to be divided by it.
        found_inf: not 0 if there is an infinity or NaN among them, as GradScaler found.
        max_grad_norm: see FusedPadam.
        skip_nonfinite: see FusedPadam.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    max_grad_norm: float | None = None
    skip_nonfinite: bool = False

    @property
    def needs_norm(self) -> bool:
        """Whether the norm of all gradients plays a part."""
        return self.max_grad_norm is not None or self.skip_nonfinite

    @property
    def needs_device(self) -> bool:
        """Whether a device knows what the host does not."""
        return self.grad_scale is not None or self.found_inf is not None or self.needs_norm

    @property
    def may_skip(self) -> bool:
        """Whether a device may decide that a step is skipped."""
        return self.found_inf is not None or self.skip_nonfinite


def check_scalar_tensor(name: str, value: Any, *, or_zero: bool = False) -> Tensor | None:
    """Raises TypeError unless the value is None or a tensor of one element.

    With `or_zero` the number 0 is None, too: GradScaler sets `found_inf` to it where there are no
    gradients.
    """
    if value is None or (or_zero and isinstance(value, int) and value == 0):
        return None
    if isinstance(value, Tensor) and value.numel() == 1:
        return value
    raise TypeError(f"{name} must be a tensor of one element or None, got {value!r}")


def make_control(inputs: ControlInputs, norm: Tensor | None) -> Control:
    """What a step does with its gradients.

    The factor is that of torch.nn.utils.clip_grad_norm_.

    Args:
        inputs: see there.
        norm: the unscaled norm, of no dimensions, in its device's widest dtype; None where nobody
            needs it.
    """
    factor, skip = Control()
    grad_scale, found_inf, max_grad_norm = inputs[:3]
    if grad_scale is not None:
        factor = widened(scalar_on(grad_scale, grad_scale.device)).reciprocal()
    if norm is not None and max_grad_norm is not None and max_grad_norm < math.inf:
        clip = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        factor = clip if grad_scale is None else clip * scalar_on(factor, clip.device)
    if found_inf is not None:
        skip = widened(scalar_on(found_inf, found_inf.device) != 0)
    if norm is not None and inputs.skip_nonfinite:
        nonfinite = widened(~norm.isfinite())
        if found_inf is not None:
            nonfinite = torch.maximum(nonfinite, scalar_on(skip, norm.device))
        skip = nonfinite
    return Control(factor, skip)


def scalar_on(value: Any, device: torch.device) -> Tensor:
    """One element as a tensor of no dimensions on a device, likewise."""
    return moved_to(value, device).reshape(())


class PrepareInputs(NamedTuple):
    """What the prepare kernel reads and writes beside a launch table, on the table's device.

    Attributes:
        sums: sums of squares of gradients, float64 [k]; None where the norm plays no part.
        grad_scale: float32 or float64 of one element, or None.
        found_inf: likewise.
        norm: where the norm goes, float32 or float64 of one element; None where nobody asks.
        skipped: int64 of one element, to which 1 is added if the step is skipped; or None.
    """

    sums: Tensor | None = None
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    norm: Tensor | None = None
    skipped: Tensor | None = None
