"""What is measured: FusedPadam, Padam as others write it, and what a user would run instead.

Each is made from a list of parameters and comes with the options under which tests/oracle.py, the
specification, describes it, so that it can be verified before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from padam_ext import FusedPadam, available_backends
from padam_ext.options import Hyperparameters
from padam_ext.reference import padam_step
from padam_ext.slots import compute_dtype

Params = list[Parameter]
Step = Callable[[], object]

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 5e-4}
_PADAM = {
    **OPTIONS,
    "partial": 1 / 8,
    "amsgrad": True,
    "bias_correction": "none",
    "decoupled_weight_decay": False,
    "maximize": False,
    "second_moment": "mean",
}
_AMSGRAD = _PADAM | {"partial": 1 / 2, "bias_correction": "adam"}


@dataclass(frozen=True)
class Implementation:
    """One way to make a step.

    Attributes:
        name: as reports show it.
        make: the step of an optimizer made for these parameters.
        options: FusedPadam's options that compute the same.
        half_states: whether parameters of half types have moments of their own type, where
            FusedPadam has float32.
        package: what has to be installed, beside what the project itself needs.
        fused: whether it makes one pass over memory. Others are several times slower, which takes
            fewer turns to tell.
        max_grad_norm: what all gradients together are clipped to in each step, if they are.
    """

    name: str
    make: Callable[[Params], Step]
    options: dict[str, Any] = field(default_factory=lambda: _PADAM)
    half_states: bool = False
    package: str | None = None
    fused: bool = False
    max_grad_norm: float | None = None

    def is_installed(self) -> bool:
        """Whether it can be measured here."""
        return self.package is None or find_spec(self.package) is not None

    def moment_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the moments of parameters of a dtype."""
        return dtype if self.half_states else compute_dtype(dtype)

    def bytes_per_element(self, dtype: torch.dtype) -> int:
        """What a step must move: parameter and moments are read and written, gradients read."""
        moments = 3 if self.options["amsgrad"] else 2
        return 3 * dtype.itemsize + 2 * moments * self.moment_dtype(dtype).itemsize


class EagerLoop:
    """Padam as PyTorch operations, one tensor after the other: reference.padam_step."""

    def __init__(self, params: Params) -> None:
        """Makes states of zeros."""
        self.params = params
        self.states: list[tuple[Tensor, ...]] = [
            tuple(torch.zeros_like(p, dtype=compute_dtype(p.dtype)) for _ in range(3))
            for p in params
        ]
        self.options = Hyperparameters.from_group(
            FusedPadam(params, **OPTIONS, partial=1 / 8).param_groups[0]
        )
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:
        """One step of every tensor."""
        self.count += 1
        for param, moments in zip(self.params, self.states, strict=True):
            assert param.grad is not None
            padam_step(param, param.grad, *moments, step=self.count, options=self.options)


def _kernels(device_type: str) -> list[str]:
    """FusedPadam's backends with a kernel that can run here."""
    here = ("cpu",) if device_type == "cpu" else ("triton", "cuda")
    return [name for name in here if name in available_backends()]


def _fused_padam(backend: str, partial: float, max_norm: float | None = None) -> Implementation:
    arguments = {"partial": partial, "backend": backend, "max_grad_norm": max_norm}
    return Implementation(
        f"FusedPadam, {backend}" + (f", p={partial:g}" if partial != 1 / 8 else ""),
        lambda params: FusedPadam(params, **OPTIONS, **arguments).step,
        _PADAM | {"partial": partial},
        fused=True,
        max_grad_norm=max_norm,
    )


def _torch_amsgrad(form: str, **arguments: bool) -> Implementation:
    return Implementation(
        f"torch AMSGrad, {form}",
        lambda params: torch.optim.Adam(params, amsgrad=True, **OPTIONS, **arguments).step,
        _AMSGRAD,
        half_states=True,
        fused=arguments.get("fused", False),
    )


# Gradients of the workloads that are clipped have a larger norm. A much smaller one would leave
# gradients that cancel with their weight decay, of which nothing can be verified.
MAX_NORM = 300.0


def clipped(device_type: str, max_norm: float) -> list[Implementation]:
    """A step with clipping: FusedPadam's own, and PyTorch's before fused AMSGrad."""
    unclipped = _torch_amsgrad("fused", fused=True)

    def clip_and_step(params: Params) -> Step:
        step = unclipped.make(params)

        def both() -> None:
            torch.nn.utils.clip_grad_norm_(params, max_norm)
            step()

        return both

    return [
        *(_fused_padam(name, 1 / 8, max_norm) for name in _kernels(device_type)),
        replace(unclipped, make=clip_and_step, max_grad_norm=max_norm),
    ]


def _pytorch_optimizer(params: Params) -> Step:
    from pytorch_optimizer import PAdam

    return PAdam(params, **OPTIONS, partial=1 / 8).step


def _optimi(params: Params) -> Step:
    from optimi import Adam

    return Adam(params, **OPTIONS, kahan_sum=False).step


def implementations(device_type: str) -> list[Implementation]:
    """All that can be measured on a type of device: the first is the one that all are held to."""
    ours = _kernels(device_type)
    return [
        *(_fused_padam(name, 1 / 8) for name in ours),
        *(_fused_padam(name, 0.3) for name in ours),
        Implementation("Padam, eager loop", lambda params: EagerLoop(params).step),
        Implementation(
            "Padam, foreach",
            lambda params: FusedPadam(params, **OPTIONS, backend="eager").step,
        ),
        Implementation(
            "pytorch-optimizer PAdam",
            _pytorch_optimizer,
            _PADAM | {"amsgrad": False, "bias_correction": "authors"},
            half_states=True,
            package="pytorch_optimizer",
        ),
        _torch_amsgrad("eager", foreach=False, fused=False),
        _torch_amsgrad("foreach", foreach=True),
        _torch_amsgrad("fused", fused=True),
        Implementation(
            "torch-optimi Adam",
            _optimi,
            _AMSGRAD | {"amsgrad": False},
            half_states=True,
            package="optimi",
        ),
    ]
