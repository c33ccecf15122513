"""The fused step of a whole list of tensors: one launch, one program for each chunk."""

from typing import Any

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
from padam_ext.kernels.codecs import (
    load,
    load_split,
    load_word,
    store,
    store_changed,
    store_split,
    store_stochastic,
    store_word,
)
from padam_ext.kernels.packed_states import pack_mv, pack_mvh, unpack_mv, unpack_mvh
from padam_ext.kernels.padam_math import padam_update
from padam_ext.kernels.random_bits import (
    random_for_m,
    random_for_v,
    random_for_x,
    random_word,
    step_key,
)


def launch(table: Any, signature: Any, root: int) -> None:
    """Steps every tensor of a table, on the current device and stream.

    There is one compiled kernel for each signature and root; nothing else is compiled in.

    Args:
        table: a DeviceTable, made for blocks of `block_of`.
        signature: its dtypes, one for each slot or None for an absent slot, its compute_dtype, and
            whether parameters are rounded stochastically.
        root: the one of the ROOTS that all rows share, or the general one.
    """
    multi_tensor_padam[(table.num_chunks,)](
        table.addresses,
        table.numels,
        table.salts,
        table.rows,
        table.constants,
        table.control,
        table.chunk_tensors,
        table.chunk_first_blocks,
        len(table.numels),
        table.blocks_per_chunk,
        **variant(signature, root),
        **compiler_options(table.addresses.device),
    )


def variant(signature: Any, root: int) -> dict[str, Any]:
    """Constants of the kernel's variant for a signature and a root."""
    storage = (None if dtype is None else triton_dtype(dtype) for dtype in signature.dtypes)
    return {
        **dict(zip(SLOTS, storage, strict=True)),
        "STOCHASTIC": signature.stochastic,
        "ROOT": root,
        **chunk_constants(signature.compute_dtype),
    }


# The dtype of an absent slot is None. The moments are in the first two or three after GRAD, or in
# one packed slot.
SLOTS = (
    "PARAM",
    "GRAD",
    "EXP_AVG",
    "EXP_AVG_SQ",
    "MAX_EXP_AVG_SQ",
    "PACKED_MVH",
    "PACKED_MV",
    "PARAM_LOW",
)
NUM_CONSTANTS: tl.constexpr = tl.constexpr(17)  # fields of a row
SEED: tl.constexpr = tl.constexpr(15)  # the last of them
STEP: tl.constexpr = tl.constexpr(16)


# `control` is one of two parts of a table: no reason to compile the kernel twice.
@triton.jit(do_not_specialize=["control", "num_tensors", "blocks_per_chunk"])
def multi_tensor_padam(
    addresses,
    numels,
    salts,
    rows,
    constants,
    control,
    chunk_tensors,
    chunk_first_blocks,
    num_tensors,
    blocks_per_chunk,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    EXP_AVG: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr,
    MAX_EXP_AVG_SQ: tl.constexpr,
    PACKED_MVH: tl.constexpr,
    PACKED_MV: tl.constexpr,
    PARAM_LOW: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROOT: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_THREADS: tl.constexpr,
):
    """Steps one chunk; the grid has one program for each.

    Args:
        addresses: int64 [slot][tensor].
        numels: int64 [tensor].
        salts: int64 [tensor], of random numbers.
        rows: int64 [tensor], index into constants.
        constants: float64 [row][field].
        control: float64 [2]: what gradients are multiplied by; 1 for a step to skip, else 0.
        chunk_tensors: int64 [chunk], index of the chunk's tensor.
        chunk_first_blocks: int64 [chunk], index of its first block in that tensor.
        num_tensors: extent of the tensor dimension.
        blocks_per_chunk: blocks in each chunk, but for a tensor's last.
        PARAM: dtype in which parameters are stored.
        GRAD: of gradients.
        EXP_AVG: of first moments; None where states are packed.
        EXP_AVG_SQ: of second moments, likewise.
        MAX_EXP_AVG_SQ: of their running maxima; None without amsgrad, too.
        PACKED_MVH: of words that hold all three; None without.
        PACKED_MV: of words that hold two; None without.
        PARAM_LOW: of the lower halves of parameters; None without.
        STOCHASTIC: whether parameters, bfloat16, are rounded stochastically.
        ROOT: how d^(2p) is taken, see padam_math.py.
        COMPUTE: dtype of the arithmetic.
        BLOCK: elements in a block, a power of two.
        NUM_THREADS: threads of the program.
    """
    tensor, begin, count = locate_chunk(
        tl.program_id(0).to(tl.int64),
        numels,
        chunk_tensors,
        chunk_first_blocks,
        blocks_per_chunk,
        BLOCK,
    )
    grad_factor = tl.load(control).to(COMPUTE)
    count = tl.where(tl.load(control + 1) != 0, 0, count)  # a skipped step does nothing
    row = constants + tl.load(rows + tensor) * NUM_CONSTANTS
    c = (
        tl.load(row).to(COMPUTE),
        tl.load(row + 1).to(COMPUTE),
        tl.load(row + 2).to(COMPUTE),
        tl.load(row + 3).to(COMPUTE),
        tl.load(row + 4).to(COMPUTE),
        tl.load(row + 5).to(COMPUTE),
        tl.load(row + 6).to(COMPUTE),
        tl.load(row + 7).to(COMPUTE),
        tl.load(row + 8).to(COMPUTE),
        tl.load(row + 9).to(COMPUTE),
        tl.load(row + 10).to(COMPUTE),
        tl.load(row + 11).to(COMPUTE),
        tl.load(row + 12).to(COMPUTE),
        tl.load(row + 13).to(COMPUTE),
    )

    x_address = tl.load(addresses + tensor)
    g_address = tl.load(addresses + num_tensors + tensor)
    every_address = widened(x_address, PARAM, COMPUTE)
    x = x_address.to(tl.pointer_type(PARAM)) + begin
    g = g_address.to(tl.pointer_type(GRAD)) + begin
    m, v, h, word, low = None, None, None, None, None
    if EXP_AVG is not None:
        m_address = tl.load(addresses + 2 * num_tensors + tensor)
        v_address = tl.load(addresses + 3 * num_tensors + tensor)
        every_address |= widened(m_address, EXP_AVG, COMPUTE)
        every_address |= widened(v_address, EXP_AVG_SQ, COMPUTE)
        m = m_address.to(tl.pointer_type(EXP_AVG)) + begin
        v = v_address.to(tl.pointer_type(EXP_AVG_SQ)) + begin
    if MAX_EXP_AVG_SQ is not None:
        h_address = tl.load(addresses + 4 * num_tensors + tensor)
        every_address |= widened(h_address, MAX_EXP_AVG_SQ, COMPUTE)
        h = h_address.to(tl.pointer_type(MAX_EXP_AVG_SQ)) + begin
    if PACKED_MVH is not None:
        word_address = tl.load(addresses + 5 * num_tensors + tensor)
        every_address |= widened(word_address, PACKED_MVH, COMPUTE)
        word = word_address.to(tl.pointer_type(PACKED_MVH)) + begin
    if PACKED_MV is not None:
        word_address = tl.load(addresses + 6 * num_tensors + tensor)
        every_address |= widened(word_address, PACKED_MV, COMPUTE)
        word = word_address.to(tl.pointer_type(PACKED_MV)) + begin
    if PARAM_LOW is not None:
        low_address = tl.load(addresses + 7 * num_tensors + tensor)
        every_address |= widened(low_address, PARAM_LOW, COMPUTE)
        low = low_address.to(tl.pointer_type(PARAM_LOW)) + begin
    key = None
    if STOCHASTIC or word is not None:
        key = step_key(
            tl.load(row + SEED).to(tl.int64),
            tl.load(salts + tensor),
            tl.load(row + STEP).to(tl.int64),
        )
    AMSGRAD: tl.constexpr = (MAX_EXP_AVG_SQ is not None) or (PACKED_MVH is not None)

    # Gradients may be taken one by one beside packs of all else, as in a bucket at an odd address.
    # Two ways to load them take registers: the last block has one, and so has float64.
    g_in_packs, g_in_last_packs = widened(g_address, GRAD, COMPUTE) % 16 == 0, False
    if COMPUTE.primitive_bitwidth == 64:
        every_address |= widened(g_address, GRAD, COMPUTE)
        g_in_packs, g_in_last_packs = True, True

    WIDTH: tl.constexpr = 128 // COMPUTE.primitive_bitwidth  # a thread takes so many at a time
    whole, in_packs = pack_ends(every_address, count, BLOCK, WIDTH)
    # The last elements come first: what only they need takes no registers in the loop over blocks.
    # One for each thread, so that neighbours still share a memory transaction.
    for start in range(in_packs, count, NUM_THREADS):
        step_block(
            x, g, m, v, h, word, low, begin, start, count, grad_factor, c, key, False,
            STOCHASTIC, AMSGRAD, ROOT, COMPUTE, NUM_THREADS, 1, False,
        )  # fmt: skip
    if whole < in_packs:
        step_block(
            x, g, m, v, h, word, low, begin, whole, in_packs, grad_factor, c, key, g_in_last_packs,
            STOCHASTIC, AMSGRAD, ROOT, COMPUTE, BLOCK, WIDTH, False,
        )  # fmt: skip
    for start in range(0, whole, BLOCK):
        step_block(
            x, g, m, v, h, word, low, begin, start, in_packs, grad_factor, c, key, g_in_packs,
            STOCHASTIC, AMSGRAD, ROOT, COMPUTE, BLOCK, WIDTH, True,
        )  # fmt: skip


@triton.jit
def step_block(
    x,
    g,
    m,
    v,
    h,
    word,
    low,
    begin,
    start,
    end,
    grad_factor,
    constants,
    key,
    g_in_packs,
    STOCHASTIC: tl.constexpr,
    AMSGRAD: tl.constexpr,
    ROOT: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Steps elements [start, min(start + BLOCK, end)) of a chunk that begins at `begin`.

    Pointers are to the chunk's first element; what it lacks is None. A WIDTH of more than 1
    promises that a thread's elements, so many, are one access of each slot, and that there are a
    multiple of it; of the gradient that is so if `g_in_packs`. WHOLE promises that there are BLOCK
    of them.
    """
    offsets = tl.arange(0, BLOCK)
    if WHOLE:
        inside = None
    else:
        inside = tl.max_constancy(offsets < end - start, WIDTH)
    x_at = block_at(x, start, offsets, WIDTH, COMPUTE)
    if low is None:
        old_x = load(x_at, COMPUTE, inside, None)
    else:
        low_at = block_at(low, start, offsets, WIDTH, COMPUTE)
        old_x = load_split(x_at, low_at, inside)
    grad = load_grad(g, start, offsets, g_in_packs, inside, WIDTH, COMPUTE)
    old_h = None
    if word is not None:
        word_at = block_at(word, start, offsets, WIDTH, COMPUTE)
        if AMSGRAD:
            old_m, old_v, old_h = unpack_mvh(load_word(word_at, inside))
        else:
            old_m, old_v = unpack_mv(load_word(word_at, inside))
    else:
        m_at = block_at(m, start, offsets, WIDTH, COMPUTE)
        v_at = block_at(v, start, offsets, WIDTH, COMPUTE)
        old_m = load(m_at, COMPUTE, inside, None)
        old_v = load(v_at, COMPUTE, inside, None)
        if AMSGRAD:
            h_at = block_at(h, start, offsets, WIDTH, COMPUTE)
            old_h = load(h_at, COMPUTE, inside, None)

    CODED: tl.constexpr = word is not None
    new_x, new_m, new_v, new_h = padam_update(
        old_x, grad, old_m, old_v, old_h, grad_factor, constants, ROOT, CODED
    )
    if key is not None:
        random = random_word(begin + (start + offsets), key)
    if low is not None:
        store_split(x_at, low_at, new_x, inside)
    elif STOCHASTIC:
        store_stochastic(x_at, new_x, random_for_x(random), inside)
    else:
        store(x_at, new_x, inside)
    if word is not None:
        if AMSGRAD:
            new_word = pack_mvh(new_m, new_v, new_h, random_for_m(random), random_for_v(random))
        else:
            new_word = pack_mv(new_m, new_v, random_for_m(random), random_for_v(random))
        store_word(word_at, new_word, inside)
    else:
        store(m_at, new_m, inside)
        store(v_at, new_v, inside)
        if AMSGRAD:
            store_changed(h_at, old_h, new_h, inside, WIDTH)


@triton.jit
def load_grad(g, start, offsets, in_packs, inside, WIDTH: tl.constexpr, COMPUTE: tl.constexpr):
    """A block of gradients: in packs, or one by one.

    What is also written has no such choice: threads would have to exchange elements first.
    """
    if in_packs:
        grad = load(block_at(g, start, offsets, WIDTH, COMPUTE), COMPUTE, inside, None)
    else:
        grad = load(block_at(g, start, offsets, 1, COMPUTE), COMPUTE, inside, None)
    return grad


@triton.jit
def block_at(pointer, start, offsets, WIDTH: tl.constexpr, COMPUTE: tl.constexpr):
    """Pointers to the elements of a block; see step_block for what WIDTH promises."""
    if WIDTH > 1:
        first = pack_begin(pointer, start, COMPUTE)
    else:
        first = pointer + start
    return first + offsets
