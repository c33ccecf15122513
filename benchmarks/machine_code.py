"""Reads what compilers made of a kernel, NVIDIA's and AMD's assembly, and writes tables of it."""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import triton
from rich.console import Console


def nvidia_tool(name: str, *arguments: str | Path) -> str:
    """Runs cuobjdump or nvdisasm, as Triton brings them, and returns what it prints."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([tool, *arguments], check=True, capture_output=True, text=True).stdout


def loops(assembly: str) -> list[list[str]]:
    """Lines of each loop, in the order of their beginnings, in PTX or machine code."""
    lines = assembly.splitlines()
    return [lines[slice(*span)] for span in _spans_of_loops(lines)]


def outside_of_loops(assembly: str) -> list[str]:
    """Lines of no loop."""
    lines = assembly.splitlines()
    for begin, end in reversed(_spans_of_loops(lines)):
        del lines[begin:end]
    return lines


def _spans_of_loops(lines: list[str]) -> list[tuple[int, int]]:
    label_at: dict[str, int] = {}
    found = []
    for at, line in enumerate(lines):
        if label := re.match(r"\s*([.$]L\w+):", line):
            label_at[label[1]] = at
        elif (jump := re.search(r"bra.*([.$]L\w+)", line, re.IGNORECASE)) and jump[1] in label_at:
            found.append((label_at[jump[1]], at + 1))
    spans: list[tuple[int, int]] = []
    for begin, end in sorted(found):
        if spans and spans[-1][0] < begin < spans[-1][1] < end:  # one loop, by several jumps
            begin, _ = spans.pop()
        spans.append((begin, end))
    return spans


def instructions(loop: list[str]) -> int:
    """Instructions in lines of NVIDIA's machine code.

    Without the calls that square roots and divisions make for unusual numbers, where these stand in
    short blocks of their own, which are jumped over.
    """
    blocks: list[list[str]] = [[]]
    for line in loop:
        if line.strip().startswith("/*"):
            blocks[-1].append(line)
        if "BRA" in line or line.startswith("."):
            blocks.append([])
    return sum(len(b) for b in blocks if len(b) > 8 or "CALL" not in " ".join(b))


def write_table(description: str, name: str, make_lines: Callable[[Console], list[str]]) -> None:
    """What a program does that writes a table: parses its arguments, makes the lines, writes them.

    Args:
        description: the program's docstring.
        name: of the file in results/, where no other is asked for.
        make_lines: shows its progress on the console.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    default = Path(__file__).parent / "results" / name
    parser.add_argument("--out", type=Path, default=default, help="default %(default)s")
    options = parser.parse_args()
    console = Console()
    options.out.write_text("\n".join(make_lines(console)) + "\n")
    console.print(f"The table is in {options.out}.")
