"""How a run stores parameters and states: the storage study, and bfloat16 parameters.

A model with bfloat16 parameters computes in float32 here, on copies of them, and its gradients are
rounded to bfloat16: what differs from a run in float32 is what an optimizer meets, not the model's
arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

# Of --param-dtype: options of FusedPadam. The first two are for every optimizer.
PARAM_DTYPES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {},
    "bfloat16-stochastic": {"param_rounding": "stochastic"},
    "bfloat16-split": {"master": "split"},
}
# The study's: parameters, states, and bytes of both for each parameter.
STORAGES = {
    "float32": ("float32", "float32", 4 + 12),
    "float32, packed states": ("float32", "packed32", 4 + 4),
    "bfloat16": ("bfloat16", "float32", 2 + 12),
    "bfloat16, stochastic": ("bfloat16-stochastic", "float32", 2 + 12),
    "bfloat16, split": ("bfloat16-split", "float32", 2 + 2 + 12),
    "bfloat16, stochastic, packed states": ("bfloat16-stochastic", "packed32", 2 + 4),
    "bfloat16, split, packed states": ("bfloat16-split", "packed32", 2 + 2 + 4),
}


def options_of(param_dtype: str, state_dtype: str) -> dict[str, Any]:
    """FusedPadam's, beside those of the task."""
    states = {} if state_dtype == "float32" else {"state_dtype": state_dtype}
    return PARAM_DTYPES[param_dtype] | states


class Stored:
    """Parameters as the optimizer has them: the model's own, or copies in bfloat16."""

    def __init__(self, params: Iterable[Parameter], param_dtype: str) -> None:
        """Rounds the model's parameters to what is stored."""
        self._of_model = list(params)
        self.params = self._of_model
        if param_dtype != "float32":
            self.params = [Parameter(p.detach().to(torch.bfloat16)) for p in self._of_model]
            self._show()

    def attach(self, optimizer: Optimizer) -> None:
        """Brings gradients to the optimizer before its steps, and what they stored back."""
        if self.params is not self._of_model:
            optimizer.register_step_pre_hook(lambda *_: self._take_gradients())
            optimizer.register_step_post_hook(lambda *_: self._show())

    @torch.no_grad()
    def load(self) -> None:
        """Takes the model's values, which are a checkpoint's."""
        if self.params is not self._of_model:
            for stored, param in zip(self.params, self._of_model, strict=True):
                stored.copy_(param)

    def _take_gradients(self) -> None:
        for stored, param in zip(self.params, self._of_model, strict=True):
            grad: Tensor | None = param.grad
            stored.grad = None if grad is None else grad.to(stored.dtype)
            param.grad = None

    @torch.no_grad()
    def _show(self) -> None:
        for stored, param in zip(self.params, self._of_model, strict=True):
            param.copy_(stored)
