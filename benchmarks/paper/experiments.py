"""The runs of the three studies, and how they are carried out side by side.

The optimizer study is the paper's comparison of seven optimizers. The p study varies Padam's
exponent, and other things beside it: without the running maximum it is a partially adaptive Adam,
without that and without momentum a partially adaptive RMSprop, with another second moment a
partially adaptive AdaGrad, AdaMax or Yogi (the paper's remark that the idea carries over), and with
the authors' bias correction it is what their released code computes.

The storage study trains with Padam for each way to store parameters and states.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.managers import SyncManager
from pathlib import Path
from queue import Empty
from typing import Any

import torch
from rich.console import Console

from benchmarks.paper.optimizers import HYPERPARAMETERS, NAMES, require_installed
from benchmarks.paper.progress import Display, Reporter
from benchmarks.paper.runs import Run, finished, read_result, require_same, unfinished
from benchmarks.paper.storage import STORAGES, options_of
from benchmarks.paper.tasks import Task
from benchmarks.paper.training import train

# The grid of the paper's section "Experiments", and AMSGrad's exponent.
EXPONENTS = (1 / 16, 1 / 8, 1 / 5, 1 / 4, 2 / 5, 1 / 2)
VARIANTS: dict[str, dict[str, Any]] = {
    "Padam": {},
    "authors' bias correction": {"bias_correction": "authors"},
    "partially adaptive Adam": {"amsgrad": False},
    "partially adaptive RMSprop": {"amsgrad": False, "betas": (0.0, 0.999)},
    "partially adaptive AdaGrad": {"amsgrad": False, "second_moment": "sum"},
    "partially adaptive AdaMax": {"amsgrad": False, "second_moment": "max"},
    "partially adaptive Yogi": {"amsgrad": False, "second_moment": "yogi"},
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
        # Packed states are of means only.
        if "second_moment" not in variant or paper.get("state_dtype", "float32") == "float32"
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


def carry_out(
    runs: list[Run],
    folder: Path,
    workers: int,
    jobs: int,
    console: Console,
    tensorboard: Path | None = None,
) -> None:
    """Trains all of them, `jobs` at a time, which share the threads, and shows how far they are.

    Args:
        runs: of one study, task and model.
        folder: where results and checkpoints lie.
        workers: processes that load images, for each job.
        jobs: how many processes train.
        console: where progress goes; a line for each run that ends, and for each epoch where those
            take long.
        tensorboard: where a folder for each run goes, finished ones too; None for nowhere.

    Raises:
        ValueError: the folder has runs of other settings, or files that cannot be read.
        ModuleNotFoundError: an optimizer's package is missing; before anything is trained.
        Exception: what the first run to fail raised. Whatever ends this early, the processes are
            ended with it; the same runs then go on from their last epochs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    require_installed(run.optimizer for run in runs)
    begun = require_alike(runs, folder)
    results = [(run, finished(run, folder)) for run in runs]
    left = [run for run, result in results if result is None]
    if len(left) < len(runs):
        console.print(f"{len(runs) - len(left)} of {len(runs)} runs are in {folder} already.")
    count = sum(run.name in begun for run in left)
    if count:
        console.print(
            f"{count} of the others {'goes' if count == 1 else 'go'} on from a checkpoint."
        )
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // jobs)
    with ExitStack() as stack:
        display = stack.enter_context(Display(left, begun, console))
        listeners: list[Any] = [display]
        if tensorboard:
            from benchmarks.paper.scalars import Scalars

            scalars = stack.enter_context(Scalars(tensorboard))
            listeners.append(scalars)
            for run, result in results:
                if result:
                    scalars.after_epoch(run, result["history"])
        manager = SyncManager(ctx=context)
        manager.start(_start_manager)
        stack.callback(manager.shutdown)
        executor = stack.enter_context(
            ProcessPoolExecutor(jobs, context, _start_process, (threads,))
        )
        stopped = stack.enter_context(signals_noted())
        queue, manager_itself = manager.Queue(), multiprocessing.active_children()
        futures = [executor.submit(_train, run, folder, workers, queue) for run in left]
        try:
            while not all(future.done() for future in futures) or not queue.empty():
                with suppress(Empty):
                    method, *arguments = queue.get(timeout=0.5)
                    for listener in listeners:
                        getattr(listener, method)(*arguments)
                if signal.SIGINT in stopped:
                    raise KeyboardInterrupt
                if stopped:
                    sys.exit(128 + stopped[0])
                for future in futures:
                    if future.done():
                        future.result()
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


def require_alike(runs: list[Run], folder: Path) -> dict[str, int]:
    """Raises if the folder has other runs of this study, task and model that differ from these.

    A table or a figure of both would say nothing. Returns how many epochs are behind those of the
    runs that have a checkpoint, by name.
    """
    same_study = ("study", "task", "model")
    alike = ["width", "epochs", "data", "device"]
    if runs[0].study != "storage":
        alike.append("param_dtype")
    for file in sorted(folder.glob("*.json")):
        settings = read_result(file)["settings"]
        if all(settings[key] == getattr(runs[0], key) for key in same_study):
            require_same(settings, runs[0], file, alike)
    begun = {}
    for run in runs:
        checkpoint = unfinished(run, folder, mmap=True)
        if checkpoint:
            begun[run.name] = len(checkpoint["history"])
    return begun


def _start_process(threads: int) -> None:
    # The process that waits for this one is told of Ctrl-C, too, and ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    torch.set_num_threads(threads)


def _start_manager() -> None:
    # Told of Ctrl-C and of SIGTERM, too, but needed until the others have ended.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with_parent()


def _end_with_parent() -> None:
    """Ends this process when the one that started it is gone, even if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _train(run: Run, folder: Path, workers: int, queue: Any) -> None:
    reporter = Reporter(run, queue)
    reporter.begin()
    train(run, folder, reporter.after_epoch, workers, reporter.after_batch)
