"""What runs measure, as TensorBoard reads it: a folder for each run, with one file.

When a run goes on, its file is made anew: the epochs from the run's own history, whatever was
written before. So no epoch is missing and none is there twice.
"""

from __future__ import annotations

import math
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, ScalarEvent
from torch.utils.tensorboard import SummaryWriter

from benchmarks.paper.runs import Epoch, Position, Run

# Its steps are percents of an epoch: so runs with other batch sizes compare.
BY_BATCH, EPOCH = "train/loss_by_batch", 100
FLUSH_SECONDS = 20


class Scalars:
    """Takes the messages of `progress.Reporter`; a context, which closes the files."""

    def __init__(self, folder: Path) -> None:
        """Each run gets a folder of its own in this one."""
        self._folder = folder
        self._files: dict[str, _File] = {}

    def __enter__(self) -> Scalars:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.writer.close()

    def begin(self, run: Run) -> None:
        """Does nothing: how many epochs the run has behind it comes with its history."""

    def after_epoch(self, run: Run, history: list[Epoch]) -> None:
        """Writes the epochs that the file does not have."""
        if run.name in self._files:
            self._files[run.name].write_epochs(history)
        else:
            self._files[run.name] = _File(self._folder / run.name, history)
        if run.is_over(history):
            self._files.pop(run.name).writer.close()

    def after_batch(self, run: Run, position: Position) -> None:
        """Writes the mean loss since the last point, if that is a percent of an epoch ago."""
        self._files[run.name].write_batches(position)


class _File:
    def __init__(self, folder: Path, history: list[Epoch]) -> None:
        """Takes over what the folder has of these epochs."""
        old_files = list(folder.glob("events.out.tfevents.*"))
        old = _points(folder) if old_files else {}
        # A TensorBoard that has read the old files forgets what they have.
        self.writer = SummaryWriter(str(folder), purge_step=0, flush_secs=FLUSH_SECONDS)
        self._epochs = 0
        self.write_epochs(history, old)
        self._step, self._before = EPOCH * len(history), Position(0, 0, 0)
        for (tag, step), point in sorted(old.items()):
            if tag == BY_BATCH and step <= self._step:
                self.writer.add_scalar(tag, point.value, step, point.wall_time)
        self.writer.flush()
        for file in old_files:
            file.unlink()

    def write_epochs(
        self, history: list[Epoch], old: dict[tuple[str, int], ScalarEvent] | None = None
    ) -> None:
        """Those after the last one written, at the time of old points, if there are such."""
        for number, epoch in enumerate(history[self._epochs :], self._epochs + 1):
            for key, value in epoch.items():
                tag = key.replace("_", "/", 1)
                point = (old or {}).get((tag, number))
                self.writer.add_scalar(
                    tag,
                    math.nan if value is None else value,
                    number,
                    point.wall_time if point else None,
                )
        self._epochs = len(history)

    def write_batches(self, position: Position) -> None:
        """See `Scalars.after_batch`."""
        share = EPOCH * position.trained // position.batches
        step = EPOCH * (position.epoch - 1) + share
        if step <= self._step:
            return
        total, examples = position.total, position.examples
        if position.epoch == self._before.epoch:
            total, examples = total - self._before.total, examples - self._before.examples
        self.writer.add_scalar(BY_BATCH, float(total) / examples, step)
        self._step, self._before = step, position


def _points(folder: Path) -> dict[tuple[str, int], ScalarEvent]:
    """All scalars of a folder, by tag and step."""
    events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    return {(tag, point.step): point for tag in tags for point in events.Scalars(tag)}
