"""What only the device knows of a step, worked out there, in one launch before the step's kernel.

That is the norm of all gradients, whether to skip the step, what to multiply gradients by, step
counts, and rows that depend on those or on a learning rate or a weight decay on the device. All
arithmetic is in float64.

Tensors and rows are divided among the programs. Each program adds up all sums itself, in the same
order, so that none waits for another.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from padam_ext.kernels.chunks import PROGRAM_THREADS, compiler_options
from padam_ext.kernels.multi_tensor_padam import NUM_CONSTANTS, STEP

# How many each program takes at a time.
BLOCKS = {"SUMS": 4 * PROGRAM_THREADS, "ROWS": PROGRAM_THREADS}


def launch(table: Any, inputs: Any) -> None:
    """Completes a table for one step, on the current device and stream.

    Args:
        table: a DeviceTable.
        inputs: tensors on the device, each None where there is no such thing: sums, grad_scale,
            found_inf, and to write to, norm and skipped.
    """
    nothing = table.limits.view(torch.float32)  # stands in for an absent tensor; never read
    num_counters = len(table.numels) if table.counts_on_device else 0
    programs = triton.cdiv(max(num_counters, table.num_late_rows, 1), BLOCKS["ROWS"])
    prepare_step[(programs,)](
        table.limits if inputs.sums is None else inputs.sums,
        nothing if inputs.grad_scale is None else inputs.grad_scale,
        nothing if inputs.found_inf is None else inputs.found_inf,
        nothing if inputs.norm is None else inputs.norm,
        table.counters if inputs.skipped is None else inputs.skipped,
        table.limits,
        table.prepared_control,
        table.counters,
        table.row_sources,
        table.constants,
        0 if inputs.sums is None else len(inputs.sums),
        int(inputs.sums is not None),
        int(inputs.grad_scale is not None),
        int(inputs.found_inf is not None),
        int(inputs.norm is not None),
        int(inputs.skipped is not None),
        num_counters,
        table.num_late_rows,
        **BLOCKS,
        **compiler_options(table.addresses.device),
    )


NUM_WORDS: tl.constexpr = tl.constexpr(11)  # of a row's source


# Variants of the kernel differ only in the dtypes of arguments.
@triton.jit(do_not_specialize=range(18))
def prepare_step(
    sums,
    grad_scale,
    found_inf,
    norm,
    skipped,
    limits,
    prepared_control,
    counters,
    row_sources,
    constants,
    num_sums,
    has_sums,
    has_grad_scale,
    has_found_inf,
    has_norm,
    has_skipped,
    num_counters,
    num_late_rows,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Counts and completes up to ROWS tensors and rows; the first program also writes the rest.

    Args:
        sums: float64 [num_sums], which add up to the sum of the squares of all gradients.
        grad_scale: what gradients are to be divided by.
        found_inf: not 0 for a step to skip.
        norm: where the norm of all gradients goes.
        skipped: int64, where a step that is skipped is counted.
        limits: float64 [2]: the largest norm; 1 to skip a step whose norm is not finite, else 0.
        prepared_control: float64 [2], the control of multi_tensor_padam, to write to.
        counters: int64 [tensor], address of a float32 that counts the tensor's steps.
        row_sources: int64 [row][word], what rows are made from, see below.
        constants: float64 [row][field], the rows of multi_tensor_padam.
        num_sums: see above.
        has_sums: 0 or 1, whether there are sums.
        has_grad_scale: likewise.
        has_found_inf: likewise.
        has_norm: likewise.
        has_skipped: likewise.
        num_counters: how many tensors to count, from the first one.
        num_late_rows: how many rows to complete, from the first one.
        SUMS: sums to add at a time, a power of two.
        ROWS: tensors and rows of a program, a power of two.
    """
    total_norm = tl.sqrt(add_up(sums, num_sums, SUMS))
    factor = tl.full([], 1.0, tl.float64)
    if has_grad_scale != 0:
        scale = tl.load(grad_scale).to(tl.float64)
        total_norm = total_norm / scale
        factor = factor / scale
    skip = tl.full([], 0.0, tl.float64)
    if has_found_inf != 0:
        skip = tl.where(tl.load(found_inf).to(tl.float64) != 0, 1.0, skip)
    if has_sums != 0:
        max_norm = tl.load(limits)
        clip = max_norm / (total_norm + 1e-6)
        clip = tl.where(clip > 1, 1.0, clip)  # NaN stays
        factor = tl.where(max_norm < float("inf"), factor * clip, factor)
        finite = tl.abs(total_norm) < float("inf")
        not_finite = tl.where(finite, 0.0, tl.load(limits + 1))
        skip = tl.where(not_finite != 0, 1.0, skip)

    if tl.program_id(0) == 0:
        tl.store(prepared_control, factor)
        tl.store(prepared_control + 1, skip)
        if has_norm != 0:
            tl.store(norm, total_norm.to(norm.dtype.element_ty))
        if has_skipped != 0:
            tl.store(skipped, tl.load(skipped) + skip.to(tl.int64))

    # A row that depends on a counter belongs to the tensor with the same index.
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    counted = at < num_counters
    counter = tl.load(counters + at, mask=counted, other=0).to(tl.pointer_type(tl.float32))
    count = tl.load(counter, mask=counted, other=0.0) + (1.0 - skip).to(tl.float32)
    tl.store(counter, count, mask=counted)
    complete_rows(row_sources, constants, count.to(tl.float64), at, at < num_late_rows)


@triton.jit
def add_up(sums, num_sums, SUMS: tl.constexpr):
    """The sum of all, always in the same order."""
    offsets = tl.arange(0, SUMS)
    totals = tl.zeros([SUMS], tl.float64)
    for start in range(0, num_sums, SUMS):
        totals += tl.load(sums + start + offsets, mask=offsets < num_sums - start, other=0.0)
    return tl.sum(totals, 0)


@triton.jit
def complete_rows(row_sources, constants, counts, at, late):
    """Writes those fields of the rows `at` that only the device can work out, where `late`.

    Args:
        row_sources: see prepare_step.
        constants: see there.
        counts: for each row, the number of this update as the device counts it.
        at: indices of rows.
        late: which of them to complete.
    """
    words = row_sources + at * NUM_WORDS
    lr = value_of(words, late)
    weight_decay = value_of(words + 3, late)
    bias_correction = tl.load(words + 6, mask=late, other=0)
    coupled_factor = load_double(words + 7, late)
    decoupled_factor = load_double(words + 8, late)
    maximum_scale = load_double(words + 9, late)
    step = load_double(words + 10, late)
    step = tl.where(step < 0, counts, step)

    row = constants + at * NUM_CONSTANTS
    first = one_minus_power(tl.load(row + 1, mask=late, other=0.5), step)
    second = tl.sqrt(one_minus_power(tl.load(row + 3, mask=late, other=0.5), step))
    authors = bias_correction == 1
    adam = bias_correction == 2
    correction = tl.where(authors, second / first, tl.where(adam, 1.0 / first, 1.0))
    tl.store(row, lr * correction, mask=late)
    tl.store(row + 7, times(coupled_factor, weight_decay), mask=late)
    tl.store(row + 8, times(decoupled_factor, lr * weight_decay), mask=late)
    tl.store(row + 9, maximum_scale * tl.where(adam, 1.0 / second, 1.0), mask=late)
    tl.store(row + STEP, step, mask=late)


@triton.jit
def times(factor, value):
    """A product in which a factor of zero makes zero, also of an infinite value."""
    return tl.where(factor == 0, 0.0, factor * value)


@triton.jit
def value_of(words, mask):
    """A number, or what stands at an address: three words, number, address or 0, and dtype."""
    number = load_double(words, mask)
    address = tl.load(words + 1, mask=mask, other=0)
    double = tl.load(words + 2, mask=mask, other=0) != 0
    on_device = mask & (address != 0)
    as_double = tl.load(address.to(tl.pointer_type(tl.float64)), mask=on_device & double, other=0.0)
    as_single = tl.load(
        address.to(tl.pointer_type(tl.float32)), mask=on_device & ~double, other=0.0
    )
    there = tl.where(double, as_double, as_single.to(tl.float64))
    return tl.where(address != 0, there, number)


@triton.jit
def load_double(words, mask):
    """The double whose bits stand in a word."""
    return tl.load(words, mask=mask, other=0).to(tl.float64, bitcast=True)


@triton.jit
def one_minus_power(beta, step):
    """1 - beta^step without the digits that a difference of two numbers near 1 would lose."""
    y = step * tl.log(beta)
    # expm1(y), after Kahan: the errors of u in the numerator and in log(u) cancel.
    u = tl.exp(y)
    difference = tl.where(u < 0.5, u - 1.0, (u - 1.0) * y / tl.log(u))
    difference = tl.where(u == 1, y, difference)
    return tl.where(beta == 0, 1.0, -difference)
