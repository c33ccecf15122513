"""Which backend runs, and what is said when the best one cannot."""

import copy
import dataclasses
import inspect
import os
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import padam_ext
from padam_ext import FusedPadam, available_backends, backends, choice, native, trial
from padam_ext.__main__ import main
from padam_ext.backends import triton as triton_backend
from padam_ext.backends.step import BucketStep

ROOT = Path(__file__).parents[1]


def start_python(code, cwd=None, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", *code],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def run_python(code, cwd=None, **environment):
    result = start_python(code, cwd, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def one_step(backend="auto", device="cpu"):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = FusedPadam([param], backend=backend)
    param.grad = torch.ones(3, device=device)
    optimizer.step()
    return param


@pytest.fixture
def without_native(monkeypatch):
    broken = tuple(
        dataclasses.replace(b, unavailable_reason=lambda: "the native module was not built")
        if b.name == "cpu"
        else b
        for b in backends.BACKENDS
    )
    monkeypatch.setattr(backends, "BACKENDS", broken)
    monkeypatch.setattr(choice, "_warned", set())


def test_this_machine_runs_every_backend():
    assert available_backends() == ("cpu", "eager")


def test_auto_falls_back_with_one_warning_that_says_why(without_native):
    assert available_backends() == ("eager",)
    with pytest.warns(UserWarning, match="plain PyTorch .*cpu: the native module was not built"):
        one_step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_step()


def test_the_warning_shows_the_line_that_made_the_step(without_native):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedPadam([param])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)  # wraps the step once more
    param.grad = torch.ones(3)
    with pytest.warns(UserWarning, match="plain PyTorch") as caught:
        optimizer.step()
    line = inspect.currentframe().f_lineno - 1
    scheduler.step()
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line)]


def test_a_backend_asked_for_by_name_must_be_able_to_run_here(without_native):
    param = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"backend='cpu' cannot run here: .*not built"):
        FusedPadam([param], backend="cpu")


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_an_optimizer_from_elsewhere_is_loaded_but_does_not_fall_back(how, request):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedPadam([param], backend="cpu")
    request.getfixturevalue("without_native")
    param, optimizer = how((param, optimizer))
    param.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"backend='cpu' cannot step .* on cpu: .*not built"):
        optimizer.step()
    assert param.tolist() == [1, 1, 1]
    assert not optimizer.state


def test_eager_by_name_is_silent(without_native):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_step("eager")


def test_tensors_on_a_device_that_only_eager_takes(monkeypatch):
    monkeypatch.setattr(choice, "_warned", set())
    with pytest.warns(UserWarning, match="tensors on meta with plain PyTorch"):
        one_step(device="meta")
    with pytest.raises(
        RuntimeError, match=r"'cpu' cannot step .* on meta: cpu: it takes .* cpu only"
    ):
        one_step("cpu", device="meta")


@pytest.fixture
def triton_here(monkeypatch):
    """Makes triton a backend for tensors on the CPU that fails there as it may on a GPU."""

    def fails(bucket, counts):
        raise RuntimeError("no compiler")

    [triton] = (b for b in backends.BACKENDS if b.name == "triton")
    calls = {
        "unavailable_reason": lambda: None,
        "takes": lambda: frozenset({"cpu"}),
        "make_step": fails,
    }
    broken = dataclasses.replace(triton, device_types=frozenset({"cpu"}), **calls)
    monkeypatch.setattr(backends, "BACKENDS", (broken, *backends.BACKENDS[1:]))
    monkeypatch.setattr(choice, "_warned", set())


def test_auto_goes_on_where_triton_is_installed_but_fails(triton_here):
    assert one_step().tolist() != [1, 1, 1]
    with pytest.raises(RuntimeError, match=r"'triton' cannot step .* RuntimeError: no compiler"):
        one_step("triton")


def test_one_warning_names_every_reason(without_native, triton_here):
    with pytest.warns(UserWarning, match=r"no compiler; cpu: the native module was not built"):
        one_step()


def test_triton_for_tensors_on_the_cpu_says_why_not():
    with pytest.raises(
        RuntimeError, match=r"'triton' cannot run here: this torch is for the CPU only"
    ):
        one_step("triton")


@pytest.mark.parametrize("failure", [RuntimeError("no C compiler\nat all"), None])
def test_a_small_step_shows_whether_a_kernel_works(failure):
    class Fails(BucketStep):
        def __init__(self, bucket, counts):
            super().__init__(bucket, counts)
            if failure is not None:
                raise failure

        def sum_of_squares(self, bound):
            raise AssertionError("nobody asked for a norm")

        def step(self, bound, options, control):
            pass

    backend = backends.Backend("triton", Fails, None, needs_trial=True)
    reason = trial.broken_reason(backend, torch.device("cpu"))
    if failure is not None:
        assert reason == "triton fails on cpu with RuntimeError: no C compiler"
    else:
        assert reason == "triton does not compute a Padam step correctly on cpu"


@pytest.mark.parametrize(
    ("version", "problem"),
    [("3.4.1", "needs Triton 3.5 or later"), ("3.6rc1", None), ("3.10.0+git1", None), ("4", None)],
)
def test_versions_of_triton(version, problem, monkeypatch):
    monkeypatch.setattr(triton_backend, "find_spec", lambda name: object())
    monkeypatch.setattr(triton_backend, "version", lambda name: version)
    found = triton_backend._installation_problem.__wrapped__()
    assert found is None if problem is None else problem in found


def test_the_report(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["padam_ext"])
    main()
    output = capsys.readouterr().out
    for expected in ("padam_ext", f"torch      {torch.__version__}", "SIMD", " in use", "threads"):
        assert expected in output
    assert "cpu      available, takes tensors on cpu" in output
    assert "eager    available, takes tensors on any device" in output


def test_the_report_without_the_native_module():
    code = (
        "import sys, runpy; sys.modules['padam_ext._native'] = None;"
        "runpy.run_module('padam_ext', run_name='__main__')"
    )
    output = run_python(["-c", code])
    assert "cpu      not available: the native module" in output
    assert "reinstall padam_ext" in output


@pytest.mark.parametrize(
    ("argument", "code", "output", "errors"),
    [
        ("--version", 0, f"padam_ext {re.escape(padam_ext.__version__)}\n", ""),
        ("--help", 0, ".*which backends can run here.*", ""),
        ("--bogus", 2, "", ".*unrecognized arguments: --bogus\n"),
    ],
)
def test_the_arguments_of_the_report(argument, code, output, errors, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["padam_ext", argument])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == code
    for text, pattern in zip(capsys.readouterr(), (output, errors), strict=True):
        assert re.fullmatch(pattern, text, re.DOTALL)


def test_the_report_without_torch():
    # -S leaves out site-packages
    result = start_python(["-S", "-m", "padam_ext"], PYTHONPATH=str(ROOT))
    assert result.returncode == 1
    [line] = result.stderr.splitlines()
    assert "padam_ext needs PyTorch 2.9 or later: pip install torch" in line


@pytest.mark.parametrize("installed_module", [True, False], ids=["native", "pure Python"])
def test_a_source_tree_in_place_of_the_installed_package(installed_module, tmp_path):
    tree, site = tmp_path / "tree", tmp_path / "site"
    for folder in (tree, site):
        (folder / "padam_ext").mkdir(parents=True)
    (tree / "setup.py").touch()
    (tree / "padam_ext" / "__init__.py").touch()  # needs no torch
    shutil.copy(ROOT / "padam_ext" / "native.py", tree / "padam_ext")
    for folder in (tree / "padam_ext.egg-info", site / "padam_ext-0.1.0.dist-info"):
        folder.mkdir()
        for name in ("METADATA", "PKG-INFO"):
            (folder / name).write_text("Metadata-Version: 2.1\nName: padam_ext\nVersion: 0.1.0\n")
    if installed_module:
        (site / "padam_ext" / "_native.so").touch()
    output = run_python(
        ["-S", "-c", "from padam_ext import native; print(native.unavailable_reason)"],
        cwd=tree,
        PYTHONPATH=str(site),
    )
    assert ("you are in the source tree" in output) == installed_module
    assert ("was not built" in output) != installed_module


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_why_there_is_no_native_code_is_told_by_all_that_need_it(name, monkeypatch):
    monkeypatch.setattr(native, "module", None)
    monkeypatch.setattr(native, "unavailable_reason", "the native module has gone")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    [backend] = [b for b in backends.BACKENDS if b.name == name]
    assert backend.unavailable_reason() == "the native module has gone"


def test_importing_needs_nothing_but_torch():
    code = (
        "import sys, torch; before = set(sys.modules); import padam_ext;"
        "new = {n.partition('.')[0] for n in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    assert run_python(["-c", code]).strip() == "['padam_ext']"
