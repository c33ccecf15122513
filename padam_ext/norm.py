"""The norm of all gradients together, out of the sums of squares of every bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from padam_ext.control import scalar_on
from padam_ext.runtime import widened, widest_float


def sums_on(device: torch.device, sums_of_squares: Sequence[Tensor]) -> Tensor:
    """All sums of squares on one device, [k]: their sum is the square of the norm.

    They are float64, or what their device has in its place.

    Args:
        device: where to.
        sums_of_squares: of each bucket, [its own number] on its own device.
    """
    dtype = widest_float(device)
    parts = [
        part if part.device == device else _total_on(part.sum(), dtype, device)
        for part in sums_of_squares
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _total_on(total: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    # First to a dtype that both devices have.
    both = dtype if dtype.itemsize < total.dtype.itemsize else total.dtype
    return scalar_on(total.to(both), device).to(dtype).reshape(1)


def norm_of(sums: Tensor, grad_scale: Tensor | None) -> Tensor:
    """The unscaled norm, of no dimensions.

    Args:
        sums: see `sums_on`.
        grad_scale: what the loss was multiplied by, None for 1.
    """
    norm = sums.sum().sqrt()
    return norm if grad_scale is None else norm / widened(scalar_on(grad_scale, norm.device))
