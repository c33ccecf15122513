"""What Triton makes of the kernels for each GPU: compiled ahead of time, without one.

Writes a table of registers and instructions per element of every variant and target.

    python -m benchmarks.triton_kernels [--out FILE]
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from rich.console import Console
from rich.progress import track
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.machine_code import instructions, loops, nvidia_tool, write_table
from padam_ext import slots
from padam_ext.constants import ROOTS
from padam_ext.kernels import multi_tensor_norm, multi_tensor_padam, prepare_step
from padam_ext.kernels.chunks import options_for
from padam_ext.options import DEFAULTS
from padam_ext.slots import Signature, Storage

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

SIGNATURES = [
    slots.signature(param, grad, Storage.of(DEFAULTS))
    for param, grad in (
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        *((half, half) for half in slots.HALF_DTYPES),
        *((half, torch.float32) for half in slots.HALF_DTYPES),
    )
]
# Parameters and gradients, and options of how these and states are stored.
_PACKED = {"state_dtype": "packed32"}
_ROUNDED, _SPLIT = {"param_rounding": "stochastic"}, {"master": "split"}
STORED_SIGNATURES = [
    slots.signature(param, grad, Storage.of(DEFAULTS | options))
    for param, grad, options in (
        (torch.float32, torch.float32, _PACKED),
        (torch.bfloat16, torch.bfloat16, _PACKED),
        (torch.float16, torch.float16, _PACKED),
        (torch.bfloat16, torch.float32, _PACKED),
        (torch.float32, torch.float32, _PACKED | {"amsgrad": False}),
        (torch.bfloat16, torch.bfloat16, _ROUNDED),
        (torch.bfloat16, torch.bfloat16, _SPLIT),
        (torch.bfloat16, torch.bfloat16, _PACKED | _ROUNDED),
        (torch.bfloat16, torch.bfloat16, _PACKED | _SPLIT),
    )
]
# The root "none" is a case of the general one here. Without amsgrad the arithmetic is the same but
# for a maximum, and how a tensor is stored does not depend on the root: a few variants stand for
# all.
_WITHOUT = Storage.of(DEFAULTS | {"amsgrad": False})
_ALL_ROOTS = (*SIGNATURES, *STORED_SIGNATURES[:2])
VARIANTS = [(one, root) for one in _ALL_ROOTS for root in range(1, len(ROOTS))] + [
    (one, ROOTS.index("eighth"))
    for one in (
        *(slots.signature(*one.dtypes[:2], _WITHOUT) for one in SIGNATURES[:3]),
        *STORED_SIGNATURES[2:],
    )
]
# Those of the norm, by the gradient's dtype.
NORM_SIGNATURES = list({one.dtypes[1]: one for one in SIGNATURES}.values())


@dataclass
class Compiled:
    """A variant of a kernel compiled for a target."""

    assembly: str  # PTX, or AMD's
    machine_code: str  # NVIDIA's; AMD's is its assembly
    registers: int
    local_bytes: int  # of a thread's local memory: spills and arrays


def compile_step(signature: Signature, root: int, target: GPUTarget) -> Compiled:
    """Compiles a variant of the step."""
    constants = multi_tensor_padam.variant(signature, root)
    return _compile(multi_tensor_padam.multi_tensor_padam, {}, constants, target)


def compile_norm(signature: Signature, target: GPUTarget) -> Compiled:
    """Compiles the norm of gradients."""
    constants = multi_tensor_norm.variant(signature.dtypes[1], signature.compute_dtype)
    return _compile(multi_tensor_norm.multi_tensor_sum_of_squares, {}, constants, target)


def compile_prepare(target: GPUTarget) -> Compiled:
    """Compiles what precedes the step, as a GradScaler and torch's norm have it."""
    pointers = dict.fromkeys(("grad_scale", "found_inf", "norm"), "*fp32")
    return _compile(prepare_step.prepare_step, pointers, prepare_step.BLOCKS, target)


# Of every kernel; what else is not a number is a pointer to int64.
_DOUBLES = ("constants", "control", "partial_sums", "sums", "limits", "prepared_control")
_NUMBER = re.compile("num_|has_|blocks_per_chunk")


def compile_kernel(
    kernel: Any,
    types: Sequence[str],
    is_aligned: Sequence[bool],
    constants: dict[str, Any],
    target: GPUTarget,
) -> Any:
    """A kernel as Triton compiles it, with all that it was compiled to.

    Args:
        kernel: one of ours.
        types: of its arguments that are no constants, in order.
        is_aligned: whether each is a pointer to a multiple of 16 bytes.
        constants: of the variant.
        target: for what.
    """
    names = [name for name in kernel.arg_names if name not in constants]
    aligned = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name, is_so in zip(names, is_aligned, strict=True)
        if is_so and not kernel.params[kernel.arg_names.index(name)].do_not_specialize
    }
    signature = dict(zip(names, types, strict=True)) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        kernel, {name: signature[name] for name in kernel.arg_names}, constants, aligned
    )
    options = options_for(target.backend, target.warp_size)
    return triton.compile(source, target=target, options=options)


def _compile(
    kernel: Any, pointers: dict[str, str], constants: dict[str, Any], target: GPUTarget
) -> Compiled:
    """Compiles a kernel as its `launch` would, with pointers at multiples of 16 bytes.

    Args:
        kernel: one of ours.
        pointers: types of those that do not always have the same.
        constants: of the variant.
        target: for what.
    """
    signature = dict.fromkeys(kernel.arg_names, "*i64") | dict.fromkeys(_DOUBLES, "*fp64")
    for name in filter(_NUMBER.match, kernel.arg_names):
        signature[name] = "i32"
    types = [(signature | pointers)[name] for name in kernel.arg_names if name not in constants]
    is_aligned = [
        not _NUMBER.match(name) and not kernel.params[index].do_not_specialize
        for index, name in enumerate(kernel.arg_names)
        if name not in constants
    ]
    compiled = compile_kernel(kernel, types, is_aligned, constants, target)
    if target.backend == "hip":
        assembly = compiled.asm["amdgcn"]
        return Compiled(
            assembly, "", _field(assembly, ".vgpr_count"),
            _field(assembly, ".private_segment_fixed_size"),
        )  # fmt: skip
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = nvidia_tool("cuobjdump", "-res-usage", cubin.name)
        machine_code = nvidia_tool("nvdisasm", "-c", cubin.name)
    stack, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("STACK", "LOCAL"))
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    return Compiled(compiled.asm["ptx"], machine_code, registers, stack + local)


def instructions_per_element(compiled: Compiled, compute_dtype: torch.dtype) -> float | None:
    """Instructions on the path of whole blocks; None if they cannot be counted."""
    if not compiled.machine_code:
        return None
    loop = [one for one in loops(compiled.machine_code) if _count("LDG", one) > 0][-1]
    # The assembler may have unrolled it. Of the ways to load a gradient it takes one.
    accesses = ("STG", "st.global") if _count("STG", loop) else ("LDG", "ld.global")
    times = _count(accesses[0], loop) / _count(accesses[1], loops(compiled.assembly)[-1])
    return instructions(loop) / (times * (16 // compute_dtype.itemsize))


def _count(part: str, lines: list[str]) -> int:
    return "\n".join(lines).count(part)


def _field(assembly: str, name: str) -> int:
    return int(re.search(rf"{re.escape(name)}:\s+(\d+)", assembly)[1])


def describe(signature: Signature) -> str:
    """Parameter's dtype, the gradient's where it is another, and what is not the usual."""
    param, grad = map(_name, signature.dtypes[:2])
    parts = {
        param: True,
        f"gradient {grad}": grad != param,
        "stochastic": signature.stochastic,
        "split": signature.has("param_low"),
        "packed": not signature.has("exp_avg"),
        "no amsgrad": not (signature.has("max_exp_avg_sq") or signature.has("packed_mvh")),
    }
    return ", ".join(part for part, is_so in parts.items() if is_so)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def table(console: Console) -> list[str]:
    """Compiles everything; the lines of the table."""
    lines = [
        "Registers of a thread / instructions per element, where these can be counted. Compiled by",
        f"Triton {triton.__version__} without a GPU (`make kernel-tables`). At 3.0 TB/s an H100",
        "issues about 11 instructions per byte: 400 for the 36 bytes of an element's step, 154 for",
        "the 14 of packed states beside bfloat16, in the norm 44 for the 4 of a gradient's, 22 for",
        "the 2 of a half type.",
        "",
        f"| parameters | p | {' | '.join(TARGETS)} |",
        f"|---|---|{'---:|' * len(TARGETS)}",
    ]
    powers = {"half": "1/2", "quarter": "1/4", "eighth": "1/8", "sixteenth": "1/16"}
    for signature, root in track(VARIANTS, "compiling", console=console):
        cells = [
            _cell(compile_step(signature, root, target), signature) for target in TARGETS.values()
        ]
        power = powers.get(ROOTS[root], "any")
        lines.append(f"| {describe(signature)} | {power} | {' | '.join(cells)} |")
    for signature in NORM_SIGNATURES:
        cells = [_cell(compile_norm(signature, target), signature) for target in TARGETS.values()]
        lines.append(f"| norm, gradient {_name(signature.dtypes[1])} | | {' | '.join(cells)} |")
    cells = [str(compile_prepare(target).registers) for target in TARGETS.values()]
    lines.append(f"| prepare | | {' | '.join(cells)} |")
    return lines


def _cell(compiled: Compiled, signature: Signature) -> str:
    count = instructions_per_element(compiled, signature.compute_dtype)
    return f"{compiled.registers}" + ("" if count is None else f" / {count:.0f}")


if __name__ == "__main__":
    write_table(__doc__, "triton_kernels.md", table)
