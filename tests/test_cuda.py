"""The cuda backend on a machine without a GPU: what it says. Its kernel's code: see conftest.py."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from padam_ext import FusedPadam, backends, cuda_step, native, triton_step
from padam_ext.__main__ import main
from padam_ext.native import module

WITH_CUDA = hasattr(module, "step_cuda")


def test_it_says_why_it_cannot_run_here():
    reason = "this torch is for the CPU only" if WITH_CUDA else "was not built with CUDA; reinstall"
    with pytest.raises(RuntimeError, match=f"^backend='cuda' cannot run here: .*{reason}"):
        FusedPadam([torch.nn.Parameter(torch.ones(3))], backend="cuda")


WITHOUT = SimpleNamespace()
BUILT = SimpleNamespace(step_cuda=None)
REINSTALL = "not built with CUDA; reinstall .* PADAM_EXT_BUILD=cuda"


@pytest.mark.parametrize(
    ("built", "sees_a_gpu", "cuda", "hip", "reason"),
    [
        (None, True, "13.0", None, REINSTALL),
        (WITHOUT, True, "13.0", None, REINSTALL),
        (BUILT, True, None, "7.1", "this torch is for AMD's"),
        (BUILT, False, None, None, "this torch is for the CPU only"),
        (BUILT, False, "13.0", None, "torch sees no NVIDIA GPU here$"),
        (BUILT, True, "13.0", None, None),
    ],
)
def test_reasons(built, sees_a_gpu, cuda, hip, reason, monkeypatch):
    monkeypatch.setattr(native, "module", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_a_gpu)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = cuda_step.unavailable_reason()
    assert found is None if reason is None else re.search(reason, found)


def test_the_order_on_an_nvidia_gpu(monkeypatch):
    """Triton hidden: cuda. Neither: eager, with one warning that names both reasons."""
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(backends, "_warned", set())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(native, "module", BUILT)
    for step in (cuda_step, triton_step):
        monkeypatch.setattr(step._trial, "_works_on", {gpu})
    assert backends.choose("auto", gpu).name == "triton"
    monkeypatch.setattr(triton_step, "_installation_problem", lambda: "Triton is not installed")
    assert backends.choose("auto", gpu).name == "cuda"
    monkeypatch.setattr(native, "module", WITHOUT)
    with pytest.warns(
        UserWarning, match="triton: Triton is not .*; cuda: .* not built with"
    ) as told:
        assert backends.choose("auto", gpu).name == "eager"
    assert backends.choose("auto", gpu).name == "eager"
    assert len(told) == 1


def test_an_error_of_cuda_says_what_where_and_how_much():
    """There is no driver here; a module without CUDA has no such function."""
    table = module.DeviceTable(
        addresses=0, numels=0, rows=0, constants=0, chunk_tensors=0, chunk_first_blocks=0,
        num_tensors=3, num_chunks=1, blocks_per_chunk=1, partial_sums=0,
        param_dtype=0, grad_dtype=0,
    )  # fmt: skip
    if not WITH_CUDA:
        assert not hasattr(module, "cuda_architectures")
        return
    message = r"^CUDA failed to .* for 3 tensors on cuda:0: .+ \(cudaError\w+\)$"
    for launch in (module.step_cuda, module.sum_of_squares_cuda):
        with pytest.raises(RuntimeError, match=message):
            launch(table, 0, 0)


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ({"param_dtype": 7}, "param_dtype: 7 is not a dtype"),
        ({"grad_dtype": 2}, "a gradient of dtype 2 beside a parameter of dtype 0"),
    ],
)
def test_a_table_of_dtypes_that_no_kernel_takes(dtypes, message):
    fields = dict.fromkeys(
        ("addresses", "numels", "rows", "constants", "chunk_tensors", "chunk_first_blocks",
         "num_tensors", "num_chunks", "blocks_per_chunk", "partial_sums", "param_dtype",
         "grad_dtype"), 0
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        module.DeviceTable(**fields | dtypes)


def test_the_report_names_the_architectures(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["padam_ext"])
    main()
    output = capsys.readouterr().out
    [line] = (line for line in output.splitlines() if line.startswith("CUDA"))
    expected = r"code for (sm_\d+ ?)+, by nvcc \d+" if WITH_CUDA else "not built in"
    assert re.search(expected, line)
