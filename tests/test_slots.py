"""Slots that are stored otherwise than they are computed with."""

import pytest
import torch

from padam_ext import slots

PARAM_DTYPES = (*slots.DTYPES, torch.complex64, torch.complex128)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("param_dtype", PARAM_DTYPES, ids=str)
def test_a_state_is_stored_as_its_signature_says(param_dtype, stored, monkeypatch):
    """Also beside complex parameters, of which torch has no pairs of bfloat16."""
    slot = slots.StateSlot("narrow", storage={torch.float32: stored})
    monkeypatch.setattr(slots, "STATE_SLOTS", (*slots.STATE_SLOTS, slot))
    signature = slots.signature(param_dtype, param_dtype, (True,) * len(slots.STATE_SLOTS))
    dtype = slot.dtype(param_dtype)
    assert dtype.is_complex == param_dtype.is_complex
    assert dtype.to_real() == signature.dtypes[-1]
    if not param_dtype.is_complex:
        assert dtype == (torch.float64 if param_dtype == torch.float64 else stored)
