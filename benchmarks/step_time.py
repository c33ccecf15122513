"""Time of one optimizer step on the CPU, beside what a user would run instead.

The optimizers take turns of some steps each, so that a change of the machine's speed meets them
alike. In every round they are made anew, another one first: where its memory happens to lie makes
some percent of the speed of a large step. What is printed is the median over all turns. Before
anything is timed, FusedPadam's step is held against the plain PyTorch form.

    python -m benchmarks.step_time [--rounds N] [--threads T]
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn import Parameter

from padam_ext import FusedPadam
from padam_ext.hyperparameters import Hyperparameters
from padam_ext.native import simd_level
from padam_ext.reference import padam_step

# Many small tensors first, as in a process that has just built its model: the large ones leave the
# heap in pieces.
WORKLOADS = {
    "1000 tensors of 1024": [1024] * 1000,
    "1 tensor of 16,000,000": [16_000_000],
}
OPTIONS = {"lr": 1e-3, "weight_decay": 5e-4}
STEPS_PER_TURN = 8
MAX_NORM = 1.0
# Five float32 read, four written: what a step must move, whatever an implementation does move.
BYTES_PER_ELEMENT = 36
OURS = "FusedPadam, p=1/8"

Step = Callable[[], object]


def make_params(sizes: list[int]) -> list[Parameter]:
    """Float32 parameters with gradients, the same for every optimizer."""
    generator = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(size, generator=generator)) for size in sizes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    return params


class EagerLoop:
    """Padam as PyTorch operations, one tensor after the other: reference.padam_step."""

    def __init__(self, params: list[Parameter], partial: float) -> None:
        """Makes states of zeros."""
        self.params = params
        self.states: list[tuple[Tensor, ...]] = [
            tuple(torch.zeros_like(param) for _ in range(3)) for param in params
        ]
        defaults = FusedPadam(params, **OPTIONS, partial=partial).param_groups[0]
        self.options = Hyperparameters.from_group(defaults)
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:
        """One step of every tensor."""
        self.count += 1
        for param, moments in zip(self.params, self.states, strict=True):
            assert param.grad is not None
            padam_step(param, param.grad, *moments, self.count, self.options)


Params = list[Parameter]
IMPLEMENTATIONS: dict[str, Callable[[Params], Step]] = {
    OURS: lambda params: FusedPadam(params, **OPTIONS, partial=1 / 8).step,
    "FusedPadam, p=0.3": lambda params: FusedPadam(params, **OPTIONS, partial=0.3).step,
    "Padam, eager loop": lambda params: EagerLoop(params, 1 / 8).step,
    "Padam, foreach": lambda params: FusedPadam(params, **OPTIONS, backend="eager").step,
    "torch AMSGrad, foreach": lambda params: torch_amsgrad(params, foreach=True),
    "torch AMSGrad, fused": lambda params: torch_amsgrad(params, fused=True),
}
OURS_CLIPPED = "FusedPadam, max_grad_norm"
CLIPPED: dict[str, Callable[[Params], Step]] = {
    OURS_CLIPPED: lambda params: FusedPadam(params, **OPTIONS, max_grad_norm=MAX_NORM).step,
    "clip_grad_norm_ and torch AMSGrad, fused": lambda params: clip_first(
        params, torch_amsgrad(params, fused=True)
    ),
}


def torch_amsgrad(params: Params, **form: bool) -> Step:
    """The step of torch.optim's AMSGrad."""
    return torch.optim.Adam(params, amsgrad=True, **OPTIONS, **form).step


def clip_first(params: Params, step: Step) -> Step:
    """Clipping by torch, then a step."""

    def clip_and_step() -> None:
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        step()

    return clip_and_step


def verify(sizes: list[int]) -> None:
    """Three steps of FusedPadam and of the eager loop must agree, clipped as well."""
    for partial, norm in ((1 / 8, None), (0.3, None), (1 / 8, MAX_NORM)):
        ours, theirs = make_params(sizes), make_params(sizes)
        loop = EagerLoop(theirs, partial).step
        steps = (
            FusedPadam(ours, **OPTIONS, partial=partial, max_grad_norm=norm).step,
            loop if norm is None else clip_first(theirs, loop),
        )
        for _ in range(3):
            for step in steps:
                step()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def measure(
    implementations: dict[str, Callable[[Params], Step]],
    sizes: list[int],
    rounds: int,
    console: Console,
) -> dict[str, float]:
    """Median seconds of one step of each implementation."""
    seconds: dict[str, list[float]] = {name: [] for name in implementations}
    # Refreshed between rounds only: in the background it would take time from what is measured.
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        for index in progress.track(range(rounds), description="measuring"):
            first = index % len(seconds)
            names = [*seconds][first:] + [*seconds][:first]
            steps = {name: implementations[name](make_params(sizes)) for name in names}
            for step in steps.values():
                step()
                step()
            for name, step in steps.items():
                for _ in range(STEPS_PER_TURN):
                    start = time.perf_counter()
                    step()
                    seconds[name].append(time.perf_counter() - start)
    return {name: median(times) for name, times in seconds.items()}


def main() -> None:
    """Prints one table per workload."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, metavar="N", default=6, help="default %(default)s")
    parser.add_argument(
        "--threads",
        type=int,
        metavar="T",
        default=torch.get_num_threads(),
        help="default %(default)s",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console()
    console.print(
        f"{platform.processor() or platform.machine()}, {simd_level()}, {options.threads} threads, "
        f"torch {torch.__version__}; medians of {options.rounds} turns of {STEPS_PER_TURN} steps"
    )
    for name, sizes in WORKLOADS.items():
        verify(sizes)
        for what, ours, implementations in (
            ("", OURS, IMPLEMENTATIONS),
            (", clipped", OURS_CLIPPED, CLIPPED),
        ):
            seconds = measure(implementations, sizes, options.rounds, console)
            table = Table(title=f"{name}, float32{what}")
            table.add_column("implementation")
            for heading in ("ms per step", "effective GB/s", f"times {ours}"):
                table.add_column(heading, justify="right")
            for implementation, time_of_step in seconds.items():
                table.add_row(
                    implementation,
                    f"{1000 * time_of_step:.2f}",
                    f"{sum(sizes) * BYTES_PER_ELEMENT / time_of_step / 1e9:.1f}",
                    f"{time_of_step / seconds[ours]:.2f}",
                )
            console.print(table)


if __name__ == "__main__":
    main()
