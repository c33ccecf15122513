"""Image classification: scikit-learn's digits, CIFAR-10 and -100, folders of ImageNet.

torchvision is imported for CIFAR and ImageNet only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.paper.models import CNNS

Images = Dataset[tuple[Tensor, int]]


@dataclass
class ImageProblem:
    """A model, batches of images (N, channels, H, W) float32 with labels (N,), and a device."""

    model: nn.Module
    train: DataLoader[Any]
    test: DataLoader[Any]
    device: torch.device
    top5: bool = False
    max_grad_norm: float | None = None

    @property
    def batches(self) -> int:
        """How many batches an epoch has."""
        return len(self.train)

    @property
    def test_batches(self) -> int:
        """How many batches the tests have."""
        return len(self.test)

    def losses(self) -> Iterator[tuple[Tensor, int]]:
        """Of one epoch: the mean loss of each batch, and how many images that are."""
        self.model.train()
        for images, labels in self.train:
            logits = self.model(images.to(self.device, non_blocking=True))
            yield nn.functional.cross_entropy(logits, labels.to(self.device)), len(labels)

    def evaluate(self, after_batch: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Percent of the test images whose label is not the first guess, nor among five."""
        self.model.eval()
        wrong = torch.zeros(2, device=self.device, dtype=torch.int64)
        count = 0
        with torch.no_grad():
            for images, labels in self.test:
                guesses = self.model(images.to(self.device)).topk(5).indices
                right = guesses == labels.to(self.device).view(-1, 1)
                wrong += torch.stack([(~right[:, 0]).sum(), (~right.any(1)).sum()])
                count += len(labels)
                after_batch()
        first, five = (100 * wrong.double() / count).tolist()
        return {"test_error": first} | ({"test_error_top5": five} if self.top5 else {})


def digits() -> tuple[Images, Images]:
    """The 1797 digits of 8 x 8 pixels that come with scikit-learn, a quarter of them for tests."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
    train_x, test_x = (
        torch.tensor(part, dtype=torch.float32).view(-1, 1, 8, 8) / 16 for part in parts[:2]
    )
    train_y, test_y = (torch.tensor(part) for part in parts[2:])
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


# Means and deviations of the channels, as everybody takes them; CIFAR-10's serve both CIFARs.
_CIFAR_STATISTICS = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_IMAGENET_STATISTICS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class _BinaryFiles(Dataset[tuple[Any, int]]):
    """Files in CIFAR's binary format: labels, the last of which counts, and 3 x 32 x 32 bytes."""

    def __init__(self, files: list[Path], labels: int, transform: Any) -> None:
        size = labels + 3 * 32 * 32
        contents = [np.fromfile(file, np.uint8) for file in files]
        for file, content in zip(files, contents, strict=True):
            if len(content) == 0 or len(content) % size:
                raise ValueError(f"{file} has {len(content)} bytes, not a multiple of {size}")
        rows = np.concatenate(contents).reshape(-1, size)
        self.labels = rows[:, labels - 1].copy()
        self.images = torch.from_numpy(rows[:, labels:].reshape(-1, 3, 32, 32))
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.images[index]), int(self.labels[index])


def _torchvision() -> Any:
    """The module, with its second transforms.

    Raises:
        ModuleNotFoundError: it is missing, or made for another torch.
    """
    try:
        import torchvision
        import torchvision.transforms.v2
    except (ImportError, RuntimeError) as error:
        raise ModuleNotFoundError(
            f"CIFAR and ImageNet need a torchvision made for torch {torch.__version__} ({error})"
        ) from error
    return torchvision


def _to_floats(v2: Any, statistics: tuple[tuple[float, ...], tuple[float, ...]]) -> list[Any]:
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(*statistics)]


def cifar(classes: int, folder: Path) -> tuple[Images, Images]:
    """CIFAR-10 or CIFAR-100 from its Python version, as torchvision reads it, or its binary one.

    Augmented as is usual: four pixels of padding, a random crop, a random flip.

    Raises:
        FileNotFoundError: the folder has neither; says what was looked for.
        ValueError: files are not what they should be.
    """
    torchvision = _torchvision()
    datasets, v2 = torchvision.datasets, torchvision.transforms.v2
    to_floats = _to_floats(v2, _CIFAR_STATISTICS)
    test = v2.Compose(to_floats)
    train = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), *to_floats])

    python, binary = {
        10: ("cifar-10-batches-py", "cifar-10-batches-bin"),
        100: ("cifar-100-python", "cifar-100-binary"),
    }[classes]
    if (folder / python).is_dir():
        kind = datasets.CIFAR10 if classes == 10 else datasets.CIFAR100
        try:
            return (
                kind(folder, train=True, transform=train),
                kind(folder, train=False, transform=test),
            )
        except RuntimeError as error:
            raise ValueError(f"{folder / python}: {error}") from error
    if not (folder / binary).is_dir():
        raise FileNotFoundError(
            f"CIFAR-{classes}: neither {python} nor {binary} is in {folder}; unpack "
            f"https://www.cs.toronto.edu/~kriz/cifar-{classes}-python.tar.gz there"
        )
    if classes == 10:
        files = [folder / binary / f"data_batch_{k}.bin" for k in range(1, 6)]
        tests, labels = [folder / binary / "test_batch.bin"], 1
    else:
        files, tests, labels = [folder / binary / "train.bin"], [folder / binary / "test.bin"], 2
    return _BinaryFiles(files, labels, train), _BinaryFiles(tests, labels, test)


def imagenet(folder: Path) -> tuple[Images, Images]:
    """Folders `train` and `val`, each with a folder of images for each class.

    Raises:
        FileNotFoundError: a folder is missing.
        ValueError: both folders do not have the same classes, or have more than a thousand.
    """
    torchvision = _torchvision()
    datasets, v2 = torchvision.datasets, torchvision.transforms.v2
    for name in ("train", "val"):
        if not (folder / name).is_dir():
            raise FileNotFoundError(
                f"ImageNet: {folder / name} is not there; {folder} must have the folders train and "
                f"val, each with one folder of images for each class"
            )
    to_floats = _to_floats(v2, _IMAGENET_STATISTICS)
    train = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), *to_floats])
    test = v2.Compose([v2.Resize(256), v2.CenterCrop(224), *to_floats])
    training = datasets.ImageFolder(str(folder / "train"), train)
    testing = datasets.ImageFolder(str(folder / "val"), test)
    if training.classes != testing.classes or len(training.classes) > 1000:
        raise ValueError(
            f"{folder} has {len(training.classes)} classes in train and {len(testing.classes)} in "
            f"val; they must be the same, a thousand at most"
        )
    return training, testing


def make_cnn(task: str, model: str, classes: int, width: int | None) -> nn.Module:
    """A model for 8 x 8 digits, for CIFAR, or torchvision's for ImageNet."""
    if task == "imagenet":
        # The paper's VGG has batch normalization here, too.
        name = {"vgg16": "vgg16_bn"}.get(model, model)
        network: nn.Module = getattr(_torchvision().models, name)(num_classes=classes)
        return network
    assert width is not None
    return CNNS[model](1 if task == "digits" else 3, classes, width)
