"""The Triton kernel compiled for GPUs that are not here: what the compiler made of it."""

import re

import pytest
import torch

from benchmarks import triton_kernels
from benchmarks.machine_code import loops

pytestmark = pytest.mark.compile
MOST_REGISTERS = {torch.float32: 80, torch.float64: 112}  # by dtype of the moments


@pytest.mark.parametrize("target", triton_kernels.TARGETS)
@pytest.mark.parametrize("root", range(1, 6), ids=lambda root: triton_kernels.ROOTS[root])
@pytest.mark.parametrize("dtypes", triton_kernels.DTYPES, ids=triton_kernels.describe)
def test_a_variant(dtypes, root, target):
    compiled = triton_kernels.compile_variant(dtypes, root, triton_kernels.TARGETS[target])
    assert compiled.local_bytes == 0
    assert compiled.registers <= MOST_REGISTERS[dtypes[2]]
    if target != "gfx942":
        assert ".local" not in compiled.assembly
        if dtypes[2] == torch.float32:
            assert ".f64" not in compiled.assembly
            assert compiled.instructions < 100

    # On the path of whole blocks a thread moves 16 bytes of each moment at a time, and of a half
    # type the 8 bytes of as many elements.
    elements = 16 // dtypes[2].itemsize
    param, grad, moment = (elements * dtype.itemsize for dtype in dtypes)
    loop = loops(compiled.assembly)[0]
    assert accesses(loop, "load|ld") == sorted([param, grad] + [moment] * 3)
    assert accesses(loop, "store|st") == sorted([param] + [moment] * 3)


def accesses(loop, kinds):
    """Bytes of each access to global memory in lines of PTX or AMD's assembly."""
    sizes = []
    for line in loop:
        if found := re.search(rf"\b(?:{kinds})\.global(?:\.v(\d))?\.b(\d+)", line):
            sizes.append(int(found[1] or 1) * int(found[2]) // 8)
        elif found := re.search(rf"(?:buffer|global|flat)_(?:{kinds})_(\w+)", line):
            sizes.append({"dwordx4": 16, "dwordx2": 8, "dword": 4}.get(found[1], 2))
    return sorted(sizes)
