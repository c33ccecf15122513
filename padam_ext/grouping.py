"""From param groups to buckets: which tensors one launch can take together.

Here, and only here, a parameter becomes the plain memory that kernels work on: real instead of
complex, dense, gradient and states laid out alike. Whatever can be wrong with a tensor is found
here, before any state is made or changed.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from padam_ext.gather import Live
from padam_ext.layout import (
    is_plain,
    is_strided,
    is_wrapper,
    lacks_memory,
    local,
    overlaps_itself,
    placement,
    real_view,
    same_layout,
)
from padam_ext.state import ParamState, check_state, fit_state

# Also the order of the enum DType in csrc/launch_table.h.
PARAM_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HALF_DTYPES = (torch.bfloat16, torch.float16)

ParamGroups = Sequence[dict[str, Any]]
OptimizerState = MutableMapping[Tensor, ParamState]


@dataclass
class Bucket:
    """Tensors of one device and one combination of dtypes, as parallel lists: one launch."""

    device: torch.device
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    positions: list[int] = field(default_factory=list)  # in Live
    group_indices: list[int] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)  # real and dense
    exp_avgs: list[Tensor] = field(default_factory=list)  # laid out as the parameter
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    max_exp_avg_sqs: list[Tensor | None] = field(default_factory=list)  # None without amsgrad
    steps: list[Tensor] = field(default_factory=list)  # float32 of no dimensions
    counts: Tensor | None = None  # float32 [tensor] on the device, of which `steps` then are views
    staged: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # a parameter, its copy
    converted: list[int] = field(default_factory=list)  # whose gradients need `_converted`

    def add(self, position: int, live: Live, state: ParamState, *, amsgrad: bool) -> None:
        """Takes in one parameter, whose state has been made to fit it."""
        param, grad = local(live.params[position]).detach(), local(live.grads[position])
        plain = param
        if not is_plain(param):  # has gaps or is lazily conjugated: the kernel works on a copy
            plain = torch.empty_like(param)
            self.staged.append((param, plain))
        plain = real_view(plain)
        if grad.is_complex() or not _readable(grad, plain, self.grad_dtype):
            self.converted.append(len(self.params))
        self.positions.append(position)
        self.group_indices.append(live.group_indices[position])
        self.params.append(plain)
        self.exp_avgs.append(real_view(local(state["exp_avg"])))
        self.exp_avg_sqs.append(real_view(local(state["exp_avg_sq"])))
        maximum = real_view(local(state["max_exp_avg_sq"])) if amsgrad else None
        self.max_exp_avg_sqs.append(maximum)
        self.steps.append(state["step"])

    def count_on_device(self, states: list[ParamState]) -> None:
        """Moves the step counts of these tensors' states to where the device can change them."""
        self.counts = torch.stack([step.to(self.device, torch.float32) for step in self.steps])
        self.steps = list(self.counts.unbind())
        for state, step in zip(states, self.steps, strict=True):
            state["step"] = step

    def count_on_host(self, states: list[ParamState]) -> None:
        """Moves them to the CPU, where they are elsewhere."""
        self.steps = [step.cpu() for step in self.steps]
        for state, step in zip(states, self.steps, strict=True):
            state["step"] = step

    def gradient(self, index: int, live: Live) -> Tensor:
        """This step's gradient of one tensor: real, of `grad_dtype`, laid out as the parameter."""
        grad = local(live.grads[self.positions[index]])
        return _converted(grad, self.params[index], self.grad_dtype)

    def load_staged(self) -> None:
        """Copies parameters that no kernel can walk to where it works."""
        for param, plain in self.staged:
            plain.copy_(param)

    def store_staged(self) -> None:
        """Copies them back."""
        for param, plain in self.staged:
            param.copy_(plain)


def make_buckets(param_groups: ParamGroups, state: OptimizerState, live: Live) -> list[Bucket]:
    """Sorts the live parameters into buckets and gives each a state that fits it.

    Raises:
        RuntimeError: a sparse gradient, or one that does not go with its parameter.
        TypeError: a dtype or tensor subclass that no backend can take.
        ValueError: a parameter whose elements share memory, or a state of another shape.
            All of these before any state has been made or changed.
    """
    for param, grad in zip(live.params, live.grads, strict=True):
        name = _Name(param_groups, param)
        check_param(param, name)
        _check_live(param, grad, name)
        check_state(state.get(param, {}), param, name)

    buckets: dict[tuple[torch.device, torch.dtype, torch.dtype], Bucket] = {}
    for position, param in enumerate(live.params):
        amsgrad = param_groups[live.group_indices[position]]["amsgrad"]
        fit_state(state[param], param, amsgrad=amsgrad)
        param_dtype = param.dtype.to_real()
        grad_dtype = _grad_dtype(param_dtype, live.grads[position].dtype.to_real())
        key = (param.device, param_dtype, grad_dtype)
        bucket = buckets.setdefault(key, Bucket(*key))
        bucket.add(position, live, state[param], amsgrad=amsgrad)
    return list(buckets.values())


class _Name:
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


def _check_live(param: Tensor, grad: Tensor, name: object) -> None:
    if placement(param) != placement(grad):
        raise RuntimeError(
            f"{name} is {_placed(param)}, but its gradient is {_placed(grad)}. Redistribute the "
            "gradient as the parameter first."
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
    if param.dtype.to_real() not in PARAM_DTYPES:
        complex_dtypes = dict.fromkeys(dtype.to_complex() for dtype in PARAM_DTYPES)
        supported = ", ".join(map(str, (*PARAM_DTYPES, *complex_dtypes)))
        raise TypeError(f"{name} has dtype {param.dtype}; supported are {supported}")
    mine, its = ((t.shape, local(t).shape, t.device, t.is_complex()) for t in (param, grad))
    if mine != its:
        raise RuntimeError(
            f"{name} has shape {tuple(param.shape)} and dtype {param.dtype} on {param.device}, but "
            f"its gradient has shape {tuple(grad.shape)} and dtype {grad.dtype} on {grad.device}. "
            "Compute the gradients again after moving, resizing or converting parameters."
        )


def _placed(tensor: Tensor) -> str:
    where = placement(tensor)
    return "a plain tensor" if where is None else f"a DTensor {where[1]} on {where[0]}"


def _grad_dtype(param_dtype: torch.dtype, grad_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the kernel reads a gradient; a conversion to it is exact."""
    if grad_dtype == param_dtype:
        return grad_dtype
    return torch.float32 if param_dtype in HALF_DTYPES else param_dtype


def _readable(grad: Tensor, param: Tensor, dtype: torch.dtype) -> bool:
    """Whether a kernel can walk the gradient's memory beside that of a plain parameter."""
    if not is_plain(grad) or grad.dtype.to_real() != dtype:
        return False
    return same_layout(real_view(grad), param)


def _converted(grad: Tensor, param: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient as a kernel can read it beside a parameter: itself or a view, else a copy."""
    real = real_view(grad)
    if _readable(grad, param, dtype):
        return real
    return torch.empty_like(param, dtype=dtype).copy_(real)
