"""The native module by itself: a hand-built launch table, threads, refusals."""

import ctypes
import math
import mmap
import os
import sys
from array import array
from itertools import product

import pytest
import torch

from checking import by_slot
from padam_ext import FusedPadam, native
from padam_ext.constants import Constants, RowOptions, make_constants
from padam_ext.slots import ABSENT, DTYPES, SLOTS, STORED_DTYPES

pytestmark = pytest.mark.sanitize

OPTIONS = RowOptions(0.1, 0.9, 0.999, 1e-8, 0.0, 0.125, "none", False, False)
LEVELS = native.module.available_simd_levels() if native.module else []


def row(options):
    """The constants of a first update."""
    return array("d", make_constants(options, 1.0))


def table(tensors):
    """Arguments for step_cpu over a list of tuples in SLOTS' order, None for an absent slot.

    Slots that a tuple is too short for are absent, too.
    """
    slots = list(zip(*tensors, strict=True))
    slots = by_slot(slots, (None,) * len(tensors))
    return {
        "addresses": array("q", [0 if t is None else t.data_ptr() for slot in slots for t in slot]),
        "numels": array("q", [param.numel() for param in slots[0]]),
        "salts": array("q", [0] * len(tensors)),
        "rows": array("q", [0] * len(tensors)),
        "constants": row(OPTIONS),
        "slot_dtypes": [ABSENT if s[0] is None else STORED_DTYPES.index(s[0].dtype) for s in slots],
        "compute_dtype": 0,
        "grad_factor": 1.0,
        "num_threads": 1,
        "simd_level": native.simd_level(),
    }


def slots_of(*codes):
    """Dtypes by slot; those left out are absent."""
    return by_slot(codes, ABSENT)


def row_with_root(root):
    return array("d", Constants(*row(OPTIONS))._replace(root=root))


def tensors(size):
    generator = torch.Generator().manual_seed(size)
    x, g, m = (torch.randn(size, generator=generator) for _ in range(3))
    return x, g, m, m.square(), m.square()


def test_slots_and_dtypes_are_in_the_order_of_the_header():
    assert SLOTS == (
        "param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq",
        "packed_mvh", "packed_mv", "param_low",
    )  # fmt: skip
    dtypes = torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int16
    assert dtypes == STORED_DTYPES


def test_fields_are_in_the_order_of_the_header():
    assert Constants._fields == (
        "step_size", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2_high",
        "one_minus_beta2_low", "eps", "coupled_decay", "decoupled_decay", "inverse_correction",
        "exponent", "exponent_high", "exponent_low", "second_moment", "root", "seed", "step",
    )  # fmt: skip


def test_a_hand_built_table():
    x, g, m, v, h = tensors(10)
    want = 0.9 * m + 0.1 * g
    native.module.step_cpu(**table([(x, g, m, v, h)]))
    torch.testing.assert_close(m, want)


# One large tensor, many small ones, and mixtures in which the work lies at one end.
LISTS = {
    "one large": [1_000_003],
    "many small": [10] * 20_000,
    "large first": [700_001] + [10] * 5_000,
    "large last": [10] * 5_000 + [700_001],
    "uneven": [1, 300_000, 0, 65, 64, 63, 200_000, 0, 0, 127, 90_001],
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("level", LEVELS)
def test_threads_share_the_work_without_gap_or_overlap(name, level):
    """Bitwise the same on any number of threads: every element exactly once."""
    made = [tensors(size) for size in LISTS[name]]
    arguments = table(made) | {"simd_level": level}
    slots = list(zip(*made, strict=True))
    before = [torch.cat(slot).split(LISTS[name]) for slot in slots]
    results = []
    for threads in (1, 2, 3, 7, 64):
        # Thousands of tensors take longer to make than all the steps.
        for slot, values in zip(slots, before, strict=True):
            torch._foreach_copy_(slot, values)
        native.module.step_cpu(**arguments | {"num_threads": threads})
        results.append([torch.cat(slot) for slot in slots])
    for several in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], several, strict=True))


def test_vector_body_and_tail_round_alike():
    """An element's result does not depend on where it lies."""
    whole = tensors(999)
    native.module.step_cpu(**table([whole]))
    for start in (1, 2, 3, 5, 8, 13, 990):
        part = tuple(t[start:] for t in tensors(999))
        native.module.step_cpu(**table([part]))
        assert all(torch.equal(a, b[start:]) for a, b in zip(part, whole, strict=True))


def test_the_optimizer_uses_as_many_threads_as_torch():
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(300_000))
        param.grad = torch.randn(300_000)
        FusedPadam([param], partial=0.3, backend="cpu").step()
        results.append(param.detach())
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def sum_of_squares(arguments, **changes):
    names = ("addresses", "numels", "num_threads", "simd_level")
    taken = {name: arguments[name] for name in names} | {"grad_dtype": arguments["slot_dtypes"][1]}
    return native.module.sum_of_squares_cpu(**taken | changes)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sizes", LISTS.values(), ids=LISTS)
def test_the_norm_does_not_depend_on_the_number_of_threads(sizes, level):
    made = [tensors(size) for size in sizes]
    arguments = table(made) | {"simd_level": level}
    sums = [sum_of_squares(arguments, num_threads=threads) for threads in (1, 2, 3, 8)]
    assert len(set(sums)) == 1
    exact = math.fsum(float(slots[1].double().square().sum()) for slots in made)
    assert sums[0] == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"numels": array("q", [4, 4])},
            f"addresses: expected {2 * len(SLOTS)} contiguous 8-byte items, got {len(SLOTS)}",
        ),
        ({"rows": array("q", [1])}, r"rows: 1 is outside \[0, 1\)"),
        ({"rows": array("q", [-1])}, r"rows: -1 is outside"),
        ({"rows": array("i", [0])}, "rows: expected 1 .* of 4 bytes"),
        ({"salts": array("q", [])}, "salts: expected 1 .* got 0"),
        ({"constants": array("d", [0.1] * 18)}, "constants: expected 17"),
        ({"constants": row_with_root(6.0)}, "constants: root 6.0* is not a Root"),
        ({"constants": row_with_root(-1.0)}, "constants: root -1.0* is not a Root"),
        ({"constants": row_with_root(math.nan)}, "constants: root -?nan is not a Root"),
        ({"simd_level": "sse9"}, "SIMD level 'sse9' is not available"),
        ({"slot_dtypes": [0] * 4}, f"slot_dtypes: expected {len(SLOTS)}, got 4"),
        ({"slot_dtypes": slots_of(7)}, "^param: 7 is not a dtype"),
        ({"slot_dtypes": slots_of(0, 0, 0, 0, -2)}, "^max_exp_avg_sq: -2 is not a dtype"),
        ({"slot_dtypes": slots_of(0, -1)}, "^grad: -1 says that it is absent, but every step"),
        ({"slot_dtypes": slots_of(0, 0, 1)}, r"^exp_avg: 1 \(float64\) has no codec to float32"),
        ({"slot_dtypes": slots_of(4)}, r"^param: 4 \(int32\) has no codec to float32"),
        ({"slot_dtypes": slots_of(0, 6)}, r"^grad: 6 \(stochastic_bfloat16\) has no codec"),
        (
            {"slot_dtypes": slots_of(0, 0, -1, -1, -1, 0)},
            r"^packed_mvh: 0 \(float32\) has no codec to float32",
        ),
        ({"slot_dtypes": slots_of(0, 0, 0)}, "exp_avg and exp_avg_sq, .* got .* exp_avg float32"),
        ({"slot_dtypes": slots_of(0, 0, 0, 0, 0, 4)}, "one packed slot .* packed_mvh int32"),
        ({"slot_dtypes": slots_of(0, 0, -1, -1, 0, 4)}, "one packed slot .* packed_mvh int32"),
        ({"slot_dtypes": slots_of(0, 0, -1, -1, -1, 4, 4)}, "one packed slot .* packed_mv int32"),
        ({"slot_dtypes": slots_of(0, 0)}, "every step needs exp_avg .* got param float32"),
        (
            {"slot_dtypes": slots_of(6, 0, 0, 0, 0, -1, -1, 5)},
            "^param_low: it goes with bfloat16 parameters; got param stochastic_bfloat16",
        ),
        ({"compute_dtype": 1}, r"^param: 0 \(float32\) has no codec to float64"),
        ({"compute_dtype": 2}, r"^compute_dtype: 2 is neither float32 \(0\) nor float64 \(1\)"),
    ],
    ids=str,
)
def test_a_table_that_contradicts_itself_is_refused(change, message):
    kept = tensors(4)
    before = [t.clone() for t in kept]
    with pytest.raises(ValueError, match=message):
        native.module.step_cpu(**table([kept]) | change)
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))


def test_counters():
    counters = [torch.tensor(float(i)) for i in (3, 0, 9)]
    addresses = array("q", [c.data_ptr() for c in counters])
    assert array("f", native.module.add_to_steps(addresses, 1.0)).tolist() == [4.0, 1.0, 10.0]
    assert [c.item() for c in counters] == [4.0, 1.0, 10.0]
    for counter in counters:
        counter.fill_(10.0)
    assert array("f", native.module.add_to_steps(addresses, 1.0)).tolist() == [11.0]
    assert native.module.add_to_steps(array("q"), 1.0) == b""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("level", LEVELS)
def test_every_half_number_passes_through_unchanged(dtype, level):
    """lr=0 leaves a parameter as it is: all 65536 bit patterns must come back, NaN as NaN."""
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    param = bits.view(dtype).clone()
    zeros = [torch.zeros(param.shape) for _ in range(3)]
    grad = torch.zeros_like(param)
    arguments = table([(param, grad, *zeros)]) | {
        "constants": row(OPTIONS._replace(lr=0.0)),
        "simd_level": level,
    }
    native.module.step_cpu(**arguments)
    is_nan = bits.view(dtype).isnan()
    assert torch.equal(param.isnan(), is_nan)
    assert torch.equal(param.view(torch.int16)[~is_nan], bits[~is_nan])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("level", LEVELS)
def test_results_are_rounded_to_half_as_torch_does(dtype, level):
    """b1=0, p=0, lr=1: x becomes the nearest half number to x - g, for g all over float32."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    grad = bits.view(torch.float32)
    grad = torch.where(grad.isfinite(), grad, torch.ones(()))
    near = torch.randn(200_000, generator=generator) * 2.0 ** torch.randint(
        -26, 17, (200_000,), generator=generator
    )
    ties = (torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)).view(dtype).float()
    ties = ties[ties.isfinite()]
    ties = (ties + torch.nextafter(ties.to(dtype), torch.tensor(9e9).to(dtype)).float()) / 2
    grad = torch.cat([grad, near, ties])
    param = torch.zeros(grad.shape, dtype=dtype)
    zeros = [torch.zeros(grad.shape) for _ in range(3)]
    options = OPTIONS._replace(lr=1.0, beta1=0.0, partial=0.0)
    arguments = table([(param, grad, *zeros)]) | {"constants": row(options), "simd_level": level}
    native.module.step_cpu(**arguments)
    assert torch.equal(param, (-grad).to(dtype))


HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("amsgrad", [True, False], ids=["amsgrad", "no amsgrad"])
@pytest.mark.parametrize("dtypes", [(h, s) for h in HALF for s in range(32)], ids=str)
def test_any_slot_may_be_stored_in_half(dtypes, amsgrad):
    """Every set of slots: as a step in float32 on what is stored, whose results are rounded."""
    half, chosen = dtypes
    for level, size, partial in product(LEVELS, (1, 511, 513, 2000), (0.125, 0.5)):
        full = [slot if amsgrad or i < 4 else None for i, slot in enumerate(tensors(size))]
        stored = [
            slot if slot is None or not chosen >> i & 1 else slot.to(half)
            for i, slot in enumerate(full)
        ]
        wide = [None if slot is None else slot.float().clone() for slot in stored]
        changes = {"constants": row(OPTIONS._replace(partial=partial)), "simd_level": level}
        native.module.step_cpu(**table([stored]) | changes)
        native.module.step_cpu(**table([wide]) | changes)
        for narrow, exact in zip(stored, wide, strict=True):
            assert narrow is None or torch.equal(narrow, exact.to(narrow.dtype))


def test_the_gradient_factor_multiplies_every_gradient():
    one, other = tensors(1000), tensors(1000)
    native.module.step_cpu(**table([one]) | {"grad_factor": 0.37})
    other[1].mul_(0.37)
    native.module.step_cpu(**table([other]))
    for slot in (0, 2, 3, 4):
        assert torch.equal(one[slot], other[slot])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinite_parameters_stay_under_decoupled_decay(dtype, level):
    options = OPTIONS._replace(weight_decay=0.1, decoupled_weight_decay=True)
    double = dtype == torch.float64
    for partial in (0.0, 0.5, 0.25, 0.125, 0.0625, 0.3):
        x = torch.tensor([math.inf, -math.inf, math.nan, 1.0, 0.0] * 20, dtype=dtype)
        grad = torch.ones_like(x)
        state_dtype = dtype if double else torch.float32
        state = [torch.full(x.shape, 0.01, dtype=state_dtype) for _ in range(3)]
        x_before = x.clone()
        arguments = table([(x, grad, *state)]) | {
            "constants": row(options._replace(partial=partial)),
            "compute_dtype": int(double),
            "simd_level": level,
        }
        native.module.step_cpu(**arguments)
        odd = ~x_before.isfinite()
        assert torch.equal(x[odd].nan_to_num(7.0), x_before[odd].nan_to_num(7.0))
        assert x[~odd].isfinite().all()
        assert (x[~odd] != x_before[~odd]).all()


def repeated_memory(num_bytes, chunk_bytes):
    """Address of `num_bytes` of memory that repeat one small chunk, and that chunk as a tensor.

    A tensor of more than 2^31 elements thus needs a few megabytes only. As much before it is
    reserved and may not be touched: an offset that wrapped around to below zero crashes.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    file = os.memfd_create("chunk")
    os.ftruncate(file, chunk_bytes)
    private_reserved, shared_fixed = 0x4022, 0x11
    start = libc.mmap(None, 2 * num_bytes + chunk_bytes, 0, private_reserved, -1, 0) + num_bytes
    for offset in range(0, num_bytes, chunk_bytes):
        assert libc.mmap(start + offset, chunk_bytes, 3, shared_fixed, file, 0) == start + offset
    chunk = torch.frombuffer(mmap.mmap(file, chunk_bytes), dtype=torch.float32)
    os.close(file)
    return start, chunk


@pytest.mark.skipif(sys.platform != "linux", reason="maps memory as Linux does")
def test_more_than_two_to_the_31_elements():
    """Offsets are 64 bits wide: every element of such a tensor is stepped, none behind its end."""
    chunk_numel, extra = 1 << 20, 5
    repeats = (1 << 11) + (1 << 8)  # so many that the last thread's share begins beyond 2^31
    numel = repeats * chunk_numel + extra
    assert numel * 15 // 16 > 2**31
    starts, chunks = zip(
        *(repeated_memory(4 * (repeats + 1) * chunk_numel, 4 * chunk_numel) for _ in range(5)),
        strict=True,
    )
    x, g, m = chunks[:3]
    arguments = table([tensors(1)]) | {
        "addresses": array("q", by_slot(starts, 0)),
        "numels": array("q", [numel]),
    }
    for partial in (0.0, 0.125):  # there is a loop for each
        x.zero_()
        g.fill_(1.0)
        # b1 = b2 = 0, lr = 1: every visit takes 1 from x.
        options = OPTIONS._replace(lr=1.0, beta1=0.0, beta2=0.0, partial=partial)
        native.module.step_cpu(**arguments | {"constants": row(options)})
        assert (x[:extra] == -(repeats + 1)).all()
        assert (x[extra:] == -repeats).all()
    # Threads: shares begin at large offsets. What repeats is stepped by several at once, so here
    # a step does the same each time: lr = 0 and b1 = 0 set m to the gradient.
    g.copy_(torch.arange(chunk_numel))
    still = row(options._replace(lr=0.0, partial=0.0))
    native.module.step_cpu(**arguments | {"constants": still, "num_threads": 2})
    assert torch.equal(m, g)
