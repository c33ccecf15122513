"""Slots: what a state holds, and what kernels are compiled for."""

import pytest
import torch

from padam_ext import slots
from padam_ext.options import DEFAULTS
from padam_ext.slots import Storage, signature

F32, BF16 = torch.float32, torch.bfloat16


def names(**options):
    """The slots of a state."""
    storage = Storage.of(DEFAULTS | options)
    return [s.name for s, is_in in zip(slots.STATE_SLOTS, storage.slots, strict=True) if is_in]


def test_which_slots_a_group_has():
    assert names() == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    assert names(amsgrad=False) == ["exp_avg", "exp_avg_sq"]
    assert names(state_dtype="packed32") == ["packed_mvh"]
    assert names(state_dtype="packed32", amsgrad=False) == ["packed_mv"]
    assert names(state_dtype="packed32", master="split") == ["packed_mvh", "param_low"]


@pytest.mark.parametrize("param_dtype", [*slots.DTYPES, torch.complex64, torch.complex128], ids=str)
def test_a_state_is_stored_as_its_signature_says(param_dtype):
    of_kernel = signature(param_dtype, param_dtype, Storage.of(DEFAULTS))
    for slot in slots.STATE_SLOTS[:3]:
        dtype = slot.dtype(param_dtype)
        assert dtype.is_complex == param_dtype.is_complex
        assert dtype.to_real() == of_kernel.dtypes[slots.SLOTS.index(slot.name)]


def test_only_bfloat16_parameters_are_rounded_stochastically():
    storage = Storage.of(DEFAULTS | {"param_rounding": "stochastic"})
    assert signature(BF16, F32, storage).stochastic
    assert signature(BF16, F32, storage).codes[0][0] == slots.STOCHASTIC
    assert not signature(F32, F32, storage).stochastic
