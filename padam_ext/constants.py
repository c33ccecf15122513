"""From the options of a param group to the constants of its update: one row of the launch table.

Whatever is the same for all elements is worked out here, once, for every kernel.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from padam_ext.hyperparameters import Hyperparameters, bias_correction_factors

# How d^(-2p) is taken; the order is that of the enum Root in csrc/padam_math.h.
ROOTS = ("none", "half", "quarter", "eighth", "sixteenth", "general")
GENERAL = ROOTS.index("general")
_ROOT_OF_EXPONENT = {0.0: 0, -1.0: 1, -0.5: 2, -0.25: 3, -0.125: 4}

_SMALLEST_NORMAL = 2.0**-126  # of float32


class Control(NamedTuple):
    """What a step does with all gradients, as numbers or as tensors of one element on a device."""

    grad_factor: float | Tensor = 1.0  # what gradients are multiplied by
    skip: float | Tensor = 0.0  # 1 for a step that changes nothing, else 0

    def on_host(self) -> Control:
        """With numbers only, for which the host waits if they are still being computed."""
        return Control(float(self.grad_factor), float(self.skip))


NO_CONTROL = Control()


class Constants(NamedTuple):
    """The constants of one param group at one step count, in the order of csrc/launch_table.h.

    Those that depend on tensors are tensors: of one element, or of one for each tensor stepped
    where step counts are such a tensor.

    To maximize, gradients enter with the other sign: that is folded into `one_minus_beta1` and
    `coupled_decay`; the second moment does not see it. 1 - beta2 comes in two pieces: float32
    rounds 1 - 0.999 by nearly half a unit, which v, off by at most two units in all, cannot afford.
    Both are positive, so that an infinite gradient, times each, gives an infinite v and not NaN.
    The exponent comes whole and in two pieces, of which the first has so few bits that its product
    with the exponent of a float is exact.
    """

    step_size: float | Tensor  # lr * c
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2_high: float
    one_minus_beta2_low: float
    eps: float
    coupled_decay: float | Tensor  # weight_decay, or 0
    decoupled_decay: float | Tensor  # lr * weight_decay, or 0
    inverse_correction: float | Tensor  # 1 / r
    exponent: float  # -2p
    exponent_high: float
    exponent_low: float
    amsgrad: float  # 0 or 1
    root: float  # index into ROOTS
    grad_factor: float | Tensor
    skip: float | Tensor  # for a device to see; no step that the host skips comes this far


def make_constants(
    options: Hyperparameters, step: float | Tensor, control: Control = NO_CONTROL
) -> Constants:
    """The constants of update number `step`, from 1; several at once for a tensor of several."""
    c, r = bias_correction_factors(options.bias_correction, options.beta1, options.beta2, step)
    sign = -1.0 if options.maximize else 1.0
    decay, decoupled = options.weight_decay, options.decoupled_weight_decay
    one_minus_beta2_high = _leading_bits_below(1.0 - options.beta2)
    exponent = -2.0 * options.partial
    exponent_high = round(exponent * 65536.0) / 65536.0
    return Constants(
        step_size=options.lr * c,
        beta1=options.beta1,
        one_minus_beta1=sign * (1.0 - options.beta1),
        beta2=options.beta2,
        one_minus_beta2_high=one_minus_beta2_high,
        one_minus_beta2_low=1.0 - options.beta2 - one_minus_beta2_high,
        eps=options.eps,
        coupled_decay=0.0 if decoupled else sign * decay,
        decoupled_decay=options.lr * decay if decoupled else 0.0,
        inverse_correction=1.0 / r,
        exponent=exponent,
        exponent_high=exponent_high,
        exponent_low=exponent - exponent_high,
        amsgrad=float(options.amsgrad),
        root=_root_of(exponent, options.eps),
        grad_factor=control.grad_factor,
        skip=control.skip,
    )


def _root_of(exponent: float, eps: float) -> float:
    """Square roots need a denominator that float32 does not lose."""
    root = _ROOT_OF_EXPONENT.get(exponent, GENERAL)
    return float(root if root == 0 or eps >= _SMALLEST_NORMAL else GENERAL)


def _leading_bits_below(value: float) -> float:
    """The largest number of 20 bits that is smaller than a positive value."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(math.ceil(math.ldexp(mantissa, 20)) - 1, exponent - 20)
