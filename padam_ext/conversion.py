"""Moments from one way to hold them to another: float32, packed with amsgrad, packed without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from padam_ext import packed_states
from padam_ext.codecs import join
from padam_ext.layout import local
from padam_ext.packed_states import CENTRE, Moments
from padam_ext.slots import ADAM_MOMENTS, MOMENTS

State = dict[str, Any]
_WAYS = [(names, frozenset(names)) for names in MOMENTS]


def held_by(state: Mapping[str, Any]) -> list[str]:
    """The keys by which a state holds its moments, each of one of the ways in MOMENTS."""
    return [names[0] for names, members in _WAYS if not members.isdisjoint(state)]


def wanted_by(group: Mapping[str, Any]) -> str:
    """The same for what a param group asks for."""
    if group["state_dtype"] == "float32":
        return "exp_avg"
    return "packed_mvh" if group["amsgrad"] else "packed_mv"


def unpacked(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The moments of a state by torch.optim.Adam's names, as copies: float32 where packed.

    Of a running maximum that was packed, what the update takes it for; but no less than the second
    moment.
    """
    if "packed_mvh" in state:
        word, unpack = state["packed_mvh"], packed_states.unpack_mvh
    elif "packed_mv" in state:
        word, unpack = state["packed_mv"], packed_states.unpack_mv
    else:
        return {name: state[name].clone() for name in ADAM_MOMENTS if name in state}
    m, v, h = unpack(local(word))
    values = (m, v, None if h is None else torch.maximum(h * CENTRE, v))
    return {
        name: _placed_as(word, value)
        for name, value in zip(ADAM_MOMENTS, values, strict=True)
        if value is not None
    }


def joined(param: Tensor, low: Tensor) -> Tensor:
    """The float32 value of a parameter whose lower bits are a state of their own."""
    return _placed_as(param, join(local(param.detach()), local(low)))


def convert(state: State, group: Mapping[str, Any]) -> None:
    """Replaces the moments of a state by what its group asks for, each rounded to the nearest."""
    wanted = wanted_by(group)
    if held_by(state) in ([], [wanted]):
        return
    values = unpacked(state)
    for name in (*ADAM_MOMENTS, "packed_mvh", "packed_mv"):
        state.pop(name, None)
    if wanted == "exp_avg":
        state.update(values)
        return
    values.setdefault("max_exp_avg_sq", values["exp_avg_sq"])
    m, v, h = (local(values[name]).to(torch.float32) for name in ADAM_MOMENTS)
    if wanted == "packed_mv":
        word = packed_states.pack_mv(Moments(m, v, None))
    else:
        word = packed_states.pack_mvh(Moments(m, v, packed_states.upper_end(h)))
    state[wanted] = _placed_as(values["exp_avg"], word)


def _placed_as(like: Tensor, values: Tensor) -> Tensor:
    """A local shard as a tensor that is placed over devices as another is."""
    if local(like) is like:
        return values
    placed = torch.zeros_like(like, dtype=values.dtype)
    local(placed).copy_(values)
    return placed
