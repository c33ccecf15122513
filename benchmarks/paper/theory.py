"""Theorem 1 and Corollary 1 of Chen et al., IJCAI 2020: how small Padam makes the gradient.

Algorithm 1, with a constant step size, on an L-smooth function whose stochastic gradients have no
coordinate beyond G, puts out an iterate drawn at random (padam_ext.IterateSampler draws it). The
theorem bounds the expected square of the norm of the gradient there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """What the theorem is told.

    Attributes:
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment.
        partial: p, in [0, 1/2].
        gradient_bound: G, the largest magnitude of a coordinate of a stochastic gradient.
        smoothness: L.
        dimension: d, how many parameters there are.
        steps: T.
        growth: s in [0, 1/2]: the norm over time of each coordinate's gradients is at most G T^s,
            1/2 for whatever gradients.
        gap: f at the start, less its infimum.
        inverse_first_moment: expectation of the sum over coordinates of (v of the first step)^-p.

    Raises:
        ValueError: the setting is outside what the theorem covers; says which condition fails.
    """

    beta1: float
    beta2: float
    partial: float
    gradient_bound: float
    smoothness: float
    dimension: int
    steps: int
    growth: float
    gap: float
    inverse_first_moment: float

    def __post_init__(self) -> None:
        if not 0 <= self.partial <= 1 / 2:
            raise ValueError(f"the theorem is for p in [0, 1/2], got partial={self.partial}")
        if not 0 <= self.growth <= 1 / 2:
            raise ValueError(f"the theorem is for s in [0, 1/2], got growth={self.growth}")
        if not self.beta1 < self.beta2 ** (2 * self.partial):
            raise ValueError(
                f"the theorem needs b1 < b2^(2p), but beta1={self.beta1} is not less than "
                f"{self.beta2 ** (2 * self.partial):.6g}, which is beta2={self.beta2} to the power "
                f"{2 * self.partial:g}"
            )

    @property
    def smallest_q(self) -> float:
        """The smallest q that the theorem allows: 0, as in Corollary 1, up to p = 1/4."""
        return max(0.0, 4 * self.partial - 1)


def constants(setting: Setting, q: float | None = None) -> tuple[float, float, float]:
    """M1, M2 and M3 of Theorem 1; with q = 0 the last is Corollary 1's M3'.

    Args:
        setting: see there.
        q: in [max(0, 4p - 1), 1]; None for the smallest.

    Raises:
        ValueError: q is outside its range.
    """
    s, q = setting, setting.smallest_q if q is None else q
    if not s.smallest_q <= q <= 1:
        raise ValueError(f"q must be in [{s.smallest_q:g}, 1] at p = {s.partial:g}, got {q}")
    g, b1, p = s.gradient_bound, s.beta1, s.partial
    m1 = 2 * g ** (2 * p) * s.gap
    m2 = 4 * g ** (2 + 2 * p) * s.inverse_first_moment / (s.dimension * (1 - b1)) + 4 * g**2
    scale = s.smoothness * g ** (1 + q - 2 * p) / (1 - s.beta2) ** (2 * p)
    momentum = (b1 / (1 - b1)) ** 2
    m3 = 4 * scale + 8 * scale * (1 - b1) / (1 - b1 / s.beta2 ** (2 * p)) * momentum
    return m1, m2, m3


def bound(setting: Setting, step_size: float, q: float | None = None) -> float:
    """Theorem 1's bound of the expected squared norm of the gradient at the output."""
    s, q = setting, setting.smallest_q if q is None else q
    m1, m2, m3 = constants(s, q)
    return m1 / (s.steps * step_size) + m2 * s.dimension / s.steps + step_size * _slope(s, m3, q)


def best_step_size(setting: Setting, q: float | None = None) -> float:
    """The step size of the smallest bound; with q = 0 of Remark 1's order, d^-1/2 T^(-1/4-s/2)."""
    s, q = setting, setting.smallest_q if q is None else q
    m1, _, m3 = constants(s, q)
    return math.sqrt(m1 / (s.steps * _slope(s, m3, q)))


def _slope(s: Setting, m3: float, q: float) -> float:
    """What the bound's last term has beside the step size."""
    decay = s.steps ** ((1 - q) * (1 / 2 - s.growth))
    return m3 * s.dimension * s.gradient_bound ** (1 - q) / decay
