"""How a slot is read and written: its storage dtype in memory, the arithmetic's in a kernel."""

import triton
import triton.language as tl

from padam_ext.kernels.packed_states import word_of


@triton.jit
def load(pointer, compute_dtype: tl.constexpr, mask, other):
    """Reads a block, widened to `compute_dtype`; `other` where the mask is false."""
    return tl.load(pointer, mask=mask, other=other).to(compute_dtype)


@triton.jit
def store(pointer, value, mask):
    """Writes a block, rounded to nearest even where the storage dtype is narrower."""
    tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def store_changed(pointer, old, new, mask, WIDTH: tl.constexpr):
    """Writes a block where one of each WIDTH neighbours has changed.

    All WIDTH have one mask, which the compiler is told of, so that they stay one access. Running
    maxima rise seldom after some training, and memory is what limits a large step.
    """
    stored = new.to(pointer.dtype.element_ty)
    changed = stored != old.to(pointer.dtype.element_ty)  # true of NaN
    if WIDTH > 1:
        BLOCK: tl.constexpr = changed.shape[0]
        groups = tl.reshape(changed.to(tl.int32), (BLOCK // WIDTH, WIDTH))
        any_changed = tl.max(groups, axis=1, keep_dims=True)
        same = tl.broadcast_to(any_changed, (BLOCK // WIDTH, WIDTH))
        changed = tl.max_constancy(tl.reshape(same, (BLOCK,)) != 0, WIDTH)
    if mask is not None:
        changed &= mask
    tl.store(pointer, stored, mask=changed)


@triton.jit
def load_word(pointer, mask):
    """Reads a block of words that hold several values."""
    return tl.load(pointer, mask=mask).to(tl.uint32, bitcast=True)


@triton.jit
def store_word(pointer, word, mask):
    """Writes it."""
    tl.store(pointer, word.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def store_stochastic(pointer, value, random, mask):
    """Writes float32 as bfloat16: up with the probability of what is cut off.

    NaN has a word of its own, since adding to it could make a number of it.
    """
    store_upper_half(
        pointer, tl.where(value != value, 0x7FC00000, word_of(value) + (random >> 16)), mask
    )


@triton.jit
def load_split(pointer, low_pointer, mask):
    """Reads float32 whose lower half is in another slot.

    A zero that somebody wrote into the parameter takes no negative rest, and an infinity no
    positive one: either would make it NaN.
    """
    high = tl.load(pointer, mask=mask).to(tl.int16, bitcast=True).to(tl.int32) << 16
    rest = tl.load(low_pointer, mask=mask).to(tl.int32)
    rest = tl.where((high & 0x7FFFFFFF) == 0, tl.maximum(rest, 0), rest)
    rest = tl.where((high & 0x7FFFFFFF) == 0x7F800000, tl.minimum(rest, 0), rest)
    return (high + rest).to(tl.float32, bitcast=True)


@triton.jit
def store_split(pointer, low_pointer, value, mask):
    """Writes it: the upper half rounded to nearest with ties away from zero, and the lower half."""
    word = tl.where(value != value, 0x7FC00000, word_of(value))
    store_upper_half(pointer, word + 0x8000, mask)
    tl.store(low_pointer, word.to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)


@triton.jit
def store_upper_half(pointer, word, mask):
    """Writes the upper half of words as bfloat16."""
    half = (word >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    tl.store(pointer, half, mask=mask)
