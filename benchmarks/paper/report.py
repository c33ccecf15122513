"""Tables, figures and files of the runs in a folder, the paper's figures beside them.

In the folder: tables.md, a figure for each study of a task and model, history.csv with each epoch
of each run, and summary.json with settings, seeds and the spread of what the last epoch measured.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import StatisticsError, mean, stdev

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from benchmarks.paper import plots
from benchmarks.paper.experiments import EXPONENTS, VARIANTS
from benchmarks.paper.optimizers import NAMES
from benchmarks.paper.published import PUBLISHED
from benchmarks.paper.runs import Result, describe_unfinished, diverged, labelled, read_result
from benchmarks.paper.storage import STORAGES
from benchmarks.paper.tasks import TASKS, Task

ACCURACY = {"test_error": "test accuracy, %", "test_error_top5": "top-5 accuracy, %"}


def load(folder: Path) -> list[Result]:
    """The results of all finished runs.

    Raises:
        FileNotFoundError: there are none.
        ValueError: one cannot be read.
    """
    results = [read_result(file) for file in sorted(folder.glob("*.json"))]
    if not results:
        raise FileNotFoundError(
            f"no finished runs in {folder}; `python -m benchmarks.paper run` makes them"
        )
    return results


def studies(results: list[Result]) -> dict[tuple[str, str, str], list[Result]]:
    """Results by study, task and model."""
    parts = defaultdict(list)
    for result in results:
        settings = result["settings"]
        parts[settings["study"], settings["task"], settings["model"]].append(result)
    return dict(parts)


def spread(results: list[Result], metric: str, accuracy: bool = False) -> str:
    """The last epoch's value, mean and standard deviation over seeds; or how many diverged."""
    lost = sum(diverged(result["history"]) for result in results)
    if not results or lost:
        return f"{lost} of {len(results)} diverged" if results else ""
    values = [result["history"][-1][metric] for result in results]
    if accuracy:
        values = [100 - value for value in values]
    digits = 4 if metric == "train_loss" else 2
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{deviation}"


def seeds_of(results: list[Result]) -> int:
    """How many seeds there are."""
    return len({result["settings"]["seed"] for result in results})


def described(results: list[Result], task: Task) -> str:
    """Data, model, epochs and seeds of runs of one study."""
    settings = results[0]["settings"]
    width = f" of width {settings['width']}" if settings["width"] else ""
    seeds = seeds_of(results)
    return (
        f"{task.title}, {settings['model']}{width}, {settings['epochs']} epochs, "
        f"{seeds} seed{'s' if seeds > 1 else ''}"
    )


def optimizer_table(results: list[Result], task: Task, model: str) -> Table:
    """A row for each optimizer: what the paper found, what was found here."""
    table = Table(title=f"Optimizers: {described(results, task)}")
    table.add_column("optimizer")
    metrics = [metric for metric in results[0]["history"][-1] if metric.startswith("test")]
    epochs = 100 if task.paper == "ImageNet" else 200
    for metric in metrics:
        title = ACCURACY.get(metric, "test perplexity")
        table.add_column(f"paper, {task.paper}, {epochs} epochs: {title}", justify="right")
        table.add_column(f"here: {title}", justify="right")
    table.add_column("here: train loss", justify="right")
    for place, (name, runs) in enumerate(labelled(results, NAMES.values()).items()):
        if not runs:
            continue
        row = [name]
        for metric in metrics:
            known = PUBLISHED.get((task.paper, model, metric))
            row.append(f"{known[place]:.2f}" if known else "")
            row.append(spread(runs, metric, metric in ACCURACY))
        table.add_row(*row, spread(runs, "train_loss"))
    return table


def p_table(results: list[Result], task: Task) -> Table:
    """A row for each p, a column for each variant: what the last epoch measured on test data."""
    table = Table(title=f"Choices of p, {plots.AXES[task.metric]}: {described(results, task)}")
    table.add_column("p", justify="right")
    for label in VARIANTS:
        table.add_column(label, justify="right")
    for p in EXPONENTS:
        of_p = [r for r in results if r["settings"]["options"]["partial"] == p]
        columns = labelled(of_p, VARIANTS).values()
        table.add_row(f"{p:g}", *(spread(runs, task.metric) for runs in columns))
    return table


def storage_table(results: list[Result], task: Task) -> Table:
    """A row for each way to store: what the last epoch measured, and how far from float32."""
    table = Table(title=f"Storage, {plots.AXES[task.metric]}: {described(results, task)}")
    for column in ("parameters and states", "bytes", plots.AXES[task.metric], "train loss",
                   "minus float32's, mean ± standard error over seeds"):  # fmt: skip
        table.add_column(column, justify="left" if column.startswith("param") else "right")
    by_label = labelled(results, STORAGES)
    for label, runs in by_label.items():
        if runs:
            difference = difference_of(runs, by_label["float32"], task.metric)
            table.add_row(label, str(STORAGES[label][2]), spread(runs, task.metric),
                          spread(runs, "train_loss"), difference)  # fmt: skip
    return table


def difference_of(runs: list[Result], others: list[Result], metric: str) -> str:
    """How much more the last epochs measured than others from the same seeds did."""
    of_others = {run["settings"]["seed"]: run["history"] for run in others}
    pairs = [(run["history"], of_others.get(run["settings"]["seed"])) for run in runs]
    if runs is others or any(not h or diverged(h) for pair in pairs for h in pair):
        return ""
    differences = [mine[-1][metric] - its[-1][metric] for mine, its in pairs if its]
    if len(differences) < 2:
        return f"{differences[0]:+.2f}"
    return f"{mean(differences):+.2f} ± {stdev(differences) / len(differences) ** 0.5:.2f}"


def origin(results: list[Result]) -> str:
    """The command that made them, and the machines."""
    settings = results[0]["settings"]
    command = {"optimizers": "run", "p": "sweep-p", "storage": "storage"}[settings["study"]]
    task = "lm" if settings["task"] == "ptb" else settings["task"]
    usual = TASKS[settings["task"]]
    more = "" if usual.embedded else " --data FOLDER"
    if settings["width"] != usual.width:
        more += f" --width {settings['width']}"
    if settings["study"] != "storage" and settings.get("param_dtype", "float32") != "float32":
        more += f" --param-dtype {settings['param_dtype']}"
    states = {result["settings"]["options"].get("state_dtype") for result in results} - {None}
    if settings["study"] != "storage" and states:
        more += f" --state-dtype {states.pop()}"
    used = {result["settings"]["optimizer"] for result in results}
    if settings["study"] == "optimizers" and used != set(NAMES):
        more += f" --optimizers {','.join(name for name in NAMES if name in used)}"
    places = sorted({", ".join(
        value if key == "device" else f"{key} {value}"
        for key, value in result["environment"].items()
    ) for result in results})  # fmt: skip
    return (
        f"`python -m benchmarks.paper {command} --task {task} --model {settings['model']}{more} "
        f"--epochs {settings['epochs']} --seeds {seeds_of(results)}` on {'; '.join(places)}"
    )


def write_history(results: list[Result], path: Path) -> None:
    """A row for each epoch of each run."""
    keys = ("study", "task", "model", "width", "device", "label", "seed")
    rows = [
        {key: result["settings"][key] for key in keys}
        | {"p": result["settings"]["options"].get("partial"), "epoch": number}
        | epoch
        for result in results
        for number, epoch in enumerate(result["history"], 1)
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


def over_seeds(
    statistic: Callable[[list[float]], float], results: list[Result], metric: str
) -> float | None:
    """A statistic of what the last epoch measured; None of diverged runs, or of too few."""
    try:
        return statistic([result["history"][-1][metric] for result in results])
    except (TypeError, StatisticsError):
        return None


def write_summary(results: list[Result], path: Path) -> None:
    """The settings of runs that differ in the seed only, and each seed's last epoch."""
    parts = defaultdict(list)
    for result in results:
        settings = {key: value for key, value in result["settings"].items() if key != "seed"}
        parts[json.dumps([settings, result["environment"]])].append(result)
    summary = []
    for key, runs in parts.items():
        settings, environment = json.loads(key)
        last = {run["settings"]["seed"]: run["history"][-1] for run in runs}
        metrics = [metric for metric in runs[0]["history"][-1] if metric != "lr"]
        summary.append(
            {"settings": settings, "environment": environment}
            | {"last_epoch_by_seed": last}
            | {"mean_over_seeds": {m: over_seeds(mean, runs, m) for m in metrics}}
            | {"deviation_over_seeds": {m: over_seeds(stdev, runs, m) for m in metrics}}
        )
    path.write_text(json.dumps(summary, indent=1) + "\n")


def report(folder: Path, console: Console) -> None:
    """Prints tables of the runs in `folder / "runs"` and writes all files into `folder`.

    Of runs that are not over it prints the last epoch.

    Raises:
        FileNotFoundError: no run has been finished.
        ValueError: a run's file cannot be read.
    """
    for line in describe_unfinished(folder / "runs"):
        console.print(f"Not over: {line}", highlight=False, soft_wrap=True)
    results = load(folder / "runs")
    with (folder / "tables.md").open("w") as file:
        markdown = Console(file=file, width=400)
        for (study, name, model), part in studies(results).items():
            task = TASKS[name]
            if study == "optimizers":
                table = optimizer_table(part, task, model)
                plots.optimizers(part, task, folder / f"optimizers-{name}-{model}.png")
            elif study == "storage":
                table = storage_table(part, task)
                plots.storages(part, task, folder / f"storage-{name}-{model}.png")
            else:
                table = p_table(part, task)
                plots.choices_of_p(part, task, folder / f"p-{name}-{model}.png")
            console.print(table)
            markdown.print(f"**{table.title}**\n")
            table.title, table.box = None, MARKDOWN
            markdown.print(table)
            markdown.print(f"{origin(part)}\n", soft_wrap=True)
    write_history(results, folder / "history.csv")
    write_summary(results, folder / "summary.json")
    console.print(f"Tables, figures, history.csv and summary.json are in {folder}.")
