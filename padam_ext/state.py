"""State of one parameter: torch.optim.Adam's names, in dtypes and layouts that kernels can take.

`step` counts the parameter's own updates, float32 of no dimensions, on the CPU or the parameter's
device. The moments have the
parameter's shape, float32 for half types, else the parameter's dtype (complex for complex).
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from padam_ext.hyperparameters import as_float, shown
from padam_ext.layout import (
    is_plain,
    is_strided,
    is_wrapper,
    lacks_memory,
    local,
    placement,
    same_layout,
)

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

ParamState = dict[str, Any]

_MOMENT_DTYPES = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.complex32: torch.complex64,
}


def moment_dtype(param_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the moments of a parameter."""
    return _MOMENT_DTYPES.get(param_dtype, param_dtype)


def check_state(state: ParamState, param: Tensor, name: object) -> None:
    """Refuses a state that belongs to another parameter, or that no optimizer can have made.

    Raises:
        ValueError: a moment of another shape, or one without the other; a step that counts nothing.
        TypeError: a moment that is not a dense tensor, or a step that is not a number.
    """
    if not isinstance(state, dict):
        raise TypeError(f"the state of {name} must be a dict, got {state!r}")
    present = [key for key in MOMENTS if key in state]
    if present and not {"exp_avg", "exp_avg_sq"} <= set(present):
        raise ValueError(
            f"the state of {name} has {present} but needs both exp_avg and exp_avg_sq; "
            "the checkpoint is of another optimizer or incomplete"
        )
    for key in present:
        if not isinstance(state[key], Tensor):
            raise TypeError(f"state {key!r} of {name} must be a tensor, got {state[key]!r}")
        if not _is_dense(state[key]) or state[key].is_meta != param.is_meta:
            raise TypeError(
                f"state {key!r} of {name} must be a dense tensor with data, got "
                f"{_describe(state[key])}"
            )
        if placement(state[key]) != placement(param):
            raise TypeError(
                f"state {key!r} of {name} must be placed over devices as the parameter, got "
                f"{_describe(state[key])}; torch.distributed.checkpoint.state_dict loads it as such"
            )
        if lacks_memory(local(state[key])):
            raise TypeError(f"state {key!r} of {name} has no memory: its storage was freed")
        if state[key].shape != param.shape:
            raise ValueError(
                f"state {key!r} of {name} has shape {tuple(state[key].shape)}, but the parameter "
                f"has shape {tuple(param.shape)}"
            )
    _check_step(state.get("step", 0), name)


def _check_step(step: Any, name: object) -> None:
    if isinstance(step, Tensor):
        if not _is_dense(step) or step.numel() != 1 or step.is_meta or lacks_memory(step):
            raise ValueError(f"state 'step' of {name} must be one number, got {_describe(step)}")
        step = step.item()
    if not isinstance(step, Real):
        raise TypeError(f"state 'step' of {name} must be a number, got {step!r}")
    number = as_float(step)
    if not (0 <= number < 2**63 and number.is_integer()):
        raise ValueError(
            f"state 'step' of {name} must be a whole number in [0, 2**63), got {shown(step)}"
        )


def _is_dense(tensor: Tensor) -> bool:
    shard = local(tensor)
    return is_strided(shard) and not is_wrapper(shard)


def _describe(tensor: Tensor) -> str:
    return (
        f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} and layout {tensor.layout} on "
        f"{tensor.device}"
    )


def fit_state(state: ParamState, param: Tensor, *, amsgrad: bool) -> None:
    """Completes a state in place and gives each tensor the dtype, device and layout it needs.

    New moments start at zero. A running maximum that is missing beside existing moments (amsgrad
    was off until now) starts at the current second moment.
    """
    dtype = moment_dtype(param.dtype)
    state["step"] = _fit_step(state.get("step", 0.0), param.device)
    for key in MOMENTS[:2]:
        state[key] = _fit_moment(state.get(key), param, dtype)
    if amsgrad:
        value = state.get("max_exp_avg_sq")
        if value is None:
            value = state["exp_avg_sq"].clone()
        state["max_exp_avg_sq"] = _fit_moment(value, param, dtype)


def _fit_step(step: Any, device: torch.device) -> Tensor:
    if isinstance(step, Tensor):
        here = step.device.type == "cpu" or step.device == device
        if step.dtype == torch.float32 and here and step.dim() == 0:
            return step
        step = step.item()
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")


def _fit_moment(value: Tensor | None, param: Tensor, dtype: torch.dtype) -> Tensor:
    if value is not None and value.dtype == dtype and value.device == param.device:
        mine, its = local(param), local(value)
        like = mine if is_plain(mine) else torch.empty_like(mine, device="meta")
        if is_plain(its) and same_layout(its, like):
            return value
    fitted = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    return fitted if value is None else fitted.copy_(value)
