"""The sum of the squares of a whole list of gradients: one launch, one program for each chunk.

Each chunk's sum is stored by itself, as float64. The sums are added up in one order
(prepare_step.py), so that the norm is the same from run to run.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from padam_ext.kernels.chunks import (
    chunk_constants,
    compiler_options,
    locate_chunk,
    pack_begin,
    pack_ends,
    triton_dtype,
    widened,
)
from padam_ext.kernels.codecs import load, store


def launch(table: Any, signature: Any) -> None:
    """Sums into a table's partial_sums, on the current device and stream.

    Args:
        table: a DeviceTable, made for blocks of `block_of`.
        signature: the table's; of its dtypes, the gradient's counts.
    """
    multi_tensor_sum_of_squares[(table.num_chunks,)](
        table.addresses,
        table.numels,
        table.chunk_tensors,
        table.chunk_first_blocks,
        table.partial_sums,
        len(table.numels),
        table.blocks_per_chunk,
        **variant(signature.dtypes[1], signature.compute_dtype),
        **compiler_options(table.addresses.device),
    )


def variant(grad_dtype: torch.dtype, compute_dtype: torch.dtype) -> dict[str, Any]:
    """Constants of the kernel's variant for gradients of a dtype."""
    return {"GRAD": triton_dtype(grad_dtype), **chunk_constants(compute_dtype)}


# `partial_sums` may be a part of a tensor, that begins anywhere.
@triton.jit(do_not_specialize=["partial_sums", "num_tensors", "blocks_per_chunk"])
def multi_tensor_sum_of_squares(
    addresses,
    numels,
    chunk_tensors,
    chunk_first_blocks,
    partial_sums,
    num_tensors,
    blocks_per_chunk,
    GRAD: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_THREADS: tl.constexpr,
):
    """Sums one chunk; the grid has one program for each. Arguments are those of the step's kernel.

    Args:
        addresses: see multi_tensor_padam.
        numels: see there.
        chunk_tensors: see there.
        chunk_first_blocks: see there.
        partial_sums: float64 [chunk], where the sums go.
        num_tensors: see multi_tensor_padam.
        blocks_per_chunk: see there.
        GRAD: dtype of gradients.
        COMPUTE: dtype of the arithmetic.
        BLOCK: elements in a block, a power of two.
        NUM_THREADS: threads of the program.
    """
    # The last chunk first: the step begins with those whose gradients are still in the L2 cache.
    chunk = tl.num_programs(0).to(tl.int64) - 1 - tl.program_id(0)
    tensor, begin, count = locate_chunk(
        chunk, numels, chunk_tensors, chunk_first_blocks, blocks_per_chunk, BLOCK
    )
    address = tl.load(addresses + num_tensors + tensor)
    grad = address.to(tl.pointer_type(GRAD)) + begin
    WIDTH: tl.constexpr = 128 // COMPUTE.primitive_bitwidth
    whole, in_packs = pack_ends(widened(address, GRAD, COMPUTE), count, BLOCK, WIDTH)
    # The last elements come first, as in multi_tensor_padam.
    rest_offsets = tl.arange(0, NUM_THREADS)
    rest = tl.zeros([NUM_THREADS], COMPUTE)
    for start in range(in_packs, count, NUM_THREADS):
        inside = rest_offsets < count - start
        g = load(grad + start + rest_offsets, COMPUTE, inside, 0.0)
        rest = tl.fma(g, g, rest)
    offsets = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], COMPUTE)
    if whole < in_packs:
        inside = tl.max_constancy(offsets < in_packs - whole, WIDTH)
        g = load(pack_begin(grad, whole, COMPUTE) + offsets, COMPUTE, inside, 0.0)
        sums = g * g
    for start in range(0, whole, BLOCK):
        g = load(pack_begin(grad, start, COMPUTE) + offsets, COMPUTE, None, None)
        sums = tl.fma(g, g, sums)
    store(partial_sums + chunk, tl.sum(sums, 0) + tl.sum(rest, 0), None)
