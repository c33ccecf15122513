"""Reads what compilers made of a kernel: NVIDIA's and AMD's assembly."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import triton


def nvidia_tool(name: str, *arguments: str | Path) -> str:
    """Runs cuobjdump or nvdisasm, as Triton brings them, and returns what it prints."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([tool, *arguments], check=True, capture_output=True, text=True).stdout


def loops(assembly: str) -> list[list[str]]:
    """Lines of each loop, in the order of their beginnings, in PTX or machine code."""
    lines = assembly.splitlines()
    label_at: dict[str, int] = {}
    found = []
    for at, line in enumerate(lines):
        if label := re.match(r"\s*([.$]L\w+):", line):
            label_at[label[1]] = at
        elif (jump := re.search(r"bra.*([.$]L\w+)", line, re.IGNORECASE)) and jump[1] in label_at:
            found.append((label_at[jump[1]], at + 1))
    return [lines[slice(*span)] for span in sorted(found)]


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
