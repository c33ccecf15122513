"""How far runs are: told by the processes that train, shown by the one that waits for them.

On a terminal there is a bar for all runs and one for each run that trains. In a log, long runs get
a line now and then instead.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from benchmarks.paper.runs import Epoch, Position, Run, described
from benchmarks.paper.tasks import TASKS

# All in seconds. A batch may take a millisecond, and a loss that is read makes a GPU wait.
BETWEEN_MESSAGES = 1.0
# Speed is the mean over this time: a batch may also take half a minute.
SPEED_OVER = 600.0
# A run's first line in a log comes early, each later one after twice the time, up to a limit.
FIRST_LINE, BETWEEN_LINES = 10.0, 600.0


class Reporter:
    """Tells the process that waits how a run goes, by messages for `Display` and `Scalars`.

    A message is the name of one of their methods, the run, and what else the method takes.
    """

    def __init__(self, run: Run, queue: Any) -> None:
        self._run = run
        self._queue = queue
        self._next = 0.0

    def begin(self) -> None:
        """Tells that a process has taken the run."""
        self._tell("begin")

    def after_epoch(self, history: list[Epoch]) -> None:
        """Tells of all epochs so far."""
        self._tell("after_epoch", history)

    def after_batch(self, position: Position) -> None:
        """Tells where the run is, if that was not told just before."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + BETWEEN_MESSAGES
            self._tell("after_batch", replace(position, total=float(position.total)))

    def _tell(self, method: str, *arguments: Any) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            os._exit(1)  # it was killed; an exception would leave this process waiting for runs
        self._queue.put((method, self._run, *arguments))


@dataclass
class _Row:
    """Of a run that trains: its bar, and when its next line in a log is due."""

    bar: TaskID
    line_due: float
    wait: float = FIRST_LINE


class Display:
    """The bars and the lines; a context, which shows the bars."""

    def __init__(self, runs: list[Run], begun: dict[str, int], console: Console) -> None:
        """Prepares the bar of all runs.

        Args:
            runs: those that are not over.
            begun: how many epochs are behind those that have a checkpoint, by name.
            console: where everything goes.
        """
        self._in_log = not console.is_terminal or console.is_dumb_terminal
        # What stands beside a bar takes 80 columns.
        width = 40 if self._in_log else max(4, min(40, console.width - 80))
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(overflow="ellipsis")),
            BarColumn(width),
            TextColumn("{task.fields[state]}", style="progress.download"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=2,
            speed_estimate_period=SPEED_OVER,
        )
        self._rows: dict[str, _Row] = {}
        self._done: dict[str, float] = {run.name: begun.get(run.name, 0) for run in runs}
        self._epochs = {run.name: run.epochs for run in runs}
        # What is done at the start does not count for the speed.
        self._all = self._progress.add_task("epochs", completed=sum(self._done.values()))
        self._count()

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, run: Run) -> None:
        """Shows a run that has yet to read its data."""
        name = run.name.removeprefix(f"{run.study}-{run.task}-{run.model}-")
        visible = not self._in_log
        bar = self._progress.add_task(name, total=None, state="reading data", visible=visible)
        self._rows[run.name] = _Row(bar, time.monotonic() + FIRST_LINE)
        if self._in_log and _is_long(run):
            self._print(f"{run.name}: reading data")

    def after_epoch(self, run: Run, history: list[Epoch]) -> None:
        """Prints the last epoch of a run that is over, and every epoch of long ones."""
        over = run.is_over(history)
        if history and (over or _is_long(run)):
            self._print(described(run.name, run.epochs, history))
        self._done[run.name] = len(history)
        bar = self._rows[run.name].bar
        if over:
            self._epochs[run.name] = len(history)  # fewer than asked for, if it diverged
            self._progress.remove_task(bar)
        else:
            self._progress.reset(bar, state=f"epoch {len(history) + 1}/{run.epochs}")
        self._count()

    def after_batch(self, run: Run, position: Position) -> None:
        """Moves the bars; in a log, prints where a long run is if it is time."""
        row = self._rows[run.name]
        done = position.trained + position.tested
        of = position.batches + position.test_batches
        self._done[run.name] = position.epoch - 1 + done / of
        self._count()
        self._progress.update(row.bar, total=of, completed=done)
        bar = self._task(row.bar)
        speed = _speed(bar)
        where = f"batch {position.trained}/{position.batches}"
        if position.tested:
            where = f"test {position.tested}/{position.test_batches}"
        state = [f"epoch {position.epoch}/{run.epochs}", where, f"loss {position.train_loss:.4g}"]
        if speed:
            state.insert(2, speed)
        self._progress.update(row.bar, state=" ".join(state))
        if self._in_log and _is_long(run) and speed and time.monotonic() >= row.line_due:
            row.wait = min(2 * row.wait, BETWEEN_LINES)
            row.line_due = time.monotonic() + row.wait
            self._print(
                f"{run.name}, epoch {position.epoch} of {run.epochs}: {where}, {speed}, "
                f"train loss {position.train_loss:.4g} so far, "
                f"epoch over in {_remaining(bar)}, all runs in {_remaining(self._task(self._all))}"
            )

    def _count(self) -> None:
        done, of = sum(self._done.values()), sum(self._epochs.values())
        state = f"{int(done)}/{of}"
        self._progress.update(self._all, total=of, completed=done, state=state)

    def _task(self, bar: TaskID) -> Task:
        return next(task for task in self._progress.tasks if task.id == bar)

    def _print(self, line: str) -> None:
        self._progress.console.print(line, highlight=False, soft_wrap=True)


def _is_long(run: Run) -> bool:
    return not TASKS[run.task].embedded


def _speed(task: Task) -> str:
    speed = task.speed
    if not speed:
        return ""
    return f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each"


def _remaining(task: Task) -> str:
    seconds = task.time_remaining
    return "unknown time" if seconds is None else str(timedelta(seconds=seconds))
