"""What the kernels share: how they are launched, and where in the launch table a program works.

A chunk is a run of blocks of one tensor. Every program looks its tensor up in the launch table
(launch_table.py; device_table.py brings it to the device), then walks its blocks.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

# Floating point contraction is off, see padam_math.py; loads do not wait for a pipeline of their
# own.
OPTIONS = {"enable_fp_fusion": False, "num_stages": 1}
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
    return {"num_warps": _warps(device), **OPTIONS}


@cache
def _warps(device: torch.device) -> int:
    """Warps of a program: of 32 threads, but for some of AMD's GPUs."""
    if device.type == "cuda" and torch.version.hip is not None:
        return PROGRAM_THREADS // torch.cuda.get_device_properties(device).warp_size
    return PROGRAM_THREADS // 32


@triton.jit
def locate_chunk(numels, chunk_tensors, chunk_first_blocks, blocks_per_chunk, BLOCK: tl.constexpr):
    """The tensor of this program's chunk, and the elements [begin, end) of it: int64."""
    chunk = tl.program_id(0).to(tl.int64)
    tensor = tl.load(chunk_tensors + chunk)
    begin = tl.load(chunk_first_blocks + chunk) * BLOCK
    end = tl.minimum(begin + blocks_per_chunk * BLOCK, tl.load(numels + tensor))
    return tensor, begin, end


@triton.jit
def whole_blocks_end(addresses, begin, end, BLOCK: tl.constexpr):
    """The end of the blocks that can be read and written 16 bytes at a time, without a mask.

    Those need addresses that are multiples of 16. `addresses` is one, or several or'ed together.
    """
    return tl.where(addresses % 16 == 0, begin + (end - begin) // BLOCK * BLOCK, begin)
