"""Options of a param group: checked once, then plain numbers."""

from __future__ import annotations

import math
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

Number = float | Tensor

BIAS_CORRECTIONS = ("none", "authors", "adam")


class Hyperparameters(NamedTuple):
    """The options of one param group as plain numbers, `partial` being the paper's p.

    `lr` and `weight_decay` may be float64 tensors of no dimensions, whose values a device has.
    """

    lr: Number
    beta1: float
    beta2: float
    eps: float
    weight_decay: Number
    partial: float
    amsgrad: bool
    bias_correction: str
    decoupled_weight_decay: bool
    maximize: bool

    @classmethod
    def from_group(cls, group: dict[str, Any], *, keep_tensors: bool = False) -> Hyperparameters:
        """Reads and checks a param group.

        Args:
            group: the param group.
            keep_tensors: leave the values of tensors to the device, also those that the host knows.

        Raises:
            TypeError: an option is of the wrong type.
            ValueError: an option is outside its range. Either message shows name and value.
        """
        betas = group["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise ValueError(f"betas must be a pair of numbers in [0, 1), got {betas!r}")
        if group.get("differentiable"):
            raise ValueError(
                "differentiable=True: a step of FusedPadam cannot be differentiated; leave it out"
            )
        lr = _scalar("lr", group["lr"], keep_tensors)
        weight_decay = _scalar("weight_decay", group["weight_decay"], keep_tensors)
        values = (
            0.0 if isinstance(lr, Tensor) else lr,
            betas[0],
            betas[1],
            group["eps"],
            0.0 if isinstance(weight_decay, Tensor) else weight_decay,
            group["partial"],
            group["amsgrad"],
            group["bias_correction"],
            group["decoupled_weight_decay"],
            group["maximize"],
        )
        try:
            checked = _checked(*values)
        except TypeError:
            # Perhaps of a type that cannot be looked up in a cache: this says which option.
            checked = _checked.__wrapped__(*values)
        if isinstance(lr, Tensor):
            checked = checked._replace(lr=lr)
        if isinstance(weight_decay, Tensor):
            checked = checked._replace(weight_decay=weight_decay)
        return checked

    def has_tensors(self) -> bool:
        """Whether a device has a value that the host does not know."""
        return isinstance(self.lr, Tensor) or isinstance(self.weight_decay, Tensor)

    def on_host(self) -> Hyperparameters:
        """With numbers only, for which the host waits if they are still being computed."""
        if not self.has_tensors():
            return self
        return self._replace(
            lr=number("lr", float(self.lr)),
            weight_decay=number("weight_decay", float(self.weight_decay)),
        )

    def to(self, device: torch.device) -> Hyperparameters:
        """With tensors on a device."""
        if not self.has_tensors():
            return self
        lr, weight_decay = (
            value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for value in (self.lr, self.weight_decay)
        )
        return self._replace(lr=lr, weight_decay=weight_decay)


# Every step asks for the options of every group, which seldom change. `typed` keeps True and 1
# apart; errors are not cached.
@lru_cache(maxsize=4096, typed=True)
def _checked(
    lr: Any,
    beta1: Any,
    beta2: Any,
    eps: Any,
    weight_decay: Any,
    partial: Any,
    amsgrad: Any,
    bias_correction: Any,
    decoupled_weight_decay: Any,
    maximize: Any,
) -> Hyperparameters:
    if not isinstance(bias_correction, str) or bias_correction not in BIAS_CORRECTIONS:
        raise ValueError(
            f"bias_correction must be one of {BIAS_CORRECTIONS}, got {bias_correction!r}"
        )
    return Hyperparameters(
        lr=number("lr", lr),
        beta1=number("betas[0]", beta1, below=1.0),
        beta2=number("betas[1]", beta2, below=1.0),
        eps=number("eps", eps),
        weight_decay=number("weight_decay", weight_decay),
        partial=number("partial", partial, most=0.5),
        amsgrad=flag("amsgrad", amsgrad),
        bias_correction=bias_correction,
        decoupled_weight_decay=flag("decoupled_weight_decay", decoupled_weight_decay),
        maximize=flag("maximize", maximize),
    )


@overload
def bias_correction_factors(
    bias_correction: str, beta1: float, beta2: float, step: float
) -> tuple[float, float]: ...


@overload
def bias_correction_factors(
    bias_correction: str, beta1: float, beta2: float, step: Tensor
) -> tuple[Number, Number]: ...


def bias_correction_factors(
    bias_correction: str, beta1: float, beta2: float, step: Number
) -> tuple[Number, Number]:
    """Factors (c, r) of the update `x -= lr * c * m / (sqrt(h) / r + eps) ** (2 * p)`.

    Args:
        bias_correction: "none", the paper's Algorithm 1; "authors", the authors' released code,
            not a debiasing when p < 1/2 but a warm-up; "adam", as torch.optim.Adam, consistent at
            every p.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        step: number of this update, from 1, or a float64 tensor of such numbers.
    """
    if bias_correction == "none":
        return 1.0, 1.0
    first = _one_minus_power(beta1, step)
    second = _one_minus_power(beta2, step)
    root_of_second = second.sqrt() if isinstance(second, Tensor) else math.sqrt(second)
    if bias_correction == "authors":
        return root_of_second / first, 1.0
    return 1.0 / first, root_of_second


def _one_minus_power(beta: float, step: Number) -> Number:
    """1 - beta**step without the digits that the difference of two numbers near 1 would lose."""
    if beta == 0.0:
        return 1.0
    exponent = step * math.log(beta)
    return -(exponent.expm1() if isinstance(exponent, Tensor) else math.expm1(exponent))


def as_float(value: Any) -> float:
    """A real number as a float, infinite where it is beyond a float's range."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def shown(value: Any) -> str:
    """A real number for an error message."""
    try:
        return repr(value)
    except ValueError:  # Python prints no int of more than 4300 digits
        return f"about 2**{int(value).bit_length() - 1}"


def _scalar(name: str, value: Any, keep_tensors: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(f"a tensor {name} must have 1 element, got shape {tuple(value.shape)}")
    left_to_a_device = keep_tensors or value.device.type != "cpu"
    if left_to_a_device and not value.is_meta and not value.is_complex():
        return value.detach().reshape(()).double()
    try:
        return value.item()
    except RuntimeError as error:
        raise TypeError(
            f"a tensor {name} must have a value that can be read, got {value!r}"
        ) from error


def number(name: str, value: Any, *, below: float = math.inf, most: float | None = None) -> float:
    """A number in [0, below) or [0, most]; else TypeError or ValueError with name and value."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    as_number = as_float(value)
    upper, bracket = (below, ")") if most is None else (most, "]")
    # Written so that NaN fails it.
    if not (0.0 <= as_number < upper or as_number == most):
        raise ValueError(f"{name} must be in [0, {upper:g}{bracket}, got {shown(value)}")
    return as_number


def flag(name: str, value: Any) -> bool:
    """True or False; else TypeError with name and value."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value
