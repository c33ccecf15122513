"""The runs of the three studies, and how they are carried out side by side.

The optimizer study is the paper's comparison of seven optimizers. The p study varies Padam's
exponent, and three things beside it: without the running maximum it is a partially adaptive Adam,
without that and without momentum a partially adaptive RMSprop (the paper's remark that the idea
carries over), and with the authors' bias correction it is what their released code computes.

The storage study trains with Padam for each way to store parameters and states.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.paper.optimizers import HYPERPARAMETERS, NAMES
from benchmarks.paper.runs import Epoch, Run, finished, read_result, require_same, unfinished
from benchmarks.paper.storage import STORAGES, options_of
from benchmarks.paper.tasks import TASKS, Task
from benchmarks.paper.training import train

# The grid of the paper's section "Experiments", and AMSGrad's exponent.
EXPONENTS = (1 / 16, 1 / 8, 1 / 5, 1 / 4, 2 / 5, 1 / 2)
VARIANTS: dict[str, dict[str, Any]] = {
    "Padam": {},
    "authors' bias correction": {"bias_correction": "authors"},
    "partially adaptive Adam": {"amsgrad": False},
    "partially adaptive RMSprop": {"amsgrad": False, "betas": (0.0, 0.999)},
}


def optimizer_study(
    task: Task,
    model: str,
    optimizers: Iterable[str],
    seeds: int,
    stored: dict[str, Any] | None = None,
    **others: Any,
) -> list[Run]:
    """Each optimizer with the paper's hyperparameters, from each seed; Padam `stored` so."""
    table = HYPERPARAMETERS[task.recipe or model]
    table = table | {"padam": table["padam"] | (stored or {})}
    return [
        Run("optimizers", NAMES[name], name, table[name], task.name, model, seed=seed, **others)
        for seed in range(seeds)
        for name in optimizers
    ]


def p_study(
    task: Task, model: str, seeds: int, stored: dict[str, Any] | None = None, **others: Any
) -> list[Run]:
    """Padam with the paper's hyperparameters but for p, and its variants, from each seed."""
    paper = HYPERPARAMETERS[task.recipe or model]["padam"] | (stored or {})
    return [
        Run("p", label, "padam", paper | variant | {"partial": p}, task.name, model, seed=seed,
            **others)
        for seed in range(seeds)
        for label, variant in VARIANTS.items()
        for p in EXPONENTS
    ]  # fmt: skip


def storage_study(task: Task, model: str, seeds: int, **others: Any) -> list[Run]:
    """Padam with the paper's hyperparameters for each way to store, from each seed."""
    paper = HYPERPARAMETERS[task.recipe or model]["padam"]
    return [
        Run("storage", label, "padam", paper | options_of(params, states), task.name, model,
            seed=seed, param_dtype=params, **others)
        for seed in range(seeds)
        for label, (params, states, _) in STORAGES.items()
    ]  # fmt: skip


def carry_out(runs: list[Run], folder: Path, workers: int, jobs: int, console: Console) -> None:
    """Trains all of them, `jobs` at a time, which share the threads, and shows how far they are.

    Args:
        runs: of one study, task and model.
        folder: where results and checkpoints lie.
        workers: processes that load images, for each job.
        jobs: how many processes train.
        console: where progress goes; a line for each run that ends, and for each epoch where those
            take long.

    Raises:
        ValueError: the folder has runs of other settings, or files that cannot be read.
        Exception: what the first run to fail raised. Whatever ends this early, the processes are
            ended with it; the same runs then go on from their last epochs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    require_alike(runs, folder)
    left = [run for run in runs if finished(run, folder) is None]
    if len(left) < len(runs):
        console.print(f"{len(runs) - len(left)} of {len(runs)} runs are in {folder} already.")
    begun = sum(run.checkpoint(folder).exists() for run in left)
    if begun:
        console.print(
            f"{begun} of the others {'goes' if begun == 1 else 'go'} on from a checkpoint."
        )
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // jobs)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with (
        context.Manager() as manager,
        ProcessPoolExecutor(jobs, context, _start_process, (threads,)) as executor,
        Progress(*columns, console=console) as progress,
        signals_noted() as stopped,
    ):
        queue, manager_itself = manager.Queue(), multiprocessing.active_children()
        bar = progress.add_task("epochs", total=sum(run.epochs for run in left))
        done = {run.name: 0 for run in left}
        futures = [executor.submit(_train, run, folder, workers, queue) for run in left]
        try:
            while not all(future.done() for future in futures) or not queue.empty():
                with suppress(Empty):
                    name, done[name], line = queue.get(timeout=0.5)
                    progress.update(bar, completed=sum(done.values()))
                    if line:
                        progress.console.print(line, highlight=False, soft_wrap=True)
                for future in futures:
                    if future.done():
                        future.result()
                if signal.SIGINT in stopped:
                    raise KeyboardInterrupt
                if stopped:
                    sys.exit(128 + stopped[0])
        except BaseException:
            for process in multiprocessing.active_children():
                if process not in manager_itself:
                    process.terminate()
            raise


@contextmanager
def signals_noted() -> Iterator[list[int]]:
    """The signals that ask for an end, as they come.

    An exception out of a handler is lost where Python runs a finalizer at that moment.
    """
    noted: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _: noted.append(number)) for number in numbers]
    try:
        yield noted
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def require_alike(runs: list[Run], folder: Path) -> None:
    """Raises if the folder has other runs of this study, task and model that differ from these.

    A table or a figure of both would say nothing.
    """
    same_study = ("study", "task", "model")
    alike = ["width", "epochs", "data", "device"]
    if runs[0].study != "storage":
        alike.append("param_dtype")
    for file in sorted(folder.glob("*.json")):
        settings = read_result(file)["settings"]
        if all(settings[key] == getattr(runs[0], key) for key in same_study):
            require_same(settings, runs[0], file, alike)
    for run in runs:
        unfinished(run, folder, mmap=True)


def _start_process(threads: int) -> None:
    # The process that waits for this one is told of Ctrl-C, too, and ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)


def _train(run: Run, folder: Path, workers: int, queue: Any) -> None:
    def after_epoch(history: list[Epoch]) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            sys.exit("the process that started this one has gone")
        over = run.is_over(history)
        line = None
        if history and (over or not TASKS[run.task].embedded):
            values = ", ".join(
                f"{key.replace('_', ' ')} {'diverged' if value is None else f'{value:.4g}'}"
                for key, value in history[-1].items()
            )
            line = f"{run.name}, epoch {len(history)} of {run.epochs}: {values}"
        queue.put((run.name, run.epochs if over else len(history), line))

    train(run, folder, after_epoch, workers)
