"""What nvcc makes of the CUDA kernel for each GPU: compiled ahead of time, without one.

Writes a table of registers and instructions per element of every variant and target.

    python -m benchmarks.cuda_kernels [--out FILE]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.machine_code import instructions, loops, nvidia_tool

ROOT = Path(__file__).parents[1]
ARCHITECTURES = re.findall(
    r"\d+", re.search(r"PADAM_CUDA_ARCHS \"([\d;]+)\"", (ROOT / "csrc/cuda.cmake").read_text())[1]
)
# Template arguments as they stand in mangled names: parameters, gradients, moments.
VARIANTS = {
    "float32": "Ifff",
    "float64": "Iddd",
    "bfloat16": "INS_8bfloat16ES2_f",
    "bfloat16, gradient float32": "INS_8bfloat16Eff",
    "float16": "INS_7float16ES2_f",
    "float16, gradient float32": "INS_7float16Eff",
}


@dataclass
class Compiled:
    """One instance of the kernel, compiled for one architecture."""

    registers: int
    stack_bytes: int  # of a thread: arrays and spilled registers
    spilled_bytes: int  # stored and loaded
    # Machine code of the loops over whole blocks, one for each root, shortest first.
    whole_block_loops: list[list[str]]

    def instructions_per_element(self, elements: int) -> list[float]:
        """Of each loop, for so many elements of a thread at a time."""
        return [instructions(loop) / elements for loop in self.whole_block_loops]


def compile_for(architecture: str) -> dict[str, Compiled]:
    """Compiles all instances of the kernel as CMake does, by name in VARIANTS."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        source = ROOT / "csrc" / "padam_cuda.cu"
        flags = [
            "-std=c++17",
            "-O3",
            "-fmad=false",
            "-Xptxas",
            "-v",
            "-Werror",
            "all-warnings",
            f'-DPADAM_CUDA_ARCHS="sm_{architecture}"',
        ]
        result = subprocess.run(
            ["nvcc", *flags, "-cubin", f"-arch=sm_{architecture}", source, "-o", cubin],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        machine_code = nvidia_tool("nvdisasm", "-c", cubin)
    usages = re.split(r"Compiling entry function ", result.stdout + result.stderr)[1:]
    functions = re.split(r"\n\s*\.section\s+\.text\.", machine_code)[1:]
    compiled = {}
    for name, mangled in VARIANTS.items():
        [usage] = (text for text in usages if f"multi_tensor_padam{mangled}E" in text)
        [code] = (text for text in functions if f"multi_tensor_padam{mangled}E" in text[:200])
        # Every loop over whole blocks reads at least three moments, 16 bytes at a time.
        wide = [loop for loop in loops(code) if "\n".join(loop).count("LDG.E.128") >= 3]
        compiled[name] = Compiled(
            registers=int(re.search(r"Used (\d+) registers", usage)[1]),
            stack_bytes=int(re.search(r"(\d+) bytes stack frame", usage)[1]),
            spilled_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", usage))),
            whole_block_loops=sorted(wide, key=instructions),
        )
    return compiled


def main() -> None:
    """Compiles everything and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).parent / "results" / "cuda_kernels.md"
    parser.add_argument("--out", type=Path, default=default, help="default %(default)s")
    options = parser.parse_args()
    console = Console()
    version = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True)
    release = re.search(r"release (\S+),", version.stdout)[1]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # of processes that compile
        results = pool.map(compile_for, ARCHITECTURES)
        table = list(track(results, "compiling", total=len(ARCHITECTURES), console=console))
    lines = [
        "Registers of a thread / instructions per element in the loops for p = 0 to the slowest p,",
        "counted with all their branches, of which one set of options takes only some. Compiled by",
        f"nvcc {release} without a GPU (`make kernel-tables`). One kernel holds all powers: rows",
        "of the launch table say which it takes.",
        "",
        f"| parameters | {' | '.join(f'sm_{a}' for a in ARCHITECTURES)} |",
        f"|---|{'---:|' * len(ARCHITECTURES)}",
    ]
    for name in VARIANTS:
        cells = []
        for compiled in table:
            counts = compiled[name].instructions_per_element(2 if name == "float64" else 4)
            cells.append(f"{compiled[name].registers} / {counts[0]:.0f} to {counts[-1]:.0f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    options.out.write_text("\n".join(lines) + "\n")
    console.print(f"The table is in {options.out}.")


if __name__ == "__main__":
    main()
