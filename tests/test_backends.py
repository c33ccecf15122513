"""Which backend runs, and what is said when the best one cannot."""

import dataclasses
import os
import subprocess
import sys
import warnings

import pytest
import torch

from padam_ext import FusedPadam, available_backends, backends


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", *code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def one_step(backend="auto", device="cpu"):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = FusedPadam([param], backend=backend)
    param.grad = torch.ones(3, device=device)
    optimizer.step()
    return param


@pytest.fixture
def without_native(monkeypatch):
    broken = tuple(
        dataclasses.replace(b, unavailable_reason="the native module was not built")
        if b.name == "cpu"
        else b
        for b in backends.BACKENDS
    )
    monkeypatch.setattr(backends, "BACKENDS", broken)
    monkeypatch.setattr(backends, "_warned", set())


def test_this_machine_runs_every_backend():
    assert available_backends() == ("cpu", "eager")


def test_auto_falls_back_with_one_warning_that_says_why(without_native):
    assert available_backends() == ("eager",)
    with pytest.warns(UserWarning, match="plain PyTorch .*cpu: the native module was not built"):
        one_step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_step()


def test_a_backend_asked_for_by_name_does_not_fall_back(without_native):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedPadam([param], backend="cpu")
    param.grad = torch.ones(3)
    with pytest.raises(
        RuntimeError, match=r"backend='cpu' cannot step tensors on cpu: .*not built"
    ):
        optimizer.step()
    assert param.tolist() == [1, 1, 1]
    assert not optimizer.state


def test_eager_by_name_is_silent(without_native):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_step("eager")


def test_tensors_on_a_device_that_only_eager_takes(monkeypatch):
    monkeypatch.setattr(backends, "_warned", set())
    with pytest.warns(UserWarning, match="tensors on meta with plain PyTorch"):
        one_step(device="meta")
    with pytest.raises(
        RuntimeError, match=r"'cpu' cannot step .* on meta: cpu: it takes .* cpu only"
    ):
        one_step("cpu", device="meta")


def test_the_report():
    output = run_python(["-m", "padam_ext"])
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


def test_importing_needs_nothing_but_torch():
    code = (
        "import sys, torch; before = set(sys.modules); import padam_ext;"
        "new = {n.partition('.')[0] for n in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    assert run_python(["-c", code]).strip() == "['padam_ext']"
