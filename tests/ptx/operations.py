"""Instructions that only compute, by their names. Any other name is an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ptx import numbers

DTYPES = {
    "pred": np.dtype(bool),
    **{f"b{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"u{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f32x2": np.dtype(np.uint64),
    "bf16x2": np.dtype(np.uint32),
    "f16x2": np.dtype(np.uint32),
}


class Operation(NamedTuple):
    """A function of arrays, and the dtypes of its operands, the result first."""

    compute: Callable[..., np.ndarray]
    dtypes: tuple[np.dtype, ...]


def find(opcode: str, lean: int) -> Operation | None:
    """The operation of an opcode; None if it has none, as branches and accesses have none."""
    if opcode.startswith("cvt."):
        return _conversion(opcode)
    if opcode.startswith("setp."):
        return _comparison(opcode)
    if opcode in _SPECIAL:
        return _SPECIAL[opcode](lean)
    stem, _, kind = opcode.rpartition(".")
    if kind not in DTYPES or "f16" in kind:  # these only in _SPECIAL
        return None
    dtype = DTYPES[kind]
    if kind == "f32x2":
        return _in_pairs(stem)
    if stem in _WIDE and dtype.kind in "iu":
        return _wide(stem, dtype)
    functions = _OF_BOTH | (_OF_FLOATS if dtype.kind == "f" else _INTEGERS)
    if stem not in functions:
        return None
    function = functions[stem]
    return Operation(function, (dtype,) * (function.__code__.co_argcount + 1))


# Those whose operands and result are all of the dtype in the name.
_INTEGERS: dict[str, Callable[..., np.ndarray]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "mad.lo": lambda a, b, c: a * b + c,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
}
_OF_BOTH: dict[str, Callable[..., np.ndarray]] = {
    "mov": lambda a: a,
    "cvta.to.global": lambda a: a,
    "min": lambda a, b: numbers.smaller(a, b) if a.dtype.kind == "f" else np.minimum(a, b),
    "max": lambda a, b: numbers.larger(a, b) if a.dtype.kind == "f" else np.maximum(a, b),
    # Of floats too: these are about bits, also of NaN.
    "neg": lambda a: -a,
    "abs": lambda a: np.abs(a),
}
_OF_FLOATS: dict[str, Callable[..., np.ndarray]] = {
    "add.rn": lambda a, b: numbers.canonical(a + b),
    "sub.rn": lambda a, b: numbers.canonical(a - b),
    "mul.rn": lambda a, b: numbers.canonical(a * b),
    "div.rn": lambda a, b: numbers.canonical(a / b),
    "sqrt.rn": lambda a: numbers.canonical(np.sqrt(a)),
    "rcp.rn": lambda a: numbers.canonical(a.dtype.type(1) / a),
    "fma.rn": numbers.fused_multiply_add,
    "min.NaN": lambda a, b: numbers.smaller(a, b, keeps_nan=True),
    "max.NaN": lambda a, b: numbers.larger(a, b, keeps_nan=True),
    "abs.ftz": lambda a: np.abs(numbers.flushed(a)),
}


def _wide(stem: str, dtype: np.dtype) -> Operation:
    double = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
    function = _WIDE[stem]
    has_addend = function.__code__.co_argcount == 3
    dtypes = (double, dtype, dtype, double) if has_addend else (double, dtype, dtype)

    def compute(a: np.ndarray, b: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        return function(a.astype(double), b.astype(double), *rest)

    return Operation(compute, dtypes)


_WIDE: dict[str, Callable[..., np.ndarray]] = {
    "mul.wide": lambda a, b: a * b,
    "mad.wide": lambda a, b, c: a * b + c,
}


def _in_pairs(stem: str) -> Operation | None:
    """Two float32 in one register."""
    function = _OF_FLOATS.get(stem)
    if function is None:
        return None

    def compute(*pairs: np.ndarray) -> np.ndarray:
        same_length = np.broadcast_arrays(*pairs)
        values = [np.ascontiguousarray(pair).view(np.float32) for pair in same_length]
        return np.ascontiguousarray(function(*values)).view(np.uint64)

    return Operation(compute, (DTYPES["f32x2"],) * (function.__code__.co_argcount + 1))


_U32, _F32, _F64 = (DTYPES[kind] for kind in ("u32", "f32", "f64"))


def _shift(function: Callable[..., np.ndarray], kind: str) -> Callable[[int], Operation]:
    return lambda lean: Operation(function, (DTYPES[kind], DTYPES[kind], _U32))


def _select(kind: str) -> Callable[[int], Operation]:
    dtype = DTYPES[kind]
    return lambda lean: Operation(
        lambda a, b, p: np.where(p, a, b), (dtype, dtype, dtype, DTYPES["pred"])
    )


def _mixed_fma(widen: Callable[[np.ndarray], np.ndarray], kind: str) -> Callable[[int], Operation]:
    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return numbers.fused_multiply_add(widen(a), widen(b), c)

    return lambda lean: Operation(compute, (_F32, DTYPES[kind], DTYPES[kind], _F32))


_SPECIAL: dict[str, Callable[[int], Operation]] = {
    "ex2.approx.f32": lambda lean: Operation(lambda a: numbers.power_of_two(a, lean), (_F32, _F32)),
    "ex2.approx.ftz.f32": lambda lean: Operation(
        lambda a: numbers.flushed(numbers.power_of_two(numbers.flushed(a), lean)), (_F32, _F32)
    ),
    "rcp.approx.ftz.f64": lambda lean: Operation(
        lambda a: numbers.reciprocal(a, lean), (_F64, _F64)
    ),
    "bfe.u32": lambda lean: Operation(numbers.field, (_U32,) * 4),
    "prmt.b32": lambda lean: Operation(numbers.permuted, (_U32,) * 4),
    "fma.rn.f32.bf16": _mixed_fma(numbers.from_bfloat16, "bf16"),
    "fma.rn.f32.f16": _mixed_fma(lambda a: a.astype(np.float32), "f16"),
    **{f"shl.{kind}": _shift(numbers.shifted_left, kind) for kind in ("b16", "b32", "b64")},
    **{
        f"shr.{sign}{bits}": _shift(numbers.shifted_right, f"{sign}{bits}")
        for sign in "us"
        for bits in (16, 32, 64)
    },
    **{
        f"selp.{kind}": _select(kind)
        for kind in ("b16", "u16", "b32", "u32", "b64", "u64", "f32", "f64")
    },
}

_ORDERED = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal,
}  # fmt: skip


def _comparison(opcode: str) -> Operation | None:
    match = re.fullmatch(r"setp\.([a-z]+)(?:\.(and|or))?\.(\w+)", opcode)
    if match is None:
        return None
    name, combine, kind = match.groups()
    if "f16" in kind:
        return None
    dtype, boolean = DTYPES[kind], DTYPES["pred"]

    def compare(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        unordered = np.isnan(a) | np.isnan(b) if dtype.kind == "f" else np.False_
        if name in ("nan", "num"):
            return unordered if name == "nan" else ~unordered
        if name in _ORDERED:
            return _ORDERED[name](a, b) & ~unordered
        return _ORDERED[name.removesuffix("u")](a, b) | unordered

    if combine is None:
        return Operation(compare, (boolean, dtype, dtype))
    join = np.logical_and if combine == "and" else np.logical_or
    return Operation(lambda a, b, c: join(compare(a, b), c), (boolean, dtype, dtype, boolean))


_ROUNDINGS = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}


def _conversion(opcode: str) -> Operation | None:
    if opcode in ("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"):
        narrow = numbers.to_bfloat16 if "bf16" in opcode else numbers.to_float16

        def pack(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
            return narrow(upper).astype(np.uint32) << np.uint32(16) | narrow(lower)

        return Operation(pack, (_U32, _F32, _F32))
    match = re.fullmatch(r"cvt(?:\.(r\w+))?(\.ftz)?\.(\w+)\.(\w+)", opcode)
    if match is None or match[3] not in DTYPES or match[4] not in DTYPES:
        return None
    rounding, ftz, to, source = match.groups()
    if rounding not in (None, "rn", *_ROUNDINGS):
        return None
    wanted, given = DTYPES[to], DTYPES[source]

    def convert(a: np.ndarray) -> np.ndarray:
        if source == "bf16":
            a = numbers.from_bfloat16(a)
        if ftz:
            a = numbers.flushed(a)
        if rounding in _ROUNDINGS:
            a = _ROUNDINGS[rounding](a)
        if to == "bf16":
            return numbers.to_bfloat16(a)
        if to == "f16":
            return numbers.to_float16(a).view(np.float16)
        if wanted.kind in "iu" and a.dtype.kind == "f":
            return numbers.to_integer(a, wanted)
        return numbers.canonical(a.astype(wanted))

    return Operation(convert, (wanted, given))
