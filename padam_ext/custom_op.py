"""`torch.ops.padam_ext.step`: a step as an operator, for code that torch.compile traces whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial as partial_of

import torch
from torch import Tensor

from padam_ext.choice import check_name, choose
from padam_ext.control import ControlInputs
from padam_ext.driver import make_step
from padam_ext.gather import StepInputs
from padam_ext.layout import overlaps_itself
from padam_ext.options import DEFAULTS, Hyperparameters, make_plain
from padam_ext.plan import Needs, Planner
from padam_ext.slots import compute_dtype
from padam_ext.state import ParamState


def step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    partial: float,
    bias_correction: str = "none",
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    backend: str = "auto",
    second_moment: str = "mean",
) -> None:
    """Makes one step of every parameter, in place. FusedPadam documents what it computes.

    States are as with `state_dtype="float32"`, half types are rounded to the nearest.

    Args:
        params: parameters, on any devices, of any of FusedPadam's dtypes.
        grads: their gradients, of the same shapes; only read.
        exp_avgs: first moments, of the same shapes; float32 for half types, else the parameter's
            dtype.
        exp_avg_sqs: second moments, like `exp_avgs`.
        max_exp_avg_sqs: running maxima of the second moments, like `exp_avgs`; an empty list for a
            step without amsgrad.
        steps: how many steps each has made, float32 of no dimensions.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: L2 penalty, or decoupled.
        partial: the paper's p.
        bias_correction: "none", "authors" or "adam".
        decoupled_weight_decay: see FusedPadam.
        maximize: ascend instead of descend.
        grad_scale: one element, by which the gradients are divided.
        found_inf: one element; if it is not 0, the step changes nothing.
        backend: see FusedPadam.
        second_moment: "mean", "sum", "max" or "yogi", see FusedPadam.

    Raises:
        ValueError: an option outside its range, or a state of another shape than its parameter.
        TypeError: a dtype that cannot be stepped.
        RuntimeError: a backend that cannot take the tensors. In each case nothing has changed.
    """
    amsgrad = len(max_exp_avg_sqs) > 0
    states = {"exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs, "step": steps}
    if amsgrad:
        states["max_exp_avg_sq"] = max_exp_avg_sqs
    for name, tensors in ({"grad": grads} | states).items():
        if len(tensors) != len(params):
            raise ValueError(f"there are {len(params)} params, but {len(tensors)} {name}s")
    check_name(backend)
    for name, tensors in states.items():
        for param, tensor in zip(params, tensors, strict=True):
            dtype = torch.float32 if name == "step" else _state_dtype(param.dtype)
            if tensor.dtype != dtype:
                raise TypeError(f"{name} must be {dtype} here, got {tensor.dtype}")
            if overlaps_itself(tensor):
                raise ValueError(f"{name} is expanded: some of its elements share memory")
    given: dict[Tensor, ParamState] = {
        param: {name: tensors[i] for name, tensors in states.items()}
        for i, param in enumerate(params)
    }
    if len(given) != len(params):
        raise ValueError("a parameter appears more than once")
    group = DEFAULTS | {
        "lr": lr,
        "betas": (beta1, beta2),
        "eps": eps,
        "weight_decay": weight_decay,
        "partial": partial,
        "amsgrad": amsgrad,
        "bias_correction": bias_correction,
        "decoupled_weight_decay": decoupled_weight_decay,
        "maximize": maximize,
        "second_moment": second_moment,
        "params": params,
    }
    make_plain(group, check_lr_sign=True)
    options = Hyperparameters.from_group(group)
    state = {param: dict(tensors) for param, tensors in given.items()}
    inputs = StepInputs(list(params), list(grads), bytes(8 * len(params)), state)
    control = ControlInputs(grad_scale, found_inf)
    needs = Needs(backend, count_on_device=found_inf is not None, compare_states=True)
    bucket_steps = Planner().plan(inputs, [group], partial_of(choose, backend), needs)
    make_step(bucket_steps, inputs, {0: options}, control)
    # Where a kernel could not take a tensor as it was, it worked on another.
    for param, its_state in given.items():
        for key, tensor in its_state.items():
            if state[param][key] is not tensor:
                tensor.copy_(state[param][key])


def _state_dtype(param_dtype: torch.dtype) -> torch.dtype:
    compute = compute_dtype(param_dtype)
    return compute.to_complex() if param_dtype.is_complex else compute


_MUTATED = ("params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "steps")
_operator = torch.library.custom_op("padam_ext::step", step, mutates_args=_MUTATED)
_operator.register_fake(lambda *arguments, **options: None)
