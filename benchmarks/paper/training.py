"""One run: a model trained from one seed by one optimizer, resumable after every epoch.

A run leaves one JSON file: its settings, and for each epoch the learning rate, the train loss and
what the task measures on its test data. Until it is finished a checkpoint lies beside that file.
Every epoch draws its order, augmentation and dropout from a seed of its own, so that a run that
goes on from a checkpoint is the same as one that never stopped.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import MultiStepLR

from benchmarks.paper.optimizers import make_optimizer
from benchmarks.paper.tasks import TASKS, Problem, make_problem

Epoch = dict[str, float | None]


@dataclass(frozen=True)
class Run:
    """What determines a run's result on one machine, but for the number of threads.

    Attributes:
        study: "optimizers" or "p".
        label: what the study calls it: the optimizer, or the variant of Padam.
        optimizer: a key of optimizers.NAMES.
        options: the optimizer's; None takes the paper's.
        task, model, width, epochs, seed: see tasks.Task.
        device: of the training, such as "cpu" or "cuda".
    """

    study: str
    label: str
    optimizer: str
    options: dict[str, Any]
    task: str
    model: str
    width: int | None
    epochs: int
    seed: int
    device: str

    @property
    def name(self) -> str:
        """The name of its file."""
        parts = [self.study, self.task, self.model, self.label]
        if self.study == "p":
            parts.append(f"{self.options['partial']:g}")
        words = "-".join([*parts, f"seed-{self.seed}"]).lower()
        return re.sub(r"[^a-z0-9.]+", "-", words)

    def settings(self) -> dict[str, Any]:
        """As they look when they have been in a JSON file."""
        settings: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return settings


def train(
    run: Run,
    folder: Path,
    data: Path | None,
    after_epoch: Callable[[int], None],
    workers: int = 0,
) -> dict[str, Any]:
    """Trains, or finds that it has been done, and returns what the JSON file has.

    Args:
        run: what to train.
        folder: where the JSON file and the checkpoint go; goes on from those that are there.
        data: the folder of the user's data; None for the embedded ones.
        after_epoch: is told how many epochs are done, first how many were before.
        workers: processes that load images.

    Raises:
        ValueError: the folder has the run with other settings.
    """
    file = folder / f"{run.name}.json"
    if file.exists():
        result: dict[str, Any] = json.loads(file.read_text())
        require_same(result["settings"], run, file)
        after_epoch(run.epochs)
        return result

    torch.manual_seed(run.seed)
    device, task = torch.device(run.device), TASKS[run.task]
    problem = make_problem(task, run.model, run.width, data, device, workers)
    steps = problem.batches * run.epochs
    optimizer = make_optimizer(run.optimizer, run.options, problem.model.parameters(), steps)
    scheduler = MultiStepLR(optimizer, task.decay_epochs(run.epochs), gamma=0.1)

    history: list[Epoch] = []
    saved = folder / f"{run.name}.checkpoint"
    whole = {"model": problem.model, "optimizer": optimizer, "scheduler": scheduler}
    if saved.exists():
        checkpoint = torch.load(saved, map_location=device, weights_only=True)
        require_same(json.loads(checkpoint["settings"]), run, saved)
        for key, part in whole.items():
            part.load_state_dict(checkpoint[key])
        history = checkpoint["history"]
    after_epoch(len(history))
    while len(history) < run.epochs and not diverged(history):
        torch.manual_seed(1_000_003 * (run.seed + 1) + len(history))
        lr = scheduler.get_last_lr()[0]
        loss = train_epoch(problem, optimizer)
        scheduler.step()
        measured = {"train_loss": loss, **problem.evaluate()}
        history.append({"lr": lr, **{key: finite(value) for key, value in measured.items()}})
        if len(history) < run.epochs:
            parts = {key: part.state_dict() for key, part in whole.items()}
            parts |= {"history": history, "settings": json.dumps(run.settings())}
            write(saved, partial(torch.save, parts))
        after_epoch(len(history))
    after_epoch(run.epochs)
    result = {
        "settings": run.settings(),
        "environment": environment(run.device),
        "history": history,
    }
    write(file, lambda path: path.write_text(json.dumps(result, indent=1) + "\n"))
    saved.unlink(missing_ok=True)
    return result


def train_epoch(problem: Problem, optimizer: Optimizer) -> float:
    """One pass over the training data; the mean loss."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for loss, examples in problem.losses():
        optimizer.zero_grad()
        loss.backward()
        if problem.max_grad_norm is not None:
            clip_grad_norm_(problem.model.parameters(), problem.max_grad_norm)
        optimizer.step()
        total = total.to(loss.device) + loss.detach().double() * examples
        count += examples
    return float(total) / count


def finite(value: float) -> float | None:
    """The value; None, which JSON can say, for infinity and NaN."""
    return value if math.isfinite(value) else None


def diverged(history: list[Epoch]) -> bool:
    """Whether the last epoch left something infinite or NaN."""
    return bool(history) and None in history[-1].values()


def require_same(settings: dict[str, Any], run: Run, file: Path) -> None:
    """Raises if a file's settings are not those of the run."""
    for key, value in run.settings().items():
        if settings.get(key) != value:
            raise ValueError(
                f"{file} is of a run with {key}={settings.get(key)!r}, this one has "
                f"{key}={value!r}; give another --out, or delete that file"
            )


def write(file: Path, writer: Callable[[Path], Any]) -> None:
    """The whole file or none of it, whenever the process ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.unfinished")
    writer(unfinished)
    os.replace(unfinished, file)


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
    return {"device": name, "python": platform.python_version(), "torch": torch.__version__}
