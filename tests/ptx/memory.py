"""Memory as a launch sees it: what it may touch, and a check of each access.

A launch works on a copy. `write_back` brings it to where the tensors are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

GRANULE = 2  # bytes; no access is smaller
SEVERAL = -1  # programs, in place of one


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
    """

    name: str
    address: int
    size: int
    is_output: bool = False
    is_written: bool = True


class GlobalMemory:
    """All regions of one launch.

    No two programs may write to one byte, nor may one read what another has written.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = sorted((r for r in regions if r.size > 0), key=lambda r: r.address)
        for one, other in zip(self.regions, self.regions[1:], strict=False):
            if one.address + one.size > other.address:
                raise ValueError(f"{one} and {other} overlap")
        self._begins = np.array([r.address for r in self.regions], np.int64)
        self._ends = self._begins + np.array([r.size for r in self.regions], np.int64)
        self._is_output = np.array([r.is_output for r in self.regions], bool)
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
        self._writer = np.zeros(count, np.int32)  # programs, counted from 1
        self._reader = np.zeros(count, np.int32)
        for region, place in zip(self.regions, places, strict=True):
            span = slice(place, place + region.size)
            self._bytes[span] = _host_bytes(region)
            self._is_written[place // GRANULE : -(-span.stop // GRANULE)] = region.is_written
        self.num_accesses = 0

    def load(
        self, addresses: np.ndarray, size: int, count: int, programs: np.ndarray
    ) -> list[np.ndarray]:
        """What `count` neighbouring numbers of `size` bytes hold, for each thread.

        Args:
            addresses: int64 [thread].
            size: of a number.
            count: how many each thread reads.
            programs: of each thread, counted from 1.
        """
        places, _ = self._places_of(addresses, size * count)
        granules = _granules(places, size * count)
        if not self._is_written[granules].all():
            self._refuse(addresses, ~self._is_written[granules].all(1), "reads what nobody wrote")
        mine = programs[:, None]
        others = (self._writer[granules] != 0) & (self._writer[granules] != mine)
        if others.any():
            self._refuse(addresses, others.any(1), "reads what another program writes")
        before = self._reader[granules]
        self._reader[granules] = np.where((before == 0) | (before == mine), mine, SEVERAL)
        alone = self._reader[granules] == mine  # else several read it in this instruction
        self._reader[granules[~alone]] = SEVERAL
        numbers = self._bytes.view(f"u{size}")
        return [numbers[places // size + i] for i in range(count)]

    def store(
        self, addresses: np.ndarray, values: Sequence[np.ndarray], programs: np.ndarray
    ) -> None:
        """Writes neighbouring numbers, [thread] each, see `load`."""
        size = values[0].dtype.itemsize
        places, regions = self._places_of(addresses, size * len(values))
        if not self._is_output[regions].all():
            self._refuse(addresses, ~self._is_output[regions], "writes to what is no output")
        granules = _granules(places, size * len(values))
        mine = programs[:, None]
        for other, what in ((self._writer, "writes"), (self._reader, "reads")):
            others = (other[granules] != 0) & (other[granules] != mine)
            if others.any():
                self._refuse(addresses, others.any(1), f"writes to what another program {what}")
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
            self._refuse(addresses, lost, "writes to what another program writes")

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

    Between two barriers no thread may touch what one of another warp writes.
    """

    def __init__(self, num_programs: int, size: int, threads_of_program: int) -> None:
        self._size = size
        self._pitch = size + -size % 16
        self._bytes = np.zeros(num_programs * self._pitch + 16, np.uint8)
        count = len(self._bytes) // GRANULE
        self._warps_of_program = threads_of_program // 32
        self._writer = np.zeros(count, np.int64)  # warp and barrier, in one number; 0 for nobody
        self._reader = np.zeros(count, np.int64)
        self._ever_written = np.zeros(count, bool)

    def load(
        self, addresses: np.ndarray, size: int, count: int, places_of_threads: Places
    ) -> list[np.ndarray]:
        """See GlobalMemory."""
        places = self._places_of(addresses, size * count, places_of_threads)
        granules = _granules(places, size * count)
        if not self._ever_written[granules].all():
            raise AccessError("reads shared memory that nobody wrote")
        self._check_others(self._writer[granules], places_of_threads, "reads", "writes")
        stamps = places_of_threads.stamps(self._warps_of_program)[:, None]
        self._reader[granules] = stamps
        numbers = self._bytes.view(f"u{size}")
        return [numbers[places // size + i] for i in range(count)]

    def store(
        self, addresses: np.ndarray, values: Sequence[np.ndarray], places_of_threads: Places
    ) -> None:
        """See GlobalMemory."""
        size = values[0].dtype.itemsize
        places = self._places_of(addresses, size * len(values), places_of_threads)
        granules = _granules(places, size * len(values))
        self._check_others(self._writer[granules], places_of_threads, "writes", "writes")
        self._check_others(self._reader[granules], places_of_threads, "writes", "reads")
        self._writer[granules] = places_of_threads.stamps(self._warps_of_program)[:, None]
        self._ever_written[granules] = True
        numbers = self._bytes.view(f"u{size}")
        for i, value in enumerate(values):
            numbers[places // size + i] = value

    def _places_of(self, addresses: np.ndarray, size: int, threads: Places) -> np.ndarray:
        def refuse(_: np.ndarray, bad: np.ndarray, what: str) -> None:
            raise AccessError(f"{what} in shared memory, at {addresses[bad.argmax()]}")

        _check_alignment(addresses, size, refuse)
        outside = (addresses < 0) | (addresses + size > self._size)
        if outside.any():
            refuse(addresses, outside, f"touches {size} bytes outside of {self._size}")
        return addresses + threads.programs * self._pitch

    def _check_others(self, stamps: np.ndarray, threads: Places, mine: str, its: str) -> None:
        same_time = stamps // self._warps_of_program == threads.barriers[:, None] + 1
        same_warp = stamps % self._warps_of_program == threads.warps[:, None]
        if (same_time & ~same_warp).any():
            raise AccessError(
                f"{mine} shared memory that another warp {its}, with no barrier between them"
            )


class Places(NamedTuple):
    """Where threads are: int64 [thread] each."""

    programs: np.ndarray
    warps: np.ndarray  # in the program
    barriers: np.ndarray  # how many the program has passed

    def stamps(self, warps_of_program: int) -> np.ndarray:
        """Warp and time in one number, not 0."""
        return (self.barriers + 1) * warps_of_program + self.warps


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
