"""Time of `step()` where the kernel has almost nothing to do: many tensors of eight elements.

What a step costs the host before a kernel runs: steady, with gradients that have moved (as after
every `zero_grad()`), and with another lr. Beside the CPU's own path the one for GPUs is measured,
as far as the launch of the Triton kernel, which a recorder replaces; the device's memory then is
the host's, so that copies to it are copies within it.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from benchmarks import measure
from benchmarks.implementations import OPTIONS
from padam_ext import FusedPadam
from pretending import take_the_cpu

pytestmark = pytest.mark.skipif(
    measure.ON_GPU, reason="measures the CPU; test_step_benchmark.py has the host's time of GPUs"
)
# Lists by their number of tensors, and in how many turns they are measured.
TURNS = {1000: 8, 10_000: 2}
ELEMENTS = 8
STEPS_PER_TURN = {1000: 15, 10_000: 4}


class Recorder:
    """Stands in for the Triton kernel: keeps what it was launched with."""

    launched = None

    def __getitem__(self, grid):
        """What Triton calls with the kernel's arguments."""

        def launch(*arguments, **options):
            self.launched = (grid, arguments, options)

        return launch


@pytest.fixture
def recorder(monkeypatch):
    """Has the triton backend take tensors on the CPU and launch nothing."""
    from padam_ext.kernels import multi_tensor_padam

    recorder = Recorder()
    monkeypatch.setattr(multi_tensor_padam, "multi_tensor_padam", recorder)
    take_the_cpu(monkeypatch, "triton")
    return recorder


def make_optimizer(name: str, count: int) -> torch.optim.Optimizer:
    """An optimizer of `count` small parameters with gradients."""
    params = [Parameter(torch.ones(ELEMENTS)) for _ in range(count)]
    for param in params:
        param.grad = torch.ones(ELEMENTS)
    if name == "torch AMSGrad, fused":
        return torch.optim.Adam(params, amsgrad=True, fused=True, **OPTIONS)
    backend = "cpu" if name == "FusedPadam, cpu" else "triton"
    return FusedPadam(params, **OPTIONS, partial=1 / 8, backend=backend)


def keep(optimizer: torch.optim.Optimizer) -> None:
    """Steady: nothing changes."""


def move_gradients(optimizer: torch.optim.Optimizer) -> None:
    """New tensors at other addresses, as after backward."""
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)


def change_lr(optimizer: torch.optim.Optimizer) -> None:
    """As a scheduler does."""
    optimizer.param_groups[0]["lr"] *= 0.999


def verify(name: str, optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
    """A step must reach every tensor, or its address the launch."""
    params = optimizer.param_groups[0]["params"]
    optimizer.step()
    if name == "FusedPadam, device path":
        _, (addresses, *_), _ = recorder.launched
        assert addresses[: 2 * len(params)].tolist() == [
            *(param.data_ptr() for param in params),
            *(param.grad.data_ptr() for param in params),
        ]
    else:
        assert all((param < 1).all() for param in params)


# The uppermost changes fastest: implementations take turns.
@pytest.mark.parametrize(
    "name", ["FusedPadam, cpu", "FusedPadam, device path", "torch AMSGrad, fused"]
)
@pytest.mark.parametrize(
    ("count", "turn"), [(count, turn) for count, turns in TURNS.items() for turn in range(turns)]
)
@pytest.mark.parametrize("change", [keep, move_gradients, change_lr], ids=lambda f: f.__name__)
def test_host_overhead(benchmark, recorder, name, count, turn, change):
    """One step, after one of three things has happened."""
    optimizer = make_optimizer(name, count)
    for _ in range(2):
        change(optimizer)
        verify(name, optimizer, recorder)
    benchmark.group = f"{count} x {ELEMENTS}, {change.__name__}"
    benchmark.extra_info.update(
        workload=f"{count} x {ELEMENTS}", change=change.__name__, implementation=name, turn=turn
    )
    benchmark.pedantic(
        optimizer.step, setup=lambda: change(optimizer), rounds=STEPS_PER_TURN[count]
    )
