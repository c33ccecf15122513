"""From the options of a param group to the constants of its update: one row of the launch table.

Whatever is the same for all elements is worked out here, once, for every kernel. What the host
does not know is NaN in a row, until the prepare kernel has completed it from the row's source.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from padam_ext.options import BIAS_CORRECTIONS, Hyperparameters, Number
from padam_ext.packed_states import ROOT_OF_CENTRE

# How d^(2p) is computed, named after p; in the order of the enum Root in csrc/padam_math.h.
ROOTS = ("none", "half", "quarter", "eighth", "sixteenth", "general")
GENERAL = ROOTS.index("general")
# v = kept * v + added * g**2, v = max(kept * v, added * g**2), or
# v = kept * v - added * sign(v - g**2) * g**2; the enum SecondMoment there.
SECOND_MOMENT_FORMS = ("weighted", "largest", "yogi")
_ROOT_OF_EXPONENT = {0.0: 0, -1.0: 1, -0.5: 2, -0.25: 3, -0.125: 4}

_SMALLEST_NORMAL = 2.0**-126  # of float32


class DeviceConstant(NamedTuple):
    """A number that only the device knows: where it is."""

    address: int
    is_double: bool  # else float32


class RowOptions(NamedTuple):
    """The options of a param group that its rows depend on; see options.py's Hyperparameters.

    Attributes:
        seed: None where no random numbers are drawn.
        maximum_scale: what the root of a running maximum is multiplied by.
    """

    lr: float | DeviceConstant
    beta1: float
    beta2: float
    eps: float
    weight_decay: float | DeviceConstant
    partial: float
    bias_correction: str
    decoupled_weight_decay: bool
    maximize: bool
    second_moment: str = "mean"
    seed: int | None = None
    maximum_scale: float = 1.0

    @classmethod
    def of(cls, options: Hyperparameters) -> RowOptions:
        """With the addresses of tensors, which must stay alive until rows have been completed."""
        lr, weight_decay = _known(options.lr), _known(options.weight_decay)
        if lr is options.lr and weight_decay is options.weight_decay:
            return _of_numbers(options)
        others = _of_numbers(options._replace(lr=0.0, weight_decay=0.0))
        return others._replace(lr=lr, weight_decay=weight_decay)

    def needs_device(self) -> bool:
        """Whether only the device knows one of them."""
        return isinstance(self.lr, DeviceConstant) or isinstance(self.weight_decay, DeviceConstant)


def _known(value: Number) -> float | DeviceConstant:
    if isinstance(value, Tensor):
        return DeviceConstant(value.data_ptr(), value.dtype == torch.float64)
    return value


@lru_cache(maxsize=4096)
def _of_numbers(options: Hyperparameters) -> RowOptions:
    values = options._asdict()
    is_packed = options.state_dtype == "packed32"
    values["maximum_scale"] = ROOT_OF_CENTRE if is_packed and options.amsgrad else 1.0
    if not is_packed and options.param_rounding != "stochastic":
        values["seed"] = None
    return RowOptions(*(values[name] for name in RowOptions._fields))


class Constants(NamedTuple):
    """The constants of one param group at one step count, in the order of csrc/launch_table.h.

    To maximize, gradients enter with the other sign: that is folded into `one_minus_beta1` and
    `coupled_decay`; the second moment does not see it. The exponent comes whole and in two pieces,
    of which the first has so few bits that its product with the exponent of a float is exact.
    """

    step_size: float  # lr * c
    beta1: float
    one_minus_beta1: float
    beta2: float  # this and the next two are the numbers of SecondMomentRule
    one_minus_beta2_high: float
    one_minus_beta2_low: float
    eps: float
    coupled_decay: float  # weight_decay, or 0
    decoupled_decay: float  # lr * weight_decay, or 0
    inverse_correction: float  # 1 / r, times `maximum_scale`
    exponent: float  # -2p
    exponent_high: float
    exponent_low: float
    second_moment: float  # index into SECOND_MOMENT_FORMS
    root: float  # index into ROOTS
    seed: float  # of random numbers
    step: float  # number of this update; 0 where it plays no part


class RowSource(NamedTuple):
    """What the prepare kernel completes a row from, in the order of csrc/device_table.h."""

    lr: float
    lr_address: int  # 0 if `lr` is the value
    lr_is_double: int
    weight_decay: float
    weight_decay_address: int
    weight_decay_is_double: int
    bias_correction: int  # index into BIAS_CORRECTIONS
    coupled_factor: float  # coupled_decay / weight_decay
    decoupled_factor: float  # decoupled_decay / (lr * weight_decay)
    maximum_scale: float
    step: float  # number of this update; -1 where the tensor's counter on the device has it


# In place of a step number that only a counter on the device knows.
UNKNOWN_STEP = -1.0


@lru_cache(maxsize=4096)
def make_constants(options: RowOptions, step: float) -> Constants:
    """The constants of update number `step`, from 1."""
    lr, decay = _or_nan(options.lr), _or_nan(options.weight_decay)
    c, r = math.nan, math.nan
    if step != UNKNOWN_STEP or options.bias_correction == "none":
        c, r = bias_correction_factors(options.bias_correction, options.beta1, options.beta2, step)
    coupled, decoupled = _decay_factors(options)
    rule = second_moment_rule(options.second_moment, options.beta2)
    exponent = -2.0 * options.partial
    exponent_high = round(exponent * 65536.0) / 65536.0
    return Constants(
        step_size=lr * c,
        beta1=options.beta1,
        one_minus_beta1=(-1.0 if options.maximize else 1.0) * (1.0 - options.beta1),
        beta2=rule.kept,
        one_minus_beta2_high=rule.added_high,
        one_minus_beta2_low=rule.added_low,
        eps=options.eps,
        coupled_decay=coupled * decay if coupled else 0.0,
        decoupled_decay=lr * decay if decoupled else 0.0,
        inverse_correction=options.maximum_scale / r,
        exponent=exponent,
        exponent_high=exponent_high,
        exponent_low=exponent - exponent_high,
        second_moment=float(SECOND_MOMENT_FORMS.index(rule.form)),
        root=_root_of(exponent, options.eps),
        seed=options.seed or 0,
        step=math.nan if step == UNKNOWN_STEP else step,
    )


def make_source(options: RowOptions, step: float) -> RowSource:
    """What a device needs to complete the parts of a row that the host may not know."""
    lr, decay = options.lr, options.weight_decay
    lr_at = lr if isinstance(lr, DeviceConstant) else DeviceConstant(0, False)
    decay_at = decay if isinstance(decay, DeviceConstant) else DeviceConstant(0, False)
    coupled, decoupled = _decay_factors(options)
    return RowSource(
        lr=0.0 if isinstance(lr, DeviceConstant) else lr,
        lr_address=lr_at.address,
        lr_is_double=int(lr_at.is_double),
        weight_decay=0.0 if isinstance(decay, DeviceConstant) else decay,
        weight_decay_address=decay_at.address,
        weight_decay_is_double=int(decay_at.is_double),
        bias_correction=BIAS_CORRECTIONS.index(options.bias_correction),
        coupled_factor=coupled,
        decoupled_factor=decoupled,
        maximum_scale=options.maximum_scale,
        step=step,
    )


class SecondMomentRule(NamedTuple):
    """How v follows from v and g**2; see SECOND_MOMENT_FORMS.

    `added` comes in two pieces: float32 rounds 1 - 0.999 by nearly half a unit, which v, off by at
    most two units in all, cannot afford. Both are positive, so that an infinite gradient, times
    each, gives an infinite v and not NaN.
    """

    form: str
    kept: float
    added_high: float
    added_low: float


def second_moment_rule(second_moment: str, beta2: float) -> SecondMomentRule:
    """The rule of one of SECOND_MOMENTS in options.py."""
    form, kept, added = "weighted", beta2, 1.0 - beta2
    if second_moment == "sum":  # AdaGrad
        kept, added = 1.0, 1.0
    elif second_moment == "max":  # AdaMax's infinity norm is the root of this
        form, kept, added = "largest", beta2**2, 1.0
    elif second_moment == "yogi":
        form, kept = "yogi", 1.0
    high = _leading_bits_below(added)
    return SecondMomentRule(form, kept, high, added - high)


def bias_correction_factors(
    bias_correction: str, beta1: float, beta2: float, step: float
) -> tuple[float, float]:
    """Factors (c, r) of the update `x -= lr * c * m / (sqrt(h) / r + eps) ** (2 * p)`.

    Args:
        bias_correction: "none", the paper's Algorithm 1; "authors", the authors' released code,
            not a debiasing when p < 1/2 but a warm-up; "adam", as torch.optim.Adam, consistent at
            every p.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        step: number of this update, from 1.
    """
    if bias_correction == "none":
        return 1.0, 1.0
    first = _one_minus_power(beta1, step)
    root_of_second = math.sqrt(_one_minus_power(beta2, step))
    if bias_correction == "authors":
        return root_of_second / first, 1.0
    return 1.0 / first, root_of_second


def _one_minus_power(beta: float, step: float) -> float:
    """1 - beta**step without the digits that the difference of two numbers near 1 would lose."""
    return 1.0 if beta == 0.0 else -math.expm1(step * math.log(beta))


def _or_nan(value: float | DeviceConstant) -> float:
    return math.nan if isinstance(value, DeviceConstant) else value


def _decay_factors(options: RowOptions) -> tuple[float, float]:
    if options.decoupled_weight_decay:
        return 0.0, 1.0
    return -1.0 if options.maximize else 1.0, 0.0


def _root_of(exponent: float, eps: float) -> float:
    """Index into ROOTS; square roots need an eps that float32 does not round or flush to zero."""
    root = _ROOT_OF_EXPONENT.get(exponent, GENERAL)
    return float(root if root == 0 or eps >= _SMALLEST_NORMAL else GENERAL)


def _leading_bits_below(value: float) -> float:
    """The largest number of 20 bits that is smaller than a positive value."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(math.ceil(math.ldexp(mantissa, 20)) - 1, exponent - 20)
