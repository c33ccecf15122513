"""The kernel that works out, before a step, what only the device knows: held against its rules.

Triton's runs in its interpreter (`make test-interpret`), the CUDA code on the CPU.
"""

import math
import random
import struct
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from cases import ON_CPU
from checking import by_slot
from padam_ext.backends import cuda
from padam_ext.slots import Signature
from pretending import use_variant

FIELDS = 17
# Fields of a row that the kernel reads, then those that it writes.
BETA1, BETA2 = 1, 3
STEP_SIZE, COUPLED_DECAY, DECOUPLED_DECAY, INVERSE_CORRECTION, STEP = 0, 7, 8, 9, 16
BIAS_CORRECTIONS = {"none": 0, "authors": 1, "adam": 2}
INF, NAN = math.inf, math.nan


def prepare_by_triton(table, inputs):
    from padam_ext.kernels import prepare_step

    prepare_step.launch(table, inputs)


pytestmark = [pytest.mark.sanitize, pytest.mark.ptx_variants]


@pytest.fixture(params=ON_CPU)
def prepare(request, monkeypatch):
    name = use_variant(request.param, monkeypatch)
    return prepare_by_triton if name == "triton" else cuda._launch_prepare


def one_element(value, dtype):
    """A tensor, or none."""
    return None if value is None else torch.tensor([value], dtype=dtype)


class Inputs:
    """What the kernel takes beside a table."""

    def __init__(
        self, sums=None, grad_scale=None, found_inf=None, norm=False, skipped=None,
        dtype=torch.float32,
    ):  # fmt: skip
        self.sums = None if sums is None else torch.tensor(sums, dtype=torch.float64)
        self.grad_scale = one_element(grad_scale, dtype)
        self.found_inf = one_element(found_inf, dtype)
        self.norm = one_element(-1.0 if norm else None, dtype)
        self.skipped = one_element(skipped, torch.int64)


@dataclass
class Row:
    """Where a row comes from; lr and weight_decay may be tensors on the device."""

    lr: float | torch.Tensor = 0.1
    weight_decay: float | torch.Tensor = 0.0
    bias_correction: str = "none"
    coupled: float = 1.0
    decoupled: float = 0.0
    maximum_scale: float = 1.0
    step: float = -1.0
    betas: tuple[float, float] = (0.9, 0.999)

    def words(self):
        return [
            *number_words(self.lr),
            *number_words(self.weight_decay),
            BIAS_CORRECTIONS[self.bias_correction],
            bits(self.coupled),
            bits(self.decoupled),
            bits(self.maximum_scale),
            bits(self.step),
        ]


def number_words(value):
    """Three words: a number, or the address of one and the dtype there."""
    if isinstance(value, torch.Tensor):
        return [bits(NAN), value.data_ptr(), int(value.dtype == torch.float64)]
    return [bits(value), 0, 0]


def bits(value):
    return struct.unpack("q", struct.pack("d", value))[0]


class Table:
    """What the kernel reads and writes of a table."""

    def __init__(
        self, counts=(0.0,), rows=(), max_grad_norm=INF, skip_nonfinite=0.0, on_device=True
    ):
        self.sources = rows  # keep the tensors that they point to
        # With gaps, as between the counters of parameters.
        self.memory = torch.full((7 * len(counts),), -1.0)
        self.memory[::7] = torch.tensor(counts)
        # One row more, which has to stay.
        constants = np.random.default_rng(0).standard_normal((len(rows) + 1, FIELDS))
        for row, source in zip(constants[:-1], rows, strict=True):
            row[[BETA1, BETA2]] = source.betas
        words = [word for row in rows for word in row.words()]

        self.addresses = torch.zeros(5 * len(counts), dtype=torch.int64)
        self.numels = torch.ones(len(counts), dtype=torch.int64)
        self.constants = torch.from_numpy(constants.reshape(-1))
        self.limits = torch.tensor([max_grad_norm, skip_nonfinite], dtype=torch.float64)
        self.control_and_more = torch.full((4,), -7.0, dtype=torch.float64)
        self.prepared_control = self.control_and_more[1:3]
        self.row_sources = torch.tensor(words, dtype=torch.int64)
        addresses = [self.memory.data_ptr() + 28 * i for i in range(len(counts))]
        self.counters = torch.tensor(addresses, dtype=torch.int64)
        self.num_late_rows = len(rows)
        self.counts_on_device = on_device
        # What the native table has beside.
        self.signature = Signature(tuple(by_slot([torch.float32] * 5, None)), torch.float32)
        self.salts = self.rows = self.chunk_tensors = self.chunk_first_blocks = self.numels
        self.control = self.prepared_control
        self.num_chunks, self.blocks_per_chunk, self.partial_sums = 0, 1, None

    @property
    def counts(self):
        return self.memory[::7].tolist()


def expected_control(table, inputs):
    """The norm, the factor of gradients, and whether to skip."""
    max_grad_norm, skip_nonfinite = table.limits.tolist()
    total = 0.0 if inputs.sums is None else math.fsum(inputs.sums.tolist())
    norm = math.sqrt(total) if total >= 0 else NAN
    factor = 1.0
    if inputs.grad_scale is not None:
        norm /= inputs.grad_scale.item()
        factor /= inputs.grad_scale.item()
    if inputs.sums is not None and max_grad_norm < INF:
        clip = max_grad_norm / (norm + 1e-6)
        factor *= 1.0 if clip > 1 else clip
    skip = inputs.found_inf is not None and inputs.found_inf.item() != 0
    if skip_nonfinite and inputs.sums is not None and not math.isfinite(norm):
        skip = True
    return norm, factor, float(skip)


def expected_row(row, source, count):
    """A row that the kernel has completed."""
    row = row.copy()
    lr, weight_decay = float(source.lr), float(source.weight_decay)
    step = count if source.step == -1 else source.step
    first, second = (one_minus_power(beta, step) for beta in source.betas)
    c, r = {
        "none": (1.0, 1.0),
        "authors": (math.sqrt(second) / first, 1.0),
        "adam": (1.0 / first, math.sqrt(second)),
    }[source.bias_correction]
    row[STEP_SIZE] = lr * c
    # A factor of zero is one whose option plays no part, whatever its value.
    row[COUPLED_DECAY] = source.coupled * weight_decay if source.coupled else 0.0
    row[DECOUPLED_DECAY] = source.decoupled * lr * weight_decay if source.decoupled else 0.0
    row[INVERSE_CORRECTION] = source.maximum_scale / r
    row[STEP] = step
    return row


def one_minus_power(beta, step):
    return 1.0 if beta == 0 else -math.expm1(step * math.log(beta))


def run_and_check(prepare, table, inputs):
    """Everything that may change is as the rules have it; nothing else has changed."""
    counts, skipped = table.counts, inputs.skipped
    skipped = None if skipped is None else skipped.item()
    constants = table.constants.reshape(-1, FIELDS).numpy().copy()
    memory = table.memory.clone()
    read_only = (table.limits, table.row_sources, table.counters)
    before = [tensor.clone() for tensor in read_only]
    norm, factor, skip = expected_control(table, inputs)

    prepare(table, inputs)

    control = [-7.0, factor, skip, -7.0]
    np.testing.assert_allclose(table.control_and_more, control, rtol=1e-14, atol=0)
    if inputs.norm is not None:
        exact = torch.tensor([norm], dtype=torch.float64).to(inputs.norm.dtype)
        rtol = 1e-14 if inputs.norm.dtype == torch.float64 else 1e-7
        torch.testing.assert_close(inputs.norm, exact, rtol=rtol, atol=0, equal_nan=True)
    if skipped is not None:
        assert inputs.skipped.item() == skipped + skip
    if table.counts_on_device:
        counts = [count + 1 - skip for count in counts]
        memory[::7] = torch.tensor(counts)
    assert torch.equal(table.memory, memory)
    for index, source in enumerate(table.sources):
        count = counts[index] if source.step == -1 else NAN
        constants[index] = expected_row(constants[index], source, count)
    after = table.constants.reshape(-1, FIELDS).numpy()
    np.testing.assert_allclose(after, constants, rtol=4e-15, atol=0)
    written = [STEP_SIZE, COUPLED_DECAY, DECOUPLED_DECAY, INVERSE_CORRECTION]
    others = np.setdiff1d(range(FIELDS), written)
    assert np.array_equal(after[:, others], constants[:, others])
    for tensor, as_before in zip(read_only, before, strict=True):
        assert torch.equal(tensor, as_before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0, 2.0, -1.0, INF, NAN])
@pytest.mark.parametrize("grad_scale", [None, 1.0, 3.0, 65536.0, 2.0**-30])
def test_what_a_scaler_hands_over(grad_scale, found_inf, dtype, prepare):
    inputs = Inputs(None, grad_scale, found_inf, skipped=5, dtype=dtype)
    run_and_check(prepare, Table([0.0, 41.0]), inputs)


# The sum of squares; from norms that 1e-6 matters beside, to those that have no square.
@pytest.mark.parametrize("total", [0.0, 1e-20, 1e-12, 0.25, 4.0, 1e30, 1e308, INF, NAN])
@pytest.mark.parametrize("max_grad_norm", [INF, 1.0, 1e-3, 0.0])
@pytest.mark.parametrize("skip_nonfinite", [0.0, 1.0])
@pytest.mark.parametrize("grad_scale", [None, 1024.0])
def test_clipping_and_norms_that_are_not_finite(
    total, max_grad_norm, skip_nonfinite, grad_scale, prepare
):
    table = Table([3.0], [], max_grad_norm, skip_nonfinite)
    run_and_check(prepare, table, Inputs([total], grad_scale, norm=True, skipped=0))


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
@pytest.mark.parametrize("total", [4.0, NAN])
def test_either_reason_to_skip_is_enough(found_inf, total, prepare):
    table = Table([3.0], [], 1.0, 1.0)
    run_and_check(prepare, table, Inputs([total], 2.0, found_inf, skipped=2**40))


def test_without_gradients_there_is_nothing_to_clip(prepare):
    table = Table([3.0], [], 1e-9, 1.0)
    run_and_check(prepare, table, Inputs(None, None, None, skipped=0))
    assert table.prepared_control.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("count", [1, 2, 255, 1023, 1024, 1025, 5000])
def test_every_sum_is_added_once_whatever_their_number(count, dtype, prepare):
    sums = np.random.default_rng(count).uniform(0, 1, count) ** 8
    run_and_check(prepare, Table([0.0], [], 1.0), Inputs(sums, norm=True, dtype=dtype))


def test_sums_behind_the_last_are_not_looked_at(prepare):
    inputs = Inputs([1.0] * 3 + [NAN] * 2000, norm=True)
    inputs.sums = inputs.sums[:3]
    run_and_check(prepare, Table([0.0]), inputs)


@pytest.mark.parametrize("bias_correction", BIAS_CORRECTIONS)
@pytest.mark.parametrize("step", [1.0, 2.0, 12.0, 1000.0, 1e6, 2.0**24])
@pytest.mark.parametrize("counted", [False, True], ids=["known", "counted"])
def test_bias_corrections(bias_correction, step, counted, prepare):
    every_betas = [
        (0.9, 0.999), (0.0, 0.0), (0.5, 0.3), (0.0, 0.999), (0.999, 0.0), (1 - 1e-12, 1 - 1e-15),
        (1e-300, 0.49999), (0.7, 0.71),
    ]  # fmt: skip
    # float32 counts up to 2^24.
    counts = [min(step, 2.0**24 - 1) - counted] * len(every_betas)
    rows = [
        Row(0.3, 0.1, bias_correction, 1.0, 0.0, scale, -1.0 if counted else step, betas)
        for betas, scale in zip(every_betas, (1.0, 0.99) * 4, strict=True)
    ]
    run_and_check(prepare, Table(counts, rows, on_device=counted), Inputs())


@pytest.mark.parametrize("coupled", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("decoupled", [0.0, 1.0])
@pytest.mark.parametrize("weight_decay", ["number", torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("lr", ["number", torch.float32, torch.float64], ids=str)
def test_where_a_learning_rate_and_a_weight_decay_come_from(
    lr, weight_decay, coupled, decoupled, prepare
):
    lr = 0.1 if lr == "number" else torch.tensor(0.1, dtype=lr)
    weight_decay = 0.3 if weight_decay == "number" else torch.tensor(0.3, dtype=weight_decay)
    rows = [Row(lr, weight_decay, "adam", coupled, decoupled), Row(7.0, 0.01, "authors")]
    run_and_check(prepare, Table([0.0, 9.0], rows), Inputs([4.0], 2.0, 0.0))


@pytest.mark.parametrize("decoupled", [0.0, 1.0])
@pytest.mark.parametrize("value", [INF, NAN])
def test_an_option_that_plays_no_part_may_have_any_value(value, decoupled, prepare):
    rows = [Row(value, 0.3, "adam", 1 - decoupled, decoupled), Row(0.1, value, "none", 0.0, 0.0)]
    run_and_check(prepare, Table([0.0, 9.0], rows), Inputs())


def test_a_number_is_rounded_nowhere(prepare):
    table = Table([0.0], [Row(0.1, 0.3)])
    run_and_check(prepare, table, Inputs())
    assert table.constants[STEP_SIZE] == 0.1
    assert table.constants[COUPLED_DECAY] == 0.3


def many_rows(count, counted, seed):
    """Rows of every kind in any order; lr and weight_decay partly on the device."""
    choose = random.Random(seed)

    def number(value):
        if choose.random() < 0.5:
            return value
        return torch.tensor(value, dtype=choose.choice([torch.float32, torch.float64]))

    return [
        Row(
            number(choose.uniform(0, 1)),
            number(choose.uniform(0, 1)),
            choose.choice(list(BIAS_CORRECTIONS)),
            *choose.choice([(1.0, 0.0), (-1.0, 0.0), (0.0, 1.0)]),
            step=-1.0 if counted and choose.random() < 0.8 else float(choose.randint(1, 5000)),
            betas=(choose.uniform(0, 1), choose.uniform(0, 1)),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("num_sums", [1, 5000])
@pytest.mark.parametrize("found_inf", [0.0, 1.0])
@pytest.mark.parametrize("count", [1, 7, 1000])
@pytest.mark.parametrize("counted", [True, False], ids=["counted", "known"])
def test_any_number_of_tensors_rows_and_sums(count, counted, found_inf, num_sums, prepare):
    """A row that is skipped before its first step has a correction of 0/0, which no one reads."""
    counts = [float(i % 100 + 1) for i in range(count)]
    rows = many_rows(count, counted, seed=count)
    table = Table(counts, rows, 1.0, 1.0, on_device=counted)
    inputs = Inputs([0.5] * num_sums, 2.0, found_inf, norm=True, skipped=0)
    run_and_check(prepare, table, inputs)


@pytest.mark.parametrize(("tensors", "rows"), [(600, 3), (3, 600), (300, 0), (1, 256), (257, 257)])
def test_tensors_and_rows_need_not_be_as_many(tensors, rows, prepare):
    """Rows at steps that the host knows are for several tensors each."""
    table = Table([0.0] * tensors, many_rows(rows, False, 0))
    run_and_check(prepare, table, Inputs([1.0], found_inf=0.0, skipped=0))


def test_a_table_of_no_tensors_still_has_its_control(prepare):
    run_and_check(prepare, Table([]), Inputs([4.0], 2.0, 0.0, norm=True, skipped=3))


def test_the_same_bits_each_time(prepare):
    sums = np.random.default_rng(0).uniform(0, 1, 5000)
    results = []
    for _ in range(2):
        table = Table([4.0] * 300, many_rows(300, True, 0), 1.0)
        inputs = Inputs(sums, norm=True, dtype=torch.float64)
        prepare(table, inputs)
        results.append([table.prepared_control.clone(), table.constants, inputs.norm])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
