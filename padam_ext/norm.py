"""The norm of all gradients together, out of the sums of squares of every bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from padam_ext.control import scalar_on


def sums_on(device: torch.device, sums_of_squares: Sequence[Tensor]) -> Tensor:
    """All sums of squares on one device, float64 [k]: their sum is the square of the norm.

    Args:
        device: where to.
        sums_of_squares: of each bucket, float64 [its own number] on its own device.
    """
    parts = [
        part if part.device == device else scalar_on(part.sum(), device).reshape(1)
        for part in sums_of_squares
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def norm_of(sums: Tensor, grad_scale: Tensor | None) -> Tensor:
    """The unscaled norm, float64 of no dimensions.

    Args:
        sums: see `sums_on`.
        grad_scale: what the loss was multiplied by, None for 1.
    """
    norm = sums.sum().sqrt()
    return norm if grad_scale is None else norm / scalar_on(grad_scale, norm.device).double()
