"""Padam in plain PyTorch: the readable specification, the eager baseline and the last fallback.

Both forms compute one step of Algorithm 1 of Chen et al., "Closing the Generalization Gap of
Adaptive Gradient Methods in Training Deep Neural Networks" (IJCAI 2020), with the additions that
FusedPadam documents. Arithmetic is in the dtype of the states: float32 for half types.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from padam_ext import codecs, packed_states
from padam_ext.constants import bias_correction_factors, second_moment_rule
from padam_ext.options import Hyperparameters
from padam_ext.slots import compute_dtype

_LARGEST = {dtype: torch.finfo(dtype).max for dtype in (torch.float32, torch.float64)}


def padam_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None = None,
    *,
    step: float,
    options: Hyperparameters,
    grad_factor: float = 1.0,
    packed_maximum: bool = False,
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
        packed_maximum: whether `max_exp_avg_sq` comes from a packed state and goes back there. It
            is then the upper end of an interval; the update takes its middle.
    """
    dtype = compute_dtype(param.dtype)
    c, r = bias_correction_factors(options.bias_correction, options.beta1, options.beta2, step)
    x, g, m, v = codecs.load((param, grad, exp_avg, exp_avg_sq), dtype)
    if grad_factor != 1:
        g = g * grad_factor
    if options.maximize:
        g = -g
    if options.weight_decay != 0:
        if options.decoupled_weight_decay:
            decay = _scalar(options.lr * options.weight_decay, dtype)
            x.sub_(_finite(x), alpha=decay)
        else:
            g = g.add(x, alpha=_scalar(options.weight_decay, dtype))

    m.mul_(options.beta1).add_(g, alpha=1 - options.beta1)
    rule = second_moment_rule(options.second_moment, options.beta2)
    # A fused multiply-add, on most machines: rounded once.
    added = (g * rule.added_low).add_(g, alpha=rule.added_high)
    if rule.form == "weighted":
        v.mul_(rule.kept).addcmul_(added, g)
    elif rule.form == "largest":
        torch.maximum(v.mul_(rule.kept), added.mul_(g), out=v)
    else:
        v.addcmul_((g * g - v).sign_().mul_(added), g)
    h = v
    if max_exp_avg_sq is not None:
        (h,) = codecs.load((max_exp_avg_sq,), dtype)
        torch.maximum(h, packed_states.upper_end(v) if packed_maximum else v, out=h)  # keeps NaN
        codecs.store((max_exp_avg_sq,), (h,))

    if packed_maximum:
        r /= packed_states.ROOT_OF_CENTRE
    d = h.sqrt().div_(r).add_(_scalar(options.eps, dtype))
    ratio = m / d.pow(2 * options.partial)
    if _denominator_may_be_zero(options, dtype):
        ratio.masked_fill_((m == 0) & (d == 0), 0.0)  # 0/0: the coordinate stays
    x.add_(ratio, alpha=_scalar(-options.lr * c, dtype))
    codecs.store((param, exp_avg, exp_avg_sq), (x, m, v))


def padam_step_foreach(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor] | None = None,
    *,
    steps: list[float],
    options: Hyperparameters,
    grad_factor: float | Tensor = 1.0,
    packed_maximum: bool = False,
) -> None:
    """Steps a list of tensors of one device and one dtype in place, with `torch._foreach_*`.

    Arguments are lists of those of `padam_step`; the lists must not be empty. `grad_factor` may be
    a tensor of one element on the same device.
    """
    dtype = compute_dtype(params[0].dtype)
    factors = [
        bias_correction_factors(options.bias_correction, options.beta1, options.beta2, step)
        for step in steps
    ]
    xs, ms, vs = (codecs.load(tensors, dtype) for tensors in (params, exp_avgs, exp_avg_sqs))
    gs: list[Tensor] | tuple[Tensor, ...] = codecs.load(grads, dtype)
    if isinstance(grad_factor, Tensor) or grad_factor != 1:
        gs = torch._foreach_mul(gs, grad_factor)
    if options.maximize:
        gs = torch._foreach_neg(gs)
    if options.weight_decay != 0:
        if options.decoupled_weight_decay:
            decay = _scalar(options.lr * options.weight_decay, dtype)
            torch._foreach_sub_(xs, [_finite(x) for x in xs], alpha=decay)
        else:
            gs = torch._foreach_add(gs, xs, alpha=_scalar(options.weight_decay, dtype))

    torch._foreach_mul_(ms, options.beta1)
    torch._foreach_add_(ms, gs, alpha=1 - options.beta1)
    rule = second_moment_rule(options.second_moment, options.beta2)
    added = torch._foreach_mul(gs, rule.added_low)
    torch._foreach_add_(added, gs, alpha=rule.added_high)
    torch._foreach_mul_(vs, rule.kept)
    if rule.form == "weighted":
        torch._foreach_addcmul_(vs, added, gs)
    elif rule.form == "largest":
        torch._foreach_maximum_(vs, torch._foreach_mul(added, gs))
    else:
        signs = torch._foreach_sign(torch._foreach_sub(torch._foreach_mul(gs, gs), vs))
        torch._foreach_addcmul_(vs, torch._foreach_mul(signs, added), gs)
    hs = vs
    if max_exp_avg_sqs is not None:
        hs = codecs.load(max_exp_avg_sqs, dtype)
        torch._foreach_maximum_(
            hs, [packed_states.upper_end(v) for v in vs] if packed_maximum else vs
        )
        codecs.store(max_exp_avg_sqs, hs)

    ds = torch._foreach_sqrt(hs)
    scale = packed_states.ROOT_OF_CENTRE if packed_maximum else 1.0
    torch._foreach_div_(ds, [r / scale for _, r in factors])
    torch._foreach_add_(ds, _scalar(options.eps, dtype))
    ratios = torch._foreach_div(ms, torch._foreach_pow(ds, 2 * options.partial))
    if _denominator_may_be_zero(options, dtype):
        for ratio, m, d in zip(ratios, ms, ds, strict=True):
            ratio.masked_fill_((m == 0) & (d == 0), 0.0)
    torch._foreach_mul_(ratios, [_scalar(-options.lr * c, dtype) for c, _ in factors])
    torch._foreach_add_(xs, ratios)
    for tensors, values in ((params, xs), (exp_avgs, ms), (exp_avg_sqs, vs)):
        codecs.store(tensors, values)


def _scalar(value: float | Tensor, dtype: torch.dtype) -> float:
    """A number as torch takes it beside tensors of a dtype: infinite rather than out of range."""
    value = float(value)
    return math.copysign(math.inf, value) if abs(value) > _LARGEST[dtype] else value


def _finite(x: Tensor) -> Tensor:
    """With 0 in place of infinities: an infinite parameter stays so, where inf - inf is NaN."""
    return x.masked_fill(x.isinf(), 0.0)


def _denominator_may_be_zero(options: Hyperparameters, dtype: torch.dtype) -> bool:
    # A smaller eps may round to zero, or, where denormals are flushed, count as zero.
    return options.eps < torch.finfo(dtype).smallest_normal
