"""A launch table in a device's memory, kept up to date by one asynchronous copy of what changed.

The host never knows what the prepare kernel writes on the device: fields of rows that only it can
fill in are NaN on the host, and the control that it writes has a section of its own.

All sections lie in one buffer, those that change from step to step first and side by side. A copy
starts from pinned memory that torch's host allocator hands out, and does not hand out again before
the copy has been made. It waits for nothing, and only the kernel after it waits for it.

A CUDA graph repeats the copy that was captured, whatever has been written to the table since. So
that one is of the whole table, from memory of its own that is never written to again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from padam_ext import runtime
from padam_ext.constants import Constants
from padam_ext.launch_table import LaunchTable
from padam_ext.rows import SOURCE_WORDS
from padam_ext.slots import SLOTS
from padam_ext.step_counts import StepCounts

# Programs for each multiprocessor: enough to even out, few enough to look the table up seldom.
_PROGRAMS_PER_PROCESSOR = 16
_MOST_BLOCKS_PER_CHUNK = 32


class DeviceTable:
    """The sections that kernels take, as tensors on the device.

    Attributes:
        signature: dtypes by slot, and of the arithmetic.
        control: float64 [2], gradient factor and skip, as this step's kernel is to read them.
        limits: float64 [2], max_grad_norm (infinite for none) and skip_nonfinite (0 or 1).
        prepared_control: float64 [2], where the prepare kernel writes control.
        addresses: int64 [slot * tensor], see launch_table.py.
        counters: int64 [tensor], addresses of step counters on the device.
        rows: int64 [tensor].
        constants: float64 [row * field].
        row_sources: int64 words [row * field], see constants.py's RowSource.
        numels: int64 [tensor].
        salts: int64 [tensor], of random numbers.
        chunk_tensors: int64 [chunk], index of the chunk's tensor.
        chunk_first_blocks: int64 [chunk], index of the chunk's first block in its tensor.
        partial_sums: float64 [chunk], once a norm was asked for.
        num_chunks: programs of a launch.
        blocks_per_chunk: blocks in each chunk, but for a tensor's last.
        num_late_rows: how many rows the prepare kernel has to complete.
        counts_on_device: whether the prepare kernel has to count.
    """

    def __init__(
        self,
        table: LaunchTable,
        counts: StepCounts,
        device: torch.device,
        block: int,
        processors: int,
    ) -> None:
        """Cuts tensors into chunks and copies everything that stays as it is.

        Args:
            table: the table on the host.
            counts: the step counters of its tensors.
            device: where to.
            block: elements that a program steps at a time.
            processors: multiprocessors of the device.
        """
        # Whatever torch's default device is: these stay on the host.
        numels = torch.tensor(list(table.numels), dtype=torch.int64, device="cpu")
        blocks = (numels + block - 1) // block
        wanted = int(blocks.sum()) // (_PROGRAMS_PER_PROCESSOR * processors)
        self.signature = table.signature
        self.blocks_per_chunk = min(max(wanted, 1), _MOST_BLOCKS_PER_CHUNK)
        chunk_tensors, chunk_numbers = _chunks(blocks, self.blocks_per_chunk)
        self.num_chunks = len(chunk_tensors)
        self.num_late_rows = 0
        self.counts_on_device = counts.on_device

        count = len(numels)
        lengths = {
            "control": 2,
            "limits": 2,
            "prepared_control": 2,
            "addresses": len(SLOTS) * count,
            "counters": count,
            "rows": count,
            # Room for a row for each tensor, in case all step counts differ.
            "constants": count * len(Constants._fields),
            "row_sources": count * SOURCE_WORDS,
            "numels": count,
            "salts": count,
            "chunk_tensors": self.num_chunks,
            "chunk_first_blocks": self.num_chunks,
        }
        spans = dict(zip(lengths, _spans(lengths.values()), strict=True))
        words = max(end for _, end in spans.values())
        self._host = torch.zeros(words, dtype=torch.int64, device="cpu")
        self._device = runtime.empty_on(device, words)
        self._stream = runtime.current_stream(device)
        self._spans = spans

        self._section("numels").copy_(numels)
        self._section("salts").copy_(
            torch.tensor(list(table.salts), dtype=torch.int64, device="cpu")
        )
        self._section("chunk_tensors").copy_(chunk_tensors)
        self._section("chunk_first_blocks").copy_(chunk_numbers * self.blocks_per_chunk)
        self._known: dict[str, bytes] = {}
        self._changed = (0, words)
        self._spare: Tensor | None = None  # pinned memory for the next capture
        self._captured: list[Tensor] = []  # that of each capture so far, the newest last
        self._set("control", array("d", [1.0, 0.0]))
        if counts.on_device:
            self._set("counters", counts.addresses)

        def on_device(name: str, dtype: torch.dtype = torch.int64) -> Tensor:
            return self._device[slice(*spans[name])].view(dtype)

        self._host_control = on_device("control", torch.float64)
        self.prepared_control = on_device("prepared_control", torch.float64)
        self.control = self._host_control
        self.limits = on_device("limits", torch.float64)
        self.addresses = on_device("addresses")
        self.counters = on_device("counters")
        self.rows = on_device("rows")
        self.constants = on_device("constants", torch.float64)
        self.row_sources = on_device("row_sources")
        self.numels = on_device("numels")
        self.salts = on_device("salts")
        self.chunk_tensors = on_device("chunk_tensors")
        self.chunk_first_blocks = on_device("chunk_first_blocks")
        self.partial_sums: Tensor | None = None

    def prepare_capture(self) -> None:
        """Allocates pinned memory for a capture, which is not possible during one."""
        if self._spare is None:
            self._spare = runtime.pinned_like(self._host, self._device.device)

    def begin_step(self) -> None:
        """Must be called first in each step.

        Raises:
            RuntimeError: a capture for which there is no memory.
        """
        if not runtime.capturing():
            if self._captured:
                self.prepare_capture()
                # A graph may have been replayed and brought its own table.
                self._mark(0, len(self._host))
            return
        if self._spare is None:
            raise RuntimeError(
                "a second step of FusedPadam is being captured into a CUDA graph: between two "
                "captured steps, make one outside of a capture"
            )
        self._captured.append(self._spare)
        self._spare = None

    def make_partial_sums(self) -> Tensor:
        """Room for one sum for each chunk, for the kernel of the norm."""
        if self.partial_sums is None:
            words = runtime.empty_on(self._device.device, max(self.num_chunks, 1))
            self.partial_sums = words.zero_().view(torch.float64)
        return self.partial_sums

    def update_addresses(self, table: LaunchTable) -> None:
        """Brings what the kernel of the norm reads up to date, in the current stream's order."""
        self._follow_stream()
        self._set("addresses", table.addresses)

    def update(self, table: LaunchTable, limits: tuple[float, float], *, prepared: bool) -> None:
        """Brings the table up to date, in the order of the current stream.

        Args:
            table: the table on the host.
            limits: see the attribute.
            prepared: whether the prepare kernel runs before the step's.
        """
        self.update_addresses(table)
        rows = table.rows
        self.num_late_rows = rows.num_late
        self.control = self.prepared_control if prepared else self._host_control
        self._set("limits", array("d", limits))
        self._set("rows", rows.of_tensors)
        self._set("constants", rows.constants)
        if rows.num_late:
            self._set("row_sources", rows.sources)

    def copy_changed(self) -> None:
        """Puts the copy of what has changed into the current stream."""
        if runtime.capturing():
            runtime.copy_later(self._device, self._captured[-1].copy_(self._host))
            return
        begin, end = self._changed
        if begin == end:
            return
        changed = runtime.pinned_copy(self._host[begin:end], self._device.device)
        runtime.copy_later(self._device[begin:end], changed)
        self._changed = (0, 0)

    def _mark(self, begin: int, end: int) -> None:
        if self._changed != (0, 0):
            begin, end = min(begin, self._changed[0]), max(end, self._changed[1])
        self._changed = (begin, end)

    def _section(self, name: str) -> Tensor:
        return self._host[slice(*self._spans[name])]

    def _set(self, name: str, values: array[int] | array[float]) -> None:
        new = values.tobytes()
        if new == self._known.get(name):
            return
        # Compared as words, so that NaN is the same as NaN.
        source = torch.frombuffer(bytearray(new), dtype=torch.int64)
        section = self._section(name)[: len(source)]
        differs = (section != source).nonzero()
        if len(differs) > 0:
            section.copy_(source)
            start = self._spans[name][0]
            self._mark(start + int(differs[0]), start + int(differs[-1]) + 1)
        self._known[name] = new  # last: what failed before is done again

    def _follow_stream(self) -> None:
        if runtime.capturing():  # a graph must not wait for work outside of it
            return
        stream = runtime.current_stream(self._device.device)
        if stream is not None and self._stream is not None and stream != self._stream:
            # What was launched there may still read the table that this step is about to change.
            stream.wait_stream(self._stream)
            runtime.record_stream(self._device, stream)
            if self.partial_sums is not None:
                runtime.record_stream(self.partial_sums, stream)
            self._stream = stream


def _chunks(blocks: Tensor, blocks_per_chunk: int) -> tuple[Tensor, Tensor]:
    """For each chunk its tensor and its number within that, given the blocks of each tensor."""
    counts = (blocks + blocks_per_chunk - 1) // blocks_per_chunk
    tensors = torch.repeat_interleave(torch.arange(len(blocks), device="cpu"), counts)
    firsts = counts.cumsum(0) - counts
    return tensors, torch.arange(len(tensors), device="cpu") - firsts[tensors]


def _spans(lengths: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Places for sections in one buffer, each at a multiple of 16 bytes."""
    begin = 0
    for length in lengths:
        yield begin, begin + length
        begin += length + length % 2
