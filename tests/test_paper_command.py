"""python -m benchmarks.paper: its arguments, what it says, how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.paper.__main__ import main
from benchmarks.paper.training import train
from small_runs import carry_out_the_first, make_run, quietly

pytestmark = pytest.mark.usefixtures("tiny_data")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--task digits --model lstm2", "has the models vgg16, resnet18, wrn-16-4"),
        ("--task digits --model vgg16 --data .", "brings its data along"),
        ("--task cifar10 --model vgg16", "needs --data, the folder of CIFAR-10"),
        ("--task imagenet --model vgg16 --data . --width 8", "which take no --width"),
        ("--task lm --model lstm2 --epochs 0", "must be at least 1, got 0"),
        ("--task lm --model lstm2 --device gpu", "--device gpu cannot be used here: Expected one"),
        ("--task lm --model lstm2 --optimizers adan", "no 'adan'; there are all, sgd, adam"),
    ],
)
def test_the_command_line_says_what_is_wrong(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["paper", "run", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "module", "message"),
    [
        (
            "--task digits --model resnet18 --optimizers yogi",
            "pytorch_optimizer",
            "import of pytorch_optimizer",
        ),
        ("--task cifar10 --model vgg16 --data .", "torchvision", "need a torchvision made"),
        (
            "--task imagenet --model vgg16 --data .",
            "torchvision",
            "need a torchvision made",
        ),
    ],
)
def test_what_is_not_installed(arguments, module, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("benchmarks.paper.__main__.carry_out", carry_out_the_first)
    monkeypatch.setattr(sys, "argv", ["paper", "run", *arguments.split(), "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        main()
    printed = " ".join(capsys.readouterr().err.split())
    assert message in printed
    assert "pip install -r requirements-paper.txt" in printed


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.paper", *map(str, arguments)],
        cwd=Path(__file__).parent.parent, capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_the_command_line(tmp_path, ptb):
    arguments = ["--task", "lm", "--model", "lstm2", "--width", 4, "--epochs", 2, "--jobs", 2]
    arguments += ["--optimizers", "sgd,padam", "--device", "cpu", "--out", tmp_path]
    arguments += ["--tensorboard"]
    done = command("run", *arguments, "--data", ptb)
    assert done.returncode == 0, done.stderr
    assert "Penn Treebank, lstm2 of width 4, 2 epochs, 1 seed" in " ".join(done.stdout.split())
    for name in ("sgd", "padam"):
        run = make_run("ptb", "lstm2", name, data=str(ptb))
        saved = json.loads((tmp_path / "runs" / f"{run.name}.json").read_text())
        assert train(run, tmp_path / "here", quietly)["history"] == saved["history"]
        (events,) = (tmp_path / "tensorboard" / run.name).iterdir()
        assert b"train/loss_by_batch" in events.read_bytes()

    (tmp_path / "runs" / "optimizers-ptb-lstm2-sgd-momentum-seed-0.json").unlink()
    (ptb / "ptb.test.txt").unlink()
    done = command("run", *arguments, "--data", ptb)
    assert done.returncode == 2
    assert "ptb.test.txt is not there" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("signal_number", "of_all"),
    [
        (signal.SIGINT, True),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, False, marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_a_checkpoint_and_no_process(signal_number, of_all, tmp_path, ptb):
    """Ctrl-C reaches all processes, other signals the first one or all."""
    arguments = (
        f"run --task lm --model lstm2 --data {ptb} --width 4 --epochs 99999 --out {tmp_path}"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.paper", *arguments.split(), "--optimizers", "sgd,adam"],
        cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    while process.poll() is None and not list(tmp_path.glob("runs/*.checkpoint")):
        time.sleep(0.1)
    if of_all:
        os.killpg(process.pid, signal_number)
    else:
        process.send_signal(signal_number)
    try:
        output, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    killed = signal_number == signal.SIGKILL
    assert process.returncode == (-signal_number if killed else 128 + signal_number), output
    assert "Traceback" not in output
    assert "optimizers-ptb-lstm2-sgd-momentum-seed-0: reading data" in output
    names = {file.name for file in (tmp_path / "runs").iterdir()}
    assert names - {"optimizers-ptb-lstm2-sgd-momentum-seed-0.checkpoint.unfinished"} == {
        "optimizers-ptb-lstm2-sgd-momentum-seed-0.checkpoint"
    }
    for _ in range(100):  # what was ended may take a moment to go
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError("a process is left")
