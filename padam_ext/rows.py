"""Rows of a launch table: the constants of each param group at each step count that occurs."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping
from typing import get_type_hints

from padam_ext.constants import (
    GENERAL,
    UNKNOWN_STEP,
    Constants,
    RowOptions,
    RowSource,
    make_constants,
    make_source,
)

# Of all tensors, or of each; UNKNOWN_STEP where only the device knows.
Steps = float | list[float]

_SOURCE = struct.Struct(
    "".join("d" if kind is float else "q" for kind in get_type_hints(RowSource).values())
)
NUM_FIELDS = len(Constants._fields)
SOURCE_WORDS = len(RowSource._fields)


class Rows:
    """The rows of a table, and the index of each tensor's row.

    Attributes:
        of_tensors: int64 [tensor], index of the tensor's row.
        constants: float64 [row][field], see constants.py.
        sources: int64 words [row][field of RowSource], where the device has to complete rows; else
            empty.
        root: the one of constants.py's ROOTS that all rows share, else the general one.
    """

    def __init__(self, group_indices: list[int]) -> None:
        """Takes the param group of each tensor."""
        self._group_indices = group_indices
        self._groups = list(dict.fromkeys(group_indices))
        place = {group: row for row, group in enumerate(self._groups)}
        self._by_group = array("q", [place[group] for group in group_indices])
        self.of_tensors = self._by_group
        self.constants = array("d")
        self.sources = array("q")
        self.root = GENERAL
        self._made_from: object = None

    @property
    def num_late(self) -> int:
        """How many rows the device has to complete: none or all."""
        return len(self.sources) // SOURCE_WORDS

    def set(self, options: Mapping[int, RowOptions], steps: Steps) -> None:
        """Makes the rows of one step.

        Args:
            options: those of each param group that occurs.
            steps: number of this update, from 1.
        """
        mine = {group: options[group] for group in self._groups}
        if all(group.bias_correction == "none" and group.seed is None for group in mine.values()):
            steps = 0.0  # the count plays no part: rows stay as they are
        made_from = (mine, steps)
        if made_from == self._made_from:
            return
        self._made_from = None
        self.of_tensors, occurring = self._occurring(steps)
        is_late = steps == UNKNOWN_STEP or any(group.needs_device() for group in mine.values())
        made = {key: make_constants(mine[key[0]], key[1]) for key in dict.fromkeys(occurring)}
        self.constants = array("d", [value for key in occurring for value in made[key]])
        self.sources = array("q")
        if is_late:
            packed = {key: _SOURCE.pack(*make_source(mine[key[0]], key[1])) for key in made}
            self.sources.frombytes(b"".join([packed[key] for key in occurring]))
        roots = {int(constants.root) for constants in made.values()}
        self.root = roots.pop() if len(roots) == 1 else GENERAL
        self._made_from = made_from

    def _occurring(self, steps: Steps) -> tuple[array[int], list[tuple[int, float]]]:
        """The row of each tensor; then of all rows the group and the step count."""
        if steps == UNKNOWN_STEP:  # each tensor has its own
            return (
                array("q", range(len(self._group_indices))),
                [(group, UNKNOWN_STEP) for group in self._group_indices],
            )
        if isinstance(steps, float):
            return self._by_group, [(group, steps) for group in self._groups]
        each = list(zip(self._group_indices, steps, strict=True))
        row_of = {key: row for row, key in enumerate(dict.fromkeys(each))}
        return array("q", [row_of[key] for key in each]), list(row_of)
