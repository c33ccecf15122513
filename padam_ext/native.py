"""Loads the native module, padam_ext._native, which csrc/ is built into.

Importing this never fails: where the native module is missing, `unavailable_reason` tells why.
"""

from __future__ import annotations

import importlib
from typing import Any


def _load() -> tuple[Any, str | None]:
    try:
        return importlib.import_module("padam_ext._native"), None
    except ModuleNotFoundError:
        return None, (
            "the native module was not built; install a C++ compiler, then reinstall padam_ext "
            "with PADAM_EXT_BUILD=cpu"
        )
    except ImportError as error:
        return None, f"the native module does not load ({error}); reinstall padam_ext"


module, unavailable_reason = _load()


def simd_level() -> str:
    """The instruction set in use: the best that this CPU has."""
    return str(module.available_simd_levels()[0])
