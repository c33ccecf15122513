"""Progress of the paper's runs: what they tell while they train, and what a user sees of it."""

import io
import sys
from dataclasses import replace
from queue import Queue

import pytest
from rich.console import Console

from benchmarks.paper import progress
from benchmarks.paper.experiments import carry_out
from benchmarks.paper.progress import Display, Reporter
from benchmarks.paper.report import report
from benchmarks.paper.runs import Position, describe_unfinished
from benchmarks.paper.training import train
from small_runs import make_run, quietly

EPOCH = {"lr": 0.1, "train_loss": 2.0, "test_perplexity": 9.0}


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)

    def console(self, terminal=False):
        return Console(file=io.StringIO(), force_terminal=terminal, width=150, height=50,
                       get_time=lambda: self.now, color_system=None, _environ={})  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def a_run(task="ptb", epochs=4, seed=0):
    return replace(make_run(task, "lstm2", "padam", epochs, data="/ptb"), seed=seed)


def position(epoch, trained, tested=0, total=None):
    total = 3.0 * trained if total is None else total
    return Position(epoch, 100, 25, trained, tested, examples=trained, total=total)


@pytest.mark.usefixtures("tiny_data")
@pytest.mark.parametrize(("task", "model"), [("digits", "resnet18"), ("lm", "lstm2")])
def test_each_batch_is_noted(task, model, tmp_path):
    seen = []
    run = make_run(task, model)
    result = train(
        run, tmp_path, quietly, after_batch=lambda position: seen.append(replace(position))
    )
    each = [p for p in seen if p.epoch == 2]
    batches, test_batches = each[0].batches, each[0].test_batches
    assert len(seen) == 2 * len(each)
    assert [(p.trained, p.tested) for p in each] == [
        *((k, 0) for k in range(1, batches + 1)),
        *((batches, k) for k in range(1, test_batches + 1)),
    ]
    assert seen[len(each) - 1].train_loss == result["history"][0]["train_loss"]


def test_batches_are_told_of_once_a_second(clock):
    queue, run = Queue(), a_run()
    reporter = Reporter(run, queue)
    reporter.begin()
    for batch in range(1, 1001):  # in ten seconds
        clock.now += 0.01
        reporter.after_batch(position(1, batch))
    reporter.after_epoch([EPOCH])
    told = [queue.get() for _ in range(queue.qsize())]
    assert [message[:2] for message in told] == [
        ("begin", run), *[("after_batch", run)] * 10, ("after_epoch", run)
    ]  # fmt: skip
    assert all(isinstance(message[2].total, float) for message in told[1:-1])


def show(display, clock, run, epochs=1, seconds=60.0):
    """A run whose batches all take the same time."""
    display.begin(run)
    display.after_epoch(run, [])
    for epoch in range(1, epochs + 1):
        for batch in range(1, 126):
            clock.now += seconds / 125
            display.after_batch(run, position(epoch, min(batch, 100), max(0, batch - 100)))
        display.after_epoch(run, [EPOCH] * epoch)


def test_a_log_has_few_lines_of_long_runs(clock):
    console, run = clock.console(), a_run()
    show(Display([run], {}, console), clock, run, epochs=2, seconds=125.0)
    name = "optimizers-ptb-lstm2-padam-seed-0, epoch"
    assert console.file.getvalue().splitlines() == [
        "optimizers-ptb-lstm2-padam-seed-0: reading data",
        f"{name} 1 of 4: batch 10/100, 1.0/s, train loss 3 so far, epoch over in 0:01:55, "
        "all runs in 0:08:10",
        f"{name} 1 of 4: batch 30/100, 1.0/s, train loss 3 so far, epoch over in 0:01:35, "
        "all runs in 0:07:50",
        f"{name} 1 of 4: batch 70/100, 1.0/s, train loss 3 so far, epoch over in 0:00:55, "
        "all runs in 0:07:10",
        f"{name} 1 of 4: lr 0.1, train loss 2, test perplexity 9",
        f"{name} 2 of 4: batch 25/100, 1.0/s, train loss 3 so far, epoch over in 0:01:40, "
        "all runs in 0:05:50",
        f"{name} 2 of 4: lr 0.1, train loss 2, test perplexity 9",
    ]


def test_a_log_has_one_line_of_each_short_run(clock):
    console, run = clock.console(), a_run("lm")
    with Display([run], {}, console) as display:
        show(display, clock, run, epochs=4, seconds=1000.0)
    first, bar = console.file.getvalue().splitlines()
    assert first.startswith("optimizers-lm-lstm2-padam-seed-0, epoch 4 of 4: lr 0.1")
    assert bar.split()[0] == "epochs"
    assert bar.split()[2:] == ["4/4", "1:06:40", "0:00:00"]


@pytest.mark.parametrize("task", ["lm", "ptb"])
def test_a_terminal_has_bars(task, clock):
    console, run, other = clock.console(terminal=True), a_run(task), a_run(task, seed=1)
    with Display([run, other], {run.name: 2}, console) as display:
        display.begin(other)
        display.begin(run)
        display.after_epoch(run, [EPOCH, EPOCH])
        for batch, tested in ((10, 0), (20, 0), (40, 0), (100, 0), (100, 5)):
            clock.now += 20
            display.after_batch(run, position(3, batch, tested))
    shown = console.file.getvalue().split("\x1b[2K")[-1].splitlines()
    cells = [[part for part in line.split() if "━" not in part] for line in shown]
    # 95 of 125 batches in 80 seconds; what the checkpoint has does not count.
    assert cells[0] == ["epochs", "2/8", "0:01:40", "0:09:04"]
    assert cells[1][:4] == ["padam-seed-1", "reading", "data", "0:01:40"]
    assert " ".join(cells[2]) == "padam-seed-0 epoch 3/4 test 5/25 1.2/s loss 3 0:01:40 0:00:17"
    lines = console.file.getvalue().count("epoch 2 of 4: lr 0.1")
    assert lines == (1 if task == "ptb" else 0)


def test_epochs_that_a_diverged_run_does_not_train_are_not_waited_for(clock):
    console, runs = clock.console(), [a_run("lm"), a_run("lm", seed=1)]
    with Display(runs, {}, console) as display:
        display.begin(runs[0])
        display.after_epoch(runs[0], [EPOCH, dict.fromkeys(EPOCH)])
        display.begin(runs[1])
        display.after_epoch(runs[1], [EPOCH])
    assert "3/6" in console.file.getvalue()


def test_slow_batches(clock):
    console, run = clock.console(), a_run()
    show(Display([run], {}, console), clock, run, seconds=125 * 31.5)
    assert "31.5 s each, train loss 3 so far, epoch over in 1:04:35" in console.file.getvalue()


@pytest.mark.usefixtures("tiny_data")
def test_a_report_says_where_unfinished_runs_are(tmp_path):
    run, over = make_run(epochs=3), make_run(optimizer="sgd", epochs=3)
    train(over, tmp_path / "runs", quietly)

    def interrupt(history):
        if len(history) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "runs", interrupt)
    console = Console(file=io.StringIO())
    report(tmp_path, console)
    line = f"Not over: {run.name}, epoch 2 of 3: lr 0.1, train loss "
    assert line in console.file.getvalue()
    (tmp_path / "runs" / f"{over.name}.checkpoint").write_bytes(
        (tmp_path / "runs" / f"{run.name}.checkpoint").read_bytes()
    )
    assert len(describe_unfinished(tmp_path / "runs")) == 1


def test_a_package_that_a_later_run_needs_is_missed_before_the_first(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    runs = [make_run(), make_run(optimizer="yogi")]
    with pytest.raises(ModuleNotFoundError, match="Yogi and AdaBound need pytorch-optimizer"):
        carry_out(runs, tmp_path, 0, 1, Console(quiet=True))
    assert not list(tmp_path.iterdir())
