"""What nvcc makes of the CUDA kernels for each GPU: compiled ahead of time, without one.

Writes a table of registers and instructions per element of every variant and target.

    python -m benchmarks.cuda_kernels [--out FILE]
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.machine_code import instructions, loops, nvidia_tool, write_table

ROOT = Path(__file__).parents[1]
ARCHITECTURES = re.findall(
    r"\d+", re.search(r"PADAM_CUDA_ARCHS \"([\d;]+)\"", (ROOT / "csrc/cuda.cmake").read_text())[1]
)


# What the slots of a step store, as its Types<...> have them: of parameters, gradients, and lower
# halves of parameters.
_DTYPES = {
    "float32": ("float", "float", ""),
    "float64": ("double", "double", ""),
    "bfloat16": ("bfloat16", "bfloat16", ""),
    "bfloat16, gradient float32": ("bfloat16", "float", ""),
    "bfloat16, stochastic": ("stochastic_bfloat16", "bfloat16", ""),
    "bfloat16, stochastic, gradient float32": ("stochastic_bfloat16", "float", ""),
    "bfloat16, split": ("bfloat16", "bfloat16", "unsigned short"),
    "bfloat16, split, gradient float32": ("bfloat16", "float", "unsigned short"),
    "float16": ("float16", "float16", ""),
    "float16, gradient float32": ("float16", "float", ""),
}
# Of the moments, in what they are computed in: each by itself, or packed.
_MOMENTS = {
    "": ("T", "T", "T", "", ""),
    ", no AMSGrad": ("T", "T", "", "", ""),
    ", packed": ("", "", "", "unsigned int", ""),
    ", packed, no AMSGrad": ("", "", "", "", "unsigned int"),
}


def _step(param: str, grad: str, low: str, moments: tuple[str, ...]) -> str:
    """A step as c++filt names it."""
    compute = "double" if param == "double" else "float"
    stored = (compute if kind == "T" else kind for kind in (param, grad, *moments, low))
    types = ", ".join(kind or "Absent" for kind in (compute, *stored))
    return f"multi_tensor_padam<Types<{types}> >"


STEPS = {
    name + suffix: _step(*dtypes, moments)
    for suffix, moments in _MOMENTS.items()
    for name, dtypes in _DTYPES.items()
    if name != "float64" or "packed" not in suffix
}
# Of gradients and sums.
NORMS = {
    "float32": "multi_tensor_sum_of_squares<float, float>",
    "float64": "multi_tensor_sum_of_squares<double, double>",
    "bfloat16": "multi_tensor_sum_of_squares<bfloat16, float>",
    "float16": "multi_tensor_sum_of_squares<float16, float>",
}
PREPARE = "prepare_step"


@dataclass
class Compiled:
    """A variant of a kernel, compiled for one architecture."""

    registers: int
    stack_bytes: int  # of a thread: arrays and spilled registers
    spilled_bytes: int  # stored and loaded
    machine_code: str

    @property
    def whole_block_loops(self) -> list[list[str]]:
        """Loops over whole blocks, shortest first: those with the widest loads of the kernel.

        The step has at least one for each root.
        """
        every = loops(self.machine_code)
        widest = max(bits for loop in every for bits in load_bits(loop))
        return sorted((loop for loop in every if widest in load_bits(loop)), key=instructions)


def load_bits(loop: list[str]) -> list[int]:
    """Width of each load from global memory."""
    return [int(bits or 32) for bits in re.findall(r"\bLDG\.E(?:\.U?(\d+))?", "\n".join(loop))]


def compile_for(architecture: str) -> dict[str, Compiled]:
    """Compiles the kernels as CMake does; all variants, by name."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernels.cubin")
        result = _nvcc("-Xptxas", "-v", "-cubin", f"-arch=sm_{architecture}", "-o", cubin)
        machine_code = nvidia_tool("nvdisasm", "-c", cubin)
    usages = _by_name(r"Compiling entry function '", result.stdout + result.stderr)
    functions = _by_name(r"\n\s*\.section\s+\.text\.", machine_code)
    compiled = {}
    for name in (*STEPS.values(), *NORMS.values(), PREPARE):
        usage = usages[name]
        compiled[name] = Compiled(
            registers=int(re.search(r"Used (\d+) registers", usage)[1]),
            stack_bytes=int(re.search(r"(\d+) bytes stack frame", usage)[1]),
            spilled_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", usage))),
            machine_code=functions[name],
        )
    return compiled


def compile_ptx(architecture: str) -> str:
    """The kernels in NVIDIA's assembly."""
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernels.ptx")
        _nvcc("-ptx", f"-arch=compute_{architecture}", "-o", ptx)
        return ptx.read_text()


def _nvcc(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Compiles the kernels as CMake does."""
    flags = ["-std=c++17", "-O3", "-fmad=false", "-Werror", "all-warnings"]
    return subprocess.run(
        ["nvcc", *flags, '-DPADAM_CUDA_ARCHS="some"', *arguments, ROOT / "csrc" / "padam_cuda.cu"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip


def demangled(names: Iterable[str]) -> list[str]:
    """Names of functions as they stand in the source, without namespaces."""
    result = subprocess.run(
        ["c++filt", "--no-params"],
        input="\n".join(names), check=True, capture_output=True, text=True,
    )  # fmt: skip
    return re.sub(r"padam::|\(anonymous namespace\)::", "", result.stdout).splitlines()


def _by_name(before: str, text: str) -> dict[str, str]:
    """Parts of a text that begin with a function's mangled name, by the name."""
    parts = re.split(before, text)[1:]
    names = demangled(re.match(r"\w+", part)[0] for part in parts)
    return dict(zip(names, parts, strict=True))


def table(console: Console) -> list[str]:
    """Compiles everything; the lines of the table."""
    version = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True)
    release = re.search(r"release (\S+),", version.stdout)[1]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # of processes that compile
        results = pool.map(compile_for, ARCHITECTURES)
        compiled = list(track(results, "compiling", total=len(ARCHITECTURES), console=console))
    lines = [
        "Registers of a thread / instructions per element in the loops for p = 0 to the slowest p,",
        "counted with all their branches, of which one set of options takes only some; then in the",
        f"loop of the norm. Compiled by nvcc {release} without a GPU (`make kernel-tables`). One",
        "kernel holds all powers: rows of the launch table say which it takes.",
        "",
        f"| parameters | {' | '.join(f'sm_{a}' for a in ARCHITECTURES)} |",
        f"|---|{'---:|' * len(ARCHITECTURES)}",
    ]
    for name, function in STEPS.items():
        cells = [_step_cell(variants[function], _elements(name)) for variants in compiled]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for name, function in NORMS.items():
        cells = [_norm_cell(variants[function], _elements(name)) for variants in compiled]
        lines.append(f"| norm, gradient {name} | {' | '.join(cells)} |")
    return lines


def _elements(name: str) -> int:
    """That a thread takes at a time."""
    return 2 if name.startswith("float64") else 4


def _step_cell(step: Compiled, elements: int) -> str:
    counts = [instructions(loop) / elements for loop in step.whole_block_loops]
    return f"{step.registers} / {counts[0]:.0f} to {counts[-1]:.0f}"


def _norm_cell(norm: Compiled, elements: int) -> str:
    # The longest is unrolled, and loads once for each time; the others take what it leaves.
    loop = norm.whole_block_loops[-1]
    return f"{norm.registers} / {instructions(loop) / (elements * len(load_bits(loop))):.0f}"


if __name__ == "__main__":
    write_table(__doc__, "cuda_kernels.md", table)
