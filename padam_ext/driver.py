"""One step, from what was gathered to the kernels: for the optimizer, the operator and trials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from padam_ext.backends.step import BucketStep
from padam_ext.control import ControlInputs
from padam_ext.distributed.reduction import Reduction
from padam_ext.gather import StepInputs
from padam_ext.options import Hyperparameters
from padam_ext.step_control import StepControl


class Outcome(NamedTuple):
    """What a step leaves behind.

    Attributes:
        norm: the norm of all gradients, where it was asked for.
        skipped: see make_step, with those that this step has added.
        found_inf: not 0 if GradScaler found an infinity in any process, of one element; None where
            it does not ask.
    """

    norm: Tensor | None
    skipped: dict[torch.device, Tensor]
    found_inf: Tensor | None


def make_step(
    steps: list[BucketStep],
    inputs: StepInputs,
    options: Mapping[int, Hyperparameters],
    control_inputs: ControlInputs,
    skipped: dict[torch.device, Tensor] | None = None,
    reduction: Reduction | None = None,
) -> Outcome:
    """Makes one step of every bucket.

    Args:
        steps: of the buckets that a planner made of `inputs`.
        inputs: what was gathered.
        options: of each param group that occurs.
        control_inputs: what unscaling, clipping and skipping depend on.
        skipped: how many steps were skipped before, int64 of one element by device.
        reduction: over which processes the norm and infinities add up; None for this one alone.

    Raises:
        RuntimeError: a step that cannot be captured, or whatever a kernel
            raises. A bucket whose kernel was not launched has not changed.
    """
    bound = [step.bucket.bind(inputs) for step in steps]
    for step, tensors in zip(steps, bound, strict=True):
        step.bind(tensors)
    done = 0
    try:
        for step, tensors in zip(steps, bound, strict=True):
            step.begin(tensors, options, control_inputs)
        sums: list[Tensor] = []
        dtype_of_norm = torch.float32
        if control_inputs.needs_norm:
            if any(step.bucket.norm_dtype == torch.float64 for step in steps):
                dtype_of_norm = torch.float64
            sums = [step.sum_of_squares(b) for step, b in zip(steps, bound, strict=True)]
        if reduction is not None:
            copies = [step.bucket.copies for step in steps] if sums else []
            finish = reduction.start(sums, copies, control_inputs.found_inf)
        # Autograd does not see what kernels write, but must refuse a backward that saved an old
        # value. Done before they run, and while other processes add up.
        torch.autograd.graph.increment_version(inputs.params)
        if reduction is not None:
            of_all = finish()
            sums = [of_all.squares] if control_inputs.needs_norm else []
            control_inputs = control_inputs._replace(found_inf=of_all.found_inf)
        control = StepControl(control_inputs, sums, dtype_of_norm, skipped or {})
        if not steps:
            control.as_tensors()
        for step, tensors in zip(steps, bound, strict=True):
            step.step(tensors, options, control)
            done += 1
    except BaseException:
        for step, tensors in zip(steps[done:], bound[done:], strict=True):
            step.cancel(tensors)
        raise
    return Outcome(control.norm, control.skipped, control_inputs.found_inf)
