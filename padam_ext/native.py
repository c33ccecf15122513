"""Loads the native module, padam_ext._native, which is built from csrc/.

Importing this never fails: where the native module is missing, `unavailable_reason` tells why.
"""

from __future__ import annotations

import importlib
from importlib.metadata import distributions
from pathlib import Path
from typing import Any


def _load() -> tuple[Any, str | None]:
    try:
        return importlib.import_module("padam_ext._native"), None
    except ModuleNotFoundError:
        if (elsewhere := _installed_elsewhere()) is not None:
            return None, (
                "you are in the source tree, which has no native module, while the installed "
                f"{elsewhere} has one; run from another folder, or install with pip install -e ."
            )
        return None, (
            "the native module was not built; reinstall padam_ext with PADAM_EXT_BUILD=cpu or "
            "cuda, which says what is missing"
        )
    except ImportError as error:
        # It is not in wheels, since most builds of torch bring one by this name.
        advice = "reinstall padam_ext"
        if "libgomp" in str(error):
            advice = "install it (Debian and Ubuntu: apt install libgomp1)"
        return None, f"the native module does not load ({error}); {advice}"


def _installed_elsewhere() -> Path | None:
    """The installed package that this source tree hides, if that one has a native module."""
    here = Path(__file__).resolve().parent
    if not (here.parent / "setup.py").exists():
        return None
    for distribution in distributions(name="padam_ext"):
        package = Path(str(distribution.locate_file("padam_ext"))).resolve()
        if package != here and any(package.glob("_native*")):
            return package
    return None


module, unavailable_reason = _load()


def simd_level() -> str:
    """The instruction set in use: the best that this CPU has."""
    return str(module.available_simd_levels()[0])
