"""What Triton makes of the kernels for each GPU: compiled ahead of time, without one.

Writes a table of registers and instructions per element of every variant and target.

    python -m benchmarks.triton_kernels [--out FILE]
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import triton
from rich.console import Console
from rich.progress import track
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.machine_code import instructions, loops, nvidia_tool, write_table
from padam_ext.constants import ROOTS
from padam_ext.kernels.chunks import OPTIONS, PROGRAM_THREADS, block_of, triton_dtype
from padam_ext.kernels.multi_tensor_norm import multi_tensor_sum_of_squares
from padam_ext.kernels.multi_tensor_padam import multi_tensor_padam

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_HALF_TYPES = (torch.bfloat16, torch.float16)
# Of parameters, gradients, moments.
DTYPES = [
    (torch.float32, torch.float32, torch.float32),
    (torch.float64, torch.float64, torch.float64),
    *((half, half, torch.float32) for half in _HALF_TYPES),
    *((half, torch.float32, torch.float32) for half in _HALF_TYPES),
]
# The root "none" is a case of the general one here.
VARIANTS = [(dtypes, root) for dtypes in DTYPES for root in range(1, len(ROOTS))]
GRAD_DTYPES = list(dict.fromkeys(dtypes[1] for dtypes in DTYPES))  # variants of the norm


@dataclass
class Compiled:
    """A variant of a kernel compiled for a target."""

    assembly: str  # PTX, or AMD's
    registers: int
    local_bytes: int  # of a thread's local memory: spills and arrays
    instructions: float | None  # per element, on the path of whole blocks; None if not counted


def compile_step(dtypes: tuple[torch.dtype, ...], root: int, target: GPUTarget) -> Compiled:
    """Compiles a variant of the step."""
    names = dict(zip(("PARAM", "GRAD", "MOMENT"), dtypes, strict=True))
    return _compile(multi_tensor_padam, names, {"ROOT": root}, target)


def compile_norm(grad: torch.dtype, target: GPUTarget) -> Compiled:
    """Compiles the norm of gradients of a dtype."""
    moment = torch.float64 if grad == torch.float64 else torch.float32
    return _compile(multi_tensor_sum_of_squares, {"GRAD": grad, "MOMENT": moment}, {}, target)


def _compile(
    kernel: Any, dtypes: dict[str, torch.dtype], options: dict[str, int], target: GPUTarget
) -> Compiled:
    """Compiles a kernel as its `launch` would, with every pointer at a multiple of 16 bytes."""
    moment = dtypes["MOMENT"]
    constexprs = {name: triton_dtype(dtype) for name, dtype in dtypes.items()} | options
    constexprs |= {"BLOCK": block_of(moment), "NUM_THREADS": PROGRAM_THREADS}
    pointers = kernel.arg_names[: kernel.arg_names.index("num_tensors")]
    to_moments = "*fp64" if moment == torch.float64 else "*fp32"
    signature = {
        name: to_moments if name in ("constants", "partial_sums") else "*i64" for name in pointers
    }
    signature |= {"num_tensors": "i32", "blocks_per_chunk": "i32"}
    signature |= dict.fromkeys(constexprs, "constexpr")
    source = ASTSource(
        kernel,
        signature,
        constexprs,
        {(index,): [["tt.divisibility", 16]] for index in range(len(pointers))},
    )
    num_warps = PROGRAM_THREADS // target.warp_size
    compiled = triton.compile(source, target=target, options={"num_warps": num_warps, **OPTIONS})
    if target.backend == "hip":
        assembly = compiled.asm["amdgcn"]
        return Compiled(
            assembly, _field(assembly, ".vgpr_count"),
            _field(assembly, ".private_segment_fixed_size"), None,
        )  # fmt: skip
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = nvidia_tool("cuobjdump", "-res-usage", cubin.name)
        machine_code = nvidia_tool("nvdisasm", "-c", cubin.name)
    stack, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("STACK", "LOCAL"))
    ptx = compiled.asm["ptx"]
    return Compiled(
        ptx,
        int(re.search(r"REG:(\d+)", usage)[1]),
        stack + local,
        _instructions_per_element(ptx, machine_code, 16 // moment.itemsize),
    )


def _instructions_per_element(ptx: str, machine_code: str, elements: int) -> float:
    """On the path of whole blocks, where a thread takes so many elements at a time."""
    loop = loops(machine_code)[0]
    # The assembler may have unrolled it.
    loads_at_a_time = "\n".join(loops(ptx)[0]).count("ld.global")
    times = "\n".join(loop).count("LDG") / loads_at_a_time
    return instructions(loop) / (times * elements)


def _field(assembly: str, name: str) -> int:
    return int(re.search(rf"{re.escape(name)}:\s+(\d+)", assembly)[1])


def describe(dtypes: tuple[torch.dtype, ...]) -> str:
    """Parameter's dtype, and the gradient's where it is another."""
    param, grad = map(_name, dtypes[:2])
    return param if param == grad else f"{param}, gradient {grad}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def table(console: Console) -> list[str]:
    """Compiles everything; the lines of the table."""
    lines = [
        "Registers of a thread / instructions per element, where these can be counted. Compiled by",
        f"Triton {triton.__version__} without a GPU (`make kernel-tables`). At 3.0 TB/s an H100",
        "issues about 11 instructions per byte: 400 for the 36 bytes of an element's step, in the",
        "norm 44 for the 4 of a gradient's, 22 for the 2 of a half type.",
        "",
        f"| parameters | p | {' | '.join(TARGETS)} |",
        f"|---|---|{'---:|' * len(TARGETS)}",
    ]
    powers = {"half": "1/2", "quarter": "1/4", "eighth": "1/8", "sixteenth": "1/16"}
    for dtypes, root in track(VARIANTS, "compiling", console=console):
        cells = [_cell(compile_step(dtypes, root, target)) for target in TARGETS.values()]
        power = powers.get(ROOTS[root], "any")
        lines.append(f"| {describe(dtypes)} | {power} | {' | '.join(cells)} |")
    for grad in GRAD_DTYPES:
        cells = [_cell(compile_norm(grad, target)) for target in TARGETS.values()]
        lines.append(f"| norm, gradient {_name(grad)} | | {' | '.join(cells)} |")
    return lines


def _cell(compiled: Compiled) -> str:
    count = "" if compiled.instructions is None else f" / {compiled.instructions:.0f}"
    return f"{compiled.registers}{count}"


if __name__ == "__main__":
    write_table(__doc__, "triton_kernels.md", table)
