"""The paper's experiments on CIFAR and ImageNet, whose readers are torchvision's.

The files are small, and laid out like the real ones.
"""

import hashlib
import math
import pickle
import sys

import numpy as np
import pytest
import torch

from benchmarks.paper import images
from benchmarks.paper.__main__ import main
from benchmarks.paper.models import CNNS
from benchmarks.paper.optimizers import NAMES
from benchmarks.paper.tasks import TASKS, make_problem
from benchmarks.paper.training import train
from small_runs import carry_out_the_first, make_run, quietly

pytestmark = [pytest.mark.paper, pytest.mark.usefixtures("quick_runs")]
COUNT = 12  # images in a file


def contents(classes, seed):
    generator = np.random.default_rng(seed)
    labels = generator.integers(classes, size=COUNT, dtype=np.uint8)
    return labels, generator.integers(256, size=(COUNT, 3 * 32 * 32), dtype=np.uint8)


def layout(classes):
    """The files of the Python version and of the binary one, training first."""
    if classes == 100:
        return ["train", "test"], ["train.bin", "test.bin"]
    python = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    return python, [f"{name}.bin" for name in python]


def python_version(folder, classes, monkeypatch):
    from torchvision import datasets

    kind = datasets.CIFAR10 if classes == 10 else datasets.CIFAR100
    folder = folder / kind.base_folder
    folder.mkdir()
    key, meta = ("labels", "label_names") if classes == 10 else ("fine_labels", "fine_label_names")
    files = {kind.meta["filename"]: {meta: [str(k) for k in range(classes)]}}
    for seed, name in enumerate(layout(classes)[0]):
        labels, data = contents(classes, seed)
        files[name] = {key: labels.tolist(), "data": data}
    sums = {}
    for name, content in files.items():
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
        sums[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
    for names in ("train_list", "test_list"):
        checked = [[name, sums[name]] for name, _ in getattr(kind, names)]
        monkeypatch.setattr(kind, names, checked)
    monkeypatch.setattr(kind, "meta", kind.meta | {"md5": sums[kind.meta["filename"]]})


def binary_version(folder, classes, monkeypatch):
    folder = folder / {10: "cifar-10-batches-bin", 100: "cifar-100-binary"}[classes]
    folder.mkdir()
    for seed, name in enumerate(layout(classes)[1]):
        labels, data = contents(classes, seed)
        columns = [labels.reshape(-1, 1), data]
        if classes == 100:  # the coarse label stands first
            columns.insert(0, labels.reshape(-1, 1) // 5)
        np.concatenate(columns, 1).tofile(folder / name)


@pytest.fixture
def imagenet(tmp_path):
    from PIL import Image

    folder = tmp_path / "imagenet"
    generator = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in ("n01440764", "n01443537"):
            (folder / part / name).mkdir(parents=True)
            for number, size in enumerate(((300, 260, 3), (80, 90, 3))):
                pixels = generator.integers(256, size=size, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.JPEG")
    return folder


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("version", [python_version, binary_version])
def test_cifar(version, classes, tmp_path, monkeypatch):
    version(tmp_path, classes, monkeypatch)
    training_data, test_data = images.cifar(classes, tmp_path)
    assert len(training_data) == COUNT * (5 if classes == 10 else 1)
    assert len(test_data) == COUNT
    labels, pixels = contents(classes, 5 if classes == 10 else 1)
    means, deviations = torch.tensor(images._CIFAR_STATISTICS).view(2, 3, 1, 1)
    for (image, label), right, content in zip(test_data, labels, pixels, strict=True):
        assert label == right
        expected = torch.tensor(content, dtype=torch.float32).view(3, 32, 32) / 255
        torch.testing.assert_close(image, (expected - means) / deviations)
    torch.manual_seed(0)
    different = [not torch.equal(training_data[0][0], training_data[0][0]) for _ in range(5)]
    assert any(different)
    labels, _ = contents(classes, 0)
    assert [training_data[k][1] for k in range(COUNT)] == labels.tolist()


@pytest.mark.parametrize("optimizer", NAMES)
@pytest.mark.parametrize("model", CNNS)
@pytest.mark.parametrize(
    ("task", "version"), [("cifar10", python_version), ("cifar100", binary_version)]
)
def test_every_model_with_every_optimizer(task, version, model, optimizer, tmp_path, monkeypatch):
    version(tmp_path, TASKS[task].classes, monkeypatch)
    run = make_run(task, model, optimizer, epochs=1, data=str(tmp_path))
    result = train(run, tmp_path, quietly)
    assert all(math.isfinite(value) for value in result["history"][0].values())


@pytest.mark.parametrize(
    ("model", "optimizer"), [*(("resnet18", name) for name in NAMES), ("vgg16", "padam")]
)
def test_imagenet(model, optimizer, imagenet, tmp_path):
    run = make_run("imagenet", model, optimizer, epochs=1, data=str(imagenet))
    result = train(run, tmp_path, quietly)
    (epoch,) = result["history"]
    assert epoch.keys() == {"lr", "train_loss", "test_error", "test_error_top5"}
    assert epoch["test_error_top5"] <= epoch["test_error"]


def test_images_of_imagenet_are_cropped(imagenet):
    for part in images.imagenet(imagenet):
        assert [label for _, label in part] == [0, 0, 1, 1]
        assert {tuple(image.shape) for image, _ in part} == {(3, 224, 224)}


def test_with_workers_an_interrupted_run_ends_as_one_that_never_stopped(tmp_path, monkeypatch):
    binary_version(tmp_path, 10, monkeypatch)
    run = make_run("cifar10", "resnet18", "padam", epochs=3, data=str(tmp_path))
    whole = train(run, tmp_path / "whole", quietly, workers=2)

    def interrupt(history):
        if len(history) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "parts", interrupt, workers=2)
    assert train(run, tmp_path / "parts", quietly, workers=2) == whole


def test_the_models_of_imagenet_are_torchvisions(imagenet):
    problem = make_problem(TASKS["imagenet"], "resnet18", None, imagenet, torch.device("cpu"), 0)
    assert sum(param.numel() for param in problem.model.parameters()) == 11_689_512
    vgg = images.make_cnn("imagenet", "vgg16", 1000, None)
    # torchvision's vgg16_bn; without normalization it has 138,357,544.
    assert sum(param.numel() for param in vgg.parameters()) == 138_365_992


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        ("cifar10", {}, "neither cifar-10-batches-py nor cifar-10-batches-bin is in"),
        ("cifar100", {}, "unpack https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz there"),
        ("cifar10", {"cifar-10-batches-py/data_batch_1": b"x"}, "not found or corrupted"),
        ("cifar10", {f"cifar-10-batches-bin/{name}": b"x" * 3072 for name in layout(10)[1]},
         "data_batch_1.bin has 3072 bytes, not a multiple of 3073"),
        ("imagenet", {"train/a/b": b""}, "val is not there"),
        ("imagenet", {"train/a/b.png": b"", "train/c/b.png": b"", "val/a/b.png": b""},
         "has 2 classes in train and 1 in val"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_folder(task, content, message, tmp_path, monkeypatch, capsys):
    for name, value in content.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(value)

    monkeypatch.setattr("benchmarks.paper.__main__.carry_out", carry_out_the_first)
    arguments = ["run", "--task", task, "--model", "resnet18", "--data", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["paper", *arguments, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert message in " ".join(capsys.readouterr().err.split())
