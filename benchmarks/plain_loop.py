"""The floor on the CPU: plain_loop.cpp over given arrays, compiled for this machine."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

_SOURCE = Path(__file__).with_suffix(".cpp")


def plain_loop(arrays: list[Tensor]) -> Callable[[], None]:
    """A function that reads five float32 arrays of one size and writes all but the second.

    Its threads are torch's, as many as there are now.
    """
    addresses = [ctypes.c_void_p(array.data_ptr()) for array in arrays]
    numel = ctypes.c_int64(arrays[0].numel())
    threads = ctypes.c_int(torch.get_num_threads())
    function = _compiled().plain_loop
    return lambda: function(*addresses, numel, threads)


@cache
def _compiled() -> ctypes.CDLL:
    compiler = os.environ.get("CXX") or "c++"
    with TemporaryDirectory() as folder:
        library = Path(folder) / f"plain_loop{sysconfig.get_config_var('SHLIB_SUFFIX')}"
        subprocess.run(
            [compiler, "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", _SOURCE,
             "-o", library],
            check=True,
        )  # fmt: skip
        return ctypes.CDLL(str(library))
