"""Stepping during backward: each gradient is used and freed as soon as it is there."""

from __future__ import annotations

from contextlib import ExitStack

from torch import Tensor

from padam_ext.optimizer import FusedPadam


def step_during_backward(optimizer: FusedPadam) -> ExitStack:
    """Has each parameter stepped in `loss.backward()`, as soon as its gradient is complete.

    The gradient is freed at once, so of all gradients only a few exist at any time: the peak of
    memory falls by nearly the size of the parameters. Go on calling `optimizer.step()`, which then
    finds no gradients, so that step hooks run and schedulers see it.

    What needs all gradients together cannot be had: accumulation over several backward passes,
    clipping by the global norm, GradScaler. Parameters that are added to the optimizer later are
    not included.

    Args:
        optimizer: whose parameters to step.

    Returns:
        What undoes it, by `close()` or at the end of a `with` statement.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = FusedPadam(model.parameters())
        >>> with step_during_backward(optimizer):
        ...     model(torch.randn(8, 4)).square().mean().backward()
        >>> model.weight.grad is None
        True
    """

    def step(param: Tensor) -> None:
        optimizer.step_param(param)
        param.grad = None

    hooks = ExitStack()
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad:
                hooks.callback(param.register_post_accumulate_grad_hook(step).remove)
    return hooks
