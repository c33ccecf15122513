"""Loading: files of FusedPadam, of torch.optim.Adam and AdamW, and of the authors' Padam.

torch.optim.Optimizer.load_state_dict casts every state to its parameter's dtype, which would round
the float32 states of half-precision parameters, and may share tensors with the state_dict. A hook
that runs after the user's own wraps the tensors so that they pass through untouched; `unwrap`
then copies each into the dtype and layout that its parameter needs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from padam_ext.caller import level_of_the_caller
from padam_ext.conversion import held_by
from padam_ext.optimizer_options import IGNORED_DEFAULTS
from padam_ext.options import DEFAULTS, make_plain
from padam_ext.slots import STATE_SLOTS
from padam_ext.state import ParamState, check_state, fit_state

# Keys of torch.optim's param groups that are not options of a param group here.
_FOREIGN_OPTIONS = ("capturable", *IGNORED_DEFAULTS)
# States of optimizers that compute something else, the first that is found.
_OTHER_STATES = {
    "sum": "torch.optim.Adagrad",
    "square_avg": "torch.optim.RMSprop or Adadelta",
    "exp_inf": "torch.optim.Adamax",
    "momentum_buffer": "torch.optim.SGD",
}
# Keys of a param group that tell of this run's processes, not of the model: no file has them.
OPTIONS_OF_THIS_RUN = ("replicated", "norm_group")
# How this run stores parameters and states, whatever the file says: its states are converted.
_OPTIONS_OF_STORAGE = ("state_dtype", "param_rounding", "master")


# Functions that make a step to have states that they can save: torch's and torchtitan's.
_MAKERS_OF_STATES = (
    ("torch.distributed.checkpoint.state_dict", "_init_optim_state"),
    ("torchtitan.components.optimizer.utils", "init_optim_state"),
)


def only_makes_states() -> bool:
    """Whether a library makes this step, before the first, to have a state that it can save.

    It does so with gradients of zero and a learning rate of 0. The step would count, and with
    weight decay put the decay into the moments.
    """
    makers = {
        (getattr(sys.modules.get(module), "__file__", None), name)
        for module, name in _MAKERS_OF_STATES
    }
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (frame.f_code.co_filename, frame.f_code.co_name) in makers:
            return True
        frame = frame.f_back
    return False


@dataclass
class _Wrapped:
    tensor: Tensor


def check_and_wrap(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A load_state_dict pre-hook: checks the whole file before any of it is loaded.

    Options that the file does not have keep their present values.

    Raises:
        ValueError: a state that does not fit its parameter, or an option outside its range.
        TypeError: one of the wrong type.
    """
    file_states = {key: _useful(state) for key, state in state_dict["state"].items()}
    for state in file_states.values():
        _check_moments(state)
    groups = []
    for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=False):
        present = {key: group[key] for key in optimizer.defaults if key in group}
        merged = {k: v for k, v in (present | saved).items() if k not in _FOREIGN_OPTIONS}
        mine = (*OPTIONS_OF_THIS_RUN, *_OPTIONS_OF_STORAGE)
        merged |= {key: group[key] for key in mine if key in group}
        make_plain(merged, check_lr_sign=False)
        _warn_of_conversion(saved, merged)
        groups.append(merged)
        if "second_moment" not in saved and any(file_states.get(key) for key in saved["params"]):
            check_second_moment(merged["second_moment"])
        for key, param in zip(saved["params"], group["params"], strict=False):
            check_state(file_states.get(key, {}), param, f"parameter {key}")
    groups.extend(state_dict["param_groups"][len(groups) :])  # the base class counts them

    states = {
        key: {name: _Wrapped(v) if isinstance(v, Tensor) else v for name, v in state.items()}
        if isinstance(state, dict)
        else state
        for key, state in file_states.items()
    }
    return {**state_dict, "state": states, "param_groups": groups}


def _check_moments(state: Any) -> None:
    """Refuses a state of a file whose moments would begin at zero, which nobody would notice."""
    keys = state.keys() - {"step"} if isinstance(state, dict) else set()
    if not keys or ("exp_inf" not in keys and any(slot.name in keys for slot in STATE_SLOTS)):
        return
    key = next((key for key in _OTHER_STATES if key in keys), min(keys, key=str))
    raise ValueError(
        f"the state_dict has {key!r}, a state of {_OTHER_STATES.get(key, 'another optimizer')}: "
        "FusedPadam loads those of FusedPadam, Adam and AdamW; for another, begin with a new state"
    )


def check_second_moment(second_moment: str) -> None:
    """Refuses to go on with the states of a file that does not say what its second moments are.

    Raises:
        ValueError: the option is not "mean", which those of Adam and of older versions are.
    """
    if second_moment != "mean":
        raise ValueError(
            f"second_moment={second_moment!r}, but the second moments in the checkpoint are means, "
            "as Adam's: go on with second_moment='mean', or begin with a new state"
        )


def _warn_of_conversion(saved: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Warns where a run would lose what it saved: it may have left the options out."""
    lost = [
        f"{name}={saved[name]!r}"
        for name in _OPTIONS_OF_STORAGE
        if group[name] == DEFAULTS[name] != saved.get(name, DEFAULTS[name])
    ]
    if lost:
        warnings.warn(
            f"the checkpoint was saved with {', '.join(lost)}, which this optimizer was not "
            "constructed with: its states are converted. To go on bitwise, pass the same options "
            "to FusedPadam.",
            stacklevel=level_of_the_caller(),
        )


def _useful(state: Any) -> Any:
    """A state without lower halves of parameters that torch.optim.Adam has had.

    It casts what it does not know to the parameter's dtype, and steps without it.
    """
    low = state.get("param_low") if isinstance(state, dict) else None
    if not isinstance(low, Tensor) or not low.is_floating_point():
        return state
    return {name: value for name, value in state.items() if name != "param_low"}


def unwrap(state: ParamState, param: Tensor, group: Mapping[str, Any], position: int) -> None:
    """Replaces wrapped tensors in a state, if any, by copies that fit the parameter.

    For a lazy parameter its first step makes them fit. `position` is the parameter's among all.
    """
    if not any(isinstance(value, _Wrapped) for value in state.values()):
        return
    for name, value in state.items():
        if isinstance(value, _Wrapped):
            state[name] = value.tensor.clone()
    if held_by(state) and not is_lazy(param):
        fit_state(state, param, group, position, may_replace=True)
