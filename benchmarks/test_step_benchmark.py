"""Time of a step: each workload, dtype and implementation.

Implementations take turns of some steps each, so that a change of the machine's speed meets them
alike; in every turn each is made anew, another one first, since where its memory happens to lie
makes some percent of the speed of a large step. Those that are not fused, several times slower,
take part in every sixth turn. report.py puts the turns of one together.

On a GPU pytest-benchmark's clock measures the host, from an empty queue until `step` returns;
`device_seconds` in the extra information is the time on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import pytest
import torch
from torch.nn import Parameter

from benchmarks import measure
from benchmarks.implementations import (
    MAX_NORM,
    OPTIONS,
    Implementation,
    clipped,
    implementations,
)
from benchmarks.plain_loop import plain_loop
from benchmarks.verification import verify
from benchmarks.workloads import WORKLOADS, Shape, elements, workload
from padam_ext import FusedPadam
from padam_ext.slots import ADAM_MOMENTS

T = TypeVar("T")
SECONDS_PER_TURN = 0.1
TURNS_OF_UNFUSED = 6  # they take part in the first of so many
# Of a GPU's memory: for an element's arrays, and for temporaries where implementations make some.
BYTES_PER_ELEMENT = 48
# Workloads that on the CPU have bfloat16 parameters, too, and one that is much like another there.
HALF_ON_CPU = ("1 x 16M", "ResNet-18")
NOT_ON_CPU = ("1 x 100M",)
CLIPPED = ("1000 x 1024", "1 x 16M")


@dataclass(frozen=True)
class Case:
    """One turn of one implementation."""

    workload: str
    dtype: torch.dtype
    implementation: Implementation
    turn: int

    @property
    def group(self) -> str:
        """What is compared with one another."""
        return f"{self.title}, {str(self.dtype).removeprefix('torch.')}"

    @property
    def title(self) -> str:
        """The workload and what else is done in a step."""
        is_clipped = self.implementation.max_grad_norm is not None
        return f"{self.workload}, clipped" if is_clipped else self.workload


def pytest_generate_tests(metafunc):
    """The cases in the order of their turns."""
    if "case" not in metafunc.fixturenames:
        return
    installed = [i for i in implementations(measure.DEVICE.type) if i.is_installed()]
    every_dtype = measure.ON_GPU or metafunc.config.getoption("--every-dtype")
    turns = range(metafunc.config.getoption("--turns"))
    cases = [
        Case(name, dtype, implementation, turn)
        for name in WORKLOADS
        if measure.ON_GPU or name not in NOT_ON_CPU
        for dtype in (torch.float32, torch.bfloat16)
        if dtype == torch.float32 or every_dtype or name in HALF_ON_CPU
        for turn in turns
        for implementation in rotated(installed, turn)
        if implementation.fused or turn % TURNS_OF_UNFUSED == 0
    ] + [
        Case(name, torch.float32, implementation, turn)
        for name in CLIPPED
        for turn in turns
        for implementation in rotated(clipped(measure.DEVICE.type, MAX_NORM), turn)
    ]
    ids = [f"{case.group}, {case.implementation.name}, turn {case.turn}" for case in cases]
    metafunc.parametrize("case", cases, ids=ids)


def rotated(those: list[T], turn: int) -> list[T]:
    """The same, another one first in each turn."""
    first = turn % len(those)
    return those[first:] + those[:first]


def shapes_of(name: str) -> tuple[list[Shape], int]:
    """A workload as it is measured here, and what its first dimensions were divided by.

    On a GPU it is scaled down to what fits; on the CPU, where 16M elements take some ten
    milliseconds, to 8M if it has more than 16M.
    """
    if not measure.ON_GPU:
        return workload(name, 16_000_000, 8_000_000)
    memory = torch.cuda.get_device_properties(measure.DEVICE).total_memory
    return workload(name, memory // BYTES_PER_ELEMENT, memory // BYTES_PER_ELEMENT)


def make_params(shapes: list[Shape], dtype: torch.dtype) -> list[Parameter]:
    """Parameters with gradients, the same for every implementation."""
    generator = torch.Generator(measure.DEVICE).manual_seed(0)

    def random(shape: Shape) -> torch.Tensor:
        empty = torch.empty(shape, dtype=dtype, device=measure.DEVICE)
        return empty.uniform_(-1, 1, generator=generator)

    params = [Parameter(random(shape)) for shape in shapes]
    for param in params:
        param.grad = random(param.shape)
    return params


def test_step(benchmark, case):
    """A step of one implementation, its gradients where they were in the step before."""
    shapes, divisor = shapes_of(case.workload)
    params = make_params(shapes, case.dtype)
    step = case.implementation.make(params)
    seconds = verify(case.implementation, params, step)
    # As many steps as there is time for, but two.
    count = min(max(int(SECONDS_PER_TURN / seconds), 2), 20)
    info = benchmark.extra_info
    info.update(
        workload=case.title,
        dtype=str(case.dtype).removeprefix("torch."),
        implementation=case.implementation.name,
        tensors=len(shapes),
        elements=elements(shapes),
        divisor=divisor,
        bytes=elements(shapes) * case.implementation.bytes_per_element(case.dtype),
        copy_bandwidth=measure.copy_bandwidth(),
        bandwidth=measure.bandwidth(),
    )
    if case.turn == 0:
        info.update(launches=measure.launches(step), peak_memory=measure.peak_memory(step))
    if measure.ON_GPU:
        info["device_seconds"] = measure.device_seconds(step, count)
    benchmark.group = case.group
    benchmark.pedantic(step, setup=measure.synchronize, rounds=count)


def assert_moves(loop, param, exp_avg):
    """The loop must be what plain_loop.cpp says."""
    before, m, g = param.detach().clone(), exp_avg.clone(), param.grad
    loop()
    torch.testing.assert_close(exp_avg, 0.9 * m + 0.1 * g)
    torch.testing.assert_close(param.detach(), before - 0.001 * exp_avg)


@pytest.mark.skipif(measure.ON_GPU, reason="on a GPU the floor is the copy bandwidth")
@pytest.mark.parametrize("partial", [1 / 8, 0.3])
def test_plain_loop(benchmark, partial):
    """A plain loop over a step's arrays, between steps: what memory allows."""
    shapes, _ = shapes_of("1 x 16M")
    params = make_params(shapes, torch.float32)
    optimizer = FusedPadam(params, **OPTIONS, partial=partial)
    optimizer.step()
    moments = [optimizer.state[params[0]][key] for key in ADAM_MOMENTS]
    loop = plain_loop([params[0].detach(), params[0].grad, *moments])
    assert_moves(loop, params[0], moments[0])

    seconds = []
    info = benchmark.extra_info
    info.update(partial=partial, elements=elements(shapes), step_seconds=seconds)
    benchmark.group = "plain loop"
    benchmark.pedantic(
        loop, setup=lambda: seconds.append(measure.seconds_of(optimizer.step)), rounds=40
    )
