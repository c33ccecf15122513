"""All moments of an element in one int32 word, in PyTorch; csrc/packed_states.h describes the bits.

Every floating point operation here is exact or rounds once, and denormals are kept, so that all
backends make the same bits. The kernels do the same in csrc and in kernels/packed_states.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from padam_ext.random_bits import Draws, shifted_right, signed

# Of a packed running maximum only the interval is known in which it lies, by its upper end: this
# share of that is the interval's middle on a scale of logarithms.
CENTRE = 0.97775
ROOT_OF_CENTRE = math.sqrt(CENTRE)

_H_MASK = 0x7FF80000
_V_MASK = 0x7FFFF000
_EXPONENT = 0x7F800000
_SIGN = signed(0x80000000)
_TWO = 0x40000000  # 2.0
_UNIT = 52 << 23
_INVERSE = 254 << 23  # minus the bits of a power of two: those of its inverse
_HALFWAY = signed(0x80000000)  # in place of random bits: rounds to nearest


class Moments(NamedTuple):
    """The values in packed words, float32 of their shape; `h` is None without amsgrad.

    In a kernel `h` is the upper end of its interval, see CENTRE.
    """

    m: Tensor
    v: Tensor
    h: Tensor | None


def unpack_mvh(word: Tensor) -> Moments:
    """The values in a word with a running maximum."""
    h = word & _H_MASK
    v = _fraction((word << 4) & 0x007FE000) * _float(h & _EXPONENT)
    m = _fraction((word << 18) & 0x07FC0000) * _float(_unit(h))
    return Moments(_with_sign(m, word), v, _float(h))


def pack_mvh(values: Moments, draws: Draws | None = None) -> Tensor:
    """Words for values, of which `h` has passed `upper_end`; rounded to nearest without `draws`."""
    m, v, upper = values
    assert upper is not None
    for_m, for_v = _bits_for(draws)
    h = _bits(upper) & _H_MASK  # a NaN may have gained bits
    scaled = _bits(v * _float(_INVERSE - (h & _EXPONENT)) + 2.0)
    v_code = ((scaled + _top(for_v, 13)) >> 4) & 0x0007FE00
    scaled = _bits(_less(m.abs() * _float(_INVERSE - _unit(h)) + 2.0, 129024.0))
    m_code = ((scaled + _top(for_m, 18)) >> 18) & 0x1FF
    return (_bits(m) & _SIGN) | h | v_code | m_code


def unpack_mv(word: Tensor) -> Moments:
    """The values in a word without a running maximum."""
    v = word & _V_MASK
    m = _fraction((word << 15) & 0x07FF8000) * _float(_unit(v))
    return Moments(_with_sign(m, word), _float(v), None)


def pack_mv(values: Moments, draws: Draws | None = None) -> Tensor:
    """Words for values; rounded to nearest without `draws`."""
    for_m, for_v = _bits_for(draws)
    v = (_bits(values.v).clamp(max=_V_MASK) + _top(for_v, 12)) & _V_MASK
    scaled = _bits(_less(values.m.abs() * _float(_INVERSE - _unit(v)) + 2.0, 130816.0))
    m_code = ((scaled + _top(for_m, 15)) >> 15) & 0xFFF
    return (_bits(values.m) & _SIGN) | v | m_code


def upper_end(v: Tensor) -> Tensor:
    """The smallest code of a running maximum that is not below v; NaN of NaN."""
    bits = _bits(v)
    at_most = torch.where((bits < 0) | (bits > _H_MASK), _H_MASK, bits)  # as unsigned numbers
    return _float((at_most + 0x0007FFFF) & _H_MASK)


def _unit(bits: Tensor) -> Tensor:
    """The bits of the unit in which m is stored: about 2^-17.5 times the root of the operand."""
    return ((bits >> 1) & _EXPONENT) + _UNIT


def _fraction(bits: Tensor) -> Tensor:
    return _float(bits | _TWO) - 2.0


def _with_sign(magnitude: Tensor, word: Tensor) -> Tensor:
    return _float(_bits(magnitude) | (word & _SIGN))


def _less(a: Tensor, b: float) -> Tensor:
    """The smaller; b where a is NaN."""
    return torch.where(a < b, a, b)


def _bits_for(draws: Draws | None) -> tuple[Tensor | int, Tensor | int]:
    return (_HALFWAY, _HALFWAY) if draws is None else (draws.for_m, draws.for_v)


def _top(bits: Tensor | int, count: int) -> Tensor | int:
    """The highest bits of a word, as a number."""
    if isinstance(bits, int):
        return (bits >> (32 - count)) & ((1 << count) - 1)
    return shifted_right(bits, 32 - count)


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def _float(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)
