"""The native prepare launch, whose code runs here on the CPU: control, counts and rows."""

import math
from array import array
from itertools import product

import pytest
import torch

from padam_ext import native

NONE = float("inf")  # no bound on the norm
STEP_SIZE, BETA1, BETA2 = 0, 1, 3
COUPLED_DECAY, DECOUPLED_DECAY, INVERSE_CORRECTION = 7, 8, 9
FIELDS = 14


def address(tensor):
    return 0 if tensor is None else tensor.data_ptr()


def words(*values):
    """Words of 8 bytes, floats by their bits, as int64."""
    parts = [array("d" if isinstance(value, float) else "q", [value]).tobytes() for value in values]
    return list(array("q", b"".join(parts)))


def source(
    lr=0.1, lr_address=0, lr_dtype=0, weight_decay=0.0, weight_decay_address=0,
    weight_decay_dtype=0, bias_correction=0, coupled_factor=1.0, decoupled_factor=0.0, step=1.0,
):  # fmt: skip
    return words(
        float(lr), lr_address, lr_dtype, float(weight_decay), weight_decay_address,
        weight_decay_dtype, bias_correction, coupled_factor, decoupled_factor, step,
    )  # fmt: skip


def prepare(
    *, sums=None, grad_scale=None, found_inf=None, norm=None, skipped=None,
    max_grad_norm=NONE, skip_nonfinite=0.0, sources=(), betas=(0.9, 0.999), counters=None,
):  # fmt: skip
    """Makes the launch; control and rows, in which -7 stands for what was not written."""
    limits = torch.tensor([max_grad_norm, skip_nonfinite], dtype=torch.float64)
    control = torch.full((2,), -7.0, dtype=torch.float64)
    rows = torch.full((len(sources) + 1, FIELDS), -7.0, dtype=torch.float64)
    rows[:, BETA1], rows[:, BETA2] = betas
    row_sources = torch.tensor([list(one) for one in sources], dtype=torch.int64)
    counter_addresses = torch.tensor([address(c) for c in counters or []], dtype=torch.int64)
    table = native.module.DeviceTable(
        addresses=0, numels=0, rows=0, constants=address(rows), control=0,
        limits=address(limits), prepared_control=address(control),
        row_sources=address(row_sources), counters=address(counter_addresses),
        chunk_tensors=0, chunk_first_blocks=0, num_tensors=len(counters or []), num_chunks=0,
        blocks_per_chunk=1, partial_sums=0, num_late_rows=len(sources),
        counts_on_device=counters is not None, slot_dtypes=[0] * 5, compute_dtype=0,
    )  # fmt: skip

    def is_double(tensor):
        return tensor is not None and tensor.dtype == torch.float64

    inputs = native.module.PrepareInputs(
        sums=address(sums), num_sums=0 if sums is None else len(sums),
        grad_scale=address(grad_scale), grad_scale_is_double=is_double(grad_scale),
        found_inf=address(found_inf), found_inf_is_double=is_double(found_inf),
        norm=address(norm), norm_is_double=is_double(norm), skipped=address(skipped),
    )  # fmt: skip
    native.module.prepare_on_host(table, inputs)
    assert rows[len(sources)].tolist() == [
        {BETA1: betas[0], BETA2: betas[1]}.get(field, -7.0) for field in range(FIELDS)
    ]
    return control.tolist(), rows[: len(sources)]


def same(actual, expected):
    return actual == expected or (math.isnan(actual) and math.isnan(expected))


DTYPES = (torch.float32, torch.float64)
SCALES = (None, 8.0)
SUMS = (None, [0.0], [9.0], [1.0] * 1000 + [24.0], [math.inf, 1.0], [math.nan])
FOUND = (None, 0.0, 1.0, math.nan)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sums", SUMS, ids=str)
def test_control(sums, dtype):
    """Every combination of what there may be, against the law in Python's own numbers."""
    for scale, found, bound, skip_nonfinite in product(
        SCALES, FOUND, (NONE, 100.0, 2.0, 0.0), (0.0, 1.0)
    ):
        norm = torch.full((1,), -7.0, dtype=dtype)
        skipped = torch.tensor([5])
        (factor, skip), _ = prepare(
            sums=None if sums is None else torch.tensor(sums, dtype=torch.float64),
            grad_scale=None if scale is None else torch.tensor([scale], dtype=dtype),
            found_inf=None if found is None else torch.tensor([found], dtype=dtype),
            norm=norm,
            skipped=skipped,
            max_grad_norm=bound,
            skip_nonfinite=skip_nonfinite,
        )
        want_norm = math.sqrt(math.fsum(sums or [])) / (scale or 1.0)
        want = 1.0 / (scale or 1.0)
        if sums is not None and bound < NONE:
            clip = bound / (want_norm + 1e-6)
            want *= 1.0 if clip > 1.0 else clip
        bad_norm = sums is not None and skip_nonfinite == 1.0 and not math.isfinite(want_norm)
        want_skip = (found is not None and found != 0.0) or bad_norm
        case = (scale, found, bound, skip_nonfinite)
        assert same(factor, want), case
        assert skip == float(want_skip), case
        assert same(norm.item(), torch.tensor(want_norm, dtype=dtype).item()), case
        assert skipped.item() == 5 + want_skip, case


def test_what_is_not_asked_for_is_not_written():
    assert prepare()[0] == [1.0, 0.0]


def test_the_sum_of_sums_has_every_term():
    generator = torch.Generator().manual_seed(0)
    for count in (1, 255, 256, 257, 5000):
        sums = torch.rand(count, generator=generator, dtype=torch.float64)
        norm = torch.zeros(1, dtype=torch.float64)
        prepare(sums=sums, norm=norm)
        assert norm.item() == pytest.approx(math.sqrt(math.fsum(sums.tolist())), rel=1e-14)


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("count", [1, 300, 20_000])
def test_each_tensor_is_counted_once_unless_the_step_is_skipped(count, found):
    steps = torch.arange(count, dtype=torch.float32)
    counters = list(steps.view(-1, 1))
    control, _ = prepare(counters=counters, found_inf=torch.tensor([found]))
    assert control == [1.0, found]
    assert torch.equal(steps, torch.arange(count, dtype=torch.float32) + (1.0 - found))


def corrections(kind, betas, step):
    """c and r of semantics' table, in Python's own numbers."""
    first, second = (1.0 if b == 0 else -math.expm1(step * math.log(b)) for b in betas)
    return [(1.0, 1.0), (math.sqrt(second) / first, 1.0), (1.0 / first, math.sqrt(second))][kind]


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["none", "authors", "adam"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.999), (0.9, 0.0), (0.5, 1 - 2**-40)])
@pytest.mark.parametrize("step", [1.0, 12.0, 1e6])
def test_rows(kind, betas, step):
    c, r = corrections(kind, betas, step)
    for coupled, decoupled in ((1.0, 0.0), (-1.0, 0.0), (0.0, 1.0)):
        one = source(
            lr=0.3, weight_decay=0.01, bias_correction=kind, step=step,
            coupled_factor=coupled, decoupled_factor=decoupled,
        )  # fmt: skip
        _, [row] = prepare(sources=[one], betas=betas)
        want = torch.full((FIELDS,), -7.0, dtype=torch.float64)
        want[BETA1], want[BETA2] = betas
        want[STEP_SIZE] = 0.3 * c
        want[COUPLED_DECAY] = coupled * 0.01
        want[DECOUPLED_DECAY] = decoupled * (0.3 * 0.01)
        want[INVERSE_CORRECTION] = 1.0 / r
        torch.testing.assert_close(row, want, rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("dtypes", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
def test_options_from_tensors(dtypes):
    lr, weight_decay = (
        torch.tensor([value], dtype=DTYPES[dtype])
        for value, dtype in zip((0.3, 0.01), dtypes, strict=True)
    )
    for coupled, decoupled in ((1.0, 0.0), (0.0, 1.0)):
        one = source(
            lr=math.nan, lr_address=address(lr), lr_dtype=dtypes[0], weight_decay=math.nan,
            weight_decay_address=address(weight_decay), weight_decay_dtype=dtypes[1],
            coupled_factor=coupled, decoupled_factor=decoupled,
        )  # fmt: skip
        _, [row] = prepare(sources=[one])
        assert row[STEP_SIZE] == lr.double()
        assert row[COUPLED_DECAY] == coupled * weight_decay.double()
        assert row[DECOUPLED_DECAY] == decoupled * lr.double() * weight_decay.double()


def test_an_infinite_rate_makes_no_decay_that_is_not_there():
    _, [row] = prepare(sources=[source(lr=math.inf, weight_decay=0.0)])
    assert row[STEP_SIZE] == math.inf
    assert row[DECOUPLED_DECAY] == 0.0


@pytest.mark.parametrize("count", [3, 20_000])
def test_a_row_takes_the_counter_of_its_tensor_after_counting(count):
    """A row for each tensor; and rows whose step the host knows, beside counters."""
    steps = torch.arange(count, dtype=torch.float32) % 50
    counters = list(steps.view(-1, 1))
    for kind, step, number in ((1, -1.0, count), (2, -1.0, count), (2, 7.0, 2)):
        before = steps.double()
        _, rows = prepare(
            counters=counters, sources=[source(bias_correction=kind, step=step)] * number
        )
        assert torch.equal(steps.double(), before + 1)
        for i in (0, 1, number - 1):
            c, r = corrections(kind, (0.9, 0.999), steps[i].item() if step < 0 else step)
            assert rows[i, STEP_SIZE].item() == pytest.approx(0.1 * c, rel=1e-14)
            assert rows[i, INVERSE_CORRECTION].item() == pytest.approx(1.0 / r, rel=1e-14)
