"""The slots of a parameter: what a step reads and writes for it, each declared once.

Everything else follows from this table: the state's tensors, the columns of the launch table, the
kernels' signatures. Kernels convert between a slot's storage dtype and the dtype of the arithmetic
by the codecs in codecs.py, kernels/codecs.py and csrc/codecs.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

# Parameter dtypes; complex ones are taken as pairs of these. The order is that of csrc's DType.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HALF_DTYPES = (torch.bfloat16, torch.float16)
ABSENT = -1  # the code of a slot that a signature lacks


class StateSlot(NamedTuple):
    """A tensor of a parameter's state, of the parameter's shape.

    Attributes:
        name: its key in `optimizer.state[param]`, torch.optim.Adam's.
        option: the flag of the param group that asks for it; None for always.
        starts_as: the slot from which it is copied if a state lacks it; None for zeros.
        storage: its dtype by dtype of the arithmetic, where the two differ.
    """

    name: str
    option: str | None = None
    starts_as: str | None = None
    storage: Mapping[torch.dtype, torch.dtype] = {}

    def is_in(self, group: Mapping[str, Any]) -> bool:
        """Whether the parameters of a group have it."""
        return self.option is None or bool(group[self.option])

    def dtype(self, param_dtype: torch.dtype) -> torch.dtype:
        """Its dtype beside a parameter of a dtype; complex for complex.

        A dtype without a complex one, like bfloat16, gives way to that of the arithmetic there.
        """
        compute = compute_dtype(param_dtype)
        stored = self.storage.get(compute, compute)
        if not param_dtype.is_complex:
            return stored
        has_complex = stored.to_complex().to_real() == stored
        return (stored if has_complex else compute).to_complex()


STATE_SLOTS = (
    StateSlot("exp_avg"),
    StateSlot("exp_avg_sq"),
    StateSlot("max_exp_avg_sq", option="amsgrad", starts_as="exp_avg_sq"),
)
# In the order of the enum Slot in csrc/launch_table.h.
SLOTS = ("param", "grad", *(slot.name for slot in STATE_SLOTS))
# All that a parameter's state holds.
STATE_KEYS = ("step", *(slot.name for slot in STATE_SLOTS))


class Signature(NamedTuple):
    """What kernels are compiled for: all tensors of one launch share it.

    Attributes:
        dtypes: storage dtype by slot, in the order of SLOTS; None for a slot that is absent.
        compute_dtype: of the arithmetic.
    """

    dtypes: tuple[torch.dtype | None, ...]
    compute_dtype: torch.dtype

    @property
    def codes(self) -> tuple[list[int], int]:
        """The same as numbers, for the native module: by slot, and of the arithmetic."""
        return [dtype_code(dtype) for dtype in self.dtypes], dtype_code(self.compute_dtype)


def dtype_code(dtype: torch.dtype | None) -> int:
    """The number of a dtype in csrc's DType."""
    return ABSENT if dtype is None else DTYPES.index(dtype)


def compute_dtype(param_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic: float64 for float64 parameters, else float32."""
    return torch.float64 if param_dtype.to_real() == torch.float64 else torch.float32


def state_slots_of(group: Mapping[str, Any]) -> tuple[bool, ...]:
    """Which state slots the parameters of a group have."""
    return tuple(slot.is_in(group) for slot in STATE_SLOTS)


def signature(
    param_dtype: torch.dtype, grad_dtype: torch.dtype, slots: tuple[bool, ...]
) -> Signature:
    """The signature of a parameter whose group has these state slots."""
    real = param_dtype.to_real()
    states = (
        slot.dtype(param_dtype).to_real() if is_present else None
        for slot, is_present in zip(STATE_SLOTS, slots, strict=True)
    )
    return Signature((real, _read_as(real, grad_dtype.to_real()), *states), compute_dtype(real))


def _read_as(param_dtype: torch.dtype, grad_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a kernel reads a gradient; a conversion to it is exact."""
    if grad_dtype == param_dtype:
        return grad_dtype
    return torch.float32 if param_dtype in HALF_DTYPES else param_dtype
