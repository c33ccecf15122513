"""Bytes of state and time of a step of packed states, bfloat16 parameters and 8-bit optimizers.

    python -m benchmarks.low_precision [--numel 16777216]

One tensor on the GPU, if there is one, else on the CPU. Ways take turns; medians are shown. Before
anything is timed, each of FusedPadam's ways must move as the one in float32 does. torchao's and
bitsandbytes' AdamW in 8 bits have their rows where they are installed and run; they have no running
maximum.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from importlib.util import find_spec

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from benchmarks.measure import DEVICE, seconds_of
from benchmarks.versions import installed
from padam_ext import FusedPadam

TURNS = 15
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


def others() -> dict[str, tuple[torch.dtype, Make]]:
    """What a user would take instead, as far as it is installed."""
    ways: dict[str, tuple[torch.dtype, Make]] = {
        f"{name}: torch.optim.Adam(amsgrad, fused)": (
            dtype,
            lambda params: torch.optim.Adam(params, lr=1e-3, amsgrad=True, fused=True),
        )
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    }
    if find_spec("torchao") is not None:
        from torchao.optim import AdamW8bit

        ways["float32: torchao AdamW8bit"] = (torch.float32, lambda p: AdamW8bit(p, lr=1e-3))
        ways["bfloat16: torchao AdamW8bit, stochastic"] = (
            torch.bfloat16,
            lambda p: AdamW8bit(p, lr=1e-3, bf16_stochastic_round=True),
        )
    if find_spec("bitsandbytes") is not None:
        from bitsandbytes.optim import AdamW8bit as OfBitsandbytes

        ways["float32: bitsandbytes AdamW8bit"] = (
            torch.float32,
            lambda p: OfBitsandbytes(p, lr=1e-3),
        )
    return ways


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


def padam_way(numel: int, name: str) -> Way:
    """One of FusedPadam's."""
    dtype, options = PADAM[name]
    return Way(numel, dtype, lambda params: FusedPadam(params, lr=0.1, **options))


def verify() -> None:
    """Raises AssertionError unless all ways of FusedPadam move by a step of 0.1 alike."""
    moved = {}
    for name in PADAM:
        way = padam_way(10_000, name)
        for _ in range(3):
            way.optimizer.step()
        moved[name] = (way.param.detach().float() - way.start.float(), way.start.float().abs())
    for name, (change, size) in moved.items():
        half = 0.5 if "bfloat16" in name else 0.0
        # Each step may round by a unit of bfloat16, and starts elsewhere by half a unit.
        bound = 0.05 * moved[REFERENCE][0].abs() + half * (3 * size + 3) * 2.0**-7
        share = ((change - moved[REFERENCE][0]).abs() <= bound).float().mean()
        assert share > 0.99, (name, share)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=2**24, help="elements; default %(default)s")
    numel = parser.parse_args().numel
    console = Console()
    verify()
    ways = {name: padam_way(numel, name) for name in PADAM}
    for name, (dtype, make) in others().items():
        way = Way(numel, dtype, make)
        try:
            way.optimizer.step()
        except Exception as error:  # it may have no code for this device
            console.print(f"{name} does not run here: {type(error).__name__}: {error}"[:300])
            continue
        ways[name] = way
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in track(range(TURNS + 3), "measuring", console=console):
        for name, way in ways.items():
            seconds = seconds_of(way.optimizer.step)
            if turn >= 3:
                times[name].append(seconds)
    table = Table(title=f"One step of {numel:,} elements on {DEVICE.type}")
    for column in ("parameters, states", "bytes of state", "ms", f"/ {REFERENCE}"):
        table.add_column(column, justify="left" if column.startswith("param") else "right")
    of_reference = statistics.median(times[REFERENCE])
    for name, way in ways.items():
        median = statistics.median(times[name])
        table.add_row(
            name,
            f"{way.state_bytes():.2f}",
            f"{median * 1e3:.2f}",
            f"{median / of_reference:.2f}",
        )
    console.print(table)
    versions = installed(("torch", "torchao", "bitsandbytes"))
    console.print(
        f"{torch.get_num_threads()} threads; {', '.join(f'{k} {v}' for k, v in versions.items())}"
    )


if __name__ == "__main__":
    main()
