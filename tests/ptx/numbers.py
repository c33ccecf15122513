"""The arithmetic of PTX on arrays, one element for each thread.

What rounds to nearest is exact to the bit. Approximations are returned at the end of the error that
NVIDIA documents: `lean` is -1 or 1 for an end, 0 for the middle.
"""

from __future__ import annotations

import ctypes
import ctypes.util

import numpy as np

NAN32 = np.uint32(0x7FFFFFFF)  # what arithmetic makes of any NaN
EX2_ERROR = 2.0**-22  # relative, of ex2.approx.f32
RCP_BITS = 20  # of the significand that rcp.approx.ftz.f64 returns


def canonical(values: np.ndarray) -> np.ndarray:
    """float32 with PTX's NaN; other dtypes as they are."""
    if values.dtype == np.float32:
        values = np.array(values, copy=True)
        values.view(np.uint32)[np.isnan(values)] = NAN32
    return values


def fused_multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c, rounded once."""
    a, b, c = np.broadcast_arrays(np.atleast_1d(a), b, c)
    if a.dtype == np.float64:
        return _fma64(a, b, c)
    # The product is exact in float64. Its sum with c is rounded to odd there, so that rounding it
    # once more, to float32, does what rounding the exact sum would.
    product = a.astype(np.float64) * b.astype(np.float64)
    return canonical(_sum_to_odd(product, c.astype(np.float64)).astype(np.float32))


def _fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008."""
    high = a * b
    halves = [_split(a), _split(b)]
    (a_high, a_low), (b_high, b_low) = halves
    low = ((a_high * b_high - high) + a_high * b_low + a_low * b_high) + a_low * b_low
    t_high, t_low = _two_sum(c, low)
    v_high, v_low = _two_sum(high, t_high)
    result = v_high + _sum_to_odd(t_low, v_low)
    # Near the ends of the range, and at zeros, those steps are not exact.
    sizes = [(np.abs(x) > 2.0**-400) & (np.abs(x) < 2.0**400) for x in (a, b, c)]
    unusual = np.flatnonzero(~(sizes[0] & sizes[1] & sizes[2]))
    if len(unusual):
        values = zip(a[unusual], b[unusual], c[unusual], strict=True)
        result[unusual] = [_libm.fma(*one) for one in values]
    return result


def _split(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Veltkamp's: two halves of 26 bits."""
    scaled = values * (2.0**27 + 1)
    high = scaled - (scaled - values)
    return high, values - high


def _two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Knuth's: the sum and its rounding error."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _sum_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of float64: where the sum is not exact, the neighbour of the two that is odd."""
    total, error = _two_sum(a, b)
    bits = total.view(np.int64).copy()
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    bits += np.where(inexact, np.where((error > 0) == (total > 0), 1, -1), 0)
    return bits.view(np.float64)


_libm = ctypes.CDLL(ctypes.util.find_library("m"))
_libm.fma.restype = ctypes.c_double
_libm.fma.argtypes = [ctypes.c_double] * 3


def smaller(a: np.ndarray, b: np.ndarray, keeps_nan: bool = False) -> np.ndarray:
    """The minimum: -0 is less than 0; of a number and NaN the number, unless NaN is kept."""
    return _chosen(a, b, (a < b) | ((a == b) & np.signbit(a)), keeps_nan)


def larger(a: np.ndarray, b: np.ndarray, keeps_nan: bool = False) -> np.ndarray:
    """The maximum, likewise."""
    return _chosen(a, b, (a > b) | ((a == b) & ~np.signbit(a)), keeps_nan)


def _chosen(a: np.ndarray, b: np.ndarray, takes_a: np.ndarray, keeps_nan: bool) -> np.ndarray:
    result = np.where(takes_a | np.isnan(b), a, b)
    if keeps_nan:
        result = np.where(np.isnan(a) | np.isnan(b), np.float32("nan").astype(a.dtype), result)
    return canonical(result)


def flushed(values: np.ndarray) -> np.ndarray:
    """Subnormal numbers made zero, as .ftz asks."""
    tiny = np.finfo(values.dtype).tiny
    return np.where(np.abs(values) < tiny, np.copysign(values.dtype.type(0), values), values)


def power_of_two(values: np.ndarray, lean: int) -> np.ndarray:
    """ex2.approx.f32."""
    exact = np.exp2(values.astype(np.float64))
    return canonical((exact * (1 + lean * EX2_ERROR)).astype(np.float32))


def reciprocal(values: np.ndarray, lean: int) -> np.ndarray:
    """rcp.approx.ftz.f64, of which only the upper half of the word counts."""
    cut = np.int64(-(1 << 32))
    known = (np.atleast_1d(flushed(values)).view(np.int64) & cut).view(np.float64)
    result = np.atleast_1d(1 / known)
    bits = result.view(np.int64) & cut
    usual = np.isfinite(result) & (result != 0)
    bits += np.where(usual, lean << 32, 0)
    return flushed(bits.view(np.float64)).reshape(np.shape(values))


def from_bfloat16(words: np.ndarray) -> np.ndarray:
    """uint16 as float32."""
    return np.atleast_1d(words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 rounded to nearest even, as uint16."""
    bits = np.atleast_1d(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)


def to_float16(values: np.ndarray) -> np.ndarray:
    """float32 rounded to nearest even, as uint16."""
    words = np.atleast_1d(values.astype(np.float16)).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), words)


def to_integer(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Of whole numbers; the nearest end of the range outside of it.

    NaN becomes 0, or the least integer of where 64 bits play a part.
    """
    info = np.iinfo(dtype)
    # The largest float below the upper end, which may itself be rounded up.
    low, high = values.dtype.type(info.min), values.dtype.type(info.max)
    inside = (values > low) & (values < high)
    result = np.where(inside, values, 0).astype(dtype)
    result = np.where(values >= high, info.max, result)
    of_nan = info.min if max(values.dtype.itemsize, info.bits // 8) == 8 else 0
    result = np.where(np.isnan(values), of_nan, result)
    return np.where(values <= low, info.min, result).astype(dtype)


def permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """prmt.b32: four bytes out of the eight of two words; with the bit of 8, their sign."""
    both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
    result = np.zeros_like(both)
    for place in range(4):
        choice = (selector.astype(np.uint64) >> np.uint64(4 * place)) & np.uint64(15)
        byte = (both >> (np.uint64(8) * (choice & np.uint64(7)))) & np.uint64(0xFF)
        sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
        byte = np.where(choice & np.uint64(8), sign, byte)
        result |= byte << np.uint64(8 * place)
    return result.astype(np.uint32)


def field(values: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
    """bfe.u32: some bits of a word."""
    wide = values.astype(np.uint64) >> (position.astype(np.uint64) & np.uint64(0xFF))
    mask = np.uint64(1) << np.minimum(length.astype(np.uint64) & np.uint64(0xFF), np.uint64(32))
    return (wide & (mask - np.uint64(1))).astype(np.uint32)


def shifted_left(values: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """By as many bits as there are, or more, it makes 0."""
    bits = 8 * values.dtype.itemsize
    near = np.minimum(amount, bits - 1).astype(values.dtype)
    return np.where(amount < bits, values << near, values.dtype.type(0))


def shifted_right(values: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """By as many bits as there are, or more, it makes 0, or -1 of a negative number."""
    bits = 8 * values.dtype.itemsize
    near = np.minimum(amount, bits - 1).astype(values.dtype)
    if values.dtype.kind == "i":
        return values >> near
    return np.where(amount < bits, values >> near, values.dtype.type(0))
