"""The Triton kernels compiled for GPUs that are not here: what the compiler made of them."""

import re

import pytest
import torch

from benchmarks import triton_kernels
from benchmarks.machine_code import loops

pytestmark = pytest.mark.compile
MOST_REGISTERS = {torch.float32: 80, torch.float64: 112}  # of the step, by dtype of the moments
# It takes 42 at most. An NVIDIA GPU hands them out in eights, and 48 let five programs in at once.
MOST_REGISTERS_OF_NORM = 48
each_target = pytest.mark.parametrize("target", triton_kernels.TARGETS)


@each_target
@pytest.mark.parametrize("root", range(1, 6), ids=lambda root: triton_kernels.ROOTS[root])
@pytest.mark.parametrize("dtypes", triton_kernels.DTYPES, ids=triton_kernels.describe)
def test_the_step(dtypes, root, target):
    compiled = triton_kernels.compile_step(dtypes, root, triton_kernels.TARGETS[target])
    moment = dtypes[2]
    check_resources(compiled, MOST_REGISTERS[moment], moment)
    if compiled.instructions is not None and moment == torch.float32:
        assert compiled.instructions < 100

    # On the path of whole blocks a thread moves 16 bytes of each moment at a time, and of a half
    # type the 8 bytes of as many elements.
    elements = 16 // moment.itemsize
    param, grad, moment = (elements * dtype.itemsize for dtype in dtypes)
    loop = loops(compiled.assembly)[0]
    assert accesses(loop, "load|ld") == sorted([param, grad] + [moment] * 3)
    assert accesses(loop, "store|st") == sorted([param] + [moment] * 3)


@each_target
@pytest.mark.parametrize("grad", triton_kernels.GRAD_DTYPES, ids=str)
def test_the_norm(grad, target):
    compiled = triton_kernels.compile_norm(grad, triton_kernels.TARGETS[target])
    moment = torch.float64 if grad == torch.float64 else torch.float32
    check_resources(compiled, MOST_REGISTERS_OF_NORM, moment)
    # As many elements at a time as in the step.
    loop = loops(compiled.assembly)[0]
    assert accesses(loop, "load|ld") == [16 // moment.itemsize * grad.itemsize]
    assert accesses(loop, "store|st") == []


def check_resources(compiled, most_registers, moment):
    assert compiled.local_bytes == 0
    assert compiled.registers <= most_registers
    assert ".local" not in compiled.assembly
    with_doubles = bool(re.search("[._]f64", compiled.assembly))
    assert with_doubles == (moment == torch.float64)


def accesses(loop, kinds):
    """Bytes of each access to global memory in lines of PTX or AMD's assembly."""
    sizes = []
    for line in loop:
        if found := re.search(rf"\b(?:{kinds})\.global(?:\.v(\d))?\.b(\d+)", line):
            sizes.append(int(found[1] or 1) * int(found[2]) // 8)
        elif found := re.search(rf"(?:buffer|global|flat)_(?:{kinds})_(\w+)", line):
            sizes.append({"dwordx4": 16, "dwordx2": 8, "dword": 4}.get(found[1], 2))
    return sorted(sizes)
