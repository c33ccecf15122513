"""Memory as a launch sees it: what it may touch, and a check of each access.

A launch works on a copy. `write_back` brings it to where the tensors are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

GRANULE = 2  # bytes; no access is smaller
SEVERAL = -1  # threads, in place of one


class AccessError(Exception):
    """An access that a GPU would refuse, or that would make the result depend on chance."""


class Region(NamedTuple):
    """Bytes in the host's memory that a launch may read or write.

    Attributes:
        name: for messages.
        address: where they begin.
        size: how many.
        is_output: whether the launch may write to it.
        is_written: whether it holds something before the launch.
        others_may_read: one thread adds to it; others may read it and not use what they read.
    """

    name: str
    address: int
    size: int
    is_output: bool = False
    is_written: bool = True
    others_may_read: bool = False


class GlobalMemory:
    """All regions of one launch.

    No two threads may write to one byte, nor may one read what another writes.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = sorted((r for r in regions if r.size > 0), key=lambda r: r.address)
        for one, other in zip(self.regions, self.regions[1:], strict=False):
            if one.address + one.size > other.address:
                raise ValueError(f"{one} and {other} overlap")
        self._begins = np.array([r.address for r in self.regions], np.int64)
        self._ends = self._begins + np.array([r.size for r in self.regions], np.int64)
        self._is_output = np.array([r.is_output for r in self.regions], bool)
        self._may_read = np.array([r.others_may_read for r in self.regions], bool)
        # Places keep their addresses' rest by 16, so that what is aligned stays aligned.
        places, end = [], 0
        for region in self.regions:
            place = end + -end % 16 + region.address % 16
            places.append(place)
            end = place + region.size
        self._places = np.array(places, np.int64)
        self._bytes = np.zeros(end + -end % 16, np.uint8)
        count = len(self._bytes) // GRANULE
        self._is_written = np.zeros(count, bool)
        self._writer = np.zeros(count, np.int32)  # threads, counted from 1
        self._reader = np.zeros(count, np.int32)
        for region, place in zip(self.regions, places, strict=True):
            span = slice(place, place + region.size)
            self._bytes[span] = _host_bytes(region)
            self._is_written[place // GRANULE : -(-span.stop // GRANULE)] = region.is_written
        self.num_accesses = 0

    def load(
        self, addresses: np.ndarray, size: int, count: int, threads: np.ndarray
    ) -> list[np.ndarray]:
        """What `count` neighbouring numbers of `size` bytes hold, for each thread.

        Args:
            addresses: int64 [thread].
            size: of a number.
            count: how many each thread reads.
            threads: their numbers in the launch, from 1.
        """
        places, regions = self._places_of(addresses, size * count)
        granules = _granules(places, size * count)
        if not self._is_written[granules].all():
            self._refuse(addresses, ~self._is_written[granules].all(1), "reads what nobody wrote")
        mine = threads[:, None]
        others = ((self._writer[granules] != 0) & (self._writer[granules] != mine)).any(1)
        others &= ~self._may_read[regions]
        if others.any():
            self._refuse(addresses, others, "reads what another thread writes")
        before = self._reader[granules]
        self._reader[granules] = np.where((before == 0) | (before == mine), mine, SEVERAL)
        alone = self._reader[granules] == mine  # else several read it in this instruction
        self._reader[granules[~alone]] = SEVERAL
        numbers = self._bytes.view(f"u{size}")
        return [numbers[places // size + i] for i in range(count)]

    def store(
        self, addresses: np.ndarray, values: Sequence[np.ndarray], threads: np.ndarray
    ) -> None:
        """Writes neighbouring numbers, [thread] each, see `load`."""
        size = values[0].dtype.itemsize
        places, regions = self._places_of(addresses, size * len(values))
        if not self._is_output[regions].all():
            self._refuse(addresses, ~self._is_output[regions], "writes to what is no output")
        granules = _granules(places, size * len(values))
        mine = threads[:, None]
        for other, what in ((self._writer, "writes"), (self._reader, "reads")):
            others = ((other[granules] != 0) & (other[granules] != mine)).any(1)
            if what == "reads":
                others &= ~self._may_read[regions]
            if others.any():
                self._refuse(addresses, others, f"writes to what another thread {what}")
        self._writer[granules] = mine
        self._is_written[granules] = True
        numbers = self._bytes.view(f"u{size}")
        for i, value in enumerate(values):
            numbers[places // size + i] = value
            lost = numbers[places // size + i] != value
            if lost.any():
                self._refuse(addresses, lost, "writes where another thread writes something else")
        lost = (self._writer[granules] != mine).any(1)
        if lost.any():
            self._refuse(addresses, lost, "writes to what another thread writes")

    def write_back(self) -> None:
        """Brings what was written to where the tensors are."""
        for region, place in zip(self.regions, self._places, strict=True):
            if region.is_output:
                _host_bytes(region)[:] = self._bytes[place : place + region.size]

    def _places_of(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        self.num_accesses += len(addresses)
        _check_alignment(addresses, size, self._refuse)
        regions = np.searchsorted(self._begins, addresses, "right") - 1
        outside = (regions < 0) | (addresses + size > self._ends[regions])
        if outside.any():
            self._refuse(addresses, outside, f"touches {size} bytes outside of all tensors")
        return self._places[regions] + (addresses - self._begins[regions]), regions

    def _refuse(self, addresses: np.ndarray, bad: np.ndarray, what: str) -> None:
        thread = int(bad.argmax())
        address = int(addresses[thread])
        place = int(np.searchsorted(self._begins, address, "right")) - 1
        near = "before all regions"
        if place >= 0:
            region = self.regions[place]
            near = f"{address - region.address} bytes into {region.name} of {region.size} bytes"
        raise AccessError(f"{what}, at {near}, in {int(bad.sum())} of {len(bad)} threads")


class SharedMemory:
    """The shared memory of several programs, each with its own.

    Between two barriers no thread may touch what another one writes.
    """

    def __init__(self, num_programs: int, size: int) -> None:
        self._size = size
        self._pitch = size + -size % 16
        self._bytes = np.zeros(num_programs * self._pitch + 16, np.uint8)
        count = len(self._bytes) // GRANULE
        self._writer = np.zeros(count, np.int64)  # threads, counted from 1
        self._written_at = np.full(count, -1, np.int64)  # after how many barriers
        self._reader = np.zeros(count, np.int64)
        self._read_at = np.full(count, -1, np.int64)

    def load(self, addresses: np.ndarray, size: int, count: int, here: Places) -> list[np.ndarray]:
        """See GlobalMemory."""
        places = self._places_of(addresses, size * count, here)
        granules = _granules(places, size * count)
        now, mine = here.barriers[:, None], here.threads[:, None]
        if (self._written_at[granules] < 0).any():
            raise AccessError("reads shared memory that nobody wrote")
        self._check_others(self._writer, self._written_at, granules, here, "reads", "writes")
        is_first = self._read_at[granules] != now
        before = np.where(is_first, mine, self._reader[granules])
        self._reader[granules] = np.where(before == mine, mine, SEVERAL)
        self._reader[granules[self._reader[granules] != mine]] = SEVERAL
        self._read_at[granules] = now
        numbers = self._bytes.view(f"u{size}")
        return [numbers[places // size + i] for i in range(count)]

    def store(self, addresses: np.ndarray, values: Sequence[np.ndarray], here: Places) -> None:
        """See GlobalMemory."""
        size = values[0].dtype.itemsize
        places = self._places_of(addresses, size * len(values), here)
        granules = _granules(places, size * len(values))
        self._check_others(self._writer, self._written_at, granules, here, "writes", "writes")
        self._check_others(self._reader, self._read_at, granules, here, "writes", "reads")
        self._writer[granules] = here.threads[:, None]
        self._written_at[granules] = here.barriers[:, None]
        numbers = self._bytes.view(f"u{size}")
        for i, value in enumerate(values):
            numbers[places // size + i] = value
        # Threads that have the same sum may store it together.
        if any((numbers[places // size + i] != value).any() for i, value in enumerate(values)):
            raise AccessError("writes shared memory where another thread writes something else")

    def _places_of(self, addresses: np.ndarray, size: int, here: Places) -> np.ndarray:
        def refuse(_: np.ndarray, bad: np.ndarray, what: str) -> None:
            raise AccessError(f"{what} in shared memory, at {addresses[bad.argmax()]}")

        _check_alignment(addresses, size, refuse)
        outside = (addresses < 0) | (addresses + size > self._size)
        if outside.any():
            refuse(addresses, outside, f"touches {size} bytes outside of {self._size}")
        return addresses + here.programs * self._pitch

    @staticmethod
    def _check_others(
        others: np.ndarray, at: np.ndarray, granules: np.ndarray, here: Places, mine: str, its: str
    ) -> None:
        same_time = at[granules] == here.barriers[:, None]
        if (same_time & (others[granules] != here.threads[:, None])).any():
            raise AccessError(
                f"{mine} shared memory that another thread {its}, with no barrier between them"
            )


class Places(NamedTuple):
    """Where threads are: int64 [thread] each."""

    programs: np.ndarray
    threads: np.ndarray  # of all programs, counted from 1
    barriers: np.ndarray  # how many the program has passed


def _check_alignment(addresses: np.ndarray, size: int, refuse: object) -> None:
    misaligned = addresses % size != 0
    if misaligned.any():
        refuse(addresses, misaligned, f"is not aligned to its {size} bytes")


def _granules(places: np.ndarray, size: int) -> np.ndarray:
    """Indices [thread, granule] of what an access covers."""
    return places[:, None] // GRANULE + np.arange(max(size // GRANULE, 1))


def _host_bytes(region: Region) -> np.ndarray:
    kind = ctypes.c_uint8 * region.size
    return np.ctypeslib.as_array(kind.from_address(region.address))
