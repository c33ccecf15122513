"""The specification in extended precision, from the formulas, independent of the package.

g = -g                       to maximize
g = g + wd * x               coupled weight decay, or
x = x * (1 - lr * wd)        decoupled
m = b1 * m + (1 - b1) * g
v = b2 * v + (1 - b2) * g**2                   where the second moment is a mean
v = v + g**2                                   where it is a sum
v = max(b2**2 * v, g**2)                       where it is a maximum
v = v - (1 - b2) * sign(v - g**2) * g**2       where it is Yogi's
h = max(h, v)                with amsgrad, else h = v
d = sqrt(h) / r + eps
x = x - lr * c * m / d**(2 * p)
"""

from dataclasses import dataclass

import numpy as np

Array = np.ndarray
EXACT = np.longdouble  # 64 bits of significand on x86: also judges float64


@dataclass
class Step:
    """What one step makes of each element, and how far rounding may take it from that."""

    x: Array
    m: Array
    v: Array
    h: Array
    m_scale: Array  # the largest of m and the terms summed up to it
    g: Array  # the gradient after weight decay
    # g is itself a number of the state's dtype: where its terms cancel, their rounding remains.
    # This is the larger term; 0 without coupled decay.
    g_scale: Array


def exact(values) -> Array:
    return np.asarray(values, dtype=EXACT)


def correction_factors(kind: str, b1: float, b2: float, t: int):
    b1, b2 = exact(b1), exact(b2)
    if kind == "none":
        return exact(1), exact(1)
    if kind == "authors":
        return np.sqrt(1 - b2**t) / (1 - b1**t), exact(1)
    assert kind == "adam"
    return 1 / (1 - b1**t), np.sqrt(1 - b2**t)


def second_moment(v, g, options):
    b2 = exact(options["betas"][1])
    return {
        "mean": b2 * v + (1 - b2) * g**2,
        "sum": v + g**2,
        "max": np.maximum(b2**2 * v, g**2),
        "yogi": v - (1 - b2) * np.sign(v - g**2) * g**2,
    }[options["second_moment"]]


def padam(x, g, m, v, h, t, options) -> Step:
    """One step, number t from 1. `options` are FusedPadam's keyword arguments, all of them."""
    x, g, m, v, h = map(exact, (x, g, m, v, h))
    lr, wd = exact(options["lr"]), exact(options["weight_decay"])
    b1 = exact(options["betas"][0])
    with np.errstate(all="ignore"):
        if options["maximize"]:
            g = -g
        decay = exact(0)
        if wd != 0:
            if options["decoupled_weight_decay"]:
                x = x * (1 - lr * wd)
            else:
                decay = wd * x
                g = g + decay
        g_scale = np.maximum(abs(g), abs(decay)) * (wd != 0)
        terms = np.maximum(abs(b1 * m), abs((1 - b1) * g))
        m = b1 * m + (1 - b1) * g
        v = second_moment(v, g, options)
        h = np.maximum(h, v) if options["amsgrad"] else v
    return Step(
        x=x + movement(m, h, t, options),
        m=m,
        v=v,
        h=h,
        m_scale=np.maximum(abs(m), terms),
        g=g,
        g_scale=g_scale,
    )


def movement(m, h, t, options):
    """Change of x by step number t, given the moments after it."""
    m, h = exact(m), exact(h)
    lr, eps, p = (exact(options[k]) for k in ("lr", "eps", "partial"))
    c, r = correction_factors(options["bias_correction"], *options["betas"], t)
    with np.errstate(all="ignore"):
        d = np.sqrt(h) / r + eps
        return -lr * c * np.where((m == 0) & (d == 0), 0, m / d ** (2 * p))
