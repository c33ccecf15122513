"""The demo: a small CNN on real handwritten digits, trained by four optimizers.

Each has the base learning rate of the paper's image experiments (Chen et al., IJCAI 2020, section
"Experiments") and its schedule: a tenth of the rate at 1/2 and again at 3/4 of the run. The data
are the 1797 digits of 8 x 8 pixels that come with scikit-learn, a quarter of them held out.

    python -m benchmarks.digits [--epochs N] [--seed S] [--out DIR]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import matplotlib
import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import MultiStepLR

from padam_ext import FusedPadam

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BATCH_SIZE = 128
WEIGHT_DECAY = 5e-4

OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "FusedPadam, p = 1/8": lambda params: FusedPadam(
        params, lr=0.1, betas=(0.9, 0.999), partial=1 / 8, weight_decay=WEIGHT_DECAY
    ),
    "SGD with momentum": lambda params: SGD(
        params, lr=0.1, momentum=0.9, weight_decay=WEIGHT_DECAY
    ),
    "Adam": lambda params: Adam(params, lr=1e-3, betas=(0.9, 0.99), weight_decay=WEIGHT_DECAY),
    "AMSGrad": lambda params: Adam(
        params, lr=1e-3, betas=(0.9, 0.99), weight_decay=WEIGHT_DECAY, amsgrad=True
    ),
}


@dataclass
class Curve:
    """What one optimizer did, by epoch."""

    train_loss: list[float] = field(default_factory=list)
    test_error: list[float] = field(default_factory=list)  # percent
    step_seconds: list[float] = field(default_factory=list)  # of each optimizer.step()


def make_model() -> nn.Module:
    """Two convolutions with batch normalization, pooling and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 4 * 4, 10),
    )  # fmt: skip


def load_data(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train images, train labels, test images, test labels; images (N, 1, 8, 8) in [0, 1]."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=seed)
    train_x, test_x = (
        torch.tensor(part, dtype=torch.float32).view(-1, 1, 8, 8) / 16 for part in parts[:2]
    )
    train_y, test_y = (torch.tensor(part) for part in parts[2:])
    return train_x, train_y, test_x, test_y


def train(
    make_optimizer: Callable[[Iterable[Tensor]], Optimizer],
    epochs: int,
    seed: int,
    after_epoch: Callable[[], None],
) -> Curve:
    """Trains one model from the seed, so that every optimizer meets the same one."""
    train_x, train_y, test_x, test_y = load_data(seed)
    torch.manual_seed(seed)
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    scheduler = MultiStepLR(optimizer, [epochs // 2, epochs * 3 // 4], gamma=0.1)
    curve = Curve()
    for _ in range(epochs):
        model.train()
        losses = []
        for batch in torch.randperm(len(train_x)).split(BATCH_SIZE):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(train_x[batch]), train_y[batch])
            loss.backward()
            start = time.perf_counter()
            optimizer.step()
            curve.step_seconds.append(time.perf_counter() - start)
            losses.append(loss.item())
        scheduler.step()
        model.eval()
        with torch.no_grad():
            wrong = model(test_x).argmax(1) != test_y
        curve.train_loss.append(sum(losses) / len(losses))
        curve.test_error.append(100 * wrong.double().mean().item())
        after_epoch()
    return curve


def print_table(curves: dict[str, Curve], console: Console) -> None:
    """One row per optimizer."""
    table = Table(title="Handwritten digits, after the last epoch")
    table.add_column("optimizer")
    for heading in ("train loss", "test accuracy", "ms per step"):
        table.add_column(heading, justify="right")
    for name, curve in curves.items():
        table.add_row(
            name,
            f"{curve.train_loss[-1]:.4f}",
            f"{100 - curve.test_error[-1]:.2f} %",
            f"{1000 * median(curve.step_seconds):.2f}",
        )
    console.print(table)


def plot(curves: dict[str, Curve], path: Path) -> None:
    """Train loss and test error by epoch, as the paper plots them."""
    figure, (loss, error) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, curve in curves.items():
        epochs = range(1, len(curve.train_loss) + 1)
        loss.semilogy(epochs, curve.train_loss, label=name)
        error.semilogy(epochs, curve.test_error, label=name)
    loss.set(xlabel="epoch", ylabel="train loss", title="Train loss")
    error.set(xlabel="epoch", ylabel="test error (%)", title="Test error")
    for axes in (loss, error):
        axes.grid(alpha=0.3)
    loss.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Trains, prints the table and writes the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for digits.png")
    options = parser.parse_args()
    if options.epochs < 4:
        parser.error(f"--epochs must be at least 4, got {options.epochs}")

    console = Console()
    curves = {}
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for name, make_optimizer in OPTIMIZERS.items():
            task = progress.add_task(f"{name:<19}", total=options.epochs)
            curves[name] = train(
                make_optimizer, options.epochs, options.seed, lambda t=task: progress.advance(t)
            )
    print_table(curves, console)
    path = options.out / "digits.png"
    plot(curves, path)
    console.print(f"The curves are in {path}.")


if __name__ == "__main__":
    main()
