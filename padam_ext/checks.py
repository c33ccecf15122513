"""Everything that can be wrong with a parameter or its gradient, found before any state changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from padam_ext.layout import (
    can_be_redistributed,
    is_strided,
    is_wrapper,
    lacks_memory,
    local,
    overlaps_itself,
    placement,
)
from padam_ext.slots import DTYPES

ParamGroups = Sequence[dict[str, Any]]


def params_of(param_groups: ParamGroups) -> list[Tensor]:
    """The parameters of all groups, in order."""
    return [param for group in param_groups for param in group["params"]]


class Name:
    """A parameter's name for an error message, worked out only if it is printed."""

    def __init__(self, param_groups: ParamGroups, param: Tensor) -> None:
        self.param_groups = param_groups
        self.param = param

    def __str__(self) -> str:
        for group_index, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                if param is self.param:
                    if "param_names" in group:
                        return f"parameter {group['param_names'][index]!r}"
                    return f"parameter {index} of param group {group_index}"
        return "a parameter"


def check_param(param: Tensor, name: object) -> None:
    """Refuses a parameter whose elements share memory: its update would be a race."""
    shard = local(param)
    if is_lazy(shard) or is_wrapper(shard) or not is_strided(shard):
        return  # a step refuses those
    if overlaps_itself(shard):
        raise ValueError(
            f"{name} of shape {tuple(param.shape)} and strides {param.stride()} is expanded: some "
            "of its elements share memory. Pass the tensor it was expanded from, or a clone."
        )


def check_grad(param: Tensor, grad: Tensor, name: object) -> None:
    """Refuses a parameter and its gradient that no backend can step.

    Raises:
        RuntimeError: a sparse gradient, or one that does not go with its parameter.
        TypeError: a dtype or tensor subclass that no backend can take.
    """
    is_elsewhere = placement(param) != placement(grad)
    if is_elsewhere and not can_be_redistributed(grad, param):
        raise RuntimeError(
            f"{name} is {_placed(param)}, but its gradient is {_placed(grad)}. Put the gradient on "
            "the parameter's mesh first."
        )
    for tensor, what in ((local(param), ""), (local(grad), "the gradient of ")):
        if is_wrapper(tensor):
            raise TypeError(
                f"{what}{name} is a {type(tensor).__name__}, a tensor subclass without memory of "
                "its own, which FusedPadam cannot step. Pass plain tensors."
            )
        if not is_strided(tensor):
            kind = "is nested" if tensor.is_nested else f"has layout {tensor.layout}"
            advice = "convert it to a dense one"
            if what and "sparse" in str(tensor.layout):
                advice = (
                    "create the embedding with sparse=False, or use torch.optim.SparseAdam for it"
                )
            raise RuntimeError(
                f"{what}{name} {kind}. FusedPadam takes dense parameters and gradients only: "
                f"{advice}."
            )
        if lacks_memory(tensor):
            raise RuntimeError(f"{what}{name} has no memory: its storage was freed or never made")
    if param.dtype.to_real() not in DTYPES:
        complex_dtypes = dict.fromkeys(dtype.to_complex() for dtype in DTYPES)
        supported = ", ".join(map(str, (*DTYPES, *complex_dtypes)))
        raise TypeError(f"{name} has dtype {param.dtype}; supported are {supported}")
    mine, its = ((t.shape, t.device, t.is_complex()) for t in (param, grad))
    if mine != its or (not is_elsewhere and local(param).shape != local(grad).shape):
        raise RuntimeError(
            f"{name} has shape {tuple(param.shape)} and dtype {param.dtype} on {param.device}, but "
            f"its gradient has shape {tuple(grad.shape)} and dtype {grad.dtype} on {grad.device}. "
            "Compute the gradients again after moving, resizing or converting parameters."
        )


def _placed(tensor: Tensor) -> str:
    where = placement(tensor)
    return "a plain tensor" if where is None else f"a DTensor {where[1]} on {where[0]}"
