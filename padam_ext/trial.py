"""A trial: whether a backend's step works on a device, found out by a small one."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

from padam_ext.backends import Backend
from padam_ext.control import ControlInputs
from padam_ext.driver import make_step
from padam_ext.gather import StepInputs
from padam_ext.options import DEFAULTS, Hyperparameters
from padam_ext.plan import Needs, Planner

_works_on: set[tuple[str, torch.device]] = set()


def broken_reason(backend: Backend, device: torch.device) -> str | None:
    """Why a small step fails on a device; None if it works. A success is remembered."""
    if not backend.needs_trial or (backend.name, device) in _works_on:
        return None
    try:
        with _disable_current_modes():  # a real step, whatever is being traced or faked
            moved = _step_moves(backend, device)
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        return f"{backend.name} fails on {device} with {type(error).__name__}: {first_line}"
    if not moved:
        return f"{backend.name} does not compute a Padam step correctly on {device}"
    _works_on.add((backend.name, device))
    return None


@torch.no_grad()
def _step_moves(backend: Backend, device: torch.device) -> bool:
    param, grad = (torch.ones(1, dtype=torch.float32, device=device) for _ in range(2))
    group = {**DEFAULTS, "params": [param]}
    inputs = StepInputs([param], [grad], bytes(8), {param: {}})
    steps = Planner().plan(inputs, [group], lambda device: backend, Needs())
    make_step(steps, inputs, {0: Hyperparameters.from_group(group)}, ControlInputs())
    return bool(param.item() < 1)
