"""What the paper's runs write for TensorBoard: each epoch once, however they were interrupted."""

import math
import sys
from contextlib import suppress

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.paper import progress
from benchmarks.paper.__main__ import main
from benchmarks.paper.experiments import carry_out
from benchmarks.paper.progress import Reporter
from benchmarks.paper.scalars import BY_BATCH, Scalars
from benchmarks.paper.training import train
from small_runs import make_run, quietly

pytestmark = pytest.mark.usefixtures("tiny_data")
TAGS = {"lr": "lr", "train/loss": "train_loss", "test/perplexity": "test_perplexity"}


class Direct:
    """In place of a queue: what is put there is written at once."""

    def __init__(self, scalars):
        self.scalars = scalars

    def put(self, message):
        getattr(self.scalars, message[0])(*message[1:])


def trained(run, folder, stop=None):
    """Trains in this process, until Ctrl-C at a batch of an epoch, and writes all batches."""
    with Scalars(folder / "tensorboard") as scalars, suppress(KeyboardInterrupt):
        reporter = Reporter(run, Direct(scalars))

        def after_batch(position):
            reporter.after_batch(position)
            if (position.epoch, position.trained) == stop:
                raise KeyboardInterrupt

        reporter.begin()
        return train(run, folder / "runs", reporter.after_epoch, after_batch=after_batch)


def written(folder, run):
    """Steps and values by tag, of the one file that is there."""
    (file,) = (folder / "tensorboard" / run.name).iterdir()
    events = EventAccumulator(str(file), {"scalars": 0}, purge_orphaned_data=False).Reload()
    return {
        tag: [(point.step, point.value) for point in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def require_epochs(points, history):
    assert points.keys() - {BY_BATCH} == TAGS.keys()
    for tag, key in TAGS.items():
        assert [step for step, _ in points[tag]] == list(range(1, len(history) + 1))
        assert [value for _, value in points[tag]] == pytest.approx([e[key] for e in history])


@pytest.fixture
def every_batch(monkeypatch):
    monkeypatch.setattr(progress, "BETWEEN_MESSAGES", 0.0)


@pytest.mark.usefixtures("every_batch")
def test_an_interrupted_run_writes_what_one_that_never_stopped_writes(tmp_path):
    run = make_run("lm", "lstm2", epochs=4)
    history = trained(run, tmp_path / "whole")["history"]
    whole = written(tmp_path / "whole", run)
    require_epochs(whole, history)
    assert [step for step, _ in whole[BY_BATCH]] == [
        100 * epoch + percent for epoch in range(4) for percent in (33, 66, 100)
    ]
    # Of 35, 35 and 4 steps, like the words.
    weighted = sum(value * n for (_, value), n in zip(whole[BY_BATCH], (35, 35, 4), strict=False))
    assert weighted / 74 == pytest.approx(history[0]["train_loss"])

    parts = tmp_path / "parts"
    for stop in ((2, 1), (2, 3), (4, 2)):
        assert trained(run, parts, stop) is None
        assert written(parts, run)[BY_BATCH][-1][0] > 100 * (stop[0] - 1)
    assert trained(run, parts)["history"] == history
    assert written(parts, run) == whole


@pytest.mark.usefixtures("every_batch")
def test_epochs_trained_without_it_are_written_when_the_run_goes_on(tmp_path):
    run = make_run("lm", "lstm2", epochs=3)

    def interrupt(history):
        if len(history) == 2:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        train(run, tmp_path / "runs", interrupt)
    history = trained(run, tmp_path)["history"]
    points = written(tmp_path, run)
    require_epochs(points, history)
    assert [step for step, _ in points[BY_BATCH]] == [233, 266, 300]


def test_finished_runs_are_written_too(tmp_path, monkeypatch):
    run = make_run("lm", "lstm2", epochs=2)
    history = train(run, tmp_path / "runs", quietly)["history"]
    for _ in range(2):
        carry_out([run], tmp_path / "runs", 0, 1, Console(quiet=True), tmp_path / "tensorboard")
        require_epochs(written(tmp_path, run), history)


def test_a_diverged_run_has_nan(tmp_path):
    run = make_run("lm", "lstm2", "sgd", epochs=4, changes={"lr": 1e30})
    history = trained(run, tmp_path)["history"]
    last = [written(tmp_path, run)[tag][-1] for tag in ("train/loss", "test/perplexity")]
    assert [step for step, _ in last] == [len(history)] * 2
    assert all(math.isnan(value) for _, value in last)


def test_without_tensorboard_nothing_is_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    arguments = ["run", "--task", "lm", "--model", "lstm2", "--tensorboard", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["paper", *arguments])
    with pytest.raises(SystemExit, match="2"):
        main()
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.endswith(
        "--tensorboard needs a package that is not here: pip install tensorboard"
    )
    assert not list(tmp_path.iterdir())
