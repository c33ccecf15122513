"""The native module, as a backend: csrc/ behind one launch table.

Importing this module never fails: where the native module is missing, `unavailable_reason` tells
why.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from padam_ext.grouping import Bucket, Live
from padam_ext.hyperparameters import Hyperparameters
from padam_ext.launch_table import LaunchTable


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


class CpuStep:
    """The fused step of one bucket on the CPU: all its tensors in one call."""

    def __init__(self, bucket: Bucket) -> None:
        """Builds the bucket's launch table."""
        self._bucket = bucket
        self._table = LaunchTable(bucket)
        self._simd_level = simd_level()

    def __call__(self, live: Live, options: Sequence[Hyperparameters]) -> None:
        """Steps every tensor of the bucket with this step's gradients and options."""
        bucket, table = self._bucket, self._table
        grads = bucket.gradients(live)  # held until the kernel has run
        smallest, largest = module.increment_steps(table.step_addresses)
        if all(group.bias_correction == "none" for group in options):
            table.set_rows(options, 0.0)  # the count plays no part: rows stay as they are
        elif smallest == largest:
            table.set_rows(options, smallest)
        else:
            table.set_rows(options, [step.item() for step in bucket.steps])
        table.set_grads(grads)
        bucket.load_staged()
        module.step_cpu(
            addresses=table.addresses,
            numels=table.numels,
            rows=table.rows,
            hyperparameters=table.hyperparameters,
            param_dtype=table.param_dtype,
            grad_dtype=table.grad_dtype,
            num_threads=torch.get_num_threads(),
            simd_level=self._simd_level,
        )
        bucket.store_staged()
