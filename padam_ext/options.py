"""The options of a param group: each declared once, checked once, then plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from functools import lru_cache, partial
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from padam_ext import runtime

Number = float | Tensor

BIAS_CORRECTIONS = ("none", "authors", "adam")
SECOND_MOMENTS = ("mean", "sum", "max", "yogi")
STATE_DTYPES = ("float32", "packed32")
PARAM_ROUNDINGS = ("nearest", "stochastic")
MASTERS = (None, "split")
# Of packed states, for |exp_avg| in roots of exp_avg_sq. It is 22.2 for the worst exp_avg_sq; betas
# of (0.9, 0.9999) can reach 22.9, which costs nothing that could be measured.
MOST_ROOTS_OF_MOMENTUM = 23


class Option(NamedTuple):
    """An option that param groups may have for themselves.

    Attributes:
        name: its key in a param group, and the constructor's argument.
        default: the constructor's default.
        plain: converts the user's value to a plain Python value; raises TypeError or ValueError,
            with name and value, if it is not allowed.
        may_be_tensor: whether it may be a tensor that is read at each step.
    """

    name: str
    default: Any
    plain: Callable[[str, Any], Any]
    may_be_tensor: bool = False


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


def any_number(name: str, value: Any) -> float:
    """A number or a tensor of one element, as a float; else TypeError with name and value."""
    one = _item(name, value)
    if not isinstance(one, Real) or isinstance(one, bool):
        raise TypeError(f"{name} must be a number, got {one!r} of type {type(one).__name__}")
    return as_float(one)


def number(name: str, value: Any, *, below: float = math.inf, most: float | None = None) -> float:
    """A number in [0, below) or [0, most]; else TypeError or ValueError with name and value."""
    as_number = any_number(name, value)
    upper, bracket = (below, ")") if most is None else (most, "]")
    # Written so that NaN fails it.
    if not (0.0 <= as_number < upper or as_number == most):
        raise ValueError(
            f"{name} must be in [0, {upper:g}{bracket}, got {shown(_item(name, value))}"
        )
    return as_number


def flag(name: str, value: Any) -> bool:
    """True or False, also as 1 or 0 or numpy's bool; else TypeError with name and value."""
    is_bool = isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")
    if not is_bool and not (isinstance(value, Integral) and value in (0, 1)):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def _pair(name: str, value: Any) -> tuple[float, float]:
    """Two numbers in [0, 1), out of any sequence, array or tensor of two."""
    is_ordered = isinstance(value, Iterable) and not isinstance(value, str | Set | Mapping)
    items = list(value) if is_ordered else []
    if len(items) != 2:
        raise ValueError(f"{name} must be a pair of numbers in [0, 1), got {value!r}")
    if isinstance(items[0], Tensor) != isinstance(items[1], Tensor):
        raise ValueError(f"{name} must be either both floats or both Tensors, got {value!r}")
    first, second = (number(f"{name}[{i}]", item, below=1.0) for i, item in enumerate(items))
    return first, second


def _one_of(name: str, value: Any, *, choices: tuple[str | None, ...]) -> str | None:
    """One of some names; else ValueError with name and value."""
    if not isinstance(value, str | None) or value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")
    return value


def _seed(name: str, value: Any) -> int:
    """An integer of 32 bits; else TypeError or ValueError with name and value."""
    value = _item(name, value)
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    if not 0 <= int(value) < 2**32:
        raise ValueError(f"{name} must be in [0, 2**32), got {shown(value)}")
    return int(value)


OPTIONS = (
    Option("lr", 0.1, number, may_be_tensor=True),
    Option("betas", (0.9, 0.999), _pair),
    Option("eps", 1e-8, number),
    Option("weight_decay", 0.0, number, may_be_tensor=True),
    Option("partial", 0.125, partial(number, most=0.5)),
    Option("amsgrad", True, flag),
    Option("bias_correction", "none", partial(_one_of, choices=BIAS_CORRECTIONS)),
    Option("decoupled_weight_decay", False, flag),
    Option("maximize", False, flag),
    Option("state_dtype", "float32", partial(_one_of, choices=STATE_DTYPES)),
    Option("param_rounding", "nearest", partial(_one_of, choices=PARAM_ROUNDINGS)),
    Option("master", None, partial(_one_of, choices=MASTERS)),
    Option("seed", 0, _seed),
    Option("second_moment", "mean", partial(_one_of, choices=SECOND_MOMENTS)),
)
DEFAULTS = {option.name: option.default for option in OPTIONS}


def make_plain(group: dict[str, Any], *, check_lr_sign: bool) -> None:
    """Checks the options of a group and stores them as plain Python values, in place.

    A learning rate or weight decay in a tensor stays that tensor. The sign of a learning rate is
    checked where a person sets it, but not where a scheduler or a file does: those may round below
    zero, and torch.optim goes on.

    Raises:
        TypeError: an option is of the wrong type.
        ValueError: an option is outside its range. Either message shows name and value.
    """
    plain: dict[str, Any] = {}
    for option in OPTIONS:
        value = group[option.name]
        read = any_number if option.name == "lr" and not check_lr_sign else option.plain
        if option.may_be_tensor and isinstance(value, Tensor):
            _check_one_element(option.name, value)
            if value.device.type == "cpu" or not _can_stay_on_device(value):
                read(option.name, value)
            plain[option.name] = value
        else:
            plain[option.name] = read(option.name, value)
    if plain["state_dtype"] == "packed32":
        _check_momentum_fits(*plain["betas"])
    if plain["master"] == "split" and plain["param_rounding"] == "stochastic":
        raise ValueError(
            "master='split' keeps every bit of bfloat16 parameters: leave out "
            "param_rounding='stochastic'"
        )
    if plain["second_moment"] != "mean":
        _check_fits_another_moment(plain)
    group.update(plain)


def _check_fits_another_moment(options: Mapping[str, Any]) -> None:
    """Refuses what is made for a second moment that is a mean."""
    for name, needed in (
        ("amsgrad", False),
        ("bias_correction", "none"),
        ("state_dtype", "float32"),
    ):
        if options[name] != needed:
            raise ValueError(
                f"second_moment={options['second_moment']!r} needs {name}={needed!r}, got "
                f"{options[name]!r}, which is for second_moment='mean' only"
            )


def _check_momentum_fits(beta1: float, beta2: float) -> None:
    """Refuses betas with which packed states would cut momentum off.

    They hold |m| up to 22.2 roots of v at least. What gradients can make of it follows from the
    inequality of Cauchy and Schwarz; it is infinite from beta1**2 = beta2 on, in the worst case.
    Without momentum m is not read again.
    """
    remains = beta2 - beta1**2
    largest = (1 - beta1) * math.sqrt(beta2 / ((1 - beta2) * remains)) if remains > 0 else math.inf
    if beta1 > 0 and largest > MOST_ROOTS_OF_MOMENTUM:
        advice = "a beta1 closer to 1, a smaller beta2,"
        if remains <= 0.01:  # near that limit the other way is the right one
            advice = "a smaller beta1, a beta2 closer to 1 (beta1**2 must be below it),"
        raise ValueError(
            f"betas=({beta1:g}, {beta2:g}) let exp_avg grow to {largest:.3g} times the root of "
            f"exp_avg_sq, and state_dtype='packed32' holds {MOST_ROOTS_OF_MOMENTUM} times: take "
            f"{advice} or state_dtype='float32'"
        )


class Hyperparameters(NamedTuple):
    """The options of one param group as plain numbers, `partial` being the paper's p.

    `lr` and `weight_decay` may be tensors of one element, float32 or float64, to be read on the
    device.
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
    state_dtype: str = "float32"
    param_rounding: str = "nearest"
    master: str | None = None
    seed: int = 0
    second_moment: str = "mean"

    @classmethod
    def from_group(cls, group: Mapping[str, Any], *, keep_tensors: bool = False) -> Hyperparameters:
        """Reads and checks a param group.

        Args:
            group: the param group.
            keep_tensors: keep tensors, even those on the CPU, for the device to read.

        Raises:
            TypeError: an option is of the wrong type.
            ValueError: an option is outside its range. Either message shows name and value.
        """
        on_device = {
            name: kept
            for name in ("lr", "weight_decay")
            if isinstance(value := group[name], Tensor)
            and (kept := _device_tensor(name, value, keep_tensors)) is not None
        }
        values = tuple(0.0 if name in on_device else group[name] for name in DEFAULTS)
        try:
            checked = _checked(values)
        except TypeError:
            # Perhaps of a type that cannot be looked up in a cache.
            checked = _check(values)
        return checked.with_numbers(on_device) if on_device else checked

    def with_numbers(self, numbers: Mapping[str, Tensor]) -> Hyperparameters:
        """With tensors for the learning rate, the weight decay, or both."""
        return self._replace(
            lr=numbers.get("lr", self.lr),
            weight_decay=numbers.get("weight_decay", self.weight_decay),
        )

    def on_host(self) -> Hyperparameters:
        """With numbers only, for which the host waits if they are still being computed."""
        lr, weight_decay = self.lr, self.weight_decay
        if not isinstance(lr, Tensor) and not isinstance(weight_decay, Tensor):
            return self
        if isinstance(lr, Tensor):
            lr = float(lr)
        if isinstance(weight_decay, Tensor):
            weight_decay = number("weight_decay", float(weight_decay))
        return self._replace(lr=lr, weight_decay=weight_decay)


def _check(values: tuple[Any, ...]) -> Hyperparameters:
    group = dict(zip(DEFAULTS, values, strict=True))
    make_plain(group, check_lr_sign=False)
    beta1, beta2 = group.pop("betas")
    for name in ("lr", "weight_decay"):
        group[name] = any_number(name, group[name])
    return Hyperparameters(beta1=beta1, beta2=beta2, **group)


@lru_cache(maxsize=4096, typed=True)
def _checked_numbers(*values: Any) -> Hyperparameters:
    return _check(values)


def _checked(values: tuple[Any, ...]) -> Hyperparameters:
    # Every step asks for the options of every group, which seldom change. A tensor would be looked
    # up by its address. `typed` keeps True and 1 apart; errors are not cached.
    if any(isinstance(value, Tensor) for value in values) or type(values[1]) is not tuple:
        return _check(values)
    return _checked_numbers(*values)


def _check_one_element(name: str, value: Tensor) -> None:
    if value.numel() != 1:
        raise ValueError(f"a tensor {name} must have 1 element, got shape {tuple(value.shape)}")


def _can_stay_on_device(value: Tensor) -> bool:
    return not value.is_meta and not value.is_complex()


def _device_tensor(name: str, value: Tensor, keep_tensors: bool) -> Tensor | None:
    """The tensor, if its value is to be read on the device, in a dtype that kernels read."""
    _check_one_element(name, value)
    if not _can_stay_on_device(value) or not (keep_tensors or value.device.type != "cpu"):
        return None
    value = value.detach()
    return value if value.dtype in (torch.float32, torch.float64) else runtime.widened(value)


def _item(name: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    _check_one_element(name, value)
    try:
        return value.item()
    except RuntimeError as error:
        raise TypeError(
            f"a tensor {name} must have a value that can be read, got {value!r}"
        ) from error
