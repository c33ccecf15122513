"""All moments of an element in one word; csrc/packed_states.h describes the bits.

Words are uint32. Every floating point operation is exact or rounds once, denormals included.
"""

import triton
import triton.language as tl

SIGN: tl.constexpr = tl.constexpr(0x80000000)
EXPONENT: tl.constexpr = tl.constexpr(0x7F800000)
MAXIMUM: tl.constexpr = tl.constexpr(0x7FF80000)
SECOND_MOMENT: tl.constexpr = tl.constexpr(0x7FFFF000)


@triton.jit
def float_of(word):
    """The float32 with these bits."""
    return word.to(tl.float32, bitcast=True)


@triton.jit
def word_of(value):
    """The bits of a float32."""
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def unit_of(word):
    """The bits of m's unit, given those of h, or of v without amsgrad."""
    return ((word >> 1) & EXPONENT) + 0x1A000000


@triton.jit
def inverse_of(word):
    """1 over the power of two with these bits."""
    return float_of(0x7F000000 - word)


@triton.jit
def fraction_of(word):
    """A fraction whose bits stand below those of 2.0."""
    return float_of(word | 0x40000000) - 2.0


@triton.jit
def in_code(value, inverse, most):
    """2 + value * inverse, and no more than `most`, also of NaN: a float whose top bits are a code.

    The product is exact, or lost beside 2: fused or not, the result is the same.
    """
    return word_of(tl.minimum(tl.fma(value, inverse, 2.0), most))


@triton.jit
def upper_end(v):
    """The smallest code of h that is not below v; NaN of every NaN."""
    word = word_of(v)
    return float_of((tl.minimum(word, MAXIMUM) + 0x0007FFFF) & MAXIMUM)


@triton.jit
def unpack_mvh(word):
    """The m, v and h in a word."""
    h = word & MAXIMUM
    magnitude = fraction_of((word << 18) & 0x07FC0000) * float_of(unit_of(h))
    v = fraction_of((word << 4) & 0x007FE000) * float_of(h & EXPONENT)
    return float_of(word_of(magnitude) | (word & SIGN)), v, float_of(h)


@triton.jit
def pack_mvh(m, v, h, for_m, for_v):
    """The word of an m, a v and an h that has passed `upper_end`, with random words.

    A NaN of h may have gained bits.
    """
    h_word = word_of(h) & MAXIMUM
    in_parts = word_of(tl.fma(v, inverse_of(h_word & EXPONENT), 2.0))
    v_code = ((in_parts + (for_v >> 19)) >> 4) & 0x0007FE00
    in_units = in_code(tl.abs(m), inverse_of(unit_of(h_word)), 129024.0)
    m_code = ((in_units + (for_m >> 14)) >> 18) & 0x1FF
    return (word_of(m) & SIGN) | h_word | v_code | m_code


@triton.jit
def unpack_mv(word):
    """The m and v in a word."""
    v = word & SECOND_MOMENT
    magnitude = fraction_of((word << 15) & 0x07FF8000) * float_of(unit_of(v))
    return float_of(word_of(magnitude) | (word & SIGN)), float_of(v)


@triton.jit
def pack_mv(m, v, for_m, for_v):
    """The word of an m and a v, with random words."""
    at_most = tl.minimum(v.to(tl.int32, bitcast=True), SECOND_MOMENT).to(tl.uint32, bitcast=True)
    v_word = (at_most + (for_v >> 20)) & SECOND_MOMENT
    in_units = in_code(tl.abs(m), inverse_of(unit_of(v_word)), 130816.0)
    m_code = ((in_units + (for_m >> 17)) >> 15) & 0xFFF
    return (word_of(m) & SIGN) | v_word | m_code
