"""One run: a model trained from one seed by one optimizer, resumable after every epoch.

A run leaves one JSON file: its settings, and for each epoch the learning rate, the train loss and
what the task measures on its test data. Until it is finished a checkpoint lies beside that file.
Every epoch draws its order, augmentation and dropout from a seed of its own, so that on the CPU,
with as many threads and workers, a run that goes on from a checkpoint is the same as one that never
stopped.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import MultiStepLR

import padam_ext
from benchmarks.paper.optimizers import make_optimizer
from benchmarks.paper.runs import Epoch, Position, Run, finished, unfinished, write
from benchmarks.paper.storage import Stored
from benchmarks.paper.tasks import TASKS, Problem, make_problem
from benchmarks.versions import installed


def train(
    run: Run,
    folder: Path,
    after_epoch: Callable[[list[Epoch]], None],
    workers: int = 0,
    after_batch: Callable[[Position], None] = lambda position: None,
) -> dict[str, Any]:
    """Trains, or finds that it has been done, and returns what the JSON file has.

    Args:
        run: what to train.
        folder: where the JSON file and the checkpoint go; goes on from those that are there.
        after_epoch: is given all epochs so far, first those that were done before.
        workers: processes that load images.
        after_batch: is given where the run is after each batch of training and of tests. It is one
            object that changes.

    Raises:
        ValueError: the folder has the run with other settings, or files that cannot be read.
    """
    result = finished(run, folder)
    if result:
        after_epoch(result["history"])
        return result

    torch.manual_seed(run.seed)
    device, task = torch.device(run.device), TASKS[run.task]
    data = None if run.data is None else Path(run.data)
    problem = make_problem(task, run.model, run.width, data, device, workers)
    steps = problem.batches * run.epochs
    stored = Stored(problem.model.parameters(), run.param_dtype)
    optimizer = make_optimizer(run.optimizer, run.options, stored.params, steps)
    stored.attach(optimizer)
    scheduler = MultiStepLR(optimizer, task.decay_epochs(run.epochs), gamma=0.1)

    history: list[Epoch] = []
    whole = {"model": problem.model, "optimizer": optimizer, "scheduler": scheduler}
    checkpoint = unfinished(run, folder)
    if checkpoint:
        for key, part in whole.items():
            part.load_state_dict(checkpoint[key])
        stored.load()
        history = checkpoint["history"]
    after_epoch(history)
    while not run.is_over(history):
        torch.manual_seed(1_000_003 * (run.seed + 1) + len(history))
        lr = scheduler.get_last_lr()[0]
        position = Position(len(history) + 1, problem.batches, problem.test_batches)
        train_epoch(problem, optimizer, position, after_batch)
        scheduler.step()
        tested = evaluate(problem, position, after_batch)
        measured = {"train_loss": position.train_loss, **tested}
        # A model of NaN still has guesses; they are nothing that was measured.
        if not all(math.isfinite(value) for value in measured.values()):
            measured = dict.fromkeys(measured, None)
        history.append({"lr": lr, **measured})
        if not run.is_over(history):
            parts = {key: part.state_dict() for key, part in whole.items()}
            parts |= {"history": history, "settings": json.dumps(run.settings())}
            write(run.checkpoint(folder), partial(torch.save, parts))
        after_epoch(history)
    result = {
        "settings": run.settings(),
        "environment": environment(run.device),
        "history": history,
    }
    text = json.dumps(result, indent=1) + "\n"
    write(run.result(folder), lambda path: path.write_text(text))
    run.checkpoint(folder).unlink(missing_ok=True)
    return result


def train_epoch(
    problem: Problem,
    optimizer: Optimizer,
    position: Position,
    after_batch: Callable[[Position], None],
) -> None:
    """One pass over the training data, noted in the position."""
    for loss, examples in problem.losses():
        optimizer.zero_grad()
        loss.backward()
        if problem.max_grad_norm is not None:
            clip_grad_norm_(problem.model.parameters(), problem.max_grad_norm)
        optimizer.step()
        position.total = position.total + loss.detach().double() * examples
        position.examples += examples
        position.trained += 1
        after_batch(position)


def evaluate(
    problem: Problem, position: Position, after_batch: Callable[[Position], None]
) -> dict[str, float]:
    """What the problem measures on its test data, noted in the position."""

    def tested() -> None:
        position.tested += 1
        after_batch(position)

    return problem.evaluate(tested)


@cache
def environment(device: str) -> dict[str, str]:
    """The machine and the versions that a result depends on."""
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(device)
    else:
        import cpuinfo

        cpu = cpuinfo.get_cpu_info().get("brand_raw") or platform.machine()
        threads = torch.get_num_threads()
        name = f"{cpu}, {threads} thread{'s' if threads > 1 else ''}"
    packages = ("torch", "padam_ext", "pytorch-optimizer", "scikit-learn", "torchvision")
    backends = ", ".join(padam_ext.available_backends())
    found = {"device": name, "backends": backends, "python": platform.python_version()}
    return found | installed(packages)
