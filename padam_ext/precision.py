"""Which options of storage go with which parameters, and what half precision needs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from padam_ext.caller import level_of_the_caller
from padam_ext.layout import local

Place = tuple[torch.device, int]

_ADVICE = (
    "master='split' keeps 16 more bits of each, param_rounding='stochastic' rounds up or down at "
    "random, right on average"
)
_has_warned = False


def check_precision(param: Tensor, group: Mapping[str, Any], name: object) -> None:
    """Refuses a parameter that cannot be stored as its group says.

    Raises:
        ValueError: `state_dtype="packed32"` for float64 or complex parameters, `master="split"` for
            others than bfloat16, `param_rounding="stochastic"` for float16.
    """
    if is_lazy(param):
        return  # it may be given another dtype; its first step finds out
    dtype = param.dtype
    if group["state_dtype"] == "packed32" and (dtype.is_complex or dtype == torch.float64):
        raise ValueError(
            f"{name} is {dtype}, but state_dtype='packed32' is for float32, bfloat16 and float16 "
            "parameters: put it into a param group with state_dtype='float32'"
        )
    if group["master"] == "split" and dtype != torch.bfloat16:
        raise ValueError(
            f"{name} is {dtype}, but master='split' is for bfloat16 parameters: put it into a "
            "param group with master=None"
        )
    if group["param_rounding"] == "stochastic" and dtype.to_real() == torch.float16:
        raise ValueError(
            f"{name} is {dtype}, but param_rounding='stochastic' is for bfloat16 parameters: put "
            "it into a param group with param_rounding='nearest'"
        )


def warn_of_stalling(param: Tensor, group: Mapping[str, Any]) -> None:
    """Warns, once per process, of bfloat16 parameters that are rounded to the nearest."""
    global _has_warned
    is_plain = group["master"] is None and group["param_rounding"] == "nearest"
    if _has_warned or param.dtype != torch.bfloat16 or not is_plain:
        return
    _has_warned = True
    warnings.warn(
        "bfloat16 parameters are rounded to the nearest after each step of FusedPadam: a change "
        f"below half a unit, 0.2 % of the parameter, is lost. Of FusedPadam's options {_ADVICE}.",
        stacklevel=level_of_the_caller(),
    )


def follow_replacement(state: dict[str, Any], before: Place | None, now: Place | None) -> None:
    """Clears the lower bits of a parameter whose memory is not that of the last step.

    They belong to the values that were there. What was moved to another device has kept its values.
    """
    if before is None or now is None or "param_low" not in state:
        return
    if before[0] == now[0] and before[1] != now[1]:
        local(state["param_low"]).zero_()
