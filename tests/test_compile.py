"""The Triton kernels compiled for GPUs that are not here: what the compiler made of them."""

import re

import pytest
import torch

from benchmarks import triton_kernels
from benchmarks.machine_code import loops, outside_of_loops
from padam_ext.constants import ROOTS
from padam_ext.kernels import prepare_step
from padam_ext.slots import SLOTS

pytestmark = pytest.mark.compile
# A thread's, of the step, by dtype of the arithmetic: with 64 four programs fit on an NVIDIA
# processor, with 80 three.
MOST_REGISTERS = {torch.float32: 64, torch.float64: 80}
MOST_REGISTERS_ON_AMD = 80
# Of an element's step, by the slowest root.
MOST_INSTRUCTIONS, MOST_WHERE_PACKED = 100, 136
# It takes 42 at most. An NVIDIA GPU hands them out in eights, and 48 let five programs in at once.
MOST_REGISTERS_OF_NORM = 48
MOST_REGISTERS_OF_PREPARE = 72  # one program or a few: it has the GPU to itself
each_target = pytest.mark.parametrize("target", triton_kernels.TARGETS)


def describe_variant(value):
    if isinstance(value, int):
        return ROOTS[value]
    return triton_kernels.describe(value)


@each_target
@pytest.mark.parametrize(("signature", "root"), triton_kernels.VARIANTS, ids=describe_variant)
def test_the_step(signature, root, target):
    check_step(signature, root, target)


def test_packed_states_leave_room_below_the_issue_limit():
    """At 14 bytes for an element of bfloat16 an H100 issues 154 instructions."""
    packed = next(
        one for one in triton_kernels.STORED_SIGNATURES if one.dtypes[0] == torch.bfloat16
    )
    target = triton_kernels.TARGETS["sm_90"]
    compiled = triton_kernels.compile_step(packed, ROOTS.index("eighth"), target)
    assert triton_kernels.instructions_per_element(compiled, torch.float32) <= 95


@each_target
def test_states_in_half_types_are_a_matter_of_the_signature(target):
    signature = triton_kernels.SIGNATURES[0]
    states = (torch.bfloat16, torch.float16, torch.float32)
    signature = signature._replace(dtypes=(*signature.dtypes[:2], *states, *signature.dtypes[5:]))
    check_step(signature, ROOTS.index("eighth"), target)


def check_step(signature, root, target):
    compiled = triton_kernels.compile_step(signature, root, triton_kernels.TARGETS[target])
    compute = signature.compute_dtype
    is_packed = not signature.has("exp_avg")
    on_nvidia = bool(compiled.machine_code)
    check_resources(compiled, MOST_REGISTERS[compute] if on_nvidia else MOST_REGISTERS_ON_AMD)
    count = triton_kernels.instructions_per_element(compiled, compute)
    if count is not None and compute == torch.float32:
        assert count < (MOST_WHERE_PACKED if is_packed else MOST_INSTRUCTIONS)

    # On the path of whole blocks a thread moves as many elements at a time as 16 bytes hold in the
    # dtype of the arithmetic; of a half type those are 8 bytes. Nothing is there for a slot that
    # there is not.
    loop = loops(compiled.assembly)[-1]
    check_arithmetic(loop, compute)
    sizes = [16 // compute.itemsize * dtype.itemsize for dtype in signature.dtypes if dtype]
    # Or only the gradient one by one, wherever it lies, if it is not float64.
    grad = signature.dtypes[1].itemsize
    one_by_one = 4 * [grad] if compute == torch.float32 else []
    assert accesses(loop, "load|ld") == sorted(sizes + one_by_one)
    assert accesses(loop, "store|st") == sorted(sizes[:1] + sizes[2:])  # all but the gradient
    if compiled.machine_code:
        # The running maximum's, which has one condition for all that is written at once.
        conditional = [line for line in loop if re.search(r"@!?%p\d+\s+st\.global", line)]
        maximum = signature.dtypes[SLOTS.index("max_exp_avg_sq")]
        expected = [16 // compute.itemsize * maximum.itemsize] if maximum else []
        assert accesses(conditional, "st") == expected
    if compiled.machine_code and compute == torch.float32:  # powers of doubles jump back and forth
        # A block that is not whole, once: the same accesses, each on a condition.
        once = outside_of_loops(compiled.assembly)
        conditional = [line for line in once if re.search(r"@!?%p\d+\s+(ld|st)\.global", line)]
        assert accesses(conditional, "ld") == sorted(sizes[:1] + one_by_one + sizes[2:])
        assert accesses(conditional, "st") == sorted(sizes[:1] + sizes[2:])
    # What is left over goes element by element, to the same slots.
    sizes = [dtype.itemsize for dtype in signature.dtypes if dtype]
    loop = loops(compiled.assembly)[0]
    check_arithmetic(loop, compute)
    assert accesses(loop, "load|ld") == sorted(sizes)
    assert accesses(loop, "store|st") == sorted(sizes[:1] + sizes[2:])
    if compiled.machine_code:
        stored = {dtype for dtype in (signature.dtypes[0], *signature.dtypes[2:]) if dtype}
        if signature.stochastic or signature.has("param_low"):
            stored.remove(torch.bfloat16)  # cut, after what is added to the bits
        assert roundings(loop) == {NARROW[dtype] for dtype in stored & NARROW.keys()}


@each_target
@pytest.mark.parametrize("signature", triton_kernels.NORM_SIGNATURES, ids=triton_kernels.describe)
def test_the_norm(signature, target):
    compiled = triton_kernels.compile_norm(signature, triton_kernels.TARGETS[target])
    compute, grad = signature.compute_dtype, signature.dtypes[1]
    check_resources(compiled, MOST_REGISTERS_OF_NORM)
    # As many elements at a time as in the step; the loop may be unrolled.
    loop = loops(compiled.assembly)[-1]
    check_arithmetic(loop, compute)
    assert set(accesses(loop, "load|ld")) == {16 // compute.itemsize * grad.itemsize}
    assert accesses(loop, "store|st") == []
    # One sum, as a double.
    assert accesses(compiled.assembly.splitlines(), "store|st") == [8]


@each_target
def test_the_prepare_kernel(target):
    compiled = triton_kernels.compile_prepare(triton_kernels.TARGETS[target])
    check_resources(compiled, MOST_REGISTERS_OF_PREPARE)


def test_numbers_and_addresses_make_no_variants_of_the_prepare_kernel():
    kernel = prepare_step.prepare_step
    assert all(parameter.do_not_specialize or parameter.is_constexpr for parameter in kernel.params)


def check_resources(compiled, most_registers):
    assert compiled.local_bytes == 0
    assert compiled.registers <= most_registers
    assert ".local" not in compiled.assembly


def check_arithmetic(loop, compute):
    """Doubles, which are slow, for float64 only."""
    with_doubles = bool(re.search("[._]f64", "\n".join(loop)))
    assert with_doubles == (compute == torch.float64)


# PTX that rounds a float to nearest even.
NARROW = {torch.bfloat16: "cvt.rn.bf16", torch.float16: "cvt.rn.f16"}


def roundings(loop):
    """Conversions from float to a half type in lines of PTX."""
    found = (re.search(r"\b(cvt\.\w+\.b?f16)(?:x2)?\.f32", line) for line in loop)
    return {match[1] for match in found if match}


def accesses(loop, kinds):
    """Bytes of each access to global memory in lines of PTX or AMD's assembly."""
    sizes = []
    for line in loop:
        if found := re.search(rf"\b(?:{kinds})\.global(?:\.v(\d))?\.b(\d+)", line):
            sizes.append(int(found[1] or 1) * int(found[2]) // 8)
        elif found := re.search(rf"(?:buffer|global|flat)_(?:{kinds})_(\w+)", line):
            sizes.append({"dwordx4": 16, "dwordx2": 8, "dword": 4}.get(found[1], 2))
    return sorted(sizes)
