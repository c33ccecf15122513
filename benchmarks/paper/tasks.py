"""What can be trained: data, models, epochs and the epochs of the paper's decays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.paper import images, text
from benchmarks.paper.models import CNNS, LSTMS

Problem = images.ImageProblem | text.TextProblem


@dataclass(frozen=True)
class Task:
    """A data set and how the paper trains on it.

    Attributes:
        name: what --task calls it, and files of results.
        title: what tables call it.
        embedded: whether it needs no files of the user's.
        models: the names of its models.
        recipe: of which HYPERPARAMETERS; those of LSTMs go by the model's name.
        epochs: how many are usual.
        decays: the percents of a run after which the learning rate is a tenth.
        batch_size: images, or streams of words.
        width: of the models; None where they have one of their own.
        metric: what is reported of the last epoch, a key of Problem.evaluate.
        paper: the paper's data set that tables set beside it.
        classes: of images.
        dropout: of LSTMs.
    """

    name: str
    title: str
    embedded: bool
    models: tuple[str, ...]
    recipe: str
    epochs: int
    decays: tuple[int, ...]
    batch_size: int
    width: int | None
    metric: str
    paper: str
    classes: int = 10
    dropout: float = 0.0

    def decay_epochs(self, epochs: int) -> list[int]:
        """After how many epochs the learning rate falls, in proportion to the paper's.

        Rounded up: the shortest of runs have fewer decays rather than one before they begin.
        """
        return [-(-percent * epochs // 100) for percent in self.decays]


_CNNS, _LSTMS = tuple(CNNS), tuple(LSTMS)
_TWICE = (50, 75)  # epochs 100 and 150 of 200
_THRICE = (30, 60, 80)
_ERROR, _PERPLEXITY = "test_error", "test_perplexity"
TASKS = {
    task.name: task
    for task in (
        Task("digits", "scikit-learn's digits", True, _CNNS, "cifar", 16, _TWICE, 128, 8, _ERROR,
             "CIFAR-10"),
        Task("cifar10", "CIFAR-10", False, _CNNS, "cifar", 200, _TWICE, 128, 64, _ERROR,
             "CIFAR-10"),
        Task("cifar100", "CIFAR-100", False, _CNNS, "cifar", 200, _TWICE, 128, 64, _ERROR,
             "CIFAR-100", 100),
        Task("imagenet", "ImageNet", False, ("resnet18", "vgg16"), "imagenet", 100, _THRICE, 256,
             None, _ERROR, "ImageNet", 1000),
        Task("lm", "Python's documentation", True, _LSTMS, "", 6, _TWICE, 20, 64, _PERPLEXITY,
             "Penn Treebank", dropout=0.2),
        Task("ptb", "Penn Treebank", False, _LSTMS, "", 200, _TWICE, 20, 650, _PERPLEXITY,
             "Penn Treebank", dropout=0.5),
    )
}  # fmt: skip


def make_problem(
    task: Task,
    model: str,
    width: int | None,
    data: Path | None,
    device: torch.device,
    workers: int,
) -> Problem:
    """The task's data and a fresh model on the device; torch's global generator draws the model.

    Raises:
        FileNotFoundError: the folder of data lacks what the task reads.
        ModuleNotFoundError: CIFAR and ImageNet without torchvision.
    """
    if task.metric == _PERPLEXITY:
        assert width is not None
        corpus = text.penn_treebank(data) if data else text.python_documentation()
        return text.make_text_problem(corpus, model, width, task.dropout, task.batch_size, device)
    if data is None:
        train, test = images.digits()
    elif task.name == "imagenet":
        train, test = images.imagenet(data)
    else:
        train, test = images.cifar(task.classes, data)
    options: dict[str, Any] = {
        "batch_size": task.batch_size,
        "num_workers": workers,
        "pin_memory": device.type == "cuda",
    }
    return images.ImageProblem(
        images.make_cnn(task.name, model, task.classes, width).to(device),
        # Its workers begin each epoch anew, since that is what seeds their augmentation.
        DataLoader(train, shuffle=True, **options),
        DataLoader(test, persistent_workers=workers > 0, **options),
        device,
        top5=task.name == "imagenet",
    )
