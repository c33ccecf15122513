"""From the text of PTX to instructions.

Functions that a kernel calls are put in place of the calls. What is not understood is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class Register(NamedTuple):
    """A register, `_` for a result that nobody wants."""

    name: str


class Immediate(NamedTuple):
    """A number: an int, or the bits of a float."""

    value: int


class Symbol(NamedTuple):
    """The address of something that is declared."""

    name: str


class Special(NamedTuple):
    """A register that only the machine writes, as %tid.x."""

    name: str


class Vector(NamedTuple):
    """Several operands in braces."""

    items: tuple[Operand, ...]


class Address(NamedTuple):
    """What stands in brackets; without a base the offset is the address."""

    base: Register | Symbol | None
    offset: int


Operand = Register | Immediate | Symbol | Special | Vector | Address


@dataclass(frozen=True)
class Instruction:
    """One instruction; `text` is for messages."""

    opcode: str
    operands: tuple[Operand, ...]
    predicate: str | None = None
    is_negated: bool = False
    target: int | None = None  # of a branch: index of an instruction
    text: str = ""


@dataclass
class Program:
    """A kernel."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)  # types by name or, in %r<9>, by prefix
    param_offsets: dict[str, int] = field(default_factory=dict)
    param_bytes: int = 0
    shared_offsets: dict[str, int] = field(default_factory=dict)
    shared_bytes: int = 0

    def type_of(self, register: str) -> str:
        """The declared type."""
        if register in self.registers:
            return self.registers[register]
        return self.registers[register.rstrip("0123456789")]


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_FUNCTION = re.compile(r"\.(entry|func)\b([^{;]*)\{")
_LINE_DIRECTIVE = re.compile(r"^\s*\.(?:loc|file)\b[^\n]*$", re.MULTILINE)
_LABEL = re.compile(r"([$\w]+):")
_INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_PARAM = re.compile(r"\.param((?:\s+\.\w+|\s+\d+)+)\s+(\w+)(?:\[(\d+)\])?")
_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[(\d*)\]")
_CALL = re.compile(r"\((\w+)\)\s*,\s*(\w+)\s*,\s*\((.*)\)", re.DOTALL)


class Module:
    """The text of a module, whose kernels are read when they are asked for.

    Attributes:
        kernels: header and body by name.
    """

    def __init__(self, text: str, dynamic_shared_bytes: int = 0) -> None:
        """`dynamic_shared_bytes`: of an array in shared memory that is declared without a size."""
        self._dynamic_bytes = dynamic_shared_bytes
        text = _LINE_DIRECTIVE.sub("", _COMMENT.sub("", text))
        self._outside = text[: _FUNCTION.search(text).start()]
        self._functions: dict[str, tuple[str, str]] = {}
        self.kernels: dict[str, tuple[str, str]] = {}
        for match in _FUNCTION.finditer(text):
            kind, header = match.groups()
            body = text[match.end() : _end_of_block(text, match.end())]
            if kind == "func":
                self._functions[re.search(r"\)\s*(\w+)", header)[1]] = (header, body)
            else:
                self.kernels[re.search(r"\w+", header)[0]] = (header, body)

    def program(self, name: str) -> Program:
        """A kernel's instructions."""
        header, body = self.kernels[name]
        program = Program(name)
        _declare_params(program, header)
        for declarations in (self._outside, body):
            _declare_shared(program, declarations, self._dynamic_bytes)
        _Body(program, self._functions).read(body)
        return program


def _end_of_block(text: str, begin: int) -> int:
    depth = 1
    for match in re.finditer(r"[{}]", text[begin:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return begin + match.start()
    raise ValueError("a block of PTX does not end")


def _declare_params(program: Program, header: str) -> None:
    for kind, name, count in _PARAM.findall(header):
        size = int(count) if count else int(re.search(r"\.[a-z](\d+)", kind)[1]) // 8
        alignment = 8 if count else size
        program.param_bytes += -program.param_bytes % alignment
        program.param_offsets[name] = program.param_bytes
        program.param_bytes += size


def _declare_shared(program: Program, text: str, dynamic_bytes: int) -> None:
    for alignment, name, size in _SHARED.findall(text):
        program.shared_bytes += -program.shared_bytes % int(alignment)
        program.shared_offsets[name] = program.shared_bytes
        program.shared_bytes += int(size) if size else dynamic_bytes


class _Body:
    """Reads the body of a kernel, and those of functions where they are called."""

    def __init__(self, program: Program, functions: dict[str, tuple[str, str]]) -> None:
        self.program = program
        self.functions = functions
        self.labels: dict[str, int] = {}
        self.branches: list[tuple[int, str]] = []
        self.num_calls = 0

    def read(self, body: str) -> None:
        """Adds all instructions to the program."""
        self._read_statements(body, "", {})
        for place, label in self.branches:
            old = self.program.instructions[place]
            self.program.instructions[place] = Instruction(
                old.opcode, (), old.predicate, old.is_negated, self.labels[label], old.text
            )

    def _read_statements(self, body: str, scope: str, returns: dict[str, str]) -> None:
        """`scope` goes before names of a called function; `returns` has the label of its end."""
        for statement in self._statements(body, scope):
            if statement.startswith(".reg"):
                for kind, names in re.findall(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.DOTALL):
                    for name in names.split(","):
                        name = _scoped(re.sub(r"<\d+>", "", name.strip()), scope)
                        self.program.registers[name] = kind
            elif not statement.startswith((".shared", ".param", ".pragma")):
                self._add(statement, scope, returns)

    def _statements(self, body: str, scope: str) -> Iterator[str]:
        for part in body.split(";"):
            statement = part.strip()
            while statement:
                if statement[0] in "{}":
                    statement = statement[1:].lstrip()
                elif label := _LABEL.match(statement):
                    self.labels[scope + label[1]] = len(self.program.instructions)
                    statement = statement[label.end() :].lstrip()
                else:
                    yield statement
                    break

    def _add(self, statement: str, scope: str, returns: dict[str, str]) -> None:
        match = _INSTRUCTION.fullmatch(statement)
        if match is None:
            raise ValueError(f"not understood in PTX: {statement!r}")
        negated, predicate, opcode, rest = match.groups()
        if opcode.startswith("call"):
            self._call(rest)
            return
        if opcode.startswith("bra") or (opcode == "ret" and returns):
            label = returns["ret"] if opcode == "ret" else scope + rest.strip()
            self.branches.append((len(self.program.instructions), label))
            opcode, rest = "bra", ""
        operands = tuple(self._operand(part, scope) for part in _split(rest))
        predicate = _scoped(predicate, scope) if predicate else None
        text = " ".join(statement.split())
        self.program.instructions.append(
            Instruction(opcode, operands, predicate, negated == "!", text=text)
        )

    def _call(self, rest: str) -> None:
        result, name, arguments = _CALL.fullmatch(rest.strip()).groups()
        header, body = self.functions[name]
        self.num_calls += 1
        scope = f"call{self.num_calls}."
        formal = [found for _, found, _ in _PARAM.findall(header)]
        actual = [result, *(part.strip() for part in arguments.split(","))]
        for one, other in zip(formal, actual, strict=True):  # the function's names, the caller's
            body = re.sub(rf"\b{one}\b", other, body)
        self._read_statements(body, scope, {"ret": scope + "end"})
        self.labels[scope + "end"] = len(self.program.instructions)

    def _operand(self, text: str, scope: str) -> Operand:
        text = text.strip()
        if text.startswith("{"):
            return Vector(tuple(self._operand(part, scope) for part in _split(text[1:-1])))
        if text.startswith("["):
            parts = re.fullmatch(r"([%$\w.]+)?\s*\+?\s*(-?\w+)?", text[1:-1].strip())
            base = None if parts[1] is None else self._operand(parts[1], scope)
            return Address(base, int(parts[2] or "0", 0))
        if re.fullmatch(r"%(?:n?tid|n?ctaid)\.[xyz]", text):
            return Special(text)
        if text.startswith("%") or text == "_":
            return Register(_scoped(text.partition("|")[0], scope))
        if found := re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", text):
            return Immediate(int(found[1], 16))
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return Immediate(int(text.rstrip("U"), 0))
        return Symbol(text)


def _scoped(name: str, scope: str) -> str:
    return scope + name if scope and name != "_" else name


def _split(text: str) -> list[str]:
    """At commas that are in no brackets."""
    parts, depth, begin = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            parts.append(text[begin:place])
            begin = place + 1
    return [part for part in [*parts, text[begin:]] if part.strip()]
