"""Words, random numbers and roundings, bit for bit in every implementation.

What is computed on the CPU and the CUDA kernel's code are one header, compiled here by itself.
Triton's is in the interpreter (`make test-interpret`).
"""

import ctypes
import os
import subprocess
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import packed_oracle
import packed_vectors as vectors
from checking import INTERPRETED
from padam_ext import codecs, packed_states, random_bits
from padam_ext.packed_states import Moments
from padam_ext.random_bits import Draws

TESTS = Path(__file__).parent
U16, U32, F32 = np.uint16, np.uint32, np.float32


def tensor(words):
    return torch.from_numpy(np.ascontiguousarray(words).view(words.dtype.str.replace("u", "i")))


def array(tensor):
    kind = {torch.float32: F32, torch.int32: U32}.get(tensor.dtype, U16)
    return tensor.view(torch.int16).numpy().view(kind) if kind == U16 else tensor.numpy().view(kind)


def eager():
    """The package's PyTorch."""

    def pack(old, m, v, for_m, for_v):
        m, v = tensor(m), tensor(v)
        draws = Draws(tensor(for_m), tensor(for_v), tensor(for_m))
        before = packed_states.unpack_mvh(tensor(old)).h
        h = torch.maximum(before, packed_states.upper_end(v))
        return (
            array(packed_states.pack_mvh(Moments(m, v, h), draws)),
            array(packed_states.pack_mv(Moments(m, v, None), draws)),
        )

    def unpack(words, amsgrad):
        one = (packed_states.unpack_mvh if amsgrad else packed_states.unpack_mv)(tensor(words))
        return tuple(array(value) for value in (one.m, one.v, one.v if one.h is None else one.h))

    def split_and_join(x):
        high, low = codecs.split(tensor(x))
        return array(high), array(low), array(codecs.join(high, low))

    def draw(seed, salt, step, count):
        drawn = random_bits.draw(count, random_bits.step_key(seed, salt, step), torch.device("cpu"))
        return tuple(array(numbers) for numbers in drawn)

    return SimpleNamespace(
        pack=pack, unpack=unpack, split_and_join=split_and_join, draw=draw,
        rounded=lambda x, bits: array(codecs.rounded_stochastically(tensor(x), tensor(bits))),
    )  # fmt: skip


@cache
def library(folder):
    """Csrc's headers, compiled."""
    path = folder / "codecs.so"
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-ffp-contract=off", "-shared"]
    sources = ["-fPIC", f"-I{TESTS.parent / 'csrc'}", TESTS / "codecs.cpp", "-o", path]
    subprocess.run([*command, *sources], check=True)
    return ctypes.CDLL(path)


def native(folder):
    """The kernels' C++."""
    compiled = library(folder)

    def call(name, *arrays, count):
        inputs = [np.ascontiguousarray(a) if isinstance(a, np.ndarray) else a for a in arrays]
        pointers = [
            ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in inputs
        ]
        getattr(compiled, name)(*pointers, ctypes.c_int64(count))

    def empty(count, *dtypes):
        return [np.empty(count, dtype) for dtype in dtypes]

    def pack(old, m, v, for_m, for_v):
        results = empty(len(old), U32, U32)
        call("pack", old, m, v, for_m, for_v, *results, count=len(old))
        return results

    def unpack(words, amsgrad):
        results = empty(len(words), F32, F32, F32)
        call("unpack", words, int(amsgrad), *results, count=len(words))
        return results

    def rounded(x, bits):
        [result] = empty(len(x), U16)
        call("round_stochastically", x, bits, result, count=len(x))
        return result

    def split_and_join(x):
        results = empty(len(x), U16, U16, F32)
        call("split_and_join", x, *results, count=len(x))
        return results

    def draw(seed, salt, step, count):
        compiled.step_key.restype = ctypes.c_uint32
        key = compiled.step_key(ctypes.c_double(seed), ctypes.c_int64(salt), ctypes.c_double(step))
        results = empty(count, U32, U32, U32)
        call("draw", ctypes.c_uint32(key), *results, count=count)
        return results

    return SimpleNamespace(
        pack=pack, unpack=unpack, rounded=rounded, split_and_join=split_and_join, draw=draw
    )


def of_oracle():
    """The numpy that other tests compare with."""

    def pack(old, m, v, for_m, for_v):
        return tuple(packed_oracle.pack(old, m, v, for_m, for_v, way) for way in (True, False))

    def split_and_join(x):
        high, low = packed_oracle.split(x)
        return high, low, packed_oracle.join(high, low)

    def draw(seed, salt, step, count):
        return packed_oracle.draw(count, packed_oracle.step_key(seed, salt, step))

    return SimpleNamespace(
        pack=pack, unpack=packed_oracle.unpack, split_and_join=split_and_join, draw=draw,
        rounded=packed_oracle.rounded,
    )  # fmt: skip


@pytest.fixture(
    params=[pytest.param("triton", marks=pytest.mark.interpret)]
    if INTERPRETED
    else ["oracle", "eager", "native"]
)
def codec(request, tmp_path_factory):
    if request.param == "triton":
        import triton_codecs

        return triton_codecs
    if request.param == "native":
        return native(tmp_path_factory.getbasetemp())
    return {"oracle": of_oracle, "eager": eager}[request.param]()


def float_bits(words):
    return words.view(F32)


def test_words(codec):
    m, v = float_bits(vectors.M), float_bits(vectors.V)
    mvh, mv = codec.pack(vectors.OLD, m, v, vectors.FOR_M, vectors.FOR_V)
    assert [f"{word:08X}" for word in mvh] == [f"{word:08X}" for word in vectors.MVH]
    new = vectors.OLD == 0  # without amsgrad the old word plays no part
    assert (mv == vectors.MV)[new].all()
    _, mv = codec.pack(np.zeros_like(vectors.OLD), m, v, vectors.FOR_M, vectors.FOR_V)
    assert [f"{word:08X}" for word in mv] == [f"{word:08X}" for word in vectors.MV]


def test_values(codec):
    for word, amsgrad, *values in vectors.DECODED:
        m, v, _ = codec.unpack(np.array([word], U32), amsgrad)
        assert [m[0], v[0]] == [F32(value) for value in values]


def test_random_numbers(codec):
    for (seed, step), key in vectors.KEYS.items():
        assert random_bits.step_key(seed, 0, step) == packed_oracle.step_key(seed, 0, step) == key
    for_m, for_v, for_x = codec.draw(7, 0, 1, 4)
    assert (np.stack([for_v, for_m, for_x]) == vectors.DRAWS).all()
    for seed, salt, step in ((2**32 - 1, 0x85EBCA6B, 12345678), (1, 2**32 - 1, 2**24)):
        expected = packed_oracle.draw(64, packed_oracle.step_key(seed, salt, step))
        for mine, its in zip(codec.draw(seed, salt, step, 64), expected, strict=True):
            assert (mine == its).all()


def test_roundings(codec):
    x, upper, expected = vectors.STOCHASTIC
    assert (codec.rounded(float_bits(x.copy()), upper << U32(16)) == expected).all()
    x, high, low = vectors.SPLIT
    halves = codec.split_and_join(float_bits(x.copy()))
    assert (halves[0] == high).all()
    assert (halves[1] == low).all()


COUNT = 2**10 if INTERPRETED else 2**18


def random_words(count=COUNT, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=U32)


def assert_words_equal(ours, theirs, reference):
    """Of a word whose maximum, or v, is not finite only that is told.

    `reference` are the bits of the maximum, or of v.
    """
    of_ours, of_theirs = (float_bits(words & reference) for words in (ours, theirs))
    same = np.where(
        np.isfinite(of_theirs),
        ours == theirs,
        (of_ours == of_theirs) | (np.isnan(of_ours) & np.isnan(of_theirs)),
    )
    assert same.all()


def test_random_bits_are_packed_alike(codec):
    """Moments of every kind: also infinite, NaN of every payload, denormal."""
    old, m, v, for_m, for_v = (random_words(seed=seed) for seed in range(5))
    v[: COUNT // 2] &= U32(0x7FFFFFFF)  # a second moment is negative only where it is NaN
    v[COUNT // 2 :] |= U32(0x7F800001)
    m[: COUNT // 4] = (v[: COUNT // 4] >> U32(1)) + U32(0x1FC00000) + (m[: COUNT // 4] >> U32(7))
    with np.errstate(all="ignore"):
        expected = of_oracle().pack(old, float_bits(m), float_bits(v), for_m, for_v)
    ours = codec.pack(old, float_bits(m), float_bits(v), for_m, for_v)
    assert_words_equal(ours[0], expected[0], U32(0x7FF80000))
    assert_words_equal(ours[1], expected[1], U32(0x7FFFF000))


@pytest.mark.parametrize("amsgrad", [True, False])
def test_random_words_are_unpacked_alike_and_packed_again(codec, amsgrad):
    words = random_words()
    exponent = words >> U32(23) & U32(255)
    words = words[(exponent > 0) & (exponent < 254)]  # the inverse of another is no number
    if amsgrad:
        # Without a second moment above the maximum, which no step makes.
        _, v, h = packed_oracle.unpack(words, True)
        words = words[v <= h]
    values = codec.unpack(words, amsgrad)
    for mine, its in zip(values, packed_oracle.unpack(words, amsgrad), strict=True):
        assert (mine.view(U32) == its.view(U32)).all()
    for seed in (7, 8):
        for_m, for_v = (random_words(len(words), 2 * seed + i) for i in range(2))
        old = words if amsgrad else np.zeros_like(words)
        again = codec.pack(old, *values[:2], for_m, for_v)[0 if amsgrad else 1]
        assert (again == words).all()


def test_every_float_is_split_and_joined(codec):
    x = float_bits(random_words())
    high, low, joined = codec.split_and_join(x)
    for mine, its in zip((high, low), packed_oracle.split(x), strict=True):
        assert (mine == its).all()
    number = ~np.isnan(x)
    assert (joined.view(U32) == x.view(U32))[number].all()
    assert np.isnan(joined[~number]).all()


def test_every_float_is_rounded_alike(codec):
    x, random = float_bits(random_words()), random_words(seed=1)
    assert (codec.rounded(x, random) == packed_oracle.rounded(x, random)).all()
