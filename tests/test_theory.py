"""The paper's bounds: their formulas, and that Padam stays below them."""

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.paper.theory import Setting, best_step_size, bound, constants
from padam_ext import FusedPadam

SETTING = Setting(
    beta1=0.5, beta2=0.96, partial=0.25, gradient_bound=4.0, smoothness=3.0, dimension=10,
    steps=10_000, growth=0.5, gap=7.0, inverse_first_moment=20.0,
)  # fmt: skip


def test_the_constants():
    """By hand: (1 - b2)^(2p) = 0.2, b2^(2p) = sqrt(0.96)."""
    m1, m2, m3 = constants(SETTING)
    assert m1 == pytest.approx(2 * 2 * 7)
    assert m2 == pytest.approx(4 * 32 * 20 / (10 * 0.5) + 4 * 16)
    scale = 3 * 2 / 0.2
    assert m3 == pytest.approx(4 * scale + 8 * scale * 0.5 / (1 - 0.5 / math.sqrt(0.96)))
    # T^(1/2 - s) = 1; at q = 1 the last term has neither G nor T.
    assert bound(SETTING, 0.01) == pytest.approx(m1 / 100 + m2 / 1000 + m3 * 0.01 * 10 * 4)
    assert bound(SETTING, 0.01, q=1) == pytest.approx(m1 / 100 + m2 / 1000 + 4 * m3 * 0.1)
    sparse = replace(SETTING, growth=0.25)
    assert bound(sparse, 0.01) == pytest.approx(m1 / 100 + m2 / 1000 + m3 * 0.4 / 10)


def test_the_best_step_size_is_best_and_of_the_papers_order():
    best = best_step_size(SETTING)
    assert bound(SETTING, best) < min(bound(SETTING, best * f) for f in (0.9, 1.1))
    for growth in (0.0, 0.25, 0.5):
        one = replace(SETTING, growth=growth)
        larger = replace(one, steps=16 * one.steps, dimension=9 * one.dimension)
        order = 9**-0.5 * 16 ** -(0.25 + growth / 2)
        assert best_step_size(larger) / best_step_size(one) == pytest.approx(order)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta1": 0.99, "partial": 0.5}, r"needs b1 < b2\^\(2p\), but beta1=0.99 .* 0.96, which"),
        ({"partial": 0.6}, r"p in \[0, 1/2\], got partial=0.6"),
        ({"growth": 0.7}, r"s in \[0, 1/2\], got growth=0.7"),
    ],
)
def test_what_the_theorem_does_not_cover(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SETTING, **change)


def test_q_has_a_range_of_its_own():
    with pytest.raises(ValueError, match=r"q must be in \[0.2, 1\] at p = 0.3, got 0.1"):
        constants(replace(SETTING, partial=0.3), q=0.1)


def losses(x):
    """Smooth and not convex: second derivative in [-1/2, 2], gradient at most 3 sqrt(3) / 8."""
    return x**2 / (1 + x**2)


def gradient(x):
    return 2 * x / (1 + x**2) ** 2


NOISE = 0.5
DIMENSION = 4
PARTIALS = (0.0, 1 / 8, 1 / 4, 0.4, 1 / 2)


@pytest.mark.parametrize("steps", [5_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_padam_stays_below_the_bound(steps):
    """The mean over all iterates is what the sampled one has in expectation.

    One optimizer runs all p side by side: each is a row of `x` and a group with its own step size.
    """
    betas = (0.3, 0.7)
    generator = torch.Generator().manual_seed(0)
    # Where the gradient is largest.
    x = torch.full((len(PARTIALS), DIMENSION), 3**-0.5, dtype=torch.float64)
    start, steepest = losses(x[0]).sum().item(), gradient(x[0])
    noise = NOISE * (2 * torch.rand(steps, DIMENSION, generator=generator).double() - 1)
    settings, groups = [], []
    for partial, row in zip(PARTIALS, x, strict=True):
        inverse = (((1 - betas[1]) * (steepest + noise) ** 2) ** -partial).sum(1).mean().item()
        setting = Setting(
            *betas, partial, gradient_bound=3 * math.sqrt(3) / 8 + NOISE, smoothness=2.0,
            dimension=DIMENSION, steps=steps, growth=0.5, gap=start, inverse_first_moment=inverse,
        )  # fmt: skip
        settings.append(setting)
        param = torch.nn.Parameter(row)
        groups.append({"params": [param], "lr": best_step_size(setting), "partial": partial})
    optimizer = FusedPadam(groups, betas=betas, eps=0.0)
    grads = torch.empty_like(x)
    for group, grad in zip(groups, grads, strict=True):
        group["params"][0].grad = grad
    total = torch.zeros(len(PARTIALS), dtype=torch.float64)
    for noise_of_step in noise[:-1]:
        torch.add(gradient(x), noise_of_step, out=grads)
        optimizer.step()
        total += gradient(x).square().sum(1)
    for setting, group, mean in zip(settings, groups, total / (steps - 1), strict=True):
        # The bound says something: it is below what standing still would give.
        assert mean < bound(setting, group["lr"]) < 0.9 * steepest.square().sum()
