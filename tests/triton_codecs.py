"""The codecs of the Triton kernels for numbers given one by one, in the interpreter."""

import numpy as np
import torch
import triton
import triton.language as tl

from padam_ext.kernels import codecs, packed_states, random_bits


@triton.jit
def _pack(old, m, v, for_m, for_v, mvh, mv, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    m_block, v_block = tl.load(m + at), tl.load(v + at)
    m_bits = tl.load(for_m + at).to(tl.uint32, bitcast=True)
    v_bits = tl.load(for_v + at).to(tl.uint32, bitcast=True)
    _, _, h = packed_states.unpack_mvh(codecs.load_word(old + at, None))
    reached = packed_states.upper_end(v_block)
    h = tl.maximum(h, reached, propagate_nan=tl.PropagateNan.ALL)
    codecs.store_word(mvh + at, packed_states.pack_mvh(m_block, v_block, h, m_bits, v_bits), None)
    codecs.store_word(mv + at, packed_states.pack_mv(m_block, v_block, m_bits, v_bits), None)


@triton.jit
def _unpack(words, m, v, h, AMSGRAD: tl.constexpr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    word = codecs.load_word(words + at, None)
    if AMSGRAD:
        m_block, v_block, h_block = packed_states.unpack_mvh(word)
    else:
        m_block, v_block = packed_states.unpack_mv(word)
        h_block = v_block
    tl.store(m + at, m_block)
    tl.store(v + at, v_block)
    tl.store(h + at, h_block)


@triton.jit
def _round(x, random, rounded, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    bits = tl.load(random + at).to(tl.uint32, bitcast=True)
    codecs.store_stochastic(rounded + at, tl.load(x + at), bits, None)


@triton.jit
def _split(x, high, low, joined, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    codecs.store_split(high + at, low + at, tl.load(x + at), None)
    tl.store(joined + at, codecs.load_split(high + at, low + at, None))


@triton.jit
def _draw(seed, salt, step, for_m, for_v, for_x, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    key = random_bits.step_key(tl.load(seed), tl.load(salt), tl.load(step))
    word = random_bits.random_word(at, key)
    codecs.store_word(for_m + at, random_bits.random_for_m(word), None)
    codecs.store_word(for_v + at, random_bits.random_for_v(word), None)
    codecs.store_word(for_x + at, random_bits.random_for_x(word), None)


def _tensor(array):
    """Filled up to a power of two, unsigned as signed."""
    kind = array.dtype.str.replace("u", "i")
    filled = np.zeros(_count(array), array.dtype)
    filled[: len(array)] = array
    return torch.from_numpy(filled.view(kind))


def _count(array):
    return 1 << (len(array) - 1).bit_length()


def _words(array):
    return torch.empty(_count(array), dtype=torch.int32)


def pack(old, m, v, for_m, for_v):
    mvh, mv = _words(old), _words(old)
    _pack[(1,)](*map(_tensor, (old, m, v, for_m, for_v)), mvh, mv, _count(old))
    return tuple(word.numpy().view(np.uint32)[: len(old)] for word in (mvh, mv))


def unpack(words, amsgrad):
    values = [torch.empty(_count(words)) for _ in range(3)]
    _unpack[(1,)](_tensor(words), *values, amsgrad, _count(words))
    return tuple(value.numpy()[: len(words)] for value in values)


def rounded(x, for_x):
    to = torch.empty(_count(x), dtype=torch.bfloat16)
    _round[(1,)](_tensor(x), _tensor(for_x), to, _count(x))
    return to.view(torch.int16).numpy().view(np.uint16)[: len(x)]


def split_and_join(x):
    high, low = (
        torch.empty(_count(x), dtype=torch.bfloat16),
        torch.empty(_count(x), dtype=torch.int16),
    )
    joined = torch.empty(_count(x))
    _split[(1,)](_tensor(x), high, low, joined, _count(x))
    halves = (half.view(torch.int16).numpy().view(np.uint16)[: len(x)] for half in (high, low))
    return (*halves, joined.numpy()[: len(x)])


def draw(seed, salt, step, count):
    numbers = [torch.empty(count, dtype=torch.int32) for _ in range(3)]
    _draw[(1,)](*(torch.tensor([value]) for value in (seed, salt, step)), *numbers, count)
    return tuple(number.numpy().view(np.uint32) for number in numbers)
