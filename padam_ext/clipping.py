"""Unscaling, clipping by the global norm, and skipping: what becomes of a step's gradients.

One factor for all of them, and whether there is a step at all. On a GPU both stay there, and no
gradient is written to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from padam_ext.constants import NO_CONTROL, Control
from padam_ext.layout import dtensor_type


def check_handed_over(name: str, value: Any) -> Tensor | None:
    """Refuses what is no tensor of one element, with a TypeError."""
    if value is None or (isinstance(value, Tensor) and value.numel() == 1):
        return value
    raise TypeError(f"{name} must be a tensor of one element or None, got {value!r}")


def refuse_dtensors(grads: Sequence[Tensor]) -> None:
    """Refuses gradients of which other processes hold parts.

    Raises:
        RuntimeError: there is a DTensor among them.
    """
    dtensor = dtensor_type()
    if dtensor is not None and any(isinstance(grad, dtensor) for grad in grads):
        raise RuntimeError(
            "max_grad_norm and skip_nonfinite do not take DTensors yet, whose norm is spread over "
            "processes: leave them out and call torch.nn.utils.clip_grad_norm_ before the step"
        )


def norm_dtype(grads: Sequence[Tensor]) -> torch.dtype:
    """The dtype of the norm: float64 if there is such a gradient, else float32."""
    dtypes = {grad.dtype for grad in grads}
    return torch.float64 if any(d.to_real() == torch.float64 for d in dtypes) else torch.float32


def global_norm(sums_of_squares: Sequence[Tensor], grad_scale: Tensor | None) -> Tensor:
    """The norm of all gradients together, unscaled: float64 of one element.

    Args:
        sums_of_squares: of each bucket's gradients, float64 of one element on any device. The
            norm is on the first one's.
        grad_scale: what the loss was multiplied by, None for 1.
    """
    if not sums_of_squares:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    device = sums_of_squares[0].device
    total = torch.stack([_on(part, device) for part in sums_of_squares]).sum()
    norm = total.sqrt()
    return norm if grad_scale is None else norm / _on(grad_scale, device).double()


def make_control(
    norm: Tensor | None,
    max_grad_norm: float | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    *,
    skip_nonfinite: bool,
) -> Control:
    """What a step does with its gradients.

    Args:
        norm: the unscaled norm; None where nobody needs it.
        max_grad_norm: see FusedPadam. The factor is that of torch.nn.utils.clip_grad_norm_.
        grad_scale: what gradients have been multiplied by, if they are still to be divided by it.
        found_inf: not 0 if there is an infinity or NaN among them, as GradScaler found.
        skip_nonfinite: whether to skip the step of a norm that is infinite or NaN.
    """
    factor, skip = NO_CONTROL
    if grad_scale is not None:
        factor = _on(grad_scale, grad_scale.device).double().reciprocal()
    if norm is not None and max_grad_norm is not None and max_grad_norm < math.inf:
        clip = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        factor = clip if grad_scale is None else clip * _on(factor, clip.device)
    if found_inf is not None:
        skip = (_on(found_inf, found_inf.device) != 0).double()
    if norm is not None and skip_nonfinite:
        nonfinite = (~norm.isfinite()).double()
        skip = nonfinite if found_inf is None else torch.maximum(nonfinite, _on(skip, norm.device))
    return Control(factor, skip)


def _on(value: Any, device: torch.device) -> Tensor:
    """One element as a tensor of no dimensions on a device."""
    moved: Tensor = value.to(device, non_blocking=True).reshape(())
    return moved
