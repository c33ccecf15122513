"""The table on the device: chunks, what a step copies, streams. The device is the CPU or a fake."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from padam_ext import runtime
from padam_ext.backends.device_table import DeviceTable
from padam_ext.buckets import address_of, make_buckets, make_record
from padam_ext.constants import Constants, RowOptions
from padam_ext.gather import StepInputs
from padam_ext.launch_table import LaunchTable
from padam_ext.options import DEFAULTS
from padam_ext.slots import SLOTS, Storage
from padam_ext.state import fit_state
from padam_ext.step_counts import StepCounts

OPTIONS = RowOptions(0.1, 0.9, 0.999, 1e-8, 0.0, 0.125, "none", False, False)
CPU = torch.device("cpu")
BLOCK = 8


class Rig:
    """A bucket of tensors, its launch table and that table's copy on a device."""

    def __init__(self, sizes, processors=1, dtype=torch.float32):
        self.params = [torch.zeros(size, dtype=dtype) for size in sizes]
        self.state = {param: {} for param in self.params}
        self.move_grads()
        records = []
        for param, grad in zip(self.params, self.grads, strict=True):
            fit_state(self.state[param], param, DEFAULTS, 0, may_replace=True)
            records.append(
                make_record(param, grad, self.state[param], Storage.of(DEFAULTS), owns_state=True)
            )
        [self.bucket] = make_buckets(records, [0] * len(sizes))
        self.options = OPTIONS
        self.limits = (torch.inf, 0.0)
        self.counts = StepCounts(self.bucket, on_device=False)
        self.table = LaunchTable(self.bucket)
        self.device_table = DeviceTable(self.table, self.counts, CPU, BLOCK, processors)

    def move_grads(self):
        self.grads = [torch.zeros_like(param) for param in self.params]

    def inputs(self):
        return StepInputs(self.params, self.grads, bytes(8 * len(self.params)), self.state)

    def step(self):
        inputs = self.inputs()
        self.table.bind(self.bucket.bind(inputs))
        self.table.rows.set({0: self.options}, self.counts.add(inputs))
        self.device_table.update(self.table, self.limits, prepared=False)
        self.device_table.copy_changed()

    def assert_up_to_date(self):
        on_device, table = self.device_table, self.table
        assert on_device.addresses.tolist() == table.addresses.tolist()
        assert on_device.numels.tolist() == table.numels.tolist()
        assert on_device.rows.tolist() == table.rows.of_tensors.tolist()
        expected = torch.tensor(table.rows.constants.tolist(), dtype=torch.float64)
        assert torch.equal(on_device.constants[: len(expected)], expected)
        assert on_device.control.tolist() == [1.0, 0.0]
        assert on_device.limits.tolist() == list(self.limits)


@pytest.fixture
def copies(monkeypatch):
    """Lengths of the copies to the device, in 8-byte words."""
    lengths = []
    original = torch.Tensor.copy_

    def counting(self, source, non_blocking=False):
        if non_blocking:
            lengths.append(len(source))
        return original(self, source, non_blocking=non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", counting)
    return lengths


@given(st.lists(st.integers(0, 200), min_size=1, max_size=30), st.integers(1, 4))
def test_chunks_hold_every_block_of_every_tensor_once(sizes, processors):
    rig = Rig(sizes, processors)
    rig.step()
    table = rig.device_table
    blocks = []
    for tensor, first in zip(
        table.chunk_tensors.tolist(), table.chunk_first_blocks.tolist(), strict=True
    ):
        last = min(first + table.blocks_per_chunk, -(-sizes[tensor] // BLOCK))
        assert first < last
        blocks += [(tensor, block) for block in range(first, last)]
    assert blocks == [(t, b) for t, size in enumerate(sizes) for b in range(-(-size // BLOCK))]
    assert table.num_chunks == len(table.chunk_tensors)


def test_few_elements_are_spread_over_many_programs_and_many_over_longer_chunks():
    assert Rig([40 * BLOCK], processors=4).device_table.blocks_per_chunk == 1
    assert Rig([10_000 * BLOCK], processors=4).device_table.blocks_per_chunk == 32
    assert Rig([640 * BLOCK], processors=4).device_table.blocks_per_chunk == 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sections_begin_at_multiples_of_16_bytes(dtype):
    table = Rig([3, 5, 1], dtype=dtype).device_table
    for name in (
        "control", "limits", "prepared_control", "addresses", "counters", "numels", "rows",
        "constants", "row_sources", "chunk_tensors", "chunk_first_blocks",
    ):  # fmt: skip
        assert getattr(table, name).data_ptr() % 16 == table.constants.data_ptr() % 16, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_table_arrives(dtype):
    rig = Rig([3, 0, 17], dtype=dtype)
    rig.step()
    rig.assert_up_to_date()


def test_the_default_device_does_not_matter():
    rig = Rig([3, 0, 17])
    with torch.device("meta"):
        table = LaunchTable(rig.bucket)
        rig.table, rig.device_table = table, DeviceTable(table, rig.counts, CPU, BLOCK, 1)
        rig.step()
    rig.assert_up_to_date()
    assert rig.device_table.chunk_tensors.tolist() == [0, 2, 2, 2]


def test_the_steady_state_copies_nothing(copies):
    rig = Rig([3, 17])
    for _ in range(5):
        rig.step()
    assert len(copies) == 1


def test_gradients_that_move_are_copied_and_nothing_else(copies):
    rig = Rig([3] * 100)
    rig.step()
    for _ in range(3):
        old, copies[:] = rig.grads, []
        rig.move_grads()
        rig.step()
        assert len(copies) == 1
        assert copies[0] <= 100
        rig.assert_up_to_date()
        del old
    copies.clear()
    rig.grads[41] = torch.zeros(3)
    rig.step()
    assert copies == [1]
    rig.assert_up_to_date()


def test_an_option_that_changes_is_one_short_copy(copies):
    rig = Rig([3] * 100)
    rig.step()
    copies.clear()
    rig.options = OPTIONS._replace(lr=0.01)
    rig.step()
    assert copies == [1]
    rig.assert_up_to_date()


def test_options_and_gradients_that_change_together_are_one_copy(copies):
    rig = Rig([3] * 10)
    rig.step()
    copies.clear()
    old = rig.grads
    rig.move_grads()
    rig.options = OPTIONS._replace(lr=0.01)
    rig.step()
    assert len(copies) == 1
    rig.assert_up_to_date()
    del old


def test_counts_that_differ_give_rows_of_their_own():
    rig = Rig([3, 5, 7])
    rig.options = OPTIONS._replace(bias_correction="adam")
    rig.step()
    rig.assert_up_to_date()
    rig.state[rig.params[1]]["step"].fill_(8.0)
    rig.step()
    rig.assert_up_to_date()
    assert rig.device_table.rows.tolist() == [0, 1, 0]
    assert rig.device_table.constants[len(Constants._fields)] != rig.device_table.constants[0]


def test_a_launch_keeps_its_root_in_the_steady_state():
    rig = Rig([3, 5])
    roots = []
    for _ in range(3):
        rig.step()
        roots.append(rig.table.rows.root)
    assert roots == [3, 3, 3]


def test_another_stream_waits_for_the_one_before(monkeypatch):
    """What was launched there may still read the table."""
    events = []

    def stream(name):
        return SimpleNamespace(
            name=name, wait_stream=lambda other: events.append((name, other.name))
        )

    main, side = stream("main"), stream("side")
    current = main
    monkeypatch.setattr(runtime, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, s: events.append(s.name))
    rig = Rig([3])
    rig.step()
    assert events == []
    current = side
    rig.step()
    rig.step()
    assert events == [("side", "main"), "side"]
    current = main
    rig.step()
    assert events[2:] == [("main", "side"), "main"]


def test_slots_lie_as_kernels_expect_them():
    rig = Rig([3, 5])
    rig.step()
    matrix = rig.device_table.addresses.view(len(SLOTS), 2)
    columns = (
        rig.params,
        rig.grads,
        *([rig.state[param].get(name) for param in rig.params] for name in SLOTS[2:]),
    )
    for row, column in zip(matrix.tolist(), columns, strict=True):
        assert row == [0 if tensor is None else tensor.data_ptr() for tensor in column]


def test_addresses_that_exceed_int64_keep_their_bits(monkeypatch):
    """Some devices map their memory into the upper half of the address space."""
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: 0xFF00FFFFFFE00000)
    assert address_of(torch.zeros(3)) == 0xFF00FFFFFFE00000 - 2**64
