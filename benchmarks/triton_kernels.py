"""What Triton makes of the fused kernel for each GPU: compiled ahead of time, without one.

Writes a table of registers and instructions per element of every variant and target.

    python -m benchmarks.triton_kernels [--out FILE]
"""

from __future__ import annotations

import argparse
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from rich.console import Console
from rich.progress import track
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.machine_code import instructions, loops, nvidia_tool
from padam_ext.constants import ROOTS
from padam_ext.kernels import multi_tensor_padam as kernel

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


@dataclass
class Compiled:
    """A variant compiled for a target."""

    assembly: str  # PTX, or AMD's
    registers: int
    local_bytes: int  # of a thread's local memory: spills and arrays
    instructions: float | None  # per element, on the path of whole blocks; None if not counted


def compile_variant(dtypes: tuple[torch.dtype, ...], root: int, target: GPUTarget) -> Compiled:
    """Compiles the kernel as `launch` would, with every pointer at a multiple of 16 bytes."""
    num_warps = kernel.PROGRAM_THREADS // target.warp_size
    moment = dtypes[2]
    constexprs = dict(
        zip(("PARAM", "GRAD", "MOMENT"), map(kernel.triton_dtype, dtypes), strict=True),
        ROOT=root, BLOCK=kernel.block_of(moment), NUM_THREADS=kernel.PROGRAM_THREADS,
    )  # fmt: skip
    pointers = ["addresses", "numels", "rows", "constants", "chunk_tensors", "chunk_first_blocks"]
    signature = dict.fromkeys(pointers, "*i64") | {
        "constants": "*fp64" if moment == torch.float64 else "*fp32",
        "num_tensors": "i32",
        "blocks_per_chunk": "i32",
    }
    signature |= dict.fromkeys(constexprs, "constexpr")
    source = ASTSource(
        kernel.multi_tensor_padam,
        signature,
        constexprs,
        {(index,): [["tt.divisibility", 16]] for index in range(len(pointers))},
    )
    options = {"num_warps": num_warps, **kernel.OPTIONS}
    compiled = triton.compile(source, target=target, options=options)
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
    return Compiled(
        compiled.asm["ptx"],
        int(re.search(r"REG:(\d+)", usage)[1]),
        stack + local,
        instructions(loops(machine_code)[0]) / (16 // moment.itemsize),
    )


def _field(assembly: str, name: str) -> int:
    return int(re.search(rf"{re.escape(name)}:\s+(\d+)", assembly)[1])


def describe(dtypes: tuple[torch.dtype, ...]) -> str:
    """Parameter's dtype, and the gradient's where it is another."""
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes[:2]]
    return names[0] if names[0] == names[1] else f"{names[0]}, gradient {names[1]}"


def main() -> None:
    """Compiles everything and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).parent / "results" / "triton_kernels.md"
    parser.add_argument("--out", type=Path, default=default, help="default %(default)s")
    options = parser.parse_args()
    console = Console()
    lines = [
        "Registers of a thread / instructions per element, where these can be counted. Compiled by",
        f"Triton {triton.__version__} without a GPU (`make kernel-tables`). At 3.0 TB/s and 36",
        "bytes an element an H100 issues about 400 instructions per element.",
        "",
        f"| parameters | p | {' | '.join(TARGETS)} |",
        f"|---|---|{'---:|' * len(TARGETS)}",
    ]
    powers = {"half": "1/2", "quarter": "1/4", "eighth": "1/8", "sixteenth": "1/16"}
    for dtypes, root in track(VARIANTS, "compiling", console=console):
        cells = []
        for target in TARGETS.values():
            result = compile_variant(dtypes, root, target)
            count = "" if result.instructions is None else f" / {result.instructions:.0f}"
            cells.append(f"{result.registers}{count}")
        power = powers.get(ROOTS[root], "any")
        lines.append(f"| {describe(dtypes)} | {power} | {' | '.join(cells)} |")
    options.out.write_text("\n".join(lines) + "\n")
    console.print(f"The table is in {options.out}.")


if __name__ == "__main__":
    main()
