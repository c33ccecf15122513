"""The rows that are measured first on a GPU, in the order of their worth.

Each is verified before it is timed. Times are medians of single steps, between events on the GPU;
beside them stand the bytes that a step must move, and how many it moves a second.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

from benchmarks.implementations import MAX_NORM, Implementation, clipped, implementations
from benchmarks.storages import PADAM, padam_way
from benchmarks.storages import verify as verify_storages
from benchmarks.verification import verify
from benchmarks.workloads import Shape, elements, llama3_8b, scaled

STEPS, WARM_UP = 20, 3
# Of an element in float32, with room for what implementations that are not fused allocate.
BYTES_PER_ELEMENT = {True: 24, False: 60}


@dataclass(frozen=True)
class Row:
    """One implementation on one list of tensors."""

    name: str
    seconds: float
    measure: Callable[[], dict[str, Any]]


def times_of(step: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Milliseconds of a step: on the device, and of the host until `step` returns."""
    for _ in range(WARM_UP):
        step()
    of_device, of_host = [], []
    for _ in range(STEPS):
        if device.type == "cpu":
            start = time.perf_counter()
            step()
            of_host.append(1e3 * (time.perf_counter() - start))
            of_device.append(of_host[-1])
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        start = time.perf_counter()
        step()
        of_host.append(1e3 * (time.perf_counter() - start))
        end.record()
        end.synchronize()
        of_device.append(begin.elapsed_time(end))
    return {
        "ms": statistics.median(of_device),
        "ms at best": min(of_device),
        "host ms": statistics.median(of_host),
    }


def _measure(
    shapes: list[Shape], dtype: torch.dtype, one: Implementation, device: torch.device
) -> dict[str, Any]:
    gc.collect()
    generator = torch.Generator(device).manual_seed(0)
    params = [
        Parameter(torch.randn(shape, generator=generator, device=device).to(dtype))
        for shape in shapes
    ]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, device=device).to(dtype)
    step = one.make(params)
    verify(one, params, step)
    found = times_of(step, device)
    moved = elements(shapes) * one.bytes_per_element(dtype)
    return {
        "elements": elements(shapes),
        "tensors": len(shapes),
        "bytes": moved,
        "GB/s": moved / found["ms"] / 1e6,
        **found,
    }


def _measure_stored(name: str, numel: int, kernel: str, device: torch.device) -> dict[str, Any]:
    """One of FusedPadam's ways to store."""
    verify_storages(kernel)
    way = padam_way(numel, name, kernel)
    found = times_of(way.optimizer.step, device)
    return {"elements": numel, "state bytes": way.state_bytes(), **found}


def rows(kernels: list[str], device: torch.device, memory: int) -> Iterator[Row]:
    """All of them; lists that do not fit into `memory` bytes are scaled down."""
    by_name = {one.name: one for one in implementations(device.type)}
    fused = [one for one in by_name.values() if one.fused and ", p=" not in one.name]
    general = [one for one in by_name.values() if ", p=" in one.name]
    slow = [one for one in by_name.values() if not one.fused and one.is_installed()]
    lists: dict[str, list[Shape]] = {
        "1 x 100M": [(100_000_000,)],
        "1000 x 1024": [(1024,)] * 1000,
        "1 x 1000M": [(1_000_000_000,)],
        "Llama-3-8B": llama3_8b(),
        "1 x 16M": [(2**24,)],
    }

    def row(title: str, one: Implementation, dtype: torch.dtype = torch.float32) -> Row:
        most = int(0.9 * memory) // BYTES_PER_ELEMENT[one.fused]
        shapes, divisor = lists[title], 1
        if elements(shapes) > most:
            shapes, divisor = scaled(shapes, most)
        kind = str(dtype).removeprefix("torch.")
        size = title if divisor == 1 else f"{title}, 1/{divisor}"
        clipping = ", clipped" if one.max_grad_norm is not None else ""
        # The verification, and allocating, take their time with large lists.
        seconds = 10 + elements(shapes) / (5e7 if one.fused else 1e7)
        return Row(
            f"{size}{clipping}, {kind}: {one.name}",
            seconds,
            lambda: _measure(shapes, dtype, one, device),
        )

    for title in ("1 x 100M", "1000 x 1024", "1 x 1000M", "Llama-3-8B"):
        yield from (row(title, one) for one in fused)
    for title in ("1 x 100M", "1000 x 1024"):
        yield from (row(title, one) for one in clipped(device.type, MAX_NORM))
    yield from (row("1 x 100M", one, torch.bfloat16) for one in fused)
    for name in PADAM:
        for kernel in kernels:
            numel = min(100_000_000, int(0.9 * memory) // 40)
            yield Row(
                f"stored as {name}: FusedPadam, {kernel}",
                15,
                partial(_measure_stored, name, numel, kernel, device),
            )
    yield from (row("1 x 16M", one) for one in fused)
    yield from (row("1 x 100M", one) for one in general)
    yield from (row("1 x 100M", one, torch.float64) for one in fused)
    # Last what takes long.
    yield from (row("1000 x 1024", one) for one in slow)
    yield from (row("1 x 16M", one) for one in slow)
