"""The table on the device: chunks, what a step copies, streams. The device is the CPU or a fake."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from padam_ext import device_table
from padam_ext.constants import NO_CONTROL
from padam_ext.device_table import DeviceTable
from padam_ext.gather import Live
from padam_ext.grouping import Bucket
from padam_ext.hyperparameters import Hyperparameters
from padam_ext.launch_table import SLOTS, LaunchTable

OPTIONS = Hyperparameters(0.1, 0.9, 0.999, 1e-8, 0.0, 0.125, True, "none", False, False)
CPU = torch.device("cpu")
BLOCK = 8


class Rig:
    """A bucket of tensors, its launch table and that table's copy on a device."""

    def __init__(self, sizes, processors=1, dtype=torch.float32):
        def column():
            return [torch.zeros(size, dtype=dtype) for size in sizes]

        count = len(sizes)
        self.bucket = Bucket(CPU, dtype, dtype, list(range(count)), [0] * count, column())
        self.bucket.exp_avgs, self.bucket.exp_avg_sqs = column(), column()
        self.bucket.max_exp_avg_sqs = column()
        self.bucket.steps = [torch.tensor(0.0) for _ in sizes]
        self.options = [OPTIONS]
        self.control = NO_CONTROL
        self.move_grads()
        self.table = LaunchTable(self.bucket)
        self.device_table = DeviceTable(self.table, CPU, dtype, BLOCK, processors)

    def move_grads(self):
        self.grads = [torch.zeros_like(param) for param in self.bucket.params]

    def step(self):
        live = Live(self.bucket.params, self.grads, self.bucket.group_indices)
        self.table.take_grads(self.bucket, live)
        self.table.update(self.bucket, self.options, self.control)
        self.device_table.update(self.table)

    def assert_up_to_date(self):
        on_device, table = self.device_table, self.table
        assert on_device.addresses.tolist() == table.addresses.tolist()
        assert on_device.numels.tolist() == table.numels.tolist()
        assert on_device.rows.tolist() == table.rows.of_tensors.tolist()
        constants = torch.tensor(table.rows.constants.tolist(), dtype=torch.float64)
        expected = constants.to(on_device.constants.dtype)
        assert torch.equal(on_device.constants[: len(expected)], expected)


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
    for name in ("addresses", "numels", "rows", "constants", "chunk_tensors", "chunk_first_blocks"):
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
        rig.table, rig.device_table = table, DeviceTable(table, CPU, torch.float32, BLOCK, 1)
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
    rig.options = [OPTIONS._replace(lr=0.01)]
    rig.step()
    assert copies == [1]
    rig.assert_up_to_date()


def test_options_and_gradients_that_change_together_are_one_copy(copies):
    rig = Rig([3] * 10)
    rig.step()
    copies.clear()
    old = rig.grads
    rig.move_grads()
    rig.options = [OPTIONS._replace(lr=0.01)]
    rig.step()
    assert len(copies) == 1
    rig.assert_up_to_date()
    del old


def test_counts_that_differ_give_rows_of_their_own():
    rig = Rig([3, 5, 7])
    rig.options = [OPTIONS._replace(bias_correction="adam")]
    rig.step()
    rig.assert_up_to_date()
    rig.bucket.steps[1].fill_(8.0)
    rig.step()
    rig.assert_up_to_date()
    assert rig.device_table.rows.tolist() == [0, 1, 0]
    assert rig.device_table.constants[17] != rig.device_table.constants[0]


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
    monkeypatch.setattr(device_table, "_current_stream", lambda device: current)
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
        rig.bucket.params,
        rig.grads,
        rig.bucket.exp_avgs,
        rig.bucket.exp_avg_sqs,
        rig.bucket.max_exp_avg_sqs,
    )
    for row, column in zip(matrix.tolist(), columns, strict=True):
        assert row == [tensor.data_ptr() for tensor in column]


def test_addresses_that_exceed_int64_keep_their_bits(monkeypatch):
    """Some devices map their memory into the upper half of the address space."""
    rig = Rig([3])
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: 0xFF00FFFFFFE00000)
    assert set(LaunchTable(rig.bucket).addresses) == {0, 0xFF00FFFFFFE00000 - 2**64}
