"""The fused step of a whole list of tensors: one launch, one program for each chunk."""

from typing import Any

import torch
import triton
import triton.language as tl

from padam_ext.kernels.chunks import (
    launch_options,
    locate_chunk,
    triton_dtype,
    whole_blocks_end,
)
from padam_ext.kernels.padam_math import padam_update


def launch(table: Any, param_dtype: torch.dtype, grad_dtype: torch.dtype, root: int) -> None:
    """Steps every tensor of a table, on the current device and stream.

    There is one compiled kernel for each combination of dtypes and root; nothing else is compiled
    in.

    Args:
        table: a device_table.py's DeviceTable, made for blocks of `block_of`.
        param_dtype: dtype of the parameters.
        grad_dtype: dtype of the gradients.
        root: the one of constants.py's ROOTS that all rows share, or the general one.
    """
    multi_tensor_padam[(table.num_chunks,)](
        table.addresses,
        table.numels,
        table.rows,
        table.constants,
        table.chunk_tensors,
        table.chunk_first_blocks,
        len(table.numels),
        table.blocks_per_chunk,
        PARAM=triton_dtype(param_dtype),
        GRAD=triton_dtype(grad_dtype),
        ROOT=root,
        **launch_options(table, table.constants.dtype),
    )


NUM_CONSTANTS: tl.constexpr = tl.constexpr(17)  # fields of constants.py's Constants


@triton.jit(do_not_specialize=["num_tensors", "blocks_per_chunk"])
def multi_tensor_padam(
    addresses,
    numels,
    rows,
    constants,
    chunk_tensors,
    chunk_first_blocks,
    num_tensors,
    blocks_per_chunk,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    ROOT: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_THREADS: tl.constexpr,
):
    """Steps one chunk; the grid has one program for each.

    Args:
        addresses: int64 [slot][tensor], as in launch_table.py.
        numels: int64 [tensor].
        rows: int64 [tensor], index into constants.
        constants: MOMENT [row][field], as in constants.py.
        chunk_tensors: int64 [chunk], index of the chunk's tensor.
        chunk_first_blocks: int64 [chunk], index of its first block in that tensor.
        num_tensors: extent of the tensor dimension.
        blocks_per_chunk: blocks in each chunk, but for a tensor's last.
        PARAM: dtype of parameters.
        GRAD: dtype of gradients.
        MOMENT: dtype of moments, and of the arithmetic.
        ROOT: how d^(2p) is taken, see padam_math.py.
        BLOCK: elements in a block, a power of two.
        NUM_THREADS: threads of the program.
    """
    tensor, begin, end = locate_chunk(
        numels, chunk_tensors, chunk_first_blocks, blocks_per_chunk, BLOCK
    )
    row = constants + tl.load(rows + tensor) * NUM_CONSTANTS
    c = (
        tl.load(row),
        tl.load(row + 1),
        tl.load(row + 2),
        tl.load(row + 3),
        tl.load(row + 4),
        tl.load(row + 5),
        tl.load(row + 6),
        tl.load(row + 7),
        tl.load(row + 8),
        tl.load(row + 9),
        tl.load(row + 10),
        tl.load(row + 11),
        tl.load(row + 12),
        tl.load(row + 15),
    )
    amsgrad = tl.load(row + 13)
    end = tl.where(tl.load(row + 16) != 0, begin, end)  # nothing to do in a step that is skipped

    x_address = tl.load(addresses + tensor)
    g_address = tl.load(addresses + num_tensors + tensor)
    m_address = tl.load(addresses + 2 * num_tensors + tensor)
    v_address = tl.load(addresses + 3 * num_tensors + tensor)
    h_address = tl.load(addresses + 4 * num_tensors + tensor)  # 0 without amsgrad
    x = x_address.to(tl.pointer_type(PARAM))
    g = g_address.to(tl.pointer_type(GRAD))
    m = m_address.to(tl.pointer_type(MOMENT))
    v = v_address.to(tl.pointer_type(MOMENT))
    h = h_address.to(tl.pointer_type(MOMENT))

    # Whole blocks of aligned tensors first, then what is left.
    every_address = x_address | g_address | m_address | v_address | h_address
    whole = whole_blocks_end(every_address, begin, end, BLOCK)
    for start in range(begin, whole, BLOCK):
        step_block(x, g, m, v, h, start, end, amsgrad, c, ROOT, BLOCK, True)
    # One element for each thread, so that neighbours still share a memory transaction.
    for start in range(whole, end, NUM_THREADS):
        step_block(x, g, m, v, h, start, end, amsgrad, c, ROOT, NUM_THREADS, False)


@triton.jit
def step_block(
    x,
    g,
    m,
    v,
    h,
    start,
    end,
    amsgrad,
    constants,
    ROOT: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Steps elements [start, min(start + BLOCK, end)) of one tensor.

    WHOLE promises that there are BLOCK of them and that they begin at addresses that are multiples
    of 16.
    """
    offsets = tl.arange(0, BLOCK)
    # Compared as a block: the interpreter cannot make a block of a scalar that is true or false.
    with_h = tl.full([BLOCK], amsgrad, m.dtype.element_ty) != 0
    if WHOLE:
        x_at = tl.multiple_of(x + start, 16) + offsets
        g_at = tl.multiple_of(g + start, 16) + offsets
        m_at = tl.multiple_of(m + start, 16) + offsets
        v_at = tl.multiple_of(v + start, 16) + offsets
        h_at = tl.multiple_of(h + start, 16) + offsets
        inside = None
    else:
        x_at, g_at, m_at = x + start + offsets, g + start + offsets, m + start + offsets
        v_at, h_at = v + start + offsets, h + start + offsets
        inside = offsets < end - start
        with_h = inside & with_h

    new_x, new_m, new_v, new_h = padam_update(
        tl.load(x_at, mask=inside).to(m.dtype.element_ty),
        tl.load(g_at, mask=inside).to(m.dtype.element_ty),
        tl.load(m_at, mask=inside),
        tl.load(v_at, mask=inside),
        tl.load(h_at, mask=with_h, other=float("-inf")),
        constants,
        ROOT,
    )
    tl.store(x_at, new_x.to(x.dtype.element_ty), mask=inside)
    tl.store(m_at, new_m, mask=inside)
    tl.store(v_at, new_v, mask=inside)
    tl.store(h_at, new_h, mask=with_h)
