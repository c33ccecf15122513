"""Stepping during backward: gradients are used and freed as soon as there are a few of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from padam_ext import runtime
from padam_ext.checks import params_of
from padam_ext.optimizer import FusedPadam

# Gradients are kept until there are this many bytes; one launch then steps their parameters. Every
# step has a fixed cost, which a few million elements hide.
BATCH_BYTES = 32 * 2**20


def step_during_backward(
    optimizer: FusedPadam, ddp: DistributedDataParallel | None = None
) -> ExitStack:
    """Steps parameters during `loss.backward()`, soon after their gradients are complete.

    Whenever 32 MiB of gradients are complete, their parameters are stepped by one launch and the
    gradients freed; the rest follows at the end of backward. The peak of memory falls by nearly the
    size of the parameters. Call `optimizer.step()` after each backward all the same: it runs step
    hooks, schedulers see it, and it steps parameters that were unfrozen or added to the optimizer
    since.

    Anything that needs all gradients at once does not work: accumulation over several backward
    passes, clipping by the global norm, GradScaler. Nor does a weight used both inside and outside
    of `torch.utils.checkpoint(use_reentrant=True)`, whose gradient comes in parts. Use a weight
    itself, not `weight.detach()`, in whatever `checkpoint` computes again, which may be after its
    step.

    DistributedDataParallel averages gradients later. Pass the module as `ddp`: a communication hook
    then steps the parameters of each bucket once it is averaged, while backward goes on. Gradients
    may be accumulated under its `no_sync()`. All processes stay bitwise the same.

    If backward fails, parameters that were stepped by then keep their step. Go on with
    `optimizer.step()` to use the gradients that are left, or with `zero_grad()` to drop them.

    Args:
        optimizer: whose parameters to step.
        ddp: the DistributedDataParallel module that has its parameters, or some of them.

    Returns:
        A context manager. Its `close()`, or the end of a `with` statement, removes the hooks. So
        does the end of the optimizer, which it keeps alive. The communication hook stays, and only
        averages then.

    Raises:
        TypeError: it is no FusedPadam, or `ddp` no DistributedDataParallel.
        ValueError: `ddp` has find_unused_parameters=True, or none of the parameters.
        RuntimeError: `max_grad_norm` or `skip_nonfinite` is set, or another optimizer steps a
            parameter during backward. Raised in backward, if a parameter gets a second gradient
            before `optimizer.step()` or belongs to another DistributedDataParallel module. Raised
            in `optimizer.step()`, if GradScaler called it, or a parameter has a gradient again.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = FusedPadam(model.parameters())
        >>> with step_during_backward(optimizer):
        ...     model(torch.randn(8, 4)).square().mean().backward()
        ...     optimizer.step()
        >>> model.weight.grad is None
        True
    """
    if not isinstance(optimizer, FusedPadam):
        raise TypeError(f"step_during_backward needs a FusedPadam, got {optimizer!r}")
    optimizer._refuse_norm("step_during_backward")
    stepper = _Stepper(optimizer, ddp)
    hooks = ExitStack()
    # It takes the optimizer only to keep it alive as long as whoever can close the hooks.
    hooks.callback(stepper.close, optimizer)
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

    def __init__(self, optimizer: FusedPadam, ddp: DistributedDataParallel | None) -> None:
        self._bucket_hook = self._ddp = None
        self._of_ddp: set[int] = set()  # parameters whose gradients come in its buckets
        self._averaged: list[Tensor] = []  # those stepped in this backward
        self._bucketed: set[int] = set()  # those that have been in a bucket
        self._steps_one_at_a_time = Lock()
        if ddp is not None:
            from padam_ext.distributed.ddp import bucket_hook_of  # not every build of torch has it

            hook = bucket_hook_of(ddp)
            self._of_ddp = {id(param) for param in ddp.module.parameters()}
            if not self._of_ddp & set(map(id, params_of(optimizer.param_groups))):
                raise ValueError("ddp has none of the optimizer's parameters")
            self._bucket_hook = hook
            self._bucket_hook.target = self
            self._ddp = weakref.ref(ddp)
        self._optimizer = weakref.ref(optimizer, self.close)
        self._hooks: dict[int, Any] = {}  # by the parameter's id
        # Of parameters that got a gradient since the last step: the backward that made it.
        self._backward_of: dict[int, int] = {}
        self._running: set[int] = set()  # backward passes that will call `_end`
        # Parameters with a gradient that are not stepped yet, by the stream that made it.
        self._waiting: dict[torch.Stream | None, _Batch] = {}
        self._looked_for_ddp = False
        self._step_hooks = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )
        try:
            self._hook_all(optimizer)
        except BaseException:
            self.close()
            raise

    def close(self, *_: Any) -> None:
        """Removes all hooks."""
        if self._bucket_hook is not None:
            self._bucket_hook.target = None
        for hook in (*self._hooks.values(), *self._step_hooks):
            hook.remove()
        self._hooks.clear()

    def _hook_all(self, optimizer: FusedPadam) -> None:
        for param in params_of(optimizer.param_groups):
            # A lazy one, without a shape yet, takes no hooks.
            if id(param) in self._hooks or not param.requires_grad or is_lazy(param):
                continue
            if id(param) in self._of_ddp:  # they come in buckets
                continue
            for hook in (param._post_accumulate_grad_hooks or {}).values():
                other = getattr(hook, "__self__", None)
                if isinstance(other, _Stepper) and other._optimizer() is not optimizer:
                    raise RuntimeError(
                        f"a parameter of shape {tuple(param.shape)} is stepped during backward by "
                        "another optimizer, which leaves no gradient to this one"
                    )
            self._hooks[id(param)] = param.register_post_accumulate_grad_hook(self._take)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        stepped, self._backward_of = self._backward_of, {}
        if optimizer._drop_grad_scaler():
            raise RuntimeError(
                "step_during_backward cannot be used with GradScaler: parameters have been stepped "
                "with gradients that were still scaled"
            )
        # Before the first bucket, none of DistributedDataParallel's can have been averaged.
        averaged = self._bucketed or self._of_ddp
        if any(id(p) in averaged and p.grad is not None for p in params_of(optimizer.param_groups)):
            raise RuntimeError(
                "there are gradients of this process alone, since backward failed or was under "
                "no_sync(): drop them by optimizer.zero_grad(), or make a backward without no_sync"
            )
        waiting = {id(param) for batch in self._waiting.values() for param in batch.params}
        for param in params_of(optimizer.param_groups):
            if id(param) in stepped and id(param) not in waiting and param.grad is not None:
                raise RuntimeError(
                    f"a parameter of shape {tuple(param.shape)} was stepped during backward, but "
                    "has a gradient again: optimizer.step() would step it twice. Drop it by "
                    "optimizer.zero_grad(). DistributedDataParallel, for example, puts it there "
                    "when it has averaged it, unless it is passed as ddp="
                )

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        """Frees gradients that `optimizer.step()` used: without a hook, or of a failed backward."""
        _free_gradients(params_of(optimizer.param_groups))
        self._waiting.clear()
        self._hook_all(optimizer)

    def _take(self, param: Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None or not optimizer._has_param(param):
            return
        if not self._looked_for_ddp:
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                from padam_ext.distributed.ddp import refuse_others

                refuse_others(
                    params_of(optimizer.param_groups), None if self._ddp is None else self._ddp()
                )
            self._looked_for_ddp = True
        self._note(param)
        stream = runtime.current_stream(param.device)
        batch = self._waiting.setdefault(stream, _Batch())
        batch.add(param)
        if batch.num_bytes >= BATCH_BYTES:
            del self._waiting[stream]
            self._step(batch.params)

    def _note(self, param: Tensor) -> None:
        """Notes that a backward has made a gradient, and sees to the end of that backward."""
        if id(param) in self._backward_of:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} got a second gradient before "
                "optimizer.step(), and may have been stepped with the first. With "
                "step_during_backward, call optimizer.step() after each backward; do not "
                "accumulate gradients; and use checkpoint(use_reentrant=False) for weights that "
                "are used more than once"
            )
        # A reentrant checkpoint runs a backward of its own inside of the other.
        this_backward = torch._C._current_graph_task_id()
        self._backward_of[id(param)] = this_backward
        if this_backward not in self._running:
            self._running.add(this_backward)
            # As in DistributedDataParallel, it runs after the last gradient, on the caller's
            # streams, which wait for those of backward.
            Variable._execution_engine.queue_callback(_End(self, this_backward))

    def begin_bucket(self, params: Sequence[Tensor]) -> list[Tensor]:
        """See ddp.py."""
        optimizer = self._optimizer()
        mine = [] if optimizer is None else [p for p in params if optimizer._has_param(p)]
        for param in mine:
            self._note(param)
        self._bucketed.update(map(id, mine))
        return mine

    def step_bucket(self, params: list[Tensor]) -> None:
        """See ddp.py."""
        optimizer = self._optimizer()
        if optimizer is not None:
            with self._steps_one_at_a_time:
                optimizer.step_params(params)
                self._averaged += params

    def end(self, backward: int) -> None:
        """Steps what is left, after a backward."""
        self._running.discard(backward)
        waiting, self._waiting = self._waiting, {}
        self._step([param for batch in waiting.values() for param in batch.params])
        if self._ddp is not None:
            # Once more at the end of the queue: after DistributedDataParallel, which waits for its
            # buckets there, and puts gradients back.
            Variable._execution_engine.queue_callback(self._free_averaged)

    def _free_averaged(self) -> None:
        _free_gradients(self._averaged)
        self._averaged.clear()

    def fail(self, backward: int) -> None:
        """Leaves gradients to `optimizer.step()`, and expects others from the next backward."""
        self._running.discard(backward)
        self._waiting.clear()
        self._free_averaged()
        self._backward_of = {p: b for p, b in self._backward_of.items() if b != backward}

    def _step(self, params: list[Tensor]) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            with self._steps_one_at_a_time:
                optimizer.step_params(params)
            _free_gradients(params)


class _End:
    """Called at the end of a backward. If backward fails, autograd drops it without a call."""

    def __init__(self, stepper: _Stepper, backward: int) -> None:
        self._stepper = stepper
        self._backward = backward
        self._reached = False

    def __call__(self) -> None:
        self._stepper.end(self._backward)
        self._reached = True

    def __del__(self) -> None:
        if not self._reached:
            self._stepper.fail(self._backward)


def _free_gradients(params: list[Tensor]) -> None:
    for param in params:
        param.grad = None
