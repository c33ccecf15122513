"""The benchmarks themselves: their lists, their verification, their report. Nothing is timed."""

import csv
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import low_precision, measure, report, test_replanning, test_training_benchmark
from benchmarks.implementations import clipped, implementations
from benchmarks.test_step_benchmark import make_params, rotated
from benchmarks.verification import verify
from benchmarks.workloads import WORKLOADS, elements, scaled, workload

SHAPES = [(3, 5), (1,), (70,), (2, 3, 4)]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(measure, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(measure, "ON_GPU", False)


# Elements and tensors as the models' own libraries count them.
COUNTS = {
    "1 x 100M": (100_000_000, 1),
    "1 x 16M": (16_000_000, 1),
    "1000 x 1024": (1_024_000, 1000),
    "10000 x 10": (100_000, 10_000),
    "ResNet-18": (11_689_512, 62),
    "ResNet-50": (25_557_032, 161),
    "VGG-16": (138_357_544, 32),
    "WRN-16-4": (2_748_890, 44),
    "LSTM, 2 layers": (19_780_400, 11),
    "GPT-2 124M": (124_439_808, 148),
    "GPT-2 1.5B": (1_557_611_200, 580),
    "Llama-3-8B layer": (218_112_000, 9),
    "Llama-3-8B": (8_030_261_248, 291),
}


def test_workloads_have_the_shapes_of_their_models():
    found = {name: (elements(shapes()), len(shapes())) for name, shapes in WORKLOADS.items()}
    assert found == COUNTS


def test_scaling_divides_first_dimensions():
    assert scaled([(7, 5), (1,)], 20) == ([(4, 5), (1,)], 2)
    assert workload("ResNet-18", 16_000_000, 8_000_000)[1] == 1
    shapes, divisor = workload("VGG-16", 16_000_000, 8_000_000)
    assert divisor == 18
    assert len(shapes) == 32
    assert elements(shapes) == pytest.approx(8_000_000, rel=0.1)


@pytest.mark.filterwarnings("default::UserWarning", "default::FutureWarning")  # other people's
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", implementations("cpu"), ids=lambda i: i.name)
def test_each_implementation_passes_its_verification(implementation, dtype):
    params = make_params(SHAPES, dtype)
    grads = [param.grad.clone() for param in params]
    assert verify(implementation, params, implementation.make(params)) > 0
    if implementation.name.startswith(("FusedPadam", "Padam")):  # others write to gradients
        assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))


@pytest.mark.parametrize("implementation", clipped("cpu", 3.0), ids=lambda i: i.name)
def test_clipping_is_verified(implementation):
    params = make_params(SHAPES, torch.float32)
    assert torch.cat([param.grad.flatten() for param in params]).norm() > 5
    step = implementation.make(params)
    verify(implementation, params, step)
    with pytest.raises(AssertionError):
        verify(replace(implementation, max_grad_norm=2.0), params, step)


@pytest.mark.parametrize("fault", ["lr", "amsgrad", "weight_decay", "last tensor", "no step"])
def test_verification_finds_a_fault(fault):
    implementation = implementations("cpu")[0]
    params = make_params(SHAPES, torch.float32)
    step = implementation.make(params[:-1] if fault == "last tensor" else params)
    group = step.__self__.param_groups[0]
    if fault == "amsgrad":
        group["amsgrad"] = False
    elif fault in group:
        group[fault] *= 2
    with pytest.raises(AssertionError, match=r"FusedPadam, cpu, step [12]: \d+ of"):
        verify(implementation, params, (lambda: None) if fault == "no step" else step)


def test_bytes_that_must_move():
    one = {i.name: i for i in implementations("cpu")}
    dtypes = (torch.float32, torch.bfloat16)
    for name, expected in (
        ("FusedPadam, cpu", [36, 30]),
        ("torch AMSGrad, fused", [36, 18]),
        ("torch-optimi Adam", [28, 14]),
    ):
        assert [one[name].bytes_per_element(dtype) for dtype in dtypes] == expected


def test_every_turn_begins_with_another():
    assert [rotated([1, 2, 3], turn) for turn in (0, 1, 5)] == [[1, 2, 3], [2, 3, 1], [3, 1, 2]]


@pytest.mark.parametrize("change", test_replanning.CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", [test_replanning.OURS, test_replanning.TORCHS])
def test_steps_with_changes_pass_their_verification(name, change, monkeypatch):
    monkeypatch.setattr(test_replanning, "COUNT", 6)
    test_replanning.verify_steps(name, change)
    make_optimizer = test_replanning.make_optimizer

    def make_faulty(which, params):
        """One parameter is left out of the optimizer that is verified."""
        return make_optimizer(which, params[:-1] if which == name else params)

    monkeypatch.setattr(test_replanning, "make_optimizer", make_faulty)
    with pytest.raises(AssertionError):
        test_replanning.verify_steps(name, change)


@pytest.mark.parametrize("name", [test_replanning.OURS, test_replanning.PER_PARAMETER])
@pytest.mark.parametrize(("num_groups", "group_size"), [(5, 1), (1, 5)])
def test_stepping_during_backward_passes_its_verification(num_groups, group_size, name):
    test_replanning.verify_backward(name, num_groups, group_size)
    info = {"memory_per_parameter": test_replanning.memory_per_parameter(name, 2, 2)}
    assert info["memory_per_parameter"] > 0
    table = report.memory([{"extra_info": {"workload": "4", "implementation": name} | info}])
    assert list(table.columns[1].cells) == [name]
    assert report.memory([{"extra_info": {}}]) is None


def result(implementation, times, **info):
    info = {
        "workload": "WRN-16-4", "dtype": "float32", "tensors": 44, "elements": 1000, "divisor": 1,
        "bytes": 36_000, "copy_bandwidth": 1e7, "bandwidth": 2e7, "launches": 1,
        "peak_memory": None, "implementation": implementation, **info,
    }  # fmt: skip
    return {"extra_info": info, "stats": {"data": times}}


def test_turns_are_put_together_and_held_against_ours():
    later = result("FusedPadam, cpu", [0.004, 0.004, 0.006])
    del later["extra_info"]["launches"]
    rows = report.collect(
        [
            result("FusedPadam, cpu", [0.002, 0.004]),
            result("FusedPadam, cpu, p=0.3", [0.005]),
            result("Padam, eager loop", [0.04]),
            later,
        ]
    )
    assert [row.seconds for row in rows] == [0.004, 0.005, 0.04]
    assert rows[0].gigabytes_per_second == pytest.approx(0.009)
    assert (rows[0].bandwidth_fraction, rows[0].copy_fraction) == pytest.approx((0.45, 0.9))
    (cells,) = zip(*(column.cells for column in report.ratios(rows).columns), strict=True)
    assert cells == ("WRN-16-4, float32", "4 ms", "0.45", "1.25", "10.00")


def test_the_report_says_what_is_missing():
    """One failed case must not take the others with it."""
    lost = result("FusedPadam, cuda", [0.002], workload="A")
    del lost["extra_info"]["launches"]
    rows = report.collect([lost, result("FusedPadam, triton", [0.001], workload="B")])
    table = report.ratios(rows)
    assert "FusedPadam, triton" in table.title
    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns["workload"] == ["A, float32", "B, float32"]
    assert columns["FusedPadam, triton"] == ["", "1 ms"]
    assert "FusedPadam, cuda" in columns
    host = {"workload": "1000 x 8", "change": "keep", "implementation": "another"}
    overhead = report.host_overhead([{"extra_info": host, "stats": {"data": [0.001]}}])
    assert list(overhead.columns[-1].cells) == ["nan"]


def test_steps_of_training_are_held_against_torchs():
    def of(name, seconds):
        info = {"training": "warmed up", "stored": "float32", "lines_risen": 0.06}
        return {"extra_info": info | {"implementation": name}, "stats": {"data": [seconds]}}

    table = report.training(
        [of("FusedPadam", 0.02), of("torch AMSGrad, fused", 0.03), of("FusedPadam", 0.02)]
    )
    assert [list(column.cells) for column in table.columns[3:]] == [
        ["6 %", "6 %"], ["20.0", "30.0"], ["1.50", "1.00"],
    ]  # fmt: skip
    assert report.training([result("FusedPadam, cpu", [0.001])]) is None


@pytest.mark.parametrize("name", test_training_benchmark.OPTIMIZERS)
@pytest.mark.parametrize("state", test_training_benchmark.STATES)
def test_states_of_training(state, name, monkeypatch):
    monkeypatch.setattr(test_training_benchmark, "NUMEL", 2**12)
    monkeypatch.setattr(test_training_benchmark, "POPULATION", 2**10)
    v = torch.ones(2**10)
    h = v + torch.linspace(0, 0.01, 2**10)  # of which the smallest rise
    monkeypatch.setattr(test_training_benchmark, "moments", lambda: (v / 2, v, h))
    grads = torch.randn(2**13, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(test_training_benchmark, "gradients", lambda: grads)
    case = test_training_benchmark.Case(state, torch.float32, name, 0)
    of_elements, of_lines = test_training_benchmark.verify(test_training_benchmark.make(case))
    if state == "rising":
        assert of_elements == of_lines == 1
    else:
        assert 0 < of_elements < of_lines < 1


def test_on_a_gpu_the_report_has_the_time_of_the_device():
    (row,) = report.collect([result("FusedPadam, triton", [0.001], device_seconds=0.002)])
    assert (row.seconds, row.host_seconds) == (0.002, 0.001)


def test_a_small_run_from_measurement_to_report(tmp_path):
    """Both benchmarks as `make bench` calls them, with little to do."""
    results = tmp_path / "step.json"
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "benchmarks", "--turns", "1",
               "-k", "(WRN and (FusedPadam or eager)) or (host and 1000-0 and keep)",
               f"--benchmark-json={results}"]  # fmt: skip
    # pytest-benchmark takes it for a run of pytest-xdist's if that started this process.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(json.loads(results.read_text())["benchmarks"]) == 4 + 3
    subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.report",
            results,
            "--out",
            tmp_path,
            "--command",
            "this",
        ],
        check=True,
    )
    markdown = (tmp_path / "step.md").read_text()
    for expected in ("by `this`", "torch 2.", "| WRN-16-4, float32 ", "| 1000 x 8 "):
        assert expected in markdown
    with (tmp_path / "step.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["implementation"] for row in rows} >= {"FusedPadam, cpu", "Padam, eager loop"}
    assert (tmp_path / "step.png").stat().st_size > 10_000


def test_the_table_of_low_precision(monkeypatch, capsys):
    monkeypatch.setattr(low_precision, "TURNS", 1)
    monkeypatch.setattr(sys, "argv", ["low_precision", "--numel", "1000"])
    low_precision.main()
    lines = [
        " ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()
    ]
    for name, size in (("float32", "12.00"), ("float32, packed states", "4.00")):
        assert any(line.startswith(f"{name} {size} ") for line in lines), name
    monkeypatch.setitem(
        low_precision.PADAM, "float32, packed states", (torch.float32, {"maximize": True})
    )
    with pytest.raises(AssertionError, match="float32, packed states"):
        low_precision.verify()
