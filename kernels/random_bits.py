"""Random numbers for stochastic rounding; padam_ext/random_bits.py says what they depend on.

All are words of 32 bits, uint32, of which only the top bits are used.
"""

import triton
import triton.language as tl


@triton.jit
def step_key(seed, salt, step):
    """32 bits for one tensor in its update number `step`, from 1; all are int64."""
    x = (seed ^ salt ^ step * 0x9E3779B9).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def random_word(places, key):
    """A word for each element, of which its numbers are multiples.

    Args:
        places: where elements lie in memory, counted from the tensor's first; any integer.
        key: that of the step.
    """
    y = places.to(tl.uint32) * 0x9E3779B1 + key
    return y ^ (y >> 15)


@triton.jit
def random_for_m(word):
    """Of an element's word."""
    return word * 0x846CA68B


@triton.jit
def random_for_v(word):
    """Of an element's word."""
    return word * 0x7FEB352D


@triton.jit
def random_for_x(word):
    """Of an element's word."""
    return word * 0xC2B2AE35
