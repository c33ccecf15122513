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
from importlib.util import find_spec

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure import DEVICE, seconds_of
from benchmarks.storages import PADAM, REFERENCE, Make, Way, padam_way, verify
from benchmarks.versions import installed

TURNS = 15


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
