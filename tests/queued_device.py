"""A stand-in for a GPU: what is queued is executed later, in any order that CUDA allows.

Streams are queues; the host runs ahead of them. Memory that the host drops may be given out again,
and is spoiled as soon as CUDA's allocators would allow that: pinned memory once the copies out of
it have been made, a device's memory once its stream, and those that were recorded for it, are past
what was queued until then. A graph repeats what was captured, by its addresses.

Kernels are the CUDA kernels' code on the CPU. All else that PyTorch does happens at once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from padam_ext import native, runtime
from padam_ext.backends import cuda
from pretending import replace_cuda_launches

SPOILED = -0x2152411021524111


class OrderError(AssertionError):
    """Work that was executed with other memory than it was meant for."""


class Choices:
    """Which of several things happens next.

    Attributes:
        taken: each choice so far, and of how many.
    """

    def __init__(self, given: list[int] = (), seed: int | None = None) -> None:
        """The choices `given`, then always the first; or random ones."""
        self.taken: list[tuple[int, int]] = []
        self._given = given
        self._random = None if seed is None else np.random.default_rng(seed)

    def choose(self, count: int) -> int:
        """One of `count`."""
        place = len(self.taken)
        if self._random is not None:
            chosen = int(self._random.integers(count))
        else:
            chosen = self._given[place] if place < len(self._given) else 0
        self.taken.append((chosen, count))
        return chosen


def every_order(most: int) -> Iterator[Choices]:
    """Choices for run after run, until all have been made or `most` runs."""
    given: list[int] = []
    for _ in range(most):
        choices = Choices(given)
        yield choices
        taken = choices.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return
        given = [chosen for chosen, _ in taken[:-1]] + [taken[-1][0] + 1]


@dataclass(eq=False)
class Work:
    """Something that is queued."""

    run: Callable[[], None]
    waits_for: Work | None = None
    is_done: bool = False


@dataclass(eq=False)
class Stream:
    """A queue; the names are torch.cuda.Stream's."""

    device: Device
    queue: deque[Work] = field(default_factory=deque)
    last: Work | None = None

    def wait_stream(self, other: Stream) -> None:
        """What is queued here from now on comes after what is queued there until now."""
        if self.device.capturing():
            raise OrderError("a capture waits for work outside of it")
        self.add(Work(lambda: None, waits_for=other.last))

    def add(self, work: Work) -> None:
        """Queues."""
        self.queue.append(work)
        self.last = work


class _Tracked(np.ndarray):
    """An array that tells when the last tensor over it is dropped."""


@dataclass(eq=False)
class Block:
    """Memory of the device, or pinned memory of the host."""

    words: np.ndarray
    stream: Stream | None  # None for pinned memory
    others: list[Stream] = field(default_factory=list)  # recorded for it
    copies: list[Work] = field(default_factory=list)  # out of pinned memory
    is_dropped: bool = False
    is_spoiled: bool = False


class Graph:
    """What was captured."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.works: list[Callable[[], None]] = []

    def replay(self) -> None:
        """Queues all of it on the current stream."""
        for work in self.works:
            self._device.queue(work)


class Device:
    """See the module. `choices` says in which order things happen."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self.streams = [Stream(self)]
        self.current = self.streams[0]
        self._capture_stream = Stream(self)
        self._behind: list[Stream] = []
        self._graph: Graph | None = None
        self._blocks: list[Block] = []
        self.num_executed = 0
        self.kept: list[Any] = []  # what a stream's order keeps valid on a GPU

    @contextlib.contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        """Makes a stream the current one."""
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def capture(self) -> Iterator[Graph]:
        """What is queued meanwhile goes into a graph."""
        self._graph = graph = Graph(self)
        with self.on_stream(self._capture_stream):  # as torch.cuda.graph does
            yield graph
        self._graph = None

    def new_stream(self) -> Stream:
        """One more."""
        self.streams.append(Stream(self))
        return self.streams[-1]

    def queue(self, run: Callable[[], None]) -> Work | None:
        """Queues work on the current stream, or into a capture; then some work is executed."""
        if self._graph is not None:
            self._graph.works.append(run)
            return None
        work = Work(run)
        self.current.add(work)
        while self._ready() and self._choices.choose(2):
            self._execute_one()
        return work

    def synchronize(self) -> None:
        """Executes all."""
        while self._ready():
            self._execute_one()
        assert not any(stream.queue for stream in self.streams)

    def _ready(self) -> list[Stream]:
        def is_ready(stream: Stream) -> bool:
            if not stream.queue:
                return False
            before = stream.queue[0].waits_for
            return before is None or before.is_done

        self._behind = [stream for stream in self._behind if stream.queue]
        return [stream for stream in (*self.streams, *self._behind) if is_ready(stream)]

    def _execute_one(self) -> None:
        ready = self._ready()
        place = self._choices.choose(len(ready)) if len(ready) > 1 else 0
        work = ready[place].queue.popleft()
        work.run()
        work.is_done = True
        self.num_executed += 1

    # What stands in for padam_ext.runtime.

    def capturing(self) -> bool:
        """See runtime.py."""
        return self._graph is not None

    def current_stream(self, device: torch.device) -> Stream:
        """See runtime.py."""
        return self.current

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """See runtime.py."""
        block = self.block_of(tensor.data_ptr())
        if block is not None:
            block.others.append(stream)

    def empty_on(self, device: torch.device, words: int) -> torch.Tensor:
        """See runtime.py."""
        return self._tensor_of(Block(np.full(words, SPOILED, np.int64), self.current))

    def pinned_like(self, words: torch.Tensor, device: torch.device) -> torch.Tensor:
        """See runtime.py."""
        if self.capturing():
            raise OrderError("pinned memory is allocated during a capture")
        for block in self._blocks:
            is_free = block.stream is None and block.is_dropped and len(block.words) == len(words)
            if is_free and all(work.is_done for work in block.copies):
                self._blocks.remove(block)
                return self._tensor_of(Block(block.words, None))
        return self._tensor_of(Block(np.full(len(words), SPOILED, np.int64), None))

    def pinned_copy(self, words: torch.Tensor, device: torch.device) -> torch.Tensor:
        """See runtime.py."""
        return self.pinned_like(words, device).copy_(words)

    def copy_later(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """See runtime.py."""
        target, begin = self.block_of(to.data_ptr()), _place(self, to)
        origin, first = self.block_of(source.data_ptr()), _place(self, source)
        count = source.numel()
        # Pageable memory is copied at once, but by a graph each time it runs.
        pageable = None
        if origin is None:
            pageable = source.numpy() if self.capturing() else source.numpy().copy()

        def run() -> None:
            if target.is_spoiled:
                raise OrderError("a copy to memory of the device that was given back")
            words = origin.words[first : first + count] if pageable is None else pageable
            target.words[begin : begin + count] = words

        work = self.queue(run)
        if origin is not None and work is not None:  # a capture records no event for the host
            origin.copies.append(work)

    def block_of(self, address: int) -> Block | None:
        """The memory at an address."""
        for block in reversed(self._blocks):
            begin = block.words.ctypes.data
            if begin <= address < begin + block.words.nbytes and not block.is_dropped:
                return block
        return None

    def _tensor_of(self, block: Block) -> torch.Tensor:
        self._blocks.append(block)
        tracked = block.words.view(_Tracked)
        weakref.finalize(tracked, self._drop, block)
        return torch.from_numpy(tracked)

    def _drop(self, block: Block) -> None:
        block.is_dropped = True
        if block.stream is None:
            return

        def spoil() -> None:
            block.is_spoiled = True
            block.words[:] = SPOILED

        # Others may be given the memory once those streams are so far; these wait for nothing.
        behind = Stream(self)
        self._behind.append(behind)
        for stream in (block.stream, *block.others):
            behind.add(Work(lambda: None, waits_for=stream.last))
        behind.add(Work(spoil))

    def launch(self, table: Any, run: Callable[[], None]) -> None:
        """Queues a kernel that reads a table: it must find what the host wrote there for it."""
        block = self.block_of(table.addresses.data_ptr())
        sections = [
            (name, _place(self, getattr(table, name)), table._section(name).numpy().copy())
            for name in ("addresses", "rows", "limits", "numels", "row_sources")
        ]

        def check_and_run() -> None:
            if block.is_spoiled:
                raise OrderError("a kernel reads a table whose memory was given back")
            for name, begin, meant in sections:
                if not np.array_equal(block.words[begin : begin + len(meant)], meant):
                    raise OrderError(f"a kernel finds other {name} than the step meant")
            run()

        self.queue(check_and_run)


def _place(device: Device, tensor: torch.Tensor) -> int:
    """In words, where a tensor begins in its block."""
    block = device.block_of(tensor.data_ptr())
    return 0 if block is None else (tensor.data_ptr() - block.words.ctypes.data) // 8


def use(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the cuda backend use a device of this kind."""
    for name in (
        "capturing", "copy_later", "current_stream", "empty_on", "pinned_copy", "pinned_like",
        "record_stream",
    ):  # fmt: skip
        monkeypatch.setattr(runtime, name, getattr(device, name))

    def norm(table: Any) -> None:
        native_table = cuda.native_table(table)
        sums = device.block_of(table.partial_sums.data_ptr())

        def run() -> None:
            if sums.is_spoiled:
                raise OrderError("a kernel writes sums to memory that was given back")
            native.module.sum_of_squares_on_host(native_table)

        device.launch(table, run)

    def prepare(table: Any, inputs: Any) -> None:
        native_table, native_inputs = cuda.native_table(table), cuda.native_inputs(inputs)
        device.launch(table, lambda: native.module.prepare_on_host(native_table, native_inputs))
        device.kept.append(inputs._replace(sums=None))  # those belong to the table

    def step(table: Any, root: int) -> None:
        native_table = cuda.native_table(table)
        device.launch(table, lambda: native.module.step_on_host(native_table))

    replace_cuda_launches(monkeypatch, norm, prepare, step)
