"""The runs of the two studies, and how they are carried out side by side.

The optimizer study is the paper's comparison of seven optimizers. The p study varies Padam's
exponent, and three things beside it: without the running maximum it is a partially adaptive Adam,
without that and without momentum a partially adaptive RMSprop (the paper's remark that the idea
carries over), and with the authors' bias correction it is what their released code computes.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.paper.optimizers import HYPERPARAMETERS, NAMES
from benchmarks.paper.tasks import Task
from benchmarks.paper.training import Run, train

# The grid of the paper's section "Experiments", and AMSGrad's exponent.
EXPONENTS = (1 / 16, 1 / 8, 1 / 5, 1 / 4, 2 / 5, 1 / 2)
VARIANTS: dict[str, dict[str, Any]] = {
    "Padam": {},
    "authors' bias correction": {"bias_correction": "authors"},
    "partially adaptive Adam": {"amsgrad": False},
    "partially adaptive RMSprop": {"amsgrad": False, "betas": (0.0, 0.999)},
}


def optimizer_study(
    task: Task, model: str, optimizers: Iterable[str], seeds: int, **others: Any
) -> list[Run]:
    """Each optimizer with the paper's hyperparameters, from each seed."""
    table = HYPERPARAMETERS[task.recipe or model]
    return [
        Run("optimizers", NAMES[name], name, table[name], task.name, model, seed=seed, **others)
        for seed in range(seeds)
        for name in optimizers
    ]


def p_study(task: Task, model: str, seeds: int, **others: Any) -> list[Run]:
    """Padam with the paper's hyperparameters but for p, and its variants, from each seed."""
    paper = HYPERPARAMETERS[task.recipe or model]["padam"]
    return [
        Run("p", label, "padam", paper | variant | {"partial": p}, task.name, model, seed=seed,
            **others)
        for seed in range(seeds)
        for label, variant in VARIANTS.items()
        for p in EXPONENTS
    ]  # fmt: skip


def carry_out(
    runs: list[Run], folder: Path, data: Path | None, workers: int, jobs: int, console: Console
) -> None:
    """Trains all of them, `jobs` at a time, which share the threads, and shows how far they are.

    Raises:
        Exception: what the first run to fail raised, after those under way have ended. What is
            finished stays.
    """
    before = sum((folder / f"{run.name}.json").exists() for run in runs)
    if before:
        console.print(f"{before} of {len(runs)} runs are in {folder} already.")
    columns = (
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // jobs)
    with (
        context.Manager() as manager,
        ProcessPoolExecutor(
            jobs, context, initializer=torch.set_num_threads, initargs=(threads,)
        ) as executor,
        Progress(*columns, console=console) as progress,
    ):
        queue = manager.Queue()
        bar = progress.add_task("epochs", total=sum(run.epochs for run in runs))
        done = dict.fromkeys((run.name for run in runs), 0)
        futures = [executor.submit(_train, run, folder, data, workers, queue) for run in runs]
        try:
            while True:
                with suppress(Empty):
                    name, epochs = queue.get(timeout=0.5)
                    done[name] = epochs
                    progress.update(bar, completed=sum(done.values()))
                ended = [future for future in futures if future.done()]
                for future in ended:
                    future.result()
                if len(ended) == len(futures) and queue.empty():
                    break
        finally:
            executor.shutdown(cancel_futures=True)


def _train(run: Run, folder: Path, data: Path | None, workers: int, queue: Any) -> None:
    train(run, folder, data, lambda epochs: queue.put((run.name, epochs)), workers)
