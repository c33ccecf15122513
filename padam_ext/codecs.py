"""Codecs: from a slot's storage dtype to the dtype of the arithmetic and back, in PyTorch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def load(tensors: Iterable[Tensor], compute_dtype: torch.dtype) -> list[Tensor]:
    """The values to work on: the tensors themselves where they are stored in that dtype."""
    return [tensor.to(compute_dtype) for tensor in tensors]


def store(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Puts new values where they are stored, rounded to the nearest."""
    for tensor, value in zip(tensors, values, strict=True):
        if value is not tensor:
            tensor.copy_(value)
