"""What a run is, and what it leaves in a folder: a JSON file, before that a checkpoint."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

Epoch = dict[str, float | None]
Result = dict[str, Any]  # what the JSON file has


@dataclass(frozen=True)
class Run:
    """What determines a run's result on one machine, but for the number of threads.

    Attributes:
        study: "optimizers", "p" or "storage".
        label: what the study calls it: the optimizer, the variant of Padam, or the storage.
        optimizer: a key of optimizers.NAMES.
        options: the optimizer's.
        task, model, width, epochs, seed: see tasks.Task.
        data: the folder of the user's data; None for the embedded ones.
        device: of the training, such as "cpu" or "cuda".
        param_dtype: a key of storage.PARAM_DTYPES.
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
    data: str | None
    device: str
    param_dtype: str = "float32"

    @property
    def name(self) -> str:
        """The name of its file."""
        parts = [self.study, self.task, self.model, self.label]
        if self.study == "p":
            parts.append(f"{self.options['partial']:g}")
        words = "-".join([*parts, f"seed-{self.seed}"]).lower()
        return re.sub(r"[^a-z0-9.]+", "-", words)

    def result(self, folder: Path) -> Path:
        """The JSON file."""
        return folder / f"{self.name}.json"

    def checkpoint(self, folder: Path) -> Path:
        """The file that lies there until the run is over."""
        return folder / f"{self.name}.checkpoint"

    def is_over(self, history: list[Epoch]) -> bool:
        """Whether these epochs are all, or the last one diverged."""
        return len(history) == self.epochs or diverged(history)

    def settings(self) -> dict[str, Any]:
        """As they look when they have been in a JSON file."""
        settings: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return settings


@dataclass
class Position:
    """Where in an epoch a run is: it trains, then it is tested.

    Attributes:
        epoch: counted from 1.
        batches, test_batches: how many this epoch has.
        trained, tested: how many of these are done.
        examples: how many are in the batches trained: images, or time steps of text.
        total: the sum of their losses. A tensor stays on its device: to read it is to wait for it.
    """

    epoch: int
    batches: int
    test_batches: int
    trained: int = 0
    tested: int = 0
    examples: int = 0
    total: Tensor | float = 0.0

    @property
    def train_loss(self) -> float:
        """The mean over what this epoch has trained."""
        return float(self.total) / self.examples


def described(name: str, epochs: int, history: list[Epoch]) -> str:
    """A run's last epoch in one line."""
    values = ", ".join(
        f"{key.replace('_', ' ')} {'diverged' if value is None else f'{value:.4g}'}"
        for key, value in history[-1].items()
    )
    return f"{name}, epoch {len(history)} of {epochs}: {values}"


def finished(run: Run, folder: Path) -> Result | None:
    """The run's result, if the folder has it.

    Raises:
        ValueError: it is of other settings, or cannot be read.
    """
    file = run.result(folder)
    if not file.exists():
        return None
    result = read_result(file)
    require_same(result["settings"], run, file)
    run.checkpoint(folder).unlink(missing_ok=True)
    return result


def read_result(file: Path) -> Result:
    """What a finished run has left.

    Raises:
        ValueError: the file cannot be read.
    """
    with _damage_named(file):
        result: Result = json.loads(file.read_text())
    return result


def unfinished(run: Run, folder: Path, mmap: bool = False) -> dict[str, Any] | None:
    """The run's checkpoint, if the folder has one.

    Args:
        run: whose.
        folder: where it lies.
        mmap: leave tensors in the file, which is for looking at the rest.

    Raises:
        ValueError: it is of other settings, or cannot be read.
    """
    file = run.checkpoint(folder)
    if not file.exists():
        return None
    checkpoint = _read_checkpoint(file, mmap)
    require_same(checkpoint["settings"], run, file)
    return checkpoint


def describe_unfinished(folder: Path) -> list[str]:
    """The last epoch of each run that has a checkpoint only.

    Raises:
        ValueError: a checkpoint cannot be read.
    """
    lines = []
    for file in sorted(folder.glob("*.checkpoint")):
        with suppress(FileNotFoundError):  # the run ended just now
            checkpoint = _read_checkpoint(file, mmap=True)
            if not file.with_suffix(".json").exists():
                epochs = checkpoint["settings"]["epochs"]
                lines.append(described(file.stem, epochs, checkpoint["history"]))
    return lines


def _read_checkpoint(file: Path, mmap: bool) -> dict[str, Any]:
    with _damage_named(file):
        # Optimizers take their states to where they belong.
        checkpoint: dict[str, Any] = torch.load(
            file, map_location="cpu", weights_only=True, mmap=mmap
        )
        return checkpoint | {"settings": json.loads(checkpoint["settings"])}


@contextmanager
def _damage_named(file: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, KeyError, RuntimeError, ValueError, UnpicklingError) as error:
        raise ValueError(
            f"{file} is damaged ({type(error).__name__}); delete it to train that run anew"
        ) from error


def labelled(results: list[Result], labels: Iterable[str]) -> dict[str, list[Result]]:
    """Results by label, in the order of the labels."""
    return {
        label: [result for result in results if result["settings"]["label"] == label]
        for label in labels
    }


def diverged(history: list[Epoch]) -> bool:
    """Whether the last epoch ended with something infinite or NaN, for which JSON has null."""
    return bool(history) and None in history[-1].values()


def require_same(
    settings: dict[str, Any], run: Run, file: Path, keys: Iterable[str] | None = None
) -> None:
    """Raises if a file's settings, all or those of some keys, are not those of the run."""
    for key, value in run.settings().items():
        if keys is not None and key not in keys:
            continue
        if settings.get(key) != value:
            raise ValueError(
                f"{file} is of a run with {key}={settings.get(key)!r}, this one has "
                f"{key}={value!r}; give another --out, or delete that file"
            )


def write(file: Path, writer: Callable[[Path], Any]) -> None:
    """The whole file or none of it, whenever the process ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.unfinished")
    writer(part)
    os.replace(part, file)
