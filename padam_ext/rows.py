"""Rows of a launch table: the constants of each param group at each step count that occurs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from padam_ext.constants import GENERAL, Control, make_constants
from padam_ext.hyperparameters import Hyperparameters

# Of all tensors, of each, or of each as a tensor that only the device can read.
Steps = float | list[float] | Tensor


class Late(NamedTuple):
    """Constants that only the device knows: what to write there into one field of some rows."""

    begin: int
    end: int
    field: int
    value: Tensor  # one, or one for each of these rows


class Rows:
    """Rows, and which of them is each tensor's.

    Attributes:
        of_tensors: int64 [tensor], index of the tensor's row.
        constants: float64 [row][field], see constants.py; 0 where `late` has something to write.
        late: what is missing there.
        root: the one of constants.py's ROOTS that all rows share, else the general one.
    """

    def __init__(self, group_indices: list[int]) -> None:
        """Takes the param group of each tensor, in ascending order."""
        self._group_indices = group_indices
        self._groups = list(dict.fromkeys(group_indices))
        self._by_group = array("q", map(self._groups.index, group_indices))
        self.of_tensors = self._by_group
        self.constants = array("d")
        self.late: list[Late] = []
        self.root = GENERAL
        self._made_from: object = None

    def set(self, options: Sequence[Hyperparameters], steps: Steps, control: Control) -> None:
        """Makes the rows of one step.

        Args:
            options: one for each param group of the optimizer.
            steps: number of this update, from 1.
            control: what to do with all gradients.
        """
        on_host = not any(isinstance(value, Tensor) for value in (steps, *control)) and not any(
            group.has_tensors() for group in options
        )
        made_from = (list(options), steps, control) if on_host else None
        if on_host and made_from == self._made_from:
            return
        self.of_tensors, occurring = self._occurring(steps)
        self.constants, self.late = array("d"), []
        roots = set()
        begin = 0
        for group, step, count in occurring:
            row = make_constants(options[group], step, control)
            numbers = [0.0 if isinstance(value, Tensor) else value for value in row]
            self.constants.extend(numbers * count)
            self.late += [
                Late(begin, begin + count, field, value)
                for field, value in enumerate(row)
                if isinstance(value, Tensor)
            ]
            roots.add(int(row.root))
            begin += count
        self.root = roots.pop() if len(roots) == 1 else GENERAL
        self._made_from = made_from

    def _occurring(self, steps: Steps) -> tuple[array[int], list[tuple[int, float | Tensor, int]]]:
        """The row of each tensor; then of all rows the group, the step count, and how many."""
        if isinstance(steps, float):
            return self._by_group, [(group, steps, 1) for group in self._groups]
        if isinstance(steps, Tensor):
            counts = [self._group_indices.count(group) for group in self._groups]
            parts = zip(self._groups, steps.split(counts), counts, strict=True)
            return array("q", range(len(self._group_indices))), list(parts)
        each = list(zip(self._group_indices, steps, strict=True))
        row_of = {key: row for row, key in enumerate(dict.fromkeys(each))}
        return array("q", [row_of[key] for key in each]), [(*key, 1) for key in row_of]
