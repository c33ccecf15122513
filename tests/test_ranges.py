"""The ends of the range of numbers: zeros, denormals, what float32 rounds to zero or infinity."""

import pytest
import torch

from cases import each_dtype, each_partial
from checking import INTERPRETED, step_and_check
from padam_ext import FusedPadam
from test_edges import parameter

pytestmark = [
    pytest.mark.numbers,
    pytest.mark.sanitize,
    pytest.mark.gpu_variants,
    pytest.mark.ptx_variants,
]

INF, NAN = torch.inf, torch.nan


@each_partial
@each_dtype
def test_a_coordinate_without_any_gradient_stays_when_eps_is_zero(partial, dtype, backend):
    param = parameter([1.0, -2.0, 0.0, 3.0], dtype)
    optimizer = FusedPadam([param], partial=partial, eps=0.0, backend=backend)
    for _ in range(3):
        param.grad = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=dtype)
        step_and_check(optimizer)
    assert param[:3].tolist() == [1.0, -2.0, 0.0]
    assert param[3] < 3


def test_a_second_moment_that_underflows_follows_ieee_when_eps_is_zero(backend):
    param = parameter([1.0, 1.0])
    optimizer = FusedPadam([param], eps=0.0, partial=0.2, backend=backend)
    param.grad = torch.tensor([1e-30, -1e-30])  # its square is 0 in float32
    optimizer.step()
    assert param.tolist() == [-torch.inf, torch.inf]


@each_partial
@each_dtype
def test_an_eps_that_rounds_to_zero_is_zero(partial, dtype, backend):
    param = parameter([1.0, 0.0, 2.0], dtype)
    optimizer = FusedPadam([param], eps=1e-50, partial=partial, backend=backend)
    param.grad = torch.tensor([0.0, 0.0, 1.0], dtype=dtype)
    step_and_check(optimizer)
    assert param[:2].tolist() == [1.0, 0.0]


def test_an_eps_that_is_flushed_to_zero_is_zero(backend):
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no such mode")
    try:
        param = parameter([1.0, 0.0])
        optimizer = FusedPadam([param], eps=1e-40, backend=backend)
        param.grad = torch.zeros(2)
        optimizer.step()
    finally:
        torch.set_flush_denormal(False)
    assert param.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"weight_decay": 1e39}, [NAN, NAN]),  # g is inf: inf/inf; and inf * 0
        ({"weight_decay": 1e39, "partial": 0.0}, [-INF, NAN]),
        ({"weight_decay": 1e39, "lr": 1.0, "decoupled_weight_decay": True}, [-INF, NAN]),
        ({"lr": 1e39}, [-INF, -INF]),
        ({"lr": 1e39, "bias_correction": "adam"}, [-INF, -INF]),
        ({"eps": 1e39}, [1.0, 0.0]),
    ],
    ids=str,
)
def test_an_option_beyond_float32_is_infinite_there(options, expected, backend):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        param = parameter([1.0, 0.0], dtype)
        optimizer = FusedPadam([param], **options, backend=backend)
        param.grad = torch.ones_like(param)
        optimizer.step()
        if dtype == torch.float64:
            assert param.isfinite().all()
        else:
            assert str(param.tolist()) == str(expected)


@each_partial
def test_the_step_is_exact_over_the_whole_range_of_the_second_moment(partial, backend):
    """From the smallest denormal to the largest float, and densely around 1."""
    exponents = torch.arange(-149, 128, dtype=torch.float64)
    h = torch.cat(
        [
            2.0**exponents,
            1.37 * 2.0**exponents,
            torch.tensor([torch.finfo(torch.float32).max], dtype=torch.float64),
            1 + torch.linspace(-1e-3, 1e-3, 501, dtype=torch.float64),
            torch.tensor([1 - 2.0**-24, 1 + 2.0**-23, 0.5, 2.0], dtype=torch.float64),
        ]
    ).float()
    param = parameter(torch.zeros_like(h))
    optimizer = FusedPadam([param], lr=1.0, eps=0.0, partial=partial, backend=backend)
    optimizer.state[param] = {
        "step": torch.tensor(5.0),
        "exp_avg": h.sqrt(),
        "exp_avg_sq": h.clone(),
        "max_exp_avg_sq": h.clone(),
    }
    param.grad = torch.zeros_like(param)
    step_and_check(optimizer)


@pytest.mark.parametrize("partial", [0.2, 0.5])  # 1 / 2^-149 itself is beyond float32
@pytest.mark.parametrize("eps", [2.0**-149, 1e-38, 1e-20])
def test_a_denominator_that_is_nearly_zero(eps, partial, backend):
    param = parameter(torch.zeros(3))
    optimizer = FusedPadam([param], eps=eps, partial=partial, lr=1e-8, backend=backend)
    param.grad = torch.tensor([1e-25, 0.0, -1e-25])
    step_and_check(optimizer)


def test_the_reciprocal_of_a_denormal_denominator_is_not_needed(backend):
    """0 / 5e-324 is 0, although 1 / 5e-324 is infinite."""
    param = parameter([1.0, 2.0], torch.float64)
    optimizer = FusedPadam([param], eps=5e-324, partial=0.5, backend=backend)
    param.grad = torch.zeros_like(param)
    step_and_check(optimizer)
    assert param.tolist() == [1.0, 2.0]


@each_partial
@pytest.mark.parametrize("extreme", [0.0, 1e-45, 1e-38, 3e38, INF, NAN])
def test_an_extreme_second_moment_changes_nothing_about_its_neighbours(extreme, partial, backend):
    """Kernels may take a shorter way where all of a block is tame: with the same result."""
    stepped = []
    for moment in (1.0, extreme):
        torch.manual_seed(0)
        param = parameter(torch.randn(600).tolist())
        optimizer = FusedPadam([param], partial=partial, eps=0.0, backend=backend)
        moments = torch.randn(600).square_()
        moments[300] = moment
        optimizer.state[param] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.randn(600),
            "exp_avg_sq": torch.zeros(600),
            "max_exp_avg_sq": moments,
        }
        param.grad = torch.randn(600) * 1e-3
        optimizer.step()
        stepped.append(torch.cat([param.detach()[:300], param.detach()[301:]]))
    assert torch.equal(*stepped)


@pytest.mark.parametrize("seed", range(3))
def test_decay_is_added_to_the_gradient_with_one_rounding(seed, backend):
    """v is the square of that sum, which doubles its error."""
    generator = torch.Generator(device=torch.get_default_device()).manual_seed(seed)
    size = 2_000 if INTERPRETED else 100_000
    param = torch.nn.Parameter(torch.randn(size, generator=generator))
    param.grad = torch.randn(size, generator=generator)
    optimizer = FusedPadam([param], weight_decay=5e-4, betas=(0.0, 0.0), backend=backend)
    step_and_check(optimizer)
