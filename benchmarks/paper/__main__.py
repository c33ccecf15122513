"""The paper's experiments.

    python -m benchmarks.paper run --task digits --model resnet18 --optimizers all --seeds 3
    python -m benchmarks.paper sweep-p --task digits --model resnet18 --seeds 3
    python -m benchmarks.paper storage --task lm --model lstm2 --seeds 3
    python -m benchmarks.paper report

A terminal shows how far each run is and when it will end; a log has a line now and then. With
--tensorboard the curves go to TensorBoard, too. Interrupted, the same command goes on after each
run's last epoch, and `report` says which that is. `digits` and `lm` need no files; cifar10,
cifar100 and imagenet need torchvision and --data, and `lm` with --data reads the Penn Treebank.
"""

from __future__ import annotations

import argparse
import signal
import sys
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.paper.experiments import carry_out, optimizer_study, p_study, storage_study
from benchmarks.paper.optimizers import NAMES
from benchmarks.paper.report import report
from benchmarks.paper.runs import Run
from benchmarks.paper.storage import PARAM_DTYPES, options_of
from benchmarks.paper.tasks import TASKS
from padam_ext.options import STATE_DTYPES


def at_least(least: int, text: str) -> int:
    """An argument that is a whole number."""
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {number}")
    return number


# argparse names a function where a text is no number.
def positive(text: str) -> int:
    """An argument that is a whole number above zero."""
    return at_least(1, text)


def not_negative(text: str) -> int:
    """An argument that is a whole number or zero."""
    return at_least(0, text)


def optimizer_names(text: str) -> list[str]:
    """An argument that names optimizers."""
    names = list(NAMES) if text == "all" else text.split(",")
    for name in names:
        if name not in NAMES:
            raise argparse.ArgumentTypeError(f"no {name!r}; there are all, {', '.join(NAMES)}")
    return list(dict.fromkeys(names))


def make_parser() -> argparse.ArgumentParser:
    """The commands and their arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, does in (
        ("run", "train with each of the paper's optimizers"),
        ("sweep-p", "train with Padam for each p, and its variants"),
        ("storage", "train with Padam for each way to store parameters and states"),
        ("report", "tables and figures of all runs in a folder"),
    ):
        command = commands.add_parser(name, help=does, description=does)
        command.add_argument(
            "--out", type=Path, default=Path("out/paper"), help="folder; default %(default)s"
        )
        if name == "report":
            continue
        models = sorted({model for task in TASKS.values() for model in task.models})
        # The Penn Treebank is what `lm` takes with --data.
        names = [name for name in TASKS if name != "ptb"]
        command.add_argument("--task", choices=names, required=True)
        command.add_argument("--model", choices=models, required=True)
        if name == "run":
            command.add_argument(
                "--optimizers",
                type=optimizer_names,
                default=list(NAMES),
                help=f"all, the default, or some of {','.join(NAMES)}",
            )
        if name != "storage":
            command.add_argument(
                "--state-dtype",
                choices=STATE_DTYPES,
                default="float32",
                help="of Padam's states; default %(default)s",
            )
            command.add_argument(
                "--param-dtype",
                choices=list(PARAM_DTYPES),
                default="float32",
                help="stochastic and split are Padam's; default %(default)s",
            )
        command.add_argument("--data", type=Path, help="folder of the data set")
        command.add_argument(
            "--epochs",
            type=positive,
            help="default: the paper's, fewer on embedded data; decays scale with it",
        )
        command.add_argument("--seeds", type=positive, default=1, help="default %(default)s")
        command.add_argument("--width", type=positive, help="of the model; default: the task's")
        command.add_argument("--device", help="default: cuda if there is one, else cpu")
        command.add_argument(
            "--jobs", type=positive, default=1, help="runs side by side; default %(default)s"
        )
        command.add_argument(
            "--workers",
            type=not_negative,
            default=0,
            help="processes that load images; default none",
        )
        command.add_argument(
            "--tensorboard",
            action="store_true",
            help="write what is measured for TensorBoard, into the folder tensorboard in --out",
        )
    return parser


def make_runs(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Run]:
    """The runs that a command asks for; ends the program if they make no sense."""
    if options.tensorboard and find_spec("tensorboard") is None:
        parser.error("--tensorboard needs a package that is not here: pip install tensorboard")
    name = "ptb" if options.task == "lm" and options.data else options.task
    task = TASKS[name]
    if options.model not in task.models:
        parser.error(f"--task {name} has the models {', '.join(task.models)}, not {options.model}")
    if task.embedded and options.data:
        parser.error(f"--task {name} brings its data along; it takes no --data")
    if not task.embedded and not options.data:
        parser.error(f"--task {name} needs --data, the folder of {task.title}")
    if options.width and task.width is None:
        parser.error(f"--task {name} has torchvision's models, which take no --width")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {device} cannot be used here: {str(error).splitlines()[0]}")
    others = {
        "seeds": options.seeds,
        "width": options.width or task.width,
        "epochs": options.epochs or task.epochs,
        "data": str(options.data.resolve()) if options.data else None,
        "device": device,
    }
    if options.command == "storage":
        return storage_study(task, options.model, **others)
    others["param_dtype"] = options.param_dtype
    others["stored"] = options_of(options.param_dtype, options.state_dtype)
    if options.command == "run":
        return optimizer_study(task, options.model, options.optimizers, **others)
    return p_study(task, options.model, **others)


def main() -> None:
    """Carries out a command."""
    parser = make_parser()
    options = parser.parse_args()
    console = Console()
    try:
        if options.command != "report":
            runs = make_runs(options, parser)
            scalars = options.out / "tensorboard" if options.tensorboard else None
            carry_out(runs, options.out / "runs", options.workers, options.jobs, console, scalars)
        report(options.out, console)
    except KeyboardInterrupt:
        console.print("Interrupted; the same command goes on after each run's last epoch.")
        sys.exit(128 + signal.SIGINT)
    except BrokenProcessPool:
        parser.error(
            "a process was killed, perhaps for want of memory; the same command goes on, and takes "
            "less with fewer --jobs"
        )
    except ModuleNotFoundError as error:
        parser.error(f"{error}; pip install -r requirements-paper.txt installs all that is needed")
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
