"""Holds an implementation's first steps against tests/oracle.py, on a sample of its elements.

Padam is elementwise: whatever holds for elements from all over each tensor, the first and the last
among them, holds for the others, too.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

import oracle
from benchmarks.implementations import Implementation, Step
from benchmarks.measure import seconds_of

_SAMPLED = 65536  # elements of all tensors together, but at least sixteen of each
# The second gradient is this much smaller, so that v falls below its maximum.
_SHRINKING = 2.0**-10
_STEPS = 2


class Sample:
    """Elements of a list of tensors at the same places in each step."""

    def __init__(self, tensors: list[Parameter]) -> None:
        """Chooses them, evenly spaced."""
        each = max(16, _SAMPLED // len(tensors))
        self._places = [
            None  # all of it
            if t.numel() <= each
            else torch.linspace(0, t.numel() - 1, each, dtype=torch.float64).long().to(t.device)
            for t in tensors
        ]

    def __call__(self, tensors: list[Tensor]) -> np.ndarray:
        """The elements of all tensors, one after the other."""
        chosen = [
            t.detach().reshape(-1) if at is None else t.detach().reshape(-1)[at]
            for t, at in zip(tensors, self._places, strict=True)
        ]
        return oracle.exact(torch.cat(chosen).double().cpu().numpy())


def clip_factor(grads: list[Tensor], max_norm: float | None) -> float:
    """What clipping multiplies all gradients by."""
    if max_norm is None:
        return 1.0
    norm = float(torch.stack([grad.double().norm() for grad in grads]).norm())
    return min(1.0, max_norm / (norm + 1e-6))


def verify(implementation: Implementation, params: list[Parameter], step: Step) -> float:
    """Makes the first two steps and checks them.

    Returns:
        How many seconds the last of them took.

    Raises:
        AssertionError: an element is not where the specification puts it.
    """
    sample = Sample(params)
    grads = [param.grad for param in params if param.grad is not None]
    dtype = params[0].dtype
    # Moments of half types make some percent of a step, and rounding of a step can tip the last
    # bit of the parameter, or more where the optimizer rounds on its way.
    half_moments = implementation.moment_dtype(dtype).itemsize < 4
    of_the_step, of_the_value = (0.05, 3.0) if half_moments else (2e-5, 1.0)
    m = v = h = np.zeros_like(sample(params))
    for count in range(1, _STEPS + 1):
        before, g = sample(params), sample(grads)
        factor = clip_factor(grads, implementation.max_grad_norm)
        seconds = seconds_of(step)
        if implementation.max_grad_norm is not None:
            after = sample(grads)
            clipped_in_place = (after != g).any()
            g = g * factor
            if clipped_in_place:
                # PyTorch sums norms up in float32: of 16M elements, on the CPU, it is off by 5e-4.
                np.testing.assert_allclose(after.astype(float), g.astype(float), rtol=2e-3)
                g = after
        want = oracle.padam(before, g, m, v, h, count, implementation.options)
        m, v, h = want.m, want.v, want.h
        tolerance = of_the_step * abs(want.x - before)
        largest = np.maximum(abs(before), abs(want.x))
        tolerance = tolerance + of_the_value * torch.finfo(dtype).eps * largest
        wrong = ~(abs(sample(params) - want.x) <= tolerance)  # true for NaN
        if wrong.any():
            at = int(np.argmax(wrong))
            raise AssertionError(
                f"{implementation.name}, step {count}: {np.count_nonzero(wrong)} of {wrong.size} "
                f"sampled elements are wrong, the first came to {sample(params)[at]!r}, "
                f"expected {want.x[at]!r}"
            )
        torch._foreach_mul_(grads, _SHRINKING)
    torch._foreach_mul_(grads, _SHRINKING**-_STEPS)
    return seconds
