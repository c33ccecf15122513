"""Runs a kernel: all threads of several programs side by side, as arrays.

Threads that stand at the same instruction execute it together. Of several such groups the one that
is furthest behind goes on, so that threads meet again where branches join.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from ptx import operations
from ptx.memory import AccessError, GlobalMemory, Places, SharedMemory
from ptx.program import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Program,
    Register,
    Special,
    Symbol,
    Vector,
)

WARP = 32
PROGRAMS_AT_A_TIME = 32
GARBAGE = 0x5BADBADB5BADBADB  # as a float32 a large number
Execute = Callable[["Batch", np.ndarray], None]


class PtxError(Exception):
    """What a kernel does wrong, with the instruction that does it."""


class Machine:
    """Executes one kernel.

    Attributes:
        counts: how often each opcode was executed by a thread.
        kinds: dtypes in which registers are kept, by name, as far as they have been asked for.
    """

    def __init__(self, program: Program, threads: int, lean: int = 0) -> None:
        """Translates the instructions.

        Args:
            program: what to run.
            threads: of a program, a multiple of 32.
            lean: to which end of their error approximations go, see numbers.py.
        """
        self.program = program
        self.threads = threads
        self.counts: Counter[str] = Counter()
        self.kinds: dict[str, np.dtype] = {}
        self._execute = [_translate(one, program, lean) for one in program.instructions]

    def run(self, grid: int, params: bytes, memory: GlobalMemory) -> None:
        """Runs `grid` programs.

        Args:
            grid: how many.
            params: the kernel's parameters, as they lie in memory.
            memory: what they may touch; it has been changed afterwards.

        Raises:
            PtxError: an access that is not allowed, or an instruction that would hang.
        """
        for first in range(0, grid, PROGRAMS_AT_A_TIME):
            count = min(PROGRAMS_AT_A_TIME, grid - first)
            with np.errstate(all="ignore"):
                self._run(Batch(self, first, count, grid, params, memory))

    def _run(self, batch: Batch) -> None:
        instructions = self.program.instructions
        batch.groups = {0: np.arange(batch.num_threads)}
        while batch.groups:
            place = min(batch.groups)
            lanes = batch.groups.pop(place)
            instruction = instructions[place]
            self.counts[instruction.opcode] += len(lanes)
            try:
                if instruction.opcode in ("ret", "exit", "bra", "bra.uni", "bar.sync"):
                    self._move(batch, place, instruction, lanes)
                    continue
                taken = batch.where(instruction, lanes)
                if len(taken):
                    self._execute[place](batch, taken)
            except AccessError as error:
                raise PtxError(f"{self.program.name}: {instruction.text!r} {error}") from error
            batch.send(lanes, place + 1)
        batch.check_ended()

    def _move(self, batch: Batch, place: int, instruction: Instruction, lanes: np.ndarray) -> None:
        taken = batch.where(instruction, lanes)
        if instruction.opcode == "bar.sync":
            if len(taken) != len(lanes) or instruction.operands != (Immediate(0),):
                raise PtxError(f"{instruction.text!r} is not understood")
            batch.wait(place, lanes)
            return
        if len(taken) != len(lanes):
            batch.send(np.setdiff1d(lanes, taken, assume_unique=True), place + 1)
        if instruction.target is not None and len(taken):
            batch.send(taken, instruction.target)


class Batch:
    """Some programs of a launch that run side by side: registers, and where threads are."""

    def __init__(
        self,
        machine: Machine,
        first: int,
        count: int,
        grid: int,
        params: bytes,
        memory: GlobalMemory,
    ) -> None:
        program = machine.program
        self._types = program
        self._kinds = machine.kinds
        self.num_threads = count * machine.threads
        self.groups: dict[int, np.ndarray] = {}  # threads by the instruction that comes next
        self.registers: dict[str, np.ndarray] = {}
        self.memory = memory
        self.params = np.frombuffer(params, np.uint8)
        self.shared = SharedMemory(count, program.shared_bytes)
        threads = np.arange(self.num_threads)
        self._threads_of_program = machine.threads
        self._programs = threads // machine.threads
        self._barriers = np.zeros(count, np.int64)
        self._waiting: dict[int, tuple[int, list[np.ndarray]]] = {}  # by program
        self.numbers = (first * machine.threads + threads + 1).astype(np.int32)  # of the launch
        self.specials = {
            "%tid.x": (threads % machine.threads).astype(np.uint32),
            "%ctaid.x": (first + self._programs).astype(np.uint32),
            "%ntid.x": np.full(self.num_threads, machine.threads, np.uint32),
            "%nctaid.x": np.full(self.num_threads, grid, np.uint32),
        }

    def send(self, lanes: np.ndarray, place: int) -> None:
        """Has threads go on at an instruction, together with those that are there."""
        there = self.groups.get(place)
        self.groups[place] = lanes if there is None else np.union1d(lanes, there)

    def where(self, instruction: Instruction, lanes: np.ndarray) -> np.ndarray:
        """Those threads for which an instruction's predicate holds."""
        if instruction.predicate is None:
            return lanes
        holds = self.registers[instruction.predicate][lanes]
        return lanes[holds != instruction.is_negated]

    def wait(self, place: int, lanes: np.ndarray) -> None:
        """Has threads wait at a barrier until all of their program are there."""
        for program in np.unique(self._programs[lanes]):
            mine = lanes[self._programs[lanes] == program]
            where, parts = self._waiting.pop(int(program), (place, []))
            if where != place:
                raise PtxError("threads of a program wait at different barriers")
            parts.append(mine)
            if sum(map(len, parts)) == self._threads_of_program:
                self._barriers[program] += 1
                self.send(np.sort(np.concatenate(parts)), place + 1)
            else:
                self._waiting[int(program)] = (place, parts)

    def check_ended(self) -> None:
        """Refuses threads that still wait."""
        if self._waiting:
            raise PtxError("threads wait at a barrier that others do not reach")

    def places(self, lanes: np.ndarray) -> Places:
        """Where threads are, for shared memory."""
        programs = self._programs[lanes]
        return Places(programs, self.numbers[lanes].astype(np.int64), self._barriers[programs])

    def read(self, operand: Operand, dtype: np.dtype, lanes: np.ndarray) -> np.ndarray:
        """The value of an operand for some threads, as a dtype."""
        if isinstance(operand, Register):
            if operand.name not in self.registers:
                raise PtxError(f"register {operand.name} is read before it is written")
            values = self.registers[operand.name]
            if len(lanes) != self.num_threads:
                values = values[lanes]
        elif isinstance(operand, Special):
            values = self.specials[operand.name][lanes]
        elif isinstance(operand, Immediate):
            return _constant(operand.value, dtype)
        elif isinstance(operand, Symbol):
            offsets = self._types.shared_offsets | self._types.param_offsets
            return np.array(offsets[operand.name], dtype)[()]
        else:
            return self._joined(operand, dtype, lanes)
        if values.dtype.itemsize != dtype.itemsize:
            values = values.astype(f"u{dtype.itemsize}")
        return values.view(dtype)

    def _joined(self, vector: Vector, dtype: np.dtype, lanes: np.ndarray) -> np.ndarray:
        size = dtype.itemsize // len(vector.items)
        # Compilers pair a number with a register that nobody writes where only the number counts.
        parts = [
            np.array(GARBAGE & (1 << 8 * size) - 1, f"u{size}")
            if isinstance(item, Register) and item.name not in self.registers
            else self.read(item, np.dtype(f"u{size}"), lanes)
            for item in vector.items
        ]
        joined = np.empty((len(lanes), len(parts)), f"u{size}")
        for place, part in enumerate(parts):
            joined[:, place] = part
        return joined.view(dtype)[:, 0]

    def write(self, operand: Operand, values: np.ndarray, lanes: np.ndarray) -> None:
        """Writes a result for some threads."""
        if isinstance(operand, Vector):
            size = values.dtype.itemsize // len(operand.items)
            parts = np.ascontiguousarray(values).view(f"u{size}").reshape(len(lanes), -1)
            for place, item in enumerate(operand.items):
                self.write(item, parts[:, place], lanes)
            return
        if operand.name == "_":
            return
        kind = self._kind_of(operand.name)
        if values.dtype.kind != "b" and values.dtype.itemsize == kind.itemsize:
            values = values.view(kind)
        else:
            values = values.astype(kind)  # extends the sign of a signed number
        if len(lanes) == self.num_threads:
            self.registers[operand.name] = np.ascontiguousarray(values)  # is never written into
            return
        before = self.registers.get(operand.name)
        if before is None:  # in other threads, nobody has written it
            bits = GARBAGE & (1 << 8 * kind.itemsize) - 1
            before = np.full(self.num_threads, bits if kind.kind == "u" else True, kind)
        after = before.copy()
        after[lanes] = values
        self.registers[operand.name] = after

    def _kind_of(self, register: str) -> np.dtype:
        """The dtype in which a register is kept: bool, or unsigned."""
        kind = self._kinds.get(register)
        if kind is None:
            wanted = operations.DTYPES[self._types.type_of(register)]
            kind = wanted if wanted.kind == "b" else np.dtype(f"u{wanted.itemsize}")
            self._kinds[register] = kind
        return kind


@cache
def _constant(value: int, dtype: np.dtype) -> np.generic:
    """A number, or the bits of one, as a dtype."""
    if dtype.kind == "b":
        return np.bool_(value)
    bits = value & (1 << 8 * dtype.itemsize) - 1
    return np.array(bits, f"u{dtype.itemsize}").view(dtype)[()]


def _translate(instruction: Instruction, program: Program, lean: int) -> Execute | None:
    opcode, operands = instruction.opcode, instruction.operands
    if opcode.split(".")[0] in ("ld", "st"):
        return _access(instruction, program)
    if opcode == "shfl.sync.bfly.b32":
        return _exchange(operands)
    if opcode in ("ret", "exit", "bra", "bra.uni", "bar.sync"):
        return None
    operation = operations.find(opcode, lean)
    if operation is None:
        raise PtxError(f"unknown opcode: {instruction.text!r}")
    result, *given = operation.dtypes

    def execute(batch: Batch, lanes: np.ndarray) -> None:
        values = [
            batch.read(one, dtype, lanes) for one, dtype in zip(operands[1:], given, strict=True)
        ]
        computed = np.asarray(operation.compute(*values)).astype(result, copy=False)
        if computed.shape != lanes.shape:
            computed = np.broadcast_to(computed, lanes.shape).copy()
        batch.write(operands[0], computed, lanes)

    return execute


def _access(instruction: Instruction, program: Program) -> Execute:
    """A load or a store; without a space it is one of global memory."""
    name, *modifiers, kind = instruction.opcode.split(".")
    dtype = operations.DTYPES[kind]
    unsigned = np.dtype(f"u{dtype.itemsize}")
    count = next((int(one[1:]) for one in modifiers if one in ("v2", "v4")), 1)
    space = next((one for one in modifiers if one in ("param", "shared")), "global")
    if not set(modifiers) <= {"v2", "v4", "param", "shared", "global"}:
        raise PtxError(f"unknown opcode: {instruction.text!r}")
    address, value = instruction.operands if name == "st" else instruction.operands[::-1]
    items: Sequence[Operand] = value.items if isinstance(value, Vector) else (value,)
    if space == "param" and isinstance(address.base, Symbol):
        if address.base.name not in program.param_offsets:  # of a function that was called
            return _copy(address, value, name, dtype, program)

    def execute(batch: Batch, lanes: np.ndarray) -> None:
        places = batch.read(address.base, np.dtype(np.int64), lanes) if address.base else 0
        places = np.broadcast_to(places + np.int64(address.offset), lanes.shape)
        if space == "param":
            if (places < 0).any() or (places + dtype.itemsize * count > program.param_bytes).any():
                raise AccessError(f"reads beyond the {program.param_bytes} bytes of parameters")
            numbers = batch.params[places[:, None] + np.arange(dtype.itemsize * count)]
            loaded = list(np.ascontiguousarray(numbers).view(unsigned).T)
        elif name == "st":
            values = [
                np.broadcast_to(batch.read(item, unsigned, lanes), lanes.shape) for item in items
            ]
            if space == "shared":
                batch.shared.store(places, values, batch.places(lanes))
            else:
                batch.memory.store(places, values, batch.numbers[lanes])
            return
        elif space == "shared":
            loaded = batch.shared.load(places, dtype.itemsize, count, batch.places(lanes))
        else:
            loaded = batch.memory.load(places, dtype.itemsize, count, batch.numbers[lanes])
        for item, one in zip(items, loaded, strict=True):
            batch.write(item, np.ascontiguousarray(one).view(dtype), lanes)

    return execute


def _copy(
    address: Address, value: Operand, name: str, dtype: np.dtype, program: Program
) -> Execute:
    """The parameter of a call, which is in place of a register here."""
    param = Register(address.base.name)
    program.registers[param.name] = f"b{8 * dtype.itemsize}"
    to, source = (param, value) if name == "st" else (value, param)

    def execute(batch: Batch, lanes: np.ndarray) -> None:
        values = np.broadcast_to(batch.read(source, dtype, lanes), lanes.shape).copy()
        batch.write(to, values, lanes)

    return execute


def _exchange(operands: Sequence[Operand]) -> Execute:
    """shfl.sync.bfly.b32: the value of the thread whose number differs in some bits."""
    result, source, flip, *rest = operands
    if [one.value & 0xFFFFFFFF for one in rest] != [31, 0xFFFFFFFF]:
        raise PtxError(f"shfl.sync.bfly.b32 with other masks: {rest}")

    def execute(batch: Batch, lanes: np.ndarray) -> None:
        flips = batch.read(flip, np.dtype(np.uint32), lanes)
        if np.any(flips >= WARP):
            raise PtxError("shfl.sync leaves the warp")
        partners = lanes ^ np.broadcast_to(flips, lanes.shape).astype(np.int64)
        is_here = np.zeros(batch.num_threads, bool)
        is_here[lanes] = True
        warps = is_here.reshape(-1, WARP)
        if not (warps.all(1) | ~warps.any(1)).all():
            raise PtxError("shfl.sync is for all threads of a warp, and one does not take part")
        batch.write(result, batch.registers[source.name][partners], lanes)

    return execute
