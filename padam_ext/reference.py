"""Padam in plain PyTorch: the readable specification, the eager baseline and the last fallback.

Both forms compute one step of Algorithm 1 of Chen et al., "Closing the Generalization Gap of
Adaptive Gradient Methods in Training Deep Neural Networks" (IJCAI 2020), with the additions that
FusedPadam documents. Arithmetic is in the dtype of the states: float32 for half types.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from padam_ext.hyperparameters import Hyperparameters, bias_correction_factors

_LARGEST = {dtype: torch.finfo(dtype).max for dtype in (torch.float32, torch.float64)}


def padam_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    step: float,
    options: Hyperparameters,
    grad_factor: float = 1.0,
) -> None:
    """Steps one real tensor in place; `grad` is only read.

    Args:
        param: parameter x, any shape.
        grad: its gradient, of the same shape.
        exp_avg: first moment m, same shape, float32 (float64 for float64 parameters).
        exp_avg_sq: second moment v, like `exp_avg`.
        max_exp_avg_sq: running maximum h of v, like `exp_avg`; None without amsgrad.
        step: number of this update, from 1.
        options: the options of the parameter's group.
        grad_factor: what the gradient is multiplied by, to unscale or clip it.
    """
    dtype = exp_avg.dtype
    c, r = bias_correction_factors(options.bias_correction, options.beta1, options.beta2, step)
    x = param.to(dtype)  # `param` itself, unless it is of a half type
    g = grad.to(dtype)
    if grad_factor != 1:
        g = g * grad_factor
    if options.maximize:
        g = -g
    if options.weight_decay != 0:
        if options.decoupled_weight_decay:
            x.sub_(x, alpha=_scalar(options.lr * options.weight_decay, dtype))
        else:
            g = g.add(x, alpha=_scalar(options.weight_decay, dtype))

    exp_avg.mul_(options.beta1).add_(g, alpha=1 - options.beta1)
    exp_avg_sq.mul_(options.beta2).addcmul_(g, g, value=1 - options.beta2)
    second_moment = exp_avg_sq
    if max_exp_avg_sq is not None:
        torch.maximum(max_exp_avg_sq, exp_avg_sq, out=max_exp_avg_sq)  # propagates NaN
        second_moment = max_exp_avg_sq

    d = second_moment.sqrt().div_(r).add_(_scalar(options.eps, dtype))
    ratio = exp_avg / d.pow(2 * options.partial)
    if _denominator_may_be_zero(options, dtype):
        ratio.masked_fill_((exp_avg == 0) & (d == 0), 0.0)  # 0/0: the coordinate stays
    x.add_(ratio, alpha=_scalar(-options.lr * c, dtype))
    if x is not param:
        param.copy_(x)


def padam_step_foreach(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor] | None,
    steps: list[float],
    options: Hyperparameters,
    grad_factor: float | Tensor = 1.0,
) -> None:
    """Steps a list of tensors of one device and one dtype in place, with `torch._foreach_*`.

    Arguments are lists of those of `padam_step`; the lists must not be empty. `grad_factor` may be
    a tensor of one element on the same device.
    """
    dtype = exp_avgs[0].dtype
    factors = [
        bias_correction_factors(options.bias_correction, options.beta1, options.beta2, step)
        for step in steps
    ]
    xs = [param.to(dtype) for param in params]  # the parameters themselves, but for half types
    gs: list[Tensor] | tuple[Tensor, ...] = [grad.to(dtype) for grad in grads]
    if isinstance(grad_factor, Tensor) or grad_factor != 1:
        gs = torch._foreach_mul(gs, grad_factor)
    if options.maximize:
        gs = torch._foreach_neg(gs)
    if options.weight_decay != 0:
        if options.decoupled_weight_decay:
            torch._foreach_sub_(xs, xs, alpha=_scalar(options.lr * options.weight_decay, dtype))
        else:
            gs = torch._foreach_add(gs, xs, alpha=_scalar(options.weight_decay, dtype))

    torch._foreach_mul_(exp_avgs, options.beta1)
    torch._foreach_add_(exp_avgs, gs, alpha=1 - options.beta1)
    torch._foreach_mul_(exp_avg_sqs, options.beta2)
    torch._foreach_addcmul_(exp_avg_sqs, gs, gs, value=1 - options.beta2)
    second_moments = exp_avg_sqs
    if max_exp_avg_sqs is not None:
        torch._foreach_maximum_(max_exp_avg_sqs, exp_avg_sqs)
        second_moments = max_exp_avg_sqs

    ds = torch._foreach_sqrt(second_moments)
    torch._foreach_div_(ds, [r for _, r in factors])
    torch._foreach_add_(ds, _scalar(options.eps, dtype))
    ratios = torch._foreach_div(exp_avgs, torch._foreach_pow(ds, 2 * options.partial))
    if _denominator_may_be_zero(options, dtype):
        for ratio, exp_avg, d in zip(ratios, exp_avgs, ds, strict=True):
            ratio.masked_fill_((exp_avg == 0) & (d == 0), 0.0)
    torch._foreach_mul_(ratios, [_scalar(-options.lr * c, dtype) for c, _ in factors])
    torch._foreach_add_(xs, ratios)
    for param, x in zip(params, xs, strict=True):
        if x is not param:
            param.copy_(x)


def _scalar(value: float | Tensor, dtype: torch.dtype) -> float:
    """A number as torch takes it beside tensors of a dtype: infinite rather than out of range."""
    value = float(value)
    return value if abs(value) <= _LARGEST[dtype] else math.copysign(math.inf, value)


def _denominator_may_be_zero(options: Hyperparameters, dtype: torch.dtype) -> bool:
    # A smaller eps may round to zero, or, where denormals are flushed, count as zero.
    return options.eps < torch.finfo(dtype).smallest_normal
