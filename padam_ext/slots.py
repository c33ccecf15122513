"""The slots of a parameter: what a step reads and writes for it, each declared once.

Everything else follows from this table: the state's tensors, the columns of the launch table, the
kernels' signatures. Kernels convert between what a slot stores and the values of the arithmetic by
the codecs in codecs.py, kernels/codecs.py and csrc/codecs.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch

# Parameter dtypes; complex ones are taken as pairs of these.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HALF_DTYPES = (torch.bfloat16, torch.float16)
# The order is that of csrc's DType, which goes on with STOCHASTIC.
STORED_DTYPES = (*DTYPES, torch.int32, torch.int16)
STOCHASTIC = len(STORED_DTYPES)  # the code of a bfloat16 parameter that is rounded so
ABSENT = -1  # the code of a slot that a signature lacks


class StateSlot(NamedTuple):
    """A tensor of a parameter's state, of the parameter's shape.

    Attributes:
        name: its key in `optimizer.state[param]`; those of torch.optim.Adam where that has it.
        when: the options of the param groups whose parameters have it.
        starts_as: the slot from which it is copied if a state lacks it; None for zeros.
        stored_as: its dtype where that is not the one of the arithmetic.
    """

    name: str
    when: Mapping[str, Any] = {}
    starts_as: str | None = None
    stored_as: torch.dtype | None = None

    def is_in(self, group: Mapping[str, Any]) -> bool:
        """Whether the parameters of a group have it."""
        return all(group[option] == value for option, value in self.when.items())

    def dtype(self, param_dtype: torch.dtype) -> torch.dtype:
        """Its dtype beside a parameter of a dtype; complex for complex."""
        if self.stored_as is not None:
            return self.stored_as
        return state_dtype(param_dtype)


STATE_SLOTS = (
    StateSlot("exp_avg", {"state_dtype": "float32"}),
    StateSlot("exp_avg_sq", {"state_dtype": "float32"}),
    StateSlot("max_exp_avg_sq", {"state_dtype": "float32", "amsgrad": True}, "exp_avg_sq"),
    StateSlot("packed_mvh", {"state_dtype": "packed32", "amsgrad": True}, stored_as=torch.int32),
    StateSlot("packed_mv", {"state_dtype": "packed32", "amsgrad": False}, stored_as=torch.int32),
    StateSlot("param_low", {"master": "split"}, stored_as=torch.int16),
)
# In the order of the enum Slot in csrc/launch_table.h. The first five are the values of the
# arithmetic, too: a packed slot stores several of them.
SLOTS = ("param", "grad", *(slot.name for slot in STATE_SLOTS))
# All that a parameter's state may hold. `salt` is a number, for random_bits.py.
STATE_KEYS = ("step", *(slot.name for slot in STATE_SLOTS), "salt")
# All moments by torch.optim.Adam's names, the last one with amsgrad only.
ADAM_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
# Each of the ways to hold the moments, by the slots that it cannot do without.
MOMENTS = (("exp_avg", "exp_avg_sq"), ("packed_mvh",), ("packed_mv",))


# The options of a param group that Storage follows from.
_OPTIONS_READ = (
    *dict.fromkeys(option for slot in STATE_SLOTS for option in slot.when),
    "param_rounding",
)
_read_options = itemgetter(*_OPTIONS_READ)
_PACKED = [i for i, slot in enumerate(STATE_SLOTS) if slot.name.startswith("packed")]


class Storage(NamedTuple):
    """How the parameters of a param group are stored.

    Attributes:
        slots: whether it has each of STATE_SLOTS.
        stochastic: whether bfloat16 parameters are rounded stochastically.
    """

    slots: tuple[bool, ...]
    stochastic: bool

    @staticmethod
    def of(group: Mapping[str, Any]) -> Storage:
        """That of a group."""
        return _storage(*_read_options(group))

    @property
    def draws(self) -> bool:
        """Whether its parameters may need random numbers."""
        return _draws(self)


@cache
def _draws(storage: Storage) -> bool:
    return storage.stochastic or any(storage.slots[place] for place in _PACKED)


@cache
def _storage(*values: Any) -> Storage:
    group = dict(zip(_OPTIONS_READ, values, strict=True))
    return Storage(
        tuple(slot.is_in(group) for slot in STATE_SLOTS), group["param_rounding"] == "stochastic"
    )


class Signature(NamedTuple):
    """What kernels are compiled for: all tensors of one launch share it.

    Attributes:
        dtypes: storage dtype by slot, in the order of SLOTS; None for a slot that is absent.
        compute_dtype: of the arithmetic.
        stochastic: whether the parameter, bfloat16 then, is rounded stochastically.
    """

    dtypes: tuple[torch.dtype | None, ...]
    compute_dtype: torch.dtype
    stochastic: bool = False

    @property
    def codes(self) -> tuple[list[int], int]:
        """The same as numbers, for the native module: by slot, and of the arithmetic."""
        by_slot = [dtype_code(dtype) for dtype in self.dtypes]
        if self.stochastic:
            by_slot[SLOTS.index("param")] = STOCHASTIC
        return by_slot, dtype_code(self.compute_dtype)

    def has(self, slot: str) -> bool:
        """Whether a slot is there."""
        return self.dtypes[SLOTS.index(slot)] is not None

    @property
    def draws(self) -> bool:
        """Whether a step needs random numbers."""
        return self.stochastic or self.has("packed_mvh") or self.has("packed_mv")


def dtype_code(dtype: torch.dtype | None) -> int:
    """The number of a dtype in csrc's DType."""
    return ABSENT if dtype is None else STORED_DTYPES.index(dtype)


def compute_dtype(param_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic: float64 for float64 parameters, else float32."""
    return torch.float64 if param_dtype.to_real() == torch.float64 else torch.float32


@cache
def state_dtype(param_dtype: torch.dtype) -> torch.dtype:
    """The dtype of moments beside a parameter of a dtype; complex for complex."""
    compute = compute_dtype(param_dtype)
    return compute.to_complex() if param_dtype.is_complex else compute


@cache
def signature(param_dtype: torch.dtype, grad_dtype: torch.dtype, storage: Storage) -> Signature:
    """The signature of a parameter of a group that is stored so."""
    real = param_dtype.to_real()
    states = (
        _real(slot.dtype(param_dtype)) if is_present else None
        for slot, is_present in zip(STATE_SLOTS, storage.slots, strict=True)
    )
    return Signature(
        (real, _read_as(real, grad_dtype.to_real()), *states),
        compute_dtype(real),
        storage.stochastic and param_dtype == torch.bfloat16,
    )


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _read_as(param_dtype: torch.dtype, grad_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a kernel reads a gradient; a conversion to it is exact."""
    if grad_dtype == param_dtype:
        return grad_dtype
    return torch.float32 if param_dtype in HALF_DTYPES else param_dtype
