"""The CUDA kernels compiled by nvcc for every GPU that they are built for: `make test-cuda`."""

import re
from functools import cache

import pytest

from benchmarks import cuda_kernels
from benchmarks.machine_code import loops

pytestmark = pytest.mark.nvcc
MOST_REGISTERS = {"float64": 128}  # of the step; 80 for what has moments of float32
# It takes 44 at most. A GPU hands them out in eights, and 48 let five thread blocks in at once.
MOST_REGISTERS_OF_NORM = 48
compile_for = cache(cuda_kernels.compile_for)
each_architecture = pytest.mark.parametrize(
    "architecture",
    # One process each: it is compiled once for all variants.
    [pytest.param(a, marks=pytest.mark.xdist_group(a)) for a in cuda_kernels.ARCHITECTURES],
)


@pytest.mark.parametrize("name", cuda_kernels.STEPS)
@each_architecture
def test_the_step(architecture, name):
    compiled = compile_for(architecture)[cuda_kernels.STEPS[name]]
    check_resources(compiled, MOST_REGISTERS.get(name.partition(",")[0], 80), name)
    # One loop for each root, or more where the compiler made one for each kind of decay.
    assert len(compiled.whole_block_loops) >= 6
    for loop in compiled.whole_block_loops:
        assert set(accesses(loop)) == expected_accesses(name)


@pytest.mark.parametrize("name", cuda_kernels.NORMS)
@each_architecture
def test_the_norm(architecture, name):
    compiled = compile_for(architecture)[cuda_kernels.NORMS[name]]
    check_resources(compiled, MOST_REGISTERS_OF_NORM, name)
    # Loops over whole blocks, as many elements at a time as in the step; and loops over the rest.
    wide = "LDG.E.64" if "16" in name else "LDG.E.128"
    single = {"float32": "LDG.E", "float64": "LDG.E.64"}.get(name, "LDG.E.U16")
    kinds = {frozenset(accesses(loop)) for loop in loops(compiled.machine_code)} - {frozenset()}
    assert kinds == {frozenset({wide}), frozenset({single})}


@each_architecture
def test_the_preparation(architecture):
    compiled = compile_for(architecture)[cuda_kernels.PREPARE]
    assert compiled.stack_bytes == 0
    assert compiled.spilled_bytes == 0


def check_resources(compiled, most_registers, name):
    assert compiled.stack_bytes == 0
    assert compiled.spilled_bytes == 0
    assert compiled.registers <= most_registers
    # Nothing is stored in bytes: a load of one is part of a number that was taken apart.
    assert not re.search(r"\bLDG\.E\.[US]8\b", compiled.machine_code)
    with_doubles = bool(re.search(r"\bD(ADD|MUL|FMA|SETP)\b", compiled.machine_code))
    assert with_doubles == name.startswith("float64")


def accesses(loop):
    """Kinds of accesses to memory, as in LDG.E.128: G for global, 128 bits."""
    return re.findall(r"\b((?:LD|ST)[A-Z]?(?:\.E)?(?:\.\w+)?)(?= )", "\n".join(loop))


def expected_accesses(name):
    """Of whole blocks: 128 bits of everything, 64 of half types; or the elements one by one."""
    kinds = {"LDG.E.128", "STG.E.128"}
    if name.startswith("float64"):
        return kinds | {"LDG.E.64", "STG.E.64"}
    if "16" in name:
        kinds |= {"LDG.E.64", "STG.E.64", "LDG.E.U16", "STG.E.U16"}
    return kinds | {"LDG.E", "STG.E"}
