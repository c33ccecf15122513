"""What pytest-benchmark's clock does not tell: memory's speed, the GPU's own time, launches."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.plain_loop import plain_loop

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type != "cpu"


def synchronize() -> None:
    """Waits for the GPU, if there is one."""
    if ON_GPU:
        torch.cuda.synchronize()


def seconds_of(step: Callable[[], object]) -> float:
    """One step, until its work is done."""
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - start


def device_seconds(step: Callable[[], object], steps: int) -> float:
    """Median time from a step's first work on the GPU to its last, between events.

    The steps follow one another without a wait, as in training. Where the host is slower than the
    GPU, this is the host's time.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(events)) / 1000


@cache
def copy_bandwidth() -> float:
    """Bytes per second of torch's copy from one large array to another, read and written."""
    numel = 2**28 if ON_GPU else 2**25
    source = torch.zeros(numel, dtype=torch.float32, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * numel * source.itemsize / _median_seconds(lambda: target.copy_(source))


@cache
def bandwidth() -> float:
    """Bytes per second that a step could move at best.

    On a GPU those of a copy. On the CPU those of a plain loop that reads five large arrays and
    writes four of them: a copy there has to read its target, too, which nobody counts.
    """
    if ON_GPU:
        return copy_bandwidth()
    arrays = [torch.zeros(2**24, dtype=torch.float32) for _ in range(5)]
    return 9 * arrays[0].nbytes / _median_seconds(plain_loop(arrays))


def _median_seconds(work: Callable[[], object]) -> float:
    return median([seconds_of(work) for _ in range(18)][3:])


class _Count(TorchDispatchMode):
    """Counts operators."""

    operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        return func(*args, **(kwargs or {}))


def launches(step: Callable[[], object]) -> int:
    """Kernels that a step launches on the GPU; on the CPU, operators of PyTorch that it calls."""
    if not ON_GPU:
        with _Count() as count:
            step()
        return count.operators
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        synchronize()
    return sum(
        event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memcpy", "Memset"))
        for event in profiler.events()
    )


def peak_memory(step: Callable[[], object]) -> int | None:
    """Bytes that a step needs beside what there is before it; None where nobody counts them."""
    if not ON_GPU:
        return None
    synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    synchronize()
    return torch.cuda.max_memory_allocated() - before
