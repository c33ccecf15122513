"""Runs of the paper's experiments that take a moment."""

from dataclasses import replace

from benchmarks.paper import experiments
from benchmarks.paper.tasks import TASKS
from benchmarks.paper.training import train


def make_run(task="digits", model="resnet18", optimizer="padam", epochs=2, changes=None, data=None):
    width = None if task == "imagenet" else 4
    (run,) = experiments.optimizer_study(
        TASKS[task], model, [optimizer], 1, width=width, epochs=epochs, data=data, device="cpu"
    )
    return replace(run, options=run.options | (changes or {}))


def p_runs(seeds=1):
    return experiments.p_study(
        TASKS["digits"], "resnet18", seeds, width=4, epochs=1, data=None, device="cpu"
    )


def quietly(history):
    pass


def carry_out_the_first(runs, folder, *others):
    """Stands in for experiments.carry_out, in this process."""
    train(runs[0], folder, quietly)
