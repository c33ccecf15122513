"""The picture of method.md: what the exponent p makes of a step."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

# FusedPadam's default. Where sqrt(h) is smaller, eps decides.
EPS = 1e-8
PARTIALS = {0: "p = 0: SGD with momentum", 1 / 16: "p = 1/16", 1 / 8: "p = 1/8", 1 / 4: "p = 1/4",
            1 / 2: "p = 1/2: AMSGrad"}  # fmt: skip


def step_size(m, h, partial, eps=EPS):
    """How far an element moves for each unit of lr, without bias correction."""
    return m / (np.sqrt(h) + eps) ** (2 * partial)


def draw(path: Path) -> None:
    """Writes the picture as SVG."""
    path.parent.mkdir(exist_ok=True)
    # Without these two the file would be another one in each build.
    with plt.rc_context({"svg.hashsalt": "padam_ext", "font.size": 11}):
        figure, (by_h, by_gradient) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
        h = np.logspace(-20, 2, 400)
        gradient = np.logspace(-10, 1, 400)
        colors = plt.colormaps["viridis"](np.linspace(0, 0.85, len(PARTIALS)))
        for (partial, label), color in zip(PARTIALS.items(), colors, strict=True):
            by_h.loglog(h, step_size(1.0, h, partial), color=color, label=label, linewidth=2)
            # A gradient that is always g has m = g and h = g**2.
            steps = step_size(gradient, gradient**2, partial)
            by_gradient.loglog(gradient, steps, color=color, linewidth=2)
        by_h.set(xlabel="second moment h, log scale", ylabel="step / (lr · m)")
        by_h.set_title("What h makes of a step")
        by_gradient.set(xlabel="size g of a steady gradient, log scale", ylabel="step / lr")
        by_gradient.set_title("The step that follows a gradient")
        by_h.axvline(EPS**2, color="gray", linestyle=":")
        by_h.annotate("h = eps²", (EPS**2 * 3, by_h.get_ylim()[0] * 2), color="dimgray")
        for axes in (by_h, by_gradient):
            axes.grid(alpha=0.3)
        figure.legend(loc="outside lower center", ncols=len(PARTIALS), frameon=False)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
