"""Tables, figures and files of the paper's experiments, of runs that diverged, too."""

import csv
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.paper.report import report
from benchmarks.paper.training import train
from small_runs import make_run, p_runs, quietly

pytestmark = pytest.mark.usefixtures("tiny_data")


def test_a_run_that_diverges_stops_and_says_so(tmp_path):
    run = make_run(optimizer="sgd", epochs=6)
    train(replace(run, seed=1), tmp_path / "runs", quietly)
    settings = make_run(optimizer="sgd", epochs=6, changes={"lr": 1e30})
    result = train(settings, tmp_path / "runs", quietly)
    assert len(result["history"]) < 6
    del result["history"][-1]["lr"]
    assert result["history"][-1] == {"train_loss": None, "test_error": None}
    assert "NaN" not in (tmp_path / "runs" / f"{run.name}.json").read_text()
    report(tmp_path, Console(quiet=True))
    tables = " ".join((tmp_path / "tables.md").read_text().split())
    assert "| SGD-Momentum | 95.00 | 1 of 2 diverged | 1 of 2 diverged |" in tables


def test_reports_of_nothing_but_diverged_runs(tmp_path):
    """From their first epoch."""
    runs = [make_run(optimizer="sgd"), *p_runs()[:1]]
    for run in runs:
        history = [{"lr": 0.1, "train_loss": None, "test_error": None}]
        result = {"settings": run.settings(), "environment": {"device": "x"}, "history": history}
        (tmp_path / "runs").mkdir(exist_ok=True)
        (tmp_path / "runs" / f"{run.name}.json").write_text(json.dumps(result))
    report(tmp_path, Console(quiet=True))
    assert (tmp_path / "tables.md").read_text().count("1 of 1 diverged") == 3
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary[0]["mean_over_seeds"] == {"train_loss": None, "test_error": None}


def test_reports(tmp_path):
    for seed in range(2):
        for name in ("sgd", "padam"):
            train(replace(make_run(optimizer=name), seed=seed), tmp_path / "runs", quietly)
    for run in p_runs()[:8]:
        train(run, tmp_path / "runs", quietly)
    report(tmp_path, Console(quiet=True))
    tables = (tmp_path / "tables.md").read_text()
    summary = json.loads((tmp_path / "summary.json").read_text())
    (padam,) = (s for s in summary if s["settings"]["label"] == "Padam" and
                s["settings"]["study"] == "optimizers")  # fmt: skip
    errors = [padam["last_epoch_by_seed"][seed]["test_error"] for seed in "01"]
    middle = sum(errors) / 2
    deviation = abs(errors[0] - errors[1]) / math.sqrt(2)
    assert f"| Padam | 94.94 | {100 - middle:.2f} ± {deviation:.2f} |" in " ".join(tables.split())
    assert "resnet18 --width 4 --optimizers sgd,padam --epochs 2 --seeds 2` on here" in tables
    with (tmp_path / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 2 + 8
    assert {row["p"] for row in rows if row["study"] == "p"} > {"0.0625", "0.5"}
    for name in ("optimizers-digits-resnet18.png", "p-digits-resnet18.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FileNotFoundError, match="no finished runs"):
        report(tmp_path / "nowhere", Console(quiet=True))
