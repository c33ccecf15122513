"""Where a warning points."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import torch

_INSIDE = tuple(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__))


def level_of_the_caller() -> int:
    """The `stacklevel` at which the caller's warning points outside this package and torch.

    torch wraps a step in a varying number of its own functions.
    """
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    return level
