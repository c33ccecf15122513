"""FusedPadam's ways to store parameters and states, each with a parameter of its own to step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from benchmarks.measure import DEVICE
from padam_ext import FusedPadam

REFERENCE = "float32"
Make = Callable[[list[Parameter]], Optimizer]
_PACKED = {"state_dtype": "packed32"}
_ROUNDED, _SPLIT = {"param_rounding": "stochastic"}, {"master": "split"}
# By name the dtype of parameters and gradients, and FusedPadam's options.
PADAM = {
    REFERENCE: (torch.float32, {}),
    "float32, packed states": (torch.float32, _PACKED),
    "float32, packed states, no amsgrad": (torch.float32, _PACKED | {"amsgrad": False}),
    "bfloat16": (torch.bfloat16, {}),
    "bfloat16, stochastic": (torch.bfloat16, _ROUNDED),
    "bfloat16, split": (torch.bfloat16, _SPLIT),
    "bfloat16, stochastic, packed states": (torch.bfloat16, _ROUNDED | _PACKED),
    "bfloat16, split, packed states": (torch.bfloat16, _SPLIT | _PACKED),
}


class Way:
    """A parameter, its gradient and the optimizer that steps it."""

    def __init__(self, numel: int, dtype: torch.dtype, make: Make) -> None:
        """Makes the same values for every way, but for rounding."""
        generator = torch.Generator(DEVICE).manual_seed(0)
        values = torch.randn(2, numel, generator=generator, device=DEVICE)
        self.start = values[0].to(dtype)
        self.param = Parameter(self.start.clone())
        self.param.grad = values[1].to(dtype)
        self.optimizer = make([self.param])

    def state_bytes(self) -> float:
        """Of state for each element, counted from the tensors."""
        tensors = [t for t in self.optimizer.state[self.param].values() if isinstance(t, Tensor)]
        return sum(_bytes(tensor) for tensor in tensors) / self.param.numel()


def _bytes(tensor: Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):  # of 8-bit codes and scales
        return sum(_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()


def padam_way(numel: int, name: str, backend: str = "auto") -> Way:
    """One of FusedPadam's."""
    dtype, options = PADAM[name]
    return Way(numel, dtype, lambda params: FusedPadam(params, lr=0.1, backend=backend, **options))


def verify(backend: str = "auto") -> None:
    """Raises AssertionError unless all ways of FusedPadam move by a step of 0.1 alike."""
    moved = {}
    for name in PADAM:
        way = padam_way(10_000, name, backend)
        for _ in range(3):
            way.optimizer.step()
        moved[name] = (way.param.detach().float() - way.start.float(), way.start.float().abs())
    for name, (change, size) in moved.items():
        half = 0.5 if "bfloat16" in name else 0.0
        # Each step may round by a unit of bfloat16, and starts elsewhere by half a unit.
        bound = 0.05 * moved[REFERENCE][0].abs() + half * (3 * size + 3) * 2.0**-7
        share = ((change - moved[REFERENCE][0]).abs() <= bound).float().mean()
        assert share > 0.99, (name, share)
