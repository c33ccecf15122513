"""Packed states, random numbers and bfloat16 in numpy, from their description, on uint32 words.

Independent of the package; csrc/packed_states.h has the picture of the bits.
"""

import numpy as np

U32 = np.uint32
# Of a running maximum's interval, the middle on a scale of logarithms, in upper ends.
CENTRE = 0.97775


def words(values):
    return np.ascontiguousarray(values, dtype=np.float32).view(U32)


def floats(bits):
    return np.ascontiguousarray(bits, dtype=U32).view(np.float32)


def hashed(x: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> shift) * factor % 2**32
    return x ^ x >> 16


def step_key(seed: int, salt: int, step: int) -> int:
    return hashed(seed ^ salt ^ step * 0x9E3779B9 % 2**32)


def draw(numel: int, key: int):
    """For m, v and x, by place in memory."""
    with np.errstate(over="ignore"):
        y = np.arange(numel, dtype=U32) * U32(0x9E3779B1) + U32(key)
        y ^= y >> U32(15)
        return tuple(y * U32(factor) for factor in (0x846CA68B, 0x7FEB352D, 0xC2B2AE35))


def unit(bits):
    """Of m, a power of two, from the bits of h, or of v without amsgrad."""
    return floats((bits >> U32(1) & U32(0x7F800000)) + U32(52 << 23))


def _fields(word, amsgrad):
    """Bits of the reference (h or v), the fraction of m in its place below 2.0."""
    if amsgrad:
        return word & U32(0x7FF80000), (word << U32(18)) & U32(0x07FC0000)
    return word & U32(0x7FFFF000), (word << U32(15)) & U32(0x07FF8000)


def _minus_two(bits):
    return floats(bits | U32(0x40000000)) - np.float32(2)


@np.errstate(invalid="ignore", over="ignore")
def unpack(word, amsgrad):
    """The m and v of words, and the upper end of h, v itself without amsgrad."""
    reference, fraction = _fields(word, amsgrad)
    m = floats(words(_minus_two(fraction) * unit(reference)) | (word & U32(0x80000000)))
    if not amsgrad:
        return m, floats(reference), floats(reference)
    v = _minus_two((word << U32(4)) & U32(0x007FE000)) * floats(reference & U32(0x7F800000))
    return m, v, floats(reference)


def upper_bits(v):
    return (np.minimum(words(v), U32(0x7FF80000)) + U32(0x7FFFF)) & U32(0x7FF80000)


def _below(value, most):
    return np.where(value < np.float32(most), value, np.float32(most))


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def pack(old, m, v, for_m, for_v, amsgrad):
    """The word after `old` for new moments."""
    m, v = np.float32(m), np.float32(v)
    if amsgrad:
        reference = np.maximum(upper_bits(v), old & U32(0x7FF80000))
        scaled = v * floats(U32(0x7F000000) - (reference & U32(0x7F800000))) + np.float32(2)
        v_code = ((words(scaled) + (for_v >> U32(19))) >> U32(4)) & U32(0x0007FE00)
        most, random, shift, mask = 129024, for_m >> U32(14), 18, 0x1FF
    else:
        signed = np.minimum(words(v).view(np.int32), np.int32(0x7FFFF000)).view(U32)
        reference = (signed + (for_v >> U32(20))) & U32(0x7FFFF000)
        v_code = U32(0)
        most, random, shift, mask = 130816, for_m >> U32(17), 15, 0xFFF
    inverse = floats(U32(0x7F000000) - words(unit(reference)))
    scaled = words(_below(np.abs(m) * inverse + np.float32(2), most))
    m_code = ((scaled + random) >> U32(shift)) & U32(mask)
    return (words(m) & U32(0x80000000)) | reference | v_code | m_code


def rounded(x, for_x):
    """The bits of float32 as bfloat16, rounded stochastically: the upper half of words."""
    bits = np.where(np.isnan(x), U32(0x7FC00000), words(x) + (for_x >> U32(16)))
    return (bits >> U32(16)).astype(np.uint16)


def split(x):
    """The bits of float32 as bfloat16 and the lower half."""
    bits = np.where(np.isnan(x), U32(0x7FC00000), words(x))
    return ((bits + U32(0x8000)) >> U32(16)).astype(np.uint16), bits.astype(np.uint16)


def join(high, low):
    """The float32 from both."""
    rest = low.view(np.int16).astype(np.int64)
    rest = np.where((high & np.uint16(0x7FFF)) == 0, np.maximum(rest, 0), rest)
    return floats(((high.astype(np.int64) << 16) + rest).astype(U32))


def _units(h):
    """Of m beside exact values of h, or of v without amsgrad."""
    return np.longdouble(1) * unit(words(h))


def v_bound(h):
    """How far rounding may take a second moment that is stored beside h."""
    return np.longdouble(2) ** -9 * floats(words(h) & U32(0x7F800000))


def m_bound(m, h, amsgrad):
    """The same for a first moment."""
    return (np.abs(m) + 2 * _units(h)) / (32 if amsgrad else 256)


def largest_m(h, amsgrad):
    """The largest first moment that can be stored beside h."""
    code = U32(0x1FF << 18 if amsgrad else 0xFFF << 15)
    return _minus_two(code) * _units(h)
