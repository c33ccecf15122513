"""The paper's experiments with packed states and bfloat16 parameters."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from benchmarks.paper.__main__ import main
from benchmarks.paper.experiments import storage_study
from benchmarks.paper.report import report
from benchmarks.paper.storage import STORAGES, Stored
from benchmarks.paper.tasks import TASKS
from benchmarks.paper.training import train
from padam_ext import FusedPadam
from small_runs import make_run, quietly

pytestmark = pytest.mark.usefixtures("tiny_data")


def storage_runs(epochs=2, seeds=2):
    others = {"width": 4, "epochs": epochs, "data": None, "device": "cpu"}
    return storage_study(TASKS["digits"], "resnet18", seeds, **others)


def test_the_study_and_its_report(tmp_path):
    runs = storage_runs()
    assert len({run.name for run in runs}) == len(runs) == 2 * len(STORAGES)
    for run in runs:
        train(run, tmp_path / "runs", quietly)
    report(tmp_path, Console(quiet=True))
    tables = " ".join((tmp_path / "tables.md").read_text().split())
    for label, (_, _, size) in STORAGES.items():
        assert f"| {label} | {size} |" in tables
    assert "benchmarks.paper storage --task digits --model resnet18 --width 4 --epochs 2" in tables
    assert (tmp_path / "storage-digits-resnet18.png").read_bytes().startswith(b"\x89PNG")


def test_bytes_are_those_of_the_optimizers_tensors():
    for run in storage_runs(seeds=1):
        params = [torch.nn.Parameter(torch.ones(1000))]
        stored = Stored(params, run.param_dtype)
        optimizer = FusedPadam(stored.params, **run.options)
        optimizer.init_state()
        [param] = stored.params
        state = [t for t in optimizer.state[param].values() if isinstance(t, torch.Tensor)]
        size = sum(t.nbytes for t in (param, *state) if t.numel() > 1) / 1000
        assert size == STORAGES[run.label][2]


@pytest.mark.parametrize("param_dtype", ["bfloat16", "bfloat16-split"])
def test_what_was_interrupted_goes_on_alike(param_dtype, tmp_path):
    run = replace(make_run(epochs=3, changes={"state_dtype": "packed32"}), param_dtype=param_dtype)
    if "split" in param_dtype:
        run.options["master"] = "split"
    whole = train(run, tmp_path / "whole", quietly)

    def interrupt(history):
        if len(history) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "parts", interrupt)
    assert train(run, tmp_path / "parts", quietly)["history"] == whole["history"]


def test_the_options_of_a_run(tmp_path, monkeypatch, capsys):
    def remember(runs, folder, *others):
        folder.mkdir(parents=True)
        for run in runs:
            history = [{"lr": 0.1, "train_loss": 1.0, "test_error": 50.0}]
            result = {
                "settings": run.settings(),
                "environment": {"device": "x"},
                "history": history,
            }
            (folder / f"{run.name}.json").write_text(json.dumps(result))

    monkeypatch.setattr("benchmarks.paper.__main__.carry_out", remember)
    arguments = (
        "run --task digits --model resnet18 --optimizers sgd,padam "
        "--param-dtype bfloat16-stochastic --state-dtype packed32"
    )
    monkeypatch.setattr(sys, "argv", ["paper", *arguments.split(), "--out", str(tmp_path)])
    main()
    files = [json.loads(file.read_text()) for file in (tmp_path / "runs").glob("*.json")]
    assert len(files) == 2
    for file in files:
        assert file["settings"]["param_dtype"] == "bfloat16-stochastic"
        options = file["settings"]["options"]
        stored = {key: options.get(key) for key in ("state_dtype", "param_rounding")}
        is_padam = file["settings"]["label"] == "Padam"
        expected = {"state_dtype": "packed32", "param_rounding": "stochastic"}
        assert stored == (expected if is_padam else dict.fromkeys(expected))
    tables = " ".join((tmp_path / "tables.md").read_text().split())
    assert "--param-dtype bfloat16-stochastic --state-dtype packed32" in tables
