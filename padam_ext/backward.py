"""Stepping during backward: gradients are used and freed as soon as there are a few of them."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from padam_ext.backends.device_table import current_stream
from padam_ext.optimizer import FusedPadam

# Gradients are kept until there are this many bytes; one launch then steps their parameters. Every
# step has a fixed cost, which a few million elements hide.
BATCH_BYTES = 32 * 2**20


def step_during_backward(optimizer: FusedPadam) -> ExitStack:
    """Steps parameters during `loss.backward()`, soon after their gradients are complete.

    Whenever 32 MiB of gradients are complete, their parameters are stepped by one launch and the
    gradients freed; the rest follows at the end of backward. The peak of memory falls by nearly the
    size of the parameters. Call `optimizer.step()` after each backward all the same: it runs step
    hooks, schedulers see it, and it steps parameters that were unfrozen or added to the optimizer
    since.

    Anything that needs all gradients at once does not work: accumulation over several backward
    passes, clipping by the global norm, and GradScaler. Nor does a weight used both inside and
    outside of `torch.utils.checkpoint(use_reentrant=True)`, whose gradient comes in parts.

    Args:
        optimizer: whose parameters to step.

    Returns:
        A context manager. Its `close()`, or the end of a `with` statement, removes the hooks.

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


@dataclass
class _Batch:
    """Parameters that are to be stepped together."""

    params: list[Tensor] = field(default_factory=list)
    num_bytes: int = 0  # of their gradients

    def add(self, param: Tensor) -> None:
        self.params.append(param)
        if param.grad is not None:  # another hook may have taken it
            self.num_bytes += param.grad.numel() * param.grad.element_size()


class _Stepper:
    """The hooks of one optimizer's parameters. They do not keep the optimizer alive."""

    def __init__(self, optimizer: FusedPadam) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._hooks: dict[int, Any] = {}  # by the parameter's id
        self._seen: set[int] = set()  # since the last `optimizer.step()`
        # Parameters with a gradient that are not stepped yet, by the stream that made it.
        self._waiting: dict[torch.Stream | None, _Batch] = {}
        self._step_hooks = (
            optimizer.register_step_pre_hook(lambda *_: self._seen.clear()),
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
                    hook = param.register_post_accumulate_grad_hook(self._take)
                    self._hooks[id(param)] = hook

    def _after_step(self) -> None:
        """Frees gradients that `optimizer.step()` used: without a hook, or of a failed backward."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in self._hooks:
                    param.grad = None
        for batch in self._waiting.values():
            _free_gradients(batch.params)
        self._waiting.clear()
        self._hook_all(optimizer)

    def _take(self, param: Tensor) -> None:
        if id(param) in self._seen:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} got a second gradient before "
                "optimizer.step(), and may have been stepped with the first. With "
                "step_during_backward, call optimizer.step() after each backward; do not "
                "accumulate gradients; and use checkpoint(use_reentrant=False) for weights that "
                "are used more than once"
            )
        self._seen.add(id(param))
        if not self._waiting:
            # As in DistributedDataParallel, it runs after the last gradient, on the caller's
            # streams, which wait for those of backward.
            Variable._execution_engine.queue_callback(self._step_all)
        stream = current_stream(param.device)
        batch = self._waiting.setdefault(stream, _Batch())
        batch.add(param)
        if batch.num_bytes >= BATCH_BYTES:
            del self._waiting[stream]
            self._step(batch.params)

    def _step_all(self) -> None:
        waiting, self._waiting = self._waiting, {}
        self._step([param for batch in waiting.values() for param in batch.params])

    def _step(self, params: list[Tensor]) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.step_params(params)
            _free_gradients(params)


def _free_gradients(params: list[Tensor]) -> None:
    for param in params:
        param.grad = None
