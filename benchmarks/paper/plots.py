"""The paper's figures: curves by epoch, mean over seeds, shaded from the least to the most."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from benchmarks.paper.experiments import EXPONENTS, VARIANTS
from benchmarks.paper.optimizers import NAMES
from benchmarks.paper.runs import Result, diverged, labelled
from benchmarks.paper.storage import STORAGES
from benchmarks.paper.tasks import Task

AXES = {
    "train_loss": "train loss",
    "test_error": "test error, %",
    "test_perplexity": "test perplexity",
}


def draw(axes: Axes, results: list[Result], metric: str, label: str) -> None:
    """One curve, of the runs that did not diverge."""
    whole = [result["history"] for result in results if not diverged(result["history"])]
    if not whole:
        return
    values = np.array([[epoch[metric] for epoch in history] for history in whole])
    epochs = np.arange(1, values.shape[1] + 1)
    (line,) = axes.plot(epochs, values.mean(0), label=label)
    if len(whole) > 1:
        axes.fill_between(
            epochs, values.min(0), values.max(0), color=line.get_color(), alpha=0.15, linewidth=0
        )


def finish(axes: Axes, metric: str, task: Task) -> None:
    """The scale, its label, the grid and the legend."""
    scale = "log" if task.metric == "test_error" else "linear"
    axes.set(yscale=scale, ylabel=AXES[metric], title=f"{AXES[metric]}, {task.title}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    if axes.lines:
        axes.legend(fontsize="small")


def optimizers(results: list[Result], task: Task, path: Path) -> None:
    """Train loss and test error or perplexity by epoch, a curve for each optimizer."""
    _by_epoch(results, NAMES.values(), task, path)


def storages(results: list[Result], task: Task, path: Path) -> None:
    """The same, a curve for each way to store."""
    _by_epoch(results, STORAGES, task, path)


def _by_epoch(results: list[Result], labels: Iterable[str], task: Task, path: Path) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axes, metric in zip(panels, ("train_loss", task.metric), strict=True):
        for label, runs in labelled(results, labels).items():
            draw(axes, runs, metric, label)
        finish(axes, metric, task)
        for epoch in task.decay_epochs(results[0]["settings"]["epochs"]):
            axes.axvline(epoch + 0.5, color="black", linestyle=":", linewidth=0.8)
        axes.set_xlabel("epoch; the learning rate falls at the dotted lines")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def choices_of_p(results: list[Result], task: Task, path: Path) -> None:
    """Padam's curve for each p, and the last epoch's test value over p for each variant."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    curves, final = panels
    of_variant = labelled(results, VARIANTS)
    for p in EXPONENTS:
        runs = [r for r in of_variant["Padam"] if r["settings"]["options"]["partial"] == p]
        draw(curves, runs, task.metric, f"p = {p:g}")
    curves.set_xlabel("epoch")
    finish(curves, task.metric, task)
    for label, runs in of_variant.items():
        points = [
            (result["settings"]["options"]["partial"], result["history"][-1][task.metric])
            for result in runs
            if not diverged(result["history"])
        ]
        if not points:
            continue
        exponents = sorted({p for p, _ in points})
        means = [np.mean([value for q, value in points if q == p]) for p in exponents]
        (line,) = final.plot(exponents, means, label=label)
        final.plot(*zip(*points, strict=True), ".", color=line.get_color())
    final.set_xlabel("p; a dot for each seed, lines through the means")
    finish(final, task.metric, task)
    figure.savefig(path, dpi=110)
    plt.close(figure)
