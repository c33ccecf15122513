"""Time of a large step in two states of training: warmed up, and with every running maximum rising.

Warmed up, gradients are drawn anew before each step, outside of the timed part, and the moments are
those that 10,000 such steps have left behind: few running maxima rise, and FusedPadam writes only
the lines of memory where one does. With a gradient that stays the same from zero moments on, as
in test_step_benchmark.py, every one rises in every step. Implementations take turns as there; in
every turn each is made anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from benchmarks import measure
from benchmarks.implementations import OPTIONS
from benchmarks.test_step_benchmark import rotated
from padam_ext import FusedPadam
from padam_ext.slots import ADAM_MOMENTS

NUMEL = 2**24
POPULATION = 2**14  # elements whose training is simulated; the others are copies of them
STEPS_BEFORE = 10_000
ROUNDS = 5
TURNS = 12  # where the memory of a turn lies decides a tenth of its time
STATES = ("warmed up", "rising")
DTYPES = (torch.float32, torch.bfloat16)
# By name the value of p; None for torch.optim.Adam(amsgrad=True, fused=True).
OPTIMIZERS = {"FusedPadam": 1 / 8, "FusedPadam, p=0.3": 0.3, "torch AMSGrad, fused": None}
LINE = 64  # bytes


@dataclass(frozen=True)
class Case:
    """One turn of one optimizer."""

    state: str
    dtype: torch.dtype
    name: str
    turn: int


def cases() -> list[Case]:
    """In the order of their turns, another optimizer first in each."""
    return [
        Case(state, dtype, name, turn)
        for state in STATES
        for dtype in DTYPES
        for turn in range(TURNS)
        for name in rotated(list(OPTIMIZERS), turn)
    ]


@cache
def gradients() -> Tensor:
    """Normal random numbers, of which a gradient is any run."""
    generator = torch.Generator(measure.DEVICE).manual_seed(0)
    return torch.randn(NUMEL + 2**16, generator=generator, device=measure.DEVICE)


def draw(grad: Tensor, generator: torch.Generator) -> None:
    """Fills a gradient anew, from a random place on."""
    pool = gradients()
    begin = int(torch.randint(pool.numel() - grad.numel(), (1,), generator=generator))
    grad.copy_(pool[begin : begin + grad.numel()])


@cache
def moments() -> tuple[Tensor, ...]:
    """Both moments and the running maximum after STEPS_BEFORE steps, of POPULATION elements."""
    generator = torch.Generator().manual_seed(1)
    param = Parameter(torch.zeros(POPULATION, device=measure.DEVICE))
    param.grad = torch.empty_like(param)
    optimizer = FusedPadam([param], **OPTIONS)
    for _ in range(STEPS_BEFORE):
        draw(param.grad, generator)
        optimizer.step()
    state = optimizer.state[param]
    return tuple(state[key] for key in ADAM_MOMENTS)


def make(case: Case) -> Optimizer:
    """An optimizer of one large parameter, after its first step."""
    param = Parameter(torch.ones(NUMEL, dtype=case.dtype, device=measure.DEVICE))
    param.grad = torch.empty_like(param)
    draw(param.grad, torch.Generator().manual_seed(2))
    partial = OPTIMIZERS[case.name]
    if partial is None:
        optimizer = torch.optim.Adam([param], **OPTIONS, amsgrad=True, fused=True)
    else:
        optimizer = FusedPadam([param], **OPTIONS, partial=partial)
    optimizer.step()
    if case.state == "warmed up":
        state = optimizer.state[param]
        for key, values in zip(ADAM_MOMENTS, moments(), strict=True):
            state[key].copy_(values.repeat(NUMEL // POPULATION))
    return optimizer


def verify(optimizer: Optimizer) -> tuple[float, float]:
    """Makes a step and checks its moments; the shares of maxima and of lines of them that rose."""
    [param] = optimizer.param_groups[0]["params"]
    state = optimizer.state[param]
    v = state["exp_avg_sq"].clone()
    group, h = optimizer.param_groups[0], state["max_exp_avg_sq"]
    g = param.grad.float() + group["weight_decay"] * param.detach().float()
    before = h.clone()
    optimizer.step()
    beta2 = group["betas"][1]
    torch.testing.assert_close(
        state["exp_avg_sq"].float(), beta2 * v.float() + (1 - beta2) * g * g, rtol=1e-2, atol=1e-12
    )
    assert torch.equal(h, torch.maximum(before, state["exp_avg_sq"]))
    rose = h != before
    of_a_line = rose.view(-1, LINE // before.itemsize).any(1)
    return rose.float().mean().item(), of_a_line.float().mean().item()


@pytest.mark.parametrize(
    "case", cases(), ids=lambda c: f"{c.state}, {str(c.dtype)[6:]}, {c.name}, turn {c.turn}"
)
def test_training(benchmark, case):
    """A step of 16M elements; each time with other gradients, unless the maxima are to rise."""
    optimizer = make(case)
    generator = torch.Generator().manual_seed(3)
    elements_risen, lines_risen = verify(optimizer)
    grad = optimizer.param_groups[0]["params"][0].grad

    def prepare() -> None:
        if case.state == "warmed up":
            draw(grad, generator)
        measure.synchronize()

    def step() -> None:
        optimizer.step()
        measure.synchronize()

    benchmark.extra_info.update(
        training=case.state,
        stored=str(case.dtype).removeprefix("torch."),
        implementation=case.name,
        elements_risen=elements_risen,
        lines_risen=lines_risen,
    )
    benchmark.group = f"{case.state}, {case.dtype}"
    benchmark.pedantic(step, setup=prepare, rounds=ROUNDS)
