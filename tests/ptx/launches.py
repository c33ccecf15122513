"""Has the backends for GPUs run the PTX of their kernels on the CPU.

A launch may touch the sections of its launch table and the elements of its chunks, nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks import cuda_kernels, triton_kernels
from padam_ext.backends import cuda
from padam_ext.kernels import multi_tensor_norm, multi_tensor_padam, prepare_step
from padam_ext.kernels.chunks import OPTIONS, PROGRAM_THREADS, block_of
from padam_ext.rows import SOURCE_WORDS
from padam_ext.slots import SLOTS, Signature
from pretending import replace_cuda_launches, take_the_cpu
from ptx.machine import Machine
from ptx.memory import GlobalMemory, Region
from ptx.program import Module
from totals import totals

PARAM, GRAD = SLOTS.index("param"), SLOTS.index("grad")
# What each kernel writes of its tables, and of those what holds nothing before.
OUTPUTS = {
    "multi_tensor_padam": set(),
    "multi_tensor_sum_of_squares": {"partial_sums"},
    "prepare_step": {"constants", "norm", "prepared_control", "skipped"},
}
UNWRITTEN = {"partial_sums", "prepared_control", "norm"}


def run(machine: Machine, grid: int, params: bytes, regions: list[Region]) -> None:
    """Runs a launch."""
    # One tensor may be the gradient of several parameters.
    memory = GlobalMemory(list({(one.address, one.size): one for one in regions}.values()))
    before = machine.counts.total()
    machine.run(grid, params, memory)
    memory.write_back()
    totals["launches"] += 1
    totals["programs"] += grid
    totals["instructions of threads"] += machine.counts.total() - before
    totals["accesses to memory"] += memory.num_accesses


def table_regions(kernel: str, sections: Mapping[str, Tensor | None]) -> Iterator[Region]:
    """Those of a table's sections, and what else a kernel is given by its address."""
    at_places: dict[int, Region] = {}
    for name, tensor in sections.items():
        if tensor is None or tensor.numel() == 0:
            continue
        is_output = name in OUTPUTS[kernel]
        region = Region(
            name, tensor.data_ptr(), tensor.nbytes, is_output,
            is_written=not (is_output and name in UNWRITTEN),
            # All threads of Triton's kernel read it, the one that adds to it uses it.
            others_may_read=name == "skipped",
        )  # fmt: skip
        other = at_places.get(region.address)  # what stands in for something that is absent
        if other is None or (other.is_output, other.size) < (region.is_output, region.size):
            at_places[region.address] = region
    return iter(at_places.values())


def chunk_regions(table: Any, slots: Mapping[int, torch.dtype], block: int) -> Iterator[Region]:
    """The elements of a table's chunks, in some slots.

    Args:
        table: see DeviceTable; numels, addresses and chunks count.
        slots: dtypes.
        block: elements in a block.
    """
    count = len(table.numels)
    numels, tensors = table.numels.tolist(), table.chunk_tensors.tolist()
    spans: dict[int, tuple[int, int]] = {}
    for tensor, first_block in zip(tensors, table.chunk_first_blocks.tolist(), strict=True):
        begin = first_block * block
        end = min(begin + table.blocks_per_chunk * block, numels[tensor])
        old = spans.get(tensor, (begin, end))
        spans[tensor] = (min(old[0], begin), max(old[1], end))
    for slot, dtype in slots.items():
        for tensor, (begin, end) in spans.items():
            address = int(table.addresses[slot * count + tensor]) + begin * dtype.itemsize
            size = (end - begin) * dtype.itemsize
            yield Region(f"{SLOTS[slot]} {tensor}", address, size, is_output=slot != GRAD)


def prepare_regions(table: Any, num_counters: int, num_late_rows: int) -> Iterator[Region]:
    """Step counters, and learning rates and weight decays on the device."""
    for address in table.counters[:num_counters].tolist():
        yield Region("a counter", address, 4, is_output=True)
    for row in range(num_late_rows):
        words = table.row_sources[row * SOURCE_WORDS :][:SOURCE_WORDS].tolist()
        for address, is_double in (words[1:3], words[4:6]):
            if address != 0:
                yield Region("an option", address, 8 if is_double else 4)


class TritonKernel:
    """Stands in for one of Triton's kernels: compiles for a GPU, and runs the PTX."""

    def __init__(self, kernel: Any, target: str, lean: int) -> None:
        self._kernel = kernel
        self._target = target
        self._lean = lean
        self.__name__ = kernel.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """What Triton calls with the kernel's arguments."""

        def launch(*arguments: Any, **options: Any) -> None:
            given = dict(zip(self._kernel.arg_names, arguments, strict=False))
            constants = {
                name: options[name] for name in self._kernel.arg_names if name not in given
            }
            machine = triton_machine(
                self._kernel, tuple(map(_kind_of, given.values())), tuple(constants.items()),
                self._target, self._lean,
            )  # fmt: skip
            params = self._params(machine, given)
            run(machine, grid[0], params, list(self._regions(given, constants)))

        return launch

    def _params(self, machine: Machine, given: dict[str, Any]) -> bytes:
        params = bytearray(machine.program.param_bytes)
        offsets = machine.program.param_offsets.values()
        for value, offset in zip(given.values(), offsets, strict=False):  # scratch memory: none
            if isinstance(value, Tensor):
                struct.pack_into("<Q", params, offset, value.data_ptr())
            else:
                struct.pack_into("<i", params, offset, value)
        return bytes(params)

    def _regions(self, given: dict[str, Any], constants: dict[str, Any]) -> Iterator[Region]:
        table = SimpleNamespace(**given)
        name = self.__name__
        sections = {key: value for key, value in given.items() if isinstance(value, Tensor)}
        for key in list(sections):
            if f"has_{key}" in given and not given[f"has_{key}"]:
                del sections[key]
        yield from table_regions(name, sections)
        if name == "prepare_step":
            yield from prepare_regions(table, table.num_counters, table.num_late_rows)
            return
        if name == "multi_tensor_padam":
            kinds = [constants[slot] for slot in multi_tensor_padam.SLOTS]
        else:
            kinds = [constants["GRAD"] if slot == GRAD else None for slot in range(len(SLOTS))]
        slots = {slot: _torch_dtype(kind) for slot, kind in enumerate(kinds) if kind is not None}
        yield from chunk_regions(table, slots, constants["BLOCK"])


def _kind_of(value: Any) -> tuple[str, bool]:
    """Triton's type of an argument, and whether it is a multiple of 16."""
    if not isinstance(value, Tensor):
        return "i32", False
    names = {torch.int64: "*i64", torch.float64: "*fp64", torch.float32: "*fp32"}
    return names[value.dtype], value.data_ptr() % 16 == 0


def _torch_dtype(kind: Any) -> torch.dtype:
    names = {"fp32": "float32", "fp64": "float64", "fp16": "float16", "bf16": "bfloat16"}
    return getattr(torch, names.get(str(kind), str(kind)))


@cache
def triton_machine(
    kernel: Any, kinds: tuple[Any, ...], constants: tuple[Any, ...], target: str, lean: int
) -> Machine:
    """One of Triton's kernels compiled for a target."""
    types = [kind for kind, _ in kinds]
    aligned = [is_aligned for _, is_aligned in kinds]
    compiled = triton_kernels.compile_kernel(
        kernel, types, aligned, dict(constants), triton_kernels.TARGETS[target]
    )
    module = Module(compiled.asm["ptx"], compiled.metadata.shared)
    return Machine(module.program(kernel.__name__), PROGRAM_THREADS, lean)


def run_triton(monkeypatch: Any, target: str, lean: int = 0) -> None:
    """Has the triton backend take tensors on the CPU and run its PTX for a target there."""
    take_the_cpu(monkeypatch, "triton")
    for module, name in (
        (multi_tensor_padam, "multi_tensor_padam"),
        (multi_tensor_norm, "multi_tensor_sum_of_squares"),
        (prepare_step, "prepare_step"),
    ):
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, TritonKernel(kernel, target, lean))


_POINTERS = (
    "addresses", "numels", "salts", "rows", "constants", "control", "limits", "prepared_control",
    "row_sources", "counters", "chunk_tensors", "chunk_first_blocks",
)  # fmt: skip
_INPUTS = ("sums", "grad_scale", "found_inf", "norm", "skipped")


def _cuda_table(table: Any) -> bytes:
    """A DeviceTable as csrc/device_table.h has it, without its signature."""
    return struct.pack(
        "<12q5q?39x",
        *(getattr(table, name).data_ptr() for name in _POINTERS),
        len(table.numels), table.num_chunks, table.blocks_per_chunk,
        cuda._address(table.partial_sums), table.num_late_rows, table.counts_on_device,
    )  # fmt: skip


def _cuda_inputs(inputs: Any) -> bytes:
    """PrepareInputs as csrc/prepare.h has them."""
    scalars = [
        item
        for one in (inputs.grad_scale, inputs.found_inf, inputs.norm)
        for item in (cuda._address(one), cuda._is_double(one))
    ]
    num_sums = 0 if inputs.sums is None else len(inputs.sums)
    return struct.pack(
        "<qqq?7xq?7xq?7xq",
        cuda._address(inputs.sums),
        num_sums,
        *scalars,
        cuda._address(inputs.skipped),
    )


_CUDA_TYPES = {
    None: "Absent", torch.float32: "float", torch.float64: "double", torch.bfloat16: "bfloat16",
    torch.float16: "float16", torch.int32: "unsigned int", torch.int16: "unsigned short",
}  # fmt: skip


def _cuda_step_name(signature: Signature) -> str:
    stored = [_CUDA_TYPES[dtype] for dtype in signature.dtypes]
    if signature.stochastic:
        stored[PARAM] = "stochastic_bfloat16"
    return (
        f"multi_tensor_padam<Types<{', '.join([_CUDA_TYPES[signature.compute_dtype], *stored])}> >"
    )


@cache
def _cuda_module(architecture: str) -> tuple[Module, dict[str, str]]:
    module = Module(cuda_kernels.compile_ptx(architecture))
    return module, dict(zip(cuda_kernels.demangled(module.kernels), module.kernels, strict=True))


@cache
def cuda_machine(name: str, architecture: str, lean: int) -> Machine:
    """One of nvcc's kernels compiled for an architecture, by the name that c++filt gives."""
    module, names = _cuda_module(architecture)
    return Machine(module.program(names[name]), PROGRAM_THREADS, lean)


def run_cuda(monkeypatch: Any, architecture: str, lean: int = 0) -> None:
    """Has the cuda backend take tensors on the CPU and run its PTX there."""

    def launch(name: str, grid: int, params: bytes, regions: Iterator[Region]) -> None:
        run(cuda_machine(name, architecture, lean), grid, params, list(regions))

    def sections(table: Any, kernel: str, **others: Tensor | None) -> Iterator[Region]:
        tensors = {name: getattr(table, name) for name in (*_POINTERS, "partial_sums")}
        return table_regions(kernel, tensors | others)

    def norm(table: Any) -> None:
        dtype, compute = table.signature.dtypes[GRAD], table.signature.compute_dtype
        name = f"multi_tensor_sum_of_squares<{_CUDA_TYPES[dtype]}, {_CUDA_TYPES[compute]}>"
        regions = [
            *sections(table, "multi_tensor_sum_of_squares"),
            *chunk_regions(table, {GRAD: dtype}, block_of(compute)),
        ]
        launch(name, table.num_chunks, _cuda_table(table), regions)

    def prepare(table: Any, inputs: Any) -> None:
        num_counters = len(table.numels) if table.counts_on_device else 0
        items = max(num_counters, table.num_late_rows)
        regions = [
            *sections(table, "prepare_step", **{n: getattr(inputs, n) for n in _INPUTS}),
            *prepare_regions(table, num_counters, table.num_late_rows),
        ]
        grid = min(max(-(-items // PROGRAM_THREADS), 1), 32)
        launch("prepare_step", grid, _cuda_table(table) + _cuda_inputs(inputs), regions)

    def step(table: Any, root: int) -> None:
        signature = table.signature
        slots = {i: dtype for i, dtype in enumerate(signature.dtypes) if dtype is not None}
        regions = [
            *sections(table, "multi_tensor_padam"),
            *chunk_regions(table, slots, block_of(signature.compute_dtype)),
        ]
        launch(_cuda_step_name(signature), table.num_chunks, _cuda_table(table), regions)

    replace_cuda_launches(monkeypatch, norm, prepare, step)


assert OPTIONS["enable_fp_fusion"] is False  # else the PTX would be another
