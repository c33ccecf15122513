"""Stepping during backward: each gradient is used and freed as soon as it is there."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from padam_ext.optimizer import FusedPadam


def step_during_backward(optimizer: FusedPadam) -> ExitStack:
    """Steps each parameter during `loss.backward()`, as soon as its gradient is complete.

    The gradient is freed at once, so of all gradients only a few exist at any time: the peak of
    memory falls by nearly the size of the parameters. Call `optimizer.step()` after each backward
    all the same: it runs step hooks, schedulers see it, and it takes in parameters that were
    unfrozen or added to the optimizer since.

    What needs all gradients together is not possible: accumulation over several backward passes,
    clipping by the global norm, GradScaler, and a weight used both inside and outside of
    `torch.utils.checkpoint(use_reentrant=True)`, whose gradient comes in parts.

    Args:
        optimizer: whose parameters to step.

    Returns:
        What undoes it, by `close()` or at the end of a `with` statement.

    Raises:
        RuntimeError: in backward, for a parameter that gets a second gradient before
            `optimizer.step()`.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = FusedPadam(model.parameters())
        >>> with step_during_backward(optimizer):
        ...     model(torch.randn(8, 4)).square().mean().backward()
        ...     optimizer.step()
        >>> model.weight.grad is None
        True
    """
    stepper = _Stepper(optimizer)
    hooks = ExitStack()
    hooks.callback(stepper.close)
    return hooks


class _Stepper:
    """The hooks of one optimizer's parameters. They do not keep the optimizer alive."""

    def __init__(self, optimizer: FusedPadam) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._hooks: dict[int, Any] = {}  # by the parameter's id
        self._stepped: set[int] = set()  # since the last `optimizer.step()`
        self._step_hooks = (
            optimizer.register_step_pre_hook(lambda *_: self._stepped.clear()),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        )
        self._hook_all(optimizer)

    def close(self) -> None:
        """Removes all hooks."""
        for hook in (*self._hooks.values(), *self._step_hooks):
            hook.remove()
        self._hooks.clear()

    def _hook_all(self, optimizer: FusedPadam) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in self._hooks and param.requires_grad:
                    hook = param.register_post_accumulate_grad_hook(self._step_param)
                    self._hooks[id(param)] = hook

    def _after_step(self) -> None:
        self._stepped.clear()
        optimizer = self._optimizer()
        if optimizer is None:
            return
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in self._hooks:
                    param.grad = None  # it has just been used, like those that backward uses
        self._hook_all(optimizer)

    def _step_param(self, param: Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        if id(param) in self._stepped:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} got a second gradient before "
                "optimizer.step(), and had been stepped with the first. With step_during_backward, "
                "call optimizer.step() after each backward; do not accumulate gradients; and use "
                "checkpoint(use_reentrant=False) for weights that are used more than once"
            )
        self._stepped.add(id(param))
        optimizer.step_param(param)
        param.grad = None
