"""State of one parameter: torch.optim.Adam's names, in dtypes and layouts that kernels can take.

`step` counts the parameter's own updates: a tensor of one number on the CPU or on the parameter's
device, float32 of no dimensions unless the user supplied another. The moments have the parameter's
shape; names and dtypes are those of slots.py. `salt`, an int, is there where random numbers are
drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from padam_ext.conversion import convert, held_by
from padam_ext.layout import (
    is_plain,
    is_strided,
    is_wrapper,
    lacks_memory,
    like_plain,
    local,
    overlaps_itself,
    placement,
    same_layout,
)
from padam_ext.options import as_float, shown
from padam_ext.random_bits import salt_of
from padam_ext.slots import MOMENTS, STATE_SLOTS, StateSlot, Storage

ParamState = dict[str, Any]
OptimizerState = MutableMapping[Tensor, ParamState]


class Sight:
    """Whether somebody else may hold an optimizer's states.

    An object of its own, since wrappers such as Lightning Fabric's take over an optimizer's
    `__dict__`: they and the optimizer then know the same.
    """

    seen = False


# A counter that the user supplies in one of these dtypes is kept. Other dtypes cannot count far:
# bfloat16 gets stuck at 256.
COUNTER_DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32)


def check_state(state: ParamState, param: Tensor, name: object, *, waits: bool = True) -> None:
    """Refuses a state that belongs to another parameter, or that no optimizer can have made.

    Without `waits` a step count on a device is not read: the host would have to wait for it.

    Raises:
        ValueError: a moment of another shape, or one without the other; a step that counts nothing.
        TypeError: a moment that is not a dense tensor, or a step that is not a number.
    """
    if not isinstance(state, dict):
        raise TypeError(f"the state of {name} must be a dict, got {state!r}")
    if not state:
        return
    present = {slot.name: slot for slot in STATE_SLOTS if slot.name in state}
    _check_moments(list(present), name)
    for key, slot in present.items():
        if not isinstance(state[key], Tensor):
            raise TypeError(f"state {key!r} of {name} must be a tensor, got {state[key]!r}")
        if not _is_dense(state[key]) or state[key].is_meta != param.is_meta:
            raise TypeError(
                f"state {key!r} of {name} must be a dense tensor with data, got "
                f"{_describe(state[key])}"
            )
        if placement(state[key]) != placement(param):
            raise TypeError(
                f"state {key!r} of {name} must be placed over devices as the parameter is, got "
                f"{_describe(state[key])}; load it with torch.distributed.checkpoint.state_dict"
            )
        if lacks_memory(local(state[key])):
            raise TypeError(f"state {key!r} of {name} has no memory: its storage was freed")
        # A lazy parameter has no shape yet; its first step finds out.
        if not is_lazy(param) and state[key].shape != param.shape:
            raise ValueError(
                f"state {key!r} of {name} has shape {tuple(state[key].shape)}, but the parameter "
                f"has shape {tuple(param.shape)}"
            )
        if slot.stored_as not in (None, state[key].dtype):
            raise TypeError(
                f"state {key!r} of {name} must be {slot.stored_as}, got {state[key].dtype}"
            )
    _check_step(state.get("step", 0), name, waits)
    _check_salt(state.get("salt", 0), name)


def _check_moments(present: list[str], name: object) -> None:
    held = held_by(dict.fromkeys(present))
    if len(held) > 1:
        raise ValueError(f"the state of {name} holds its moments twice, as {' and as '.join(held)}")
    for names in MOMENTS:
        if (names[0] in held or (present and not held)) and not set(names) <= set(present):
            raise ValueError(
                f"the state of {name} has {present} but needs {' and '.join(names)}; "
                "the checkpoint is from another optimizer or incomplete"
            )


def _check_salt(salt: Any, name: object) -> None:
    if isinstance(salt, Tensor):
        salt = salt.item() if salt.numel() == 1 else salt
    if not isinstance(salt, Integral) or not 0 <= int(salt) < 2**32:
        raise ValueError(f"state 'salt' of {name} must be an integer in [0, 2**32), got {salt!r}")


def _check_step(step: Any, name: object, waits: bool) -> None:
    if isinstance(step, Tensor):
        if not _is_dense(step) or step.numel() != 1 or step.is_meta or lacks_memory(step):
            raise ValueError(f"state 'step' of {name} must be one number, got {_describe(step)}")
        if not waits and step.device.type != "cpu":
            return
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


def fit_state(
    state: ParamState,
    param: Tensor,
    group: Mapping[str, Any],
    position: int,
    *,
    may_replace: bool,
    keep_counter: bool = False,
    plain: bool = False,
) -> None:
    """Completes a state in place and gives each tensor the dtype and device it needs.

    New moments start at zero. A running maximum that is missing beside existing moments (amsgrad
    was off until now) starts at the current second moment. Moments that are held in another way
    than the group asks for are converted, see conversion.py.

    Args:
        state: of the parameter, changed in place.
        param: the parameter.
        group: its param group.
        position: the parameter's among all of the optimizer.
        may_replace: see below.
        keep_counter: see below.
        plain: whether nothing is unusual about the parameter, see gather.py's Reading.

    Steps are slower if a moment's layout differs from the parameter's, or if the counter is not
    float32. Such tensors are replaced if nobody else can hold them (`may_replace`; the counter only
    without `keep_counter`). Otherwise they are kept.
    """
    state["step"] = _fit_step(
        state.get("step", 0.0), param.device, may_replace=may_replace and not keep_counter
    )
    is_new = len(state) == 1  # the step alone
    if not is_new:  # would slow down a first step
        convert(state, group)
    storage = Storage.of(group)
    if storage.draws:
        state["salt"] = int(state.get("salt", salt_of(position)))
    walked = param if plain else like_plain(local(param))
    for slot, is_present in zip(STATE_SLOTS, storage.slots, strict=True):
        if is_present:
            value = state.get(slot.name)
            if value is None and slot.starts_as is not None and not is_new:
                value = state[slot.starts_as].clone()
            state[slot.name] = _fit_moment(slot, value, param, walked, may_replace=may_replace)
    if group["master"] is None:
        state.pop("param_low", None)  # would be of another value of the parameter later


def _fit_step(step: Any, device: torch.device, *, may_replace: bool) -> Tensor:
    if isinstance(step, Tensor):
        here = step.device.type == "cpu" or step.device == device
        is_ours = step.dtype == torch.float32 and step.dim() == 0
        if here and (is_ours or (step.dtype in COUNTER_DTYPES and not may_replace)):
            return step
        step = step.item()
    return torch.full((), float(step), dtype=torch.float32, device="cpu")


def _fit_moment(
    slot: StateSlot, value: Tensor | None, param: Tensor, walked: Tensor, *, may_replace: bool
) -> Tensor:
    dtype = slot.dtype(param.dtype)
    if value is not None and value.dtype == dtype and value.device == param.device:
        keeps = not may_replace and not overlaps_itself(local(value))
        if keeps or is_direct(value, walked):
            return value
    like = local(param) if placement(param) is None else param
    fitted = torch.zeros_like(like, dtype=dtype, memory_format=torch.preserve_format)
    return fitted if value is None else fitted.copy_(value)


def is_direct(value: Tensor, walked: Tensor) -> bool:
    """Whether a kernel can walk the memory of a parameter's moment as it walks the parameter's.

    `walked` has the layout of that, see `like_plain`.
    """
    shard = local(value)
    return is_plain(shard) and same_layout(shard, walked)
