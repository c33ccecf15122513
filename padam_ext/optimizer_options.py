"""The options of the whole optimizer, which param groups cannot have for themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from padam_ext.options import flag, number

OPTIMIZER_DEFAULTS = {
    "max_grad_norm": None,
    "skip_nonfinite": False,
    "norm_group": None,
    "unscale_grads": True,
    "capturable": False,
    "backend": "auto",
}
# Options that torch.optim has and that have no effect here.
IGNORED_DEFAULTS = {"foreach": None, "fused": None, "differentiable": False}
_FLAGS = ("skip_nonfinite", "unscale_grads", "capturable")


def check_ignored_options(options: Mapping[str, Any]) -> None:
    """Checks what there is of IGNORED_DEFAULTS.

    Raises:
        TypeError: one of the wrong type.
        ValueError: `differentiable` is True.
    """
    for name in IGNORED_DEFAULTS:
        value = options.get(name)
        if value is not None and flag(name, value) and name == "differentiable":
            raise ValueError(
                "differentiable=True: a step of FusedPadam cannot be differentiated; leave it out"
            )


def check_optimizer_options(optimizer: Any) -> None:
    """Checks attributes, which may have been set since the optimizer was made.

    Raises:
        TypeError: one of the wrong type.
        ValueError: `max_grad_norm` is negative or NaN.
    """
    if optimizer.max_grad_norm is not None:
        number("max_grad_norm", optimizer.max_grad_norm, most=math.inf)
    for name in _FLAGS:
        flag(name, getattr(optimizer, name))


def check_has_none_of_its_own(param_group: Mapping[str, Any], optimizer: Any) -> None:
    """Raises ValueError if a param group asks for another value than the optimizer has."""
    for name in OPTIMIZER_DEFAULTS.keys() & param_group.keys():
        mine = getattr(optimizer, name)
        if param_group[name] != mine:
            raise ValueError(
                f"a param group has {name}={param_group[name]!r}, but {name} is for the whole "
                f"optimizer, which has {mine!r}: pass it to FusedPadam, or set the optimizer's "
                f"attribute {name}"
            )
