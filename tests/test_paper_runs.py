"""Runs of the paper's experiments on data that need no download: trained, resumed, refused."""

import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.paper import experiments, training
from benchmarks.paper.models import CNNS
from benchmarks.paper.optimizers import NAMES
from benchmarks.paper.tasks import TASKS
from benchmarks.paper.training import train
from small_runs import make_run, quietly

pytestmark = pytest.mark.usefixtures("tiny_data")
DIGITS = [("digits", model) for model in CNNS]
TEXTS = [("lm", "lstm2"), ("lm", "lstm3"), ("ptb", "lstm2")]


@pytest.mark.parametrize("optimizer", NAMES)
@pytest.mark.parametrize(("task", "model"), DIGITS + TEXTS)
def test_every_model_with_every_optimizer(task, model, optimizer, tmp_path, ptb):
    seen = []
    run = make_run(task, model, optimizer, data=str(ptb) if task == "ptb" else None)
    result = train(run, tmp_path, lambda history: seen.append(len(history)))
    assert seen == [0, 1, 2]
    lr = run.options["lr"]
    assert [epoch["lr"] for epoch in result["history"]] == pytest.approx([lr, lr / 10])
    for epoch in result["history"]:
        assert all(math.isfinite(value) for value in epoch.values())
    assert result == json.loads((tmp_path / f"{run.name}.json").read_text())
    assert not list(tmp_path.glob("*.checkpoint*"))


@pytest.mark.parametrize(("task", "model"), [("digits", "resnet18"), ("lm", "lstm2")])
def test_padam_learns(task, model, tmp_path):
    changes = {"lr": 1.0, "partial": 0.2} if task == "lm" else {}
    history = train(make_run(task, model, epochs=8, changes=changes), tmp_path, quietly)
    first, *_, last = history["history"]
    assert last["train_loss"] < first["train_loss"] - 0.7
    assert last[TASKS[task].metric] < first[TASKS[task].metric]


@pytest.mark.parametrize(
    ("task", "model", "optimizer"),
    [("digits", "resnet18", "padam"), *(("lm", "lstm2", name) for name in NAMES)],
)
def test_an_interrupted_run_ends_as_one_that_never_stopped(task, model, optimizer, tmp_path):
    run = make_run(task, model, optimizer, epochs=4)
    whole = train(run, tmp_path / "whole", quietly)

    def interrupt(history):
        if len(history) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "parts", interrupt)
    seen = []
    go_on = train(run, tmp_path / "parts", lambda history: seen.append(len(history)))
    assert go_on == whole
    assert seen == [3, 4]
    files = [(tmp_path / part / f"{run.name}.json").read_bytes() for part in ("whole", "parts")]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    "other", [{"width": 8}, {"epochs": 3}, {"optimizer": "sgd", "width": 8}, {"data": "/other"}]
)
def test_runs_that_differ_are_refused_before_any_is_trained(other, tmp_path):
    run = make_run()
    train(run, tmp_path, quietly)
    label = NAMES[other.get("optimizer", "padam")]
    runs = [replace(run, seed=1), replace(run, label=label, **other)]
    with pytest.raises(ValueError, match=r"one has .*; give another --out, or delete that file"):
        experiments.carry_out(runs[::-1], tmp_path, 0, 1, Console(quiet=True))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("content", [b"", b'{"settings"', b"\xff"])
@pytest.mark.parametrize("ending", ["json", "checkpoint"])
def test_damaged_files_are_named(ending, content, tmp_path):
    run = make_run()
    (tmp_path / f"{run.name}.{ending}").write_bytes(content)
    with pytest.raises(ValueError, match=rf"{run.name}.{ending} is damaged .*; delete it"):
        train(run, tmp_path, quietly)


def test_a_finished_run_keeps_no_checkpoint(tmp_path):
    run = make_run(epochs=1)
    train(run, tmp_path, quietly)
    (tmp_path / f"{run.name}.checkpoint").write_bytes(b"left by a process that was killed")
    train(run, tmp_path, quietly)
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"]


def test_seeds_differ(tmp_path):
    losses = {
        train(replace(make_run(), seed=seed), tmp_path, quietly)["history"][0]["train_loss"]
        for seed in range(3)
    }
    assert len(losses) == 3


def test_a_finished_run_is_not_made_again_nor_taken_for_another(tmp_path, monkeypatch):
    run = make_run(epochs=1)
    first = train(run, tmp_path, quietly)
    monkeypatch.setattr(training, "make_problem", None)
    assert train(run, tmp_path, quietly) == first
    other = replace(run, epochs=5)
    with pytest.raises(ValueError, match=r"epochs=1, this one has epochs=5; give another --out"):
        train(other, tmp_path, quietly)
