"""Codecs: from what is stored to the values of the arithmetic and back, in PyTorch.

Most slots store one value in another dtype. Words of packed states hold several values, and a
bfloat16 parameter may have the rest of its bits in another slot, or be rounded stochastically.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from padam_ext import packed_states
from padam_ext.packed_states import Moments
from padam_ext.random_bits import Draws, shifted_right
from padam_ext.slots import Signature

_QUIET_NAN = 0x7FC00000


def load(tensors: Iterable[Tensor], compute_dtype: torch.dtype) -> list[Tensor]:
    """The values to work on: the tensors themselves where they are stored in that dtype."""
    return [tensor.to(compute_dtype) for tensor in tensors]


def store(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Puts new values where they are stored, rounded to the nearest."""
    for tensor, value in zip(tensors, values, strict=True):
        if value is not tensor:
            tensor.copy_(value)


def decode(stored: Mapping[str, Tensor], signature: Signature) -> dict[str, Tensor]:
    """By name, what the update of one parameter works on: values where `load` is not enough.

    Args:
        stored: the tensor of each slot that is present.
        signature: of the parameter.
    """
    values = dict(stored)
    moments: Moments | None = None
    if (word := values.pop("packed_mvh", None)) is not None:
        moments = packed_states.unpack_mvh(word)
    elif (word := values.pop("packed_mv", None)) is not None:
        moments = packed_states.unpack_mv(word)
    if moments is not None:
        values |= {"exp_avg": moments.m, "exp_avg_sq": moments.v}
        if moments.h is not None:
            values["max_exp_avg_sq"] = moments.h
    if (low := values.pop("param_low", None)) is not None:
        values["param"] = join(stored["param"], low)
    elif signature.stochastic:
        values["param"] = stored["param"].to(signature.compute_dtype)
    return values


def encode(
    stored: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    signature: Signature,
    draws: Draws | None,
) -> None:
    """Stores what `decode` gave, after the update.

    Args:
        stored: as for `decode`.
        values: those, updated in place.
        signature: of the parameter.
        draws: its random numbers, where `signature.draws`.
    """
    for name, pack in (
        ("packed_mvh", packed_states.pack_mvh),
        ("packed_mv", packed_states.pack_mv),
    ):
        if name in stored:
            h = values.get("max_exp_avg_sq")
            stored[name].copy_(pack(Moments(values["exp_avg"], values["exp_avg_sq"], h), draws))
    if "param_low" in stored:
        high, low = split(values["param"])
        stored["param"].copy_(high)
        stored["param_low"].copy_(low)
    elif signature.stochastic:
        assert draws is not None
        stored["param"].copy_(rounded_stochastically(values["param"], draws.for_x))


def rounded_stochastically(x: Tensor, random: Tensor) -> Tensor:
    """Float32 as bfloat16: up with the probability of what is cut off.

    Args:
        x: float32.
        random: int32 of the same shape, of which the upper half is used.
    """
    return _upper_half(_bits(x) + shifted_right(random, 16), x)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 as bfloat16, rounded to nearest with ties away from zero, and its lower 16 bits."""
    bits = torch.where(x.isnan(), _QUIET_NAN, _bits(x))
    return _upper_half(bits + 0x8000, x), bits.to(torch.int16)


def join(high: Tensor, low: Tensor) -> Tensor:
    """The float32 that `split` has split.

    A zero that somebody wrote into the parameter takes no negative rest, and an infinity no
    positive one: either would make it NaN.
    """
    bits, rest = high.view(torch.int16).to(torch.int32), low.to(torch.int32)
    rest = torch.where((bits & 0x7FFF) == 0, rest.clamp(min=0), rest)
    rest = torch.where((bits & 0x7FFF) == 0x7F80, rest.clamp(max=0), rest)
    return ((bits << 16) + rest).view(torch.float32)


def _upper_half(bits: Tensor, x: Tensor) -> Tensor:
    """The upper half of int32 as bfloat16; NaN where x is."""
    bits = torch.where(x.isnan(), _QUIET_NAN, bits)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)
