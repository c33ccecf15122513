"""What the kernels share: how they are launched, and where in the launch table a program works.

A chunk is a run of blocks of one tensor. Every program looks its tensor up in the launch table
(launch_table.py; device_table.py brings it to the device), then walks its blocks.
"""

from dataclasses import fields
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

# Floating point contraction is off, see padam_math.py; loads do not wait for a pipeline of their
# own.
OPTIONS = {"enable_fp_fusion": False, "num_stages": 1}
# NVIDIA's library of functions keeps subnormal numbers. Older versions of Triton have no choice.
NVIDIA_OPTIONS = {"enable_reflect_ftz": False}
PROGRAM_THREADS = 256


def block_of(compute_dtype: torch.dtype) -> int:
    """Elements that a program takes at a time: 16 bytes of the arithmetic for every thread."""
    return PROGRAM_THREADS * 16 // compute_dtype.itemsize


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """Triton's name of a dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def chunk_constants(compute_dtype: torch.dtype) -> dict[str, Any]:
    """Constants of every kernel whose programs take a chunk each."""
    return {
        "COMPUTE": triton_dtype(compute_dtype),
        "BLOCK": block_of(compute_dtype),
        "NUM_THREADS": PROGRAM_THREADS,
    }


def compiler_options(device: torch.device) -> dict[str, Any]:
    """The compiler's options for a launch on a device."""
    warp_size = 32
    if device.type == "cuda" and torch.version.hip is not None:
        warp_size = torch.cuda.get_device_properties(device).warp_size
    return options_for("cuda" if torch.version.hip is None else "hip", warp_size)


@cache
def options_for(backend: str, warp_size: int) -> dict[str, Any]:
    """The options for one of Triton's backends and the number of threads in a warp there."""
    options = {"num_warps": PROGRAM_THREADS // warp_size, **OPTIONS}
    return options | NVIDIA_OPTIONS if backend == "cuda" and _can_keep_subnormals() else options


def _can_keep_subnormals() -> bool:
    try:
        from triton.backends.nvidia.compiler import CUDAOptions
    except ImportError:  # this Triton is for other GPUs
        return False
    return set(NVIDIA_OPTIONS) <= {field.name for field in fields(CUDAOptions)}


@triton.jit
def locate_chunk(
    chunk, numels, chunk_tensors, chunk_first_blocks, blocks_per_chunk, BLOCK: tl.constexpr
):
    """A chunk's tensor, its first element there (both int64), and its number of elements (int32).

    Of a chunk all else is int32: with int64, loops need more registers.
    """
    tensor = tl.load(chunk_tensors + chunk)
    begin = tl.load(chunk_first_blocks + chunk) * BLOCK
    count = tl.minimum(blocks_per_chunk * BLOCK, tl.load(numels + tensor) - begin)
    return tensor, begin, count.to(tl.int32)


@triton.jit
def widened(address, STORED: tl.constexpr, COMPUTE: tl.constexpr):
    """A number that is a multiple of 16 where the elements that a thread takes are one access.

    They take 16 bytes in the dtype of the arithmetic, and half of that in a half type.
    """
    return address * (COMPUTE.primitive_bitwidth // STORED.primitive_bitwidth)


@triton.jit
def pack_begin(pointer, start, COMPUTE: tl.constexpr):
    """A pointer to elements of which the compiler is told what `widened` has found."""
    BITS: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth
    return tl.multiple_of(pointer + start, 16 * BITS // COMPUTE.primitive_bitwidth)


@triton.jit
def pack_ends(addresses, count, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """How many elements can be taken in the widest accesses: in whole blocks, and in all.

    `addresses` is one that has passed `widened`, or several or'ed together. A thread takes WIDTH
    elements at a time.
    """
    aligned = addresses % 16 == 0
    whole = tl.where(aligned, count & -BLOCK, 0)
    in_packs = tl.where(aligned, count & -WIDTH, 0)
    return whole, in_packs
