"""Random numbers for stochastic rounding.

They are worked out from the seed, the parameter's salt, the step count and the element's place, so
there is no generator whose state would have to be kept: a resumed run and every replica draw the
same. The kernels do the same in csrc/random_bits.h and kernels/random_bits.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SALT_FACTOR = 0x85EBCA6B
_WORD = 0xFFFFFFFF


class Draws(NamedTuple):
    """Numbers for each element, int32 [numel], of which only the top bits are used."""

    for_m: Tensor
    for_v: Tensor
    for_x: Tensor


def salt_of(position: int) -> int:
    """The salt of the parameter at a position among all of an optimizer: 32 bits."""
    return position * SALT_FACTOR & _WORD


def step_key(seed: int, salt: int, step: int) -> int:
    """32 bits for one tensor in its update number `step`, from 1."""
    return _hash(seed ^ salt ^ (step * 0x9E3779B9 & _WORD))


def draw(numel: int, key: int, device: torch.device) -> Draws:
    """The numbers of a tensor's elements, in the order in which they lie in memory."""
    place = torch.arange(numel, dtype=torch.int64, device=device).to(torch.int32)
    y = place * signed(0x9E3779B1) + signed(key)
    y = y ^ shifted_right(y, 15)
    return Draws(
        for_m=y * signed(0x846CA68B), for_v=y * signed(0x7FEB352D), for_x=y * signed(0xC2B2AE35)
    )


def signed(bits: int) -> int:
    """32 bits as the number that torch takes beside int32."""
    return bits - 2**32 if bits >= 2**31 else bits


def shifted_right(x: Tensor, count: int) -> Tensor:
    """A logical shift of int32 by 1 to 31 bits."""
    return (x >> count) & ((1 << (32 - count)) - 1)


def _hash(x: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> shift) * factor & _WORD
    return x ^ x >> 16
