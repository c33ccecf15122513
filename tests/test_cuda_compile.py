"""The CUDA kernel compiled by nvcc for every GPU that it is built for: `make test-cuda`."""

import re
from functools import cache

import pytest

from benchmarks import cuda_kernels

pytestmark = pytest.mark.nvcc
MOST_REGISTERS = {"float32": 80, "float64": 128}
compile_for = cache(cuda_kernels.compile_for)


@pytest.mark.parametrize("name", cuda_kernels.VARIANTS)
@pytest.mark.parametrize(
    "architecture",
    # One process each: it is compiled once for all variants.
    [pytest.param(a, marks=pytest.mark.xdist_group(a)) for a in cuda_kernels.ARCHITECTURES],
)
def test_a_variant(architecture, name):
    compiled = compile_for(architecture)[name]
    assert compiled.stack_bytes == 0
    assert compiled.spilled_bytes == 0
    assert compiled.registers <= MOST_REGISTERS.get(name, MOST_REGISTERS["float32"])

    # One loop for each root, or more where the compiler made one for each kind of decay.
    assert len(compiled.whole_block_loops) >= 6
    for loop in map("\n".join, compiled.whole_block_loops):
        assert set(accesses(loop)) == expected_accesses(name)
        assert bool(re.search(r"\bD(ADD|MUL|FMA|SETP)\b", loop)) == (name == "float64")


def accesses(code):
    """Kinds of accesses to memory, as in LDG.E.128: G for global, 128 bits."""
    return re.findall(r"\b((?:LD|ST)[A-Z]?(?:\.E)?(?:\.\w+)?)(?= )", code)


def expected_accesses(name):
    """Of whole blocks: 128 bits of everything, 64 of half types."""
    kinds = {"LDG.E.128", "STG.E.128"}
    if "16" in name:
        kinds |= {"LDG.E.64", "STG.E.64"}
    return kinds
