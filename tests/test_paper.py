"""The paper's experiments on data that need no download: models, runs, studies, reports."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.utils.data import Subset

from benchmarks import workloads
from benchmarks.paper import experiments, images, text, training
from benchmarks.paper.__main__ import main
from benchmarks.paper.models import CNNS, LanguageModel, resnet18, wrn_16_4
from benchmarks.paper.optimizers import HYPERPARAMETERS, NAMES, make_optimizer, weight_decay
from benchmarks.paper.published import PUBLISHED
from benchmarks.paper.report import report
from benchmarks.paper.tasks import TASKS
from benchmarks.paper.training import train

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LSTM.*:UserWarning", "ignore:.*lr_scheduler.step.*:UserWarning"
)
DIGITS = [("digits", model) for model in CNNS]
TEXTS = [("lm", "lstm2"), ("lm", "lstm3"), ("ptb", "lstm2")]
FOLDER_OF_PTB = {
    "ptb.train.txt": " the cat sat on the mat \n" * 30,
    "ptb.test.txt": " the cat \n" * 9,
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A hundred digits and a thousand words, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(training, "environment", lambda device: {"device": "here"})
    train_data, test_data = images.digits()
    parts = Subset(train_data, range(100)), Subset(test_data, range(50))
    monkeypatch.setattr(images, "digits", lambda: parts)
    corpus = text.python_documentation()
    small = text.Corpus(corpus.train[:1500] % 300, corpus.test[:300] % 300, 300)
    monkeypatch.setattr(text, "python_documentation", lambda: small)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def ptb(tmp_path):
    folder = tmp_path / "ptb"
    folder.mkdir()
    for name, content in FOLDER_OF_PTB.items():
        (folder / name).write_text(content)
    return folder


def make_run(task="digits", model="resnet18", optimizer="padam", epochs=2, changes=None, data=None):
    (run,) = experiments.optimizer_study(
        TASKS[task], model, [optimizer], 1, width=4, epochs=epochs, data=data, device="cpu"
    )
    return replace(run, options=run.options | (changes or {}))


def p_runs(seeds=1):
    return experiments.p_study(
        TASKS["digits"], "resnet18", seeds, width=4, epochs=1, data=None, device="cpu"
    )


def quietly(history):
    pass


def test_models_have_the_known_sizes():
    def shapes(model):
        return sorted(tuple(param.shape) for param in model.parameters())

    assert shapes(wrn_16_4(3, 10, 64)) == sorted(workloads.wide_resnet(16, 4))
    assert shapes(LanguageModel(10_000, 650, 2, 0.5)) == sorted(workloads.lstm(2, 650, 10_000))
    assert sum(param.numel() for param in resnet18(3, 10, 64).parameters()) == 11_173_962
    # Without the biases of convolutions, which the normalization after them would undo.
    convolutions = sum(9 * shape[0] * shape[1] + 2 * shape[0] for shape in workloads.vgg16()
                       if len(shape) == 4)  # fmt: skip
    vgg = CNNS["vgg16"](3, 10, 64)
    assert (
        sum(param.numel() for param in vgg.parameters())
        == convolutions + 2 * (512 * 512 + 512) + 5130
    )


@pytest.mark.parametrize("name", CNNS)
@pytest.mark.parametrize("size", [8, 32])
def test_cnns_take_images_of_digits_and_of_cifar(name, size):
    assert CNNS[name](3, 10, 4)(torch.randn(2, 3, size, size)).shape == (2, 10)


@pytest.mark.parametrize("optimizer", NAMES)
@pytest.mark.parametrize(("task", "model"), DIGITS + TEXTS)
def test_every_model_with_every_optimizer(task, model, optimizer, tmp_path, ptb):
    seen = []
    run = make_run(task, model, optimizer, data=str(ptb) if task == "ptb" else None)
    result = train(run, tmp_path, lambda history: seen.append(len(history)))
    assert seen == [0, 1, 2]
    lr = run.options["lr"]
    assert [epoch["lr"] for epoch in result["history"]] == pytest.approx([lr, lr / 10])
    for epoch in result["history"]:
        assert all(math.isfinite(value) for value in epoch.values())
    assert result == json.loads((tmp_path / f"{run.name}.json").read_text())
    assert not list(tmp_path.glob("*.checkpoint*"))


@pytest.mark.parametrize(("task", "model"), [("digits", "resnet18"), ("lm", "lstm2")])
def test_padam_learns(task, model, tmp_path):
    changes = {"lr": 1.0, "partial": 0.2} if task == "lm" else {}
    history = train(make_run(task, model, epochs=8, changes=changes), tmp_path, quietly)
    first, *_, last = history["history"]
    assert last["train_loss"] < first["train_loss"] - 0.7
    assert last[TASKS[task].metric] < first[TASKS[task].metric]


@pytest.mark.parametrize(
    ("task", "model", "optimizer"),
    [("digits", "resnet18", "padam"), *(("lm", "lstm2", name) for name in NAMES)],
)
def test_an_interrupted_run_ends_as_one_that_never_stopped(task, model, optimizer, tmp_path):
    run = make_run(task, model, optimizer, epochs=4)
    whole = train(run, tmp_path / "whole", quietly)

    def interrupt(history):
        if len(history) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "parts", interrupt)
    seen = []
    go_on = train(run, tmp_path / "parts", lambda history: seen.append(len(history)))
    assert go_on == whole
    assert seen == [3, 4]
    files = [(tmp_path / part / f"{run.name}.json").read_bytes() for part in ("whole", "parts")]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    "other", [{"width": 8}, {"epochs": 3}, {"optimizer": "sgd", "width": 8}, {"data": "/other"}]
)
def test_runs_that_differ_are_refused_before_any_is_trained(other, tmp_path):
    run = make_run()
    train(run, tmp_path, quietly)
    label = NAMES[other.get("optimizer", "padam")]
    runs = [replace(run, seed=1), replace(run, label=label, **other)]
    with pytest.raises(ValueError, match=r"one has .*; give another --out, or delete that file"):
        experiments.carry_out(runs[::-1], tmp_path, 0, 1, Console(quiet=True))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("content", [b"", b'{"settings"', b"\xff"])
@pytest.mark.parametrize("ending", ["json", "checkpoint"])
def test_damaged_files_are_named(ending, content, tmp_path):
    run = make_run()
    (tmp_path / f"{run.name}.{ending}").write_bytes(content)
    with pytest.raises(ValueError, match=rf"{run.name}.{ending} is damaged .*; delete it"):
        train(run, tmp_path, quietly)


def test_a_finished_run_keeps_no_checkpoint(tmp_path):
    run = make_run(epochs=1)
    train(run, tmp_path, quietly)
    (tmp_path / f"{run.name}.checkpoint").write_bytes(b"left by a process that was killed")
    train(run, tmp_path, quietly)
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"]


def test_seeds_differ(tmp_path):
    losses = {
        train(replace(make_run(), seed=seed), tmp_path, quietly)["history"][0]["train_loss"]
        for seed in range(3)
    }
    assert len(losses) == 3


def test_a_finished_run_is_not_made_again_nor_taken_for_another(tmp_path, monkeypatch):
    run = make_run(epochs=1)
    first = train(run, tmp_path, quietly)
    monkeypatch.setattr(training, "make_problem", None)
    assert train(run, tmp_path, quietly) == first
    other = replace(run, epochs=5)
    with pytest.raises(ValueError, match=r"epochs=1, this one has epochs=5; give another --out"):
        train(other, tmp_path, quietly)


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


def test_decays_are_at_the_papers_epochs_in_proportion():
    assert TASKS["cifar10"].decay_epochs(200) == [100, 150]
    assert TASKS["ptb"].decay_epochs(200) == [100, 150]
    assert TASKS["imagenet"].decay_epochs(100) == [30, 60, 80]
    assert TASKS["imagenet"].decay_epochs(10) == [3, 6, 8]
    assert TASKS["cifar100"].decay_epochs(40) == [20, 30]
    # The shortest runs have no decay before they begin, nor two at once in the middle.
    assert TASKS["digits"].decay_epochs(1) == [1, 1]
    assert TASKS["digits"].decay_epochs(3) == [2, 3]


def test_hyperparameters_reach_the_optimizers():
    params = [torch.nn.Parameter(torch.ones(3))]
    groups = {
        (recipe, name): make_optimizer(name, options, params, 10_000).param_groups[0]
        for recipe, table in HYPERPARAMETERS.items()
        for name, options in table.items()
    }
    assert set(groups) == {
        (r, name) for r in ("cifar", "imagenet", "lstm2", "lstm3") for name in NAMES
    }
    for (recipe, name), group in groups.items():
        assert group["lr"] == HYPERPARAMETERS[recipe][name]["lr"]
        assert group.get("weight_decouple", False) is False
        if name == "adamw":
            factor = {"cifar": 0.025, "imagenet": 0.05}.get(recipe, 4e-4)
            assert group["lr"] * group["weight_decay"] == pytest.approx(factor / 100)
        else:
            assert group["weight_decay"] == (1.2e-6 if "lstm" in recipe else 5e-4)
        if name != "sgd":
            decay = 0.99 if name in ("adam", "amsgrad") and "lstm" not in recipe else 0.999
            assert group["betas"] == (0.9, decay)
    assert groups["cifar", "amsgrad"]["amsgrad"]
    assert not groups["cifar", "adam"]["amsgrad"]
    assert [groups[r, "padam"]["partial"] for r in HYPERPARAMETERS] == [1 / 8, 1 / 8, 0.4, 0.2]
    assert [groups[r, "padam"]["lr"] for r in HYPERPARAMETERS] == [0.1, 0.1, 0.01, 1]
    assert [groups[r, "sgd"]["lr"] for r in HYPERPARAMETERS] == [0.1, 0.1, 1, 10]
    assert [groups[r, "yogi"]["lr"] for r in HYPERPARAMETERS] == [0.001, 0.001, 0.01, 0.1]
    assert [groups[r, "adabound"]["final_lr"] for r in HYPERPARAMETERS] == [0.1, 0.1, 10, 100]


def test_normalized_weight_decay():
    # 200 epochs of CIFAR-10 by 128: 0.025 sqrt(128 / (50000 * 200)) is taken away in a step.
    assert 1e-3 * weight_decay(0.025, 1e-3, 200 * 50_000 / 128) == pytest.approx(
        0.025 * math.sqrt(128 / (50_000 * 200))
    )


def test_the_p_study():
    runs = experiments.p_study(
        TASKS["digits"], "resnet18", 2, width=4, epochs=1, data=None, device="cpu"
    )
    assert len({run.name for run in runs}) == len(runs) == 2 * 4 * 6
    params = [torch.nn.Parameter(torch.ones(3))]
    kinds = set()
    for run in runs:
        (group,) = make_optimizer("padam", run.options, params, 10).param_groups
        assert (group["lr"], group["weight_decay"]) == (0.1, 5e-4)
        kinds.add((group["partial"], group["amsgrad"], group["betas"], group["bias_correction"]))
    usual, without = (0.9, 0.999), (0.0, 0.999)
    assert kinds == {
        (p, *kind)
        for p in (1 / 16, 1 / 8, 1 / 5, 1 / 4, 2 / 5, 1 / 2)
        for kind in (
            (True, usual, "none"), (True, usual, "authors"), (False, usual, "none"),
            (False, without, "none"),
        )
    }  # fmt: skip


def test_the_papers_tables_are_whole():
    for (dataset, model, metric), values in PUBLISHED.items():
        assert len(values) == len(NAMES)
        (*_, task) = (task for task in TASKS.values() if task.paper == dataset)
        assert model in task.models
        assert metric.startswith(task.metric)


def test_penn_treebank(ptb):
    corpus = text.penn_treebank(ptb)
    # <eos> and "the" 60 and 30 times; words of one count by the alphabet; <unk> was not there.
    assert corpus.vocabulary == 7
    assert corpus.train[:7].tolist() == [0, 2, 5, 4, 0, 3, 1]
    assert corpus.test[:3].tolist() == [0, 2, 1]
    (ptb / "ptb.test.txt").write_text("the dog\n")
    assert text.penn_treebank(ptb).test.tolist() == [0, 6, 1]
    (ptb / "ptb.test.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"ptb.test.txt is not there; the files are"):
        text.penn_treebank(ptb)


def test_no_paragraph_is_in_both_parts_of_the_documentation(monkeypatch):
    monkeypatch.undo()
    corpus = text.python_documentation()

    def paragraphs(words):
        words = words.tolist()
        parts, end = [[]], words[-1]
        for word in words:
            parts.append([]) if word == end else parts[-1].append(word)
        return {tuple(part) for part in parts if len(part) > 8}

    train_part, test_part = paragraphs(corpus.train), paragraphs(corpus.test)
    assert len(test_part) > 100
    # What differs in rare words only is the same here.
    assert len(train_part & test_part) <= 0.02 * len(test_part)


def test_perplexity_of_a_model_that_knows_nothing_is_the_number_of_words():
    corpus = text.Corpus(torch.arange(900) % 50, torch.arange(370) % 50, 50)
    problem = text.make_text_problem(corpus, "lstm2", 8, 0.5, 20, torch.device("cpu"))
    torch.nn.init.zeros_(problem.model.decoder.weight)
    torch.nn.init.zeros_(problem.model.decoder.bias)
    assert problem.evaluate()["test_perplexity"] == pytest.approx(50, rel=1e-5)
    assert problem.train.shape == (45, 20)
    assert problem.train[:, 1].tolist() == corpus.train[45:90].tolist()
    counts = [count for _, count in problem.losses()]
    assert len(counts) == problem.batches == 2
    assert counts == [35, 9]


def test_the_state_of_an_lstm_goes_on_from_batch_to_batch():
    corpus = text.Corpus(torch.arange(2000) % 50, torch.arange(900) % 7, 50)
    problem = text.make_text_problem(corpus, "lstm2", 8, 0.0, 20, torch.device("cpu"))
    in_parts = problem.evaluate()["test_perplexity"]
    with torch.no_grad():
        logits, _ = problem.model(problem.test[:-1], None)
    whole = torch.nn.functional.cross_entropy(logits.flatten(0, 1), problem.test[1:].flatten())
    assert in_parts == pytest.approx(math.exp(whole), rel=1e-5)


def test_test_error_counts_images():
    class First(torch.nn.Module):
        def forward(self, x):
            return torch.tensor([9.0, 5, 4, 3, 2, 1, 0, 0, 0, 0]).expand(len(x), 10)

    data = [(torch.zeros(1, 8, 8), label) for label in (0, 1, 4, 9)]
    loader = torch.utils.data.DataLoader(data, batch_size=3)
    problem = images.ImageProblem(First(), loader, loader, torch.device("cpu"), top5=True)
    assert problem.evaluate() == {"test_error": 75.0, "test_error_top5": 25.0}


def test_reports(tmp_path):
    for seed in range(2):
        for name in ("sgd", "padam"):
            train(replace(make_run(optimizer=name), seed=seed), tmp_path / "runs", quietly)
    for run in experiments.p_study(
        TASKS["digits"], "resnet18", 1, width=4, epochs=1, data=None, device="cpu"
    )[:8]:
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
    def in_this_process(runs, folder, workers, jobs, console):
        train(runs[0], folder, quietly)

    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("benchmarks.paper.__main__.carry_out", in_this_process)
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


def test_the_command_line(tmp_path, ptb):
    arguments = ["--task", "lm", "--model", "lstm2", "--width", 4, "--epochs", 2, "--jobs", 2]
    arguments += ["--optimizers", "sgd,padam", "--device", "cpu", "--out", tmp_path]
    done = command("run", *arguments, "--data", ptb)
    assert done.returncode == 0, done.stderr
    assert "Penn Treebank, lstm2 of width 4, 2 epochs, 1 seed" in " ".join(done.stdout.split())
    for name in ("sgd", "padam"):
        run = make_run("ptb", "lstm2", name, data=str(ptb))
        saved = json.loads((tmp_path / "runs" / f"{run.name}.json").read_text())
        assert train(run, tmp_path / "here", quietly)["history"] == saved["history"]

    (tmp_path / "runs" / "optimizers-ptb-lstm2-sgd-momentum-seed-0.json").unlink()
    (ptb / "ptb.test.txt").unlink()
    done = command("run", *arguments, "--data", ptb)
    assert done.returncode == 2
    assert "ptb.test.txt is not there" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_and_no_process(signal_number, tmp_path, ptb):
    """Ctrl-C reaches all processes, SIGTERM the first one."""
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
    if signal_number == signal.SIGINT:
        os.killpg(process.pid, signal_number)
    else:
        process.send_signal(signal_number)
    try:
        output, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 128 + signal_number, output
    assert "Traceback" not in output
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
