"""The cuda backend on a machine without a GPU: what it says. Its kernel's code: see conftest.py."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from checking import by_slot
from padam_ext import FusedPadam, choice, native, trial
from padam_ext.__main__ import main
from padam_ext.backends import cuda as cuda_backend
from padam_ext.backends import triton as triton_backend
from padam_ext.native import module
from padam_ext.slots import SLOTS

WITH_CUDA = hasattr(module, "step_cuda")


def test_it_says_why_it_cannot_run_here():
    """Not that padam_ext must be built anew, which would not help."""
    reason = "this torch is for the CPU only"
    with pytest.raises(RuntimeError, match=f"^backend='cuda' cannot run here: {reason}"):
        FusedPadam([torch.nn.Parameter(torch.ones(3))], backend="cuda")


WITHOUT = SimpleNamespace()
BUILT = SimpleNamespace(step_cuda=None)
REINSTALL = "not built with CUDA; reinstall .* PADAM_EXT_BUILD=cuda"


@pytest.mark.parametrize(
    ("built", "sees_a_gpu", "cuda", "hip", "reason"),
    [
        (WITHOUT, True, "13.0", None, REINSTALL),
        (BUILT, True, None, "7.1", "this torch is for AMD's"),
        (BUILT, False, None, None, "this torch is for the CPU only"),
        (WITHOUT, False, None, None, "this torch is for the CPU only"),
        (BUILT, False, "13.0", None, "torch sees no NVIDIA GPU here$"),
        (BUILT, True, "13.0", None, None),
    ],
)
def test_reasons(built, sees_a_gpu, cuda, hip, reason, monkeypatch):
    monkeypatch.setattr(native, "module", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_a_gpu)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = cuda_backend.unavailable_reason()
    assert found is None if reason is None else re.search(reason, found)


def test_the_order_on_an_nvidia_gpu(monkeypatch):
    """Triton hidden: cuda. Neither: eager, with one warning that names both reasons."""
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(choice, "_warned", set())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(native, "module", BUILT)
    monkeypatch.setattr(trial, "_works_on", {("cuda", gpu), ("triton", gpu)})
    assert choice.choose("auto", gpu).name == "triton"
    monkeypatch.setattr(triton_backend, "_installation_problem", lambda: "Triton is not installed")
    assert choice.choose("auto", gpu).name == "cuda"
    monkeypatch.setattr(native, "module", WITHOUT)
    with pytest.warns(
        UserWarning, match="triton: Triton is not .*; cuda: .* not built with"
    ) as told:
        assert choice.choose("auto", gpu).name == "eager"
    assert choice.choose("auto", gpu).name == "eager"
    assert len(told) == 1


def native_table(**fields):
    names = (
        "addresses", "numels", "salts", "rows", "constants", "control", "limits",
        "prepared_control",
        "row_sources", "counters", "chunk_tensors", "chunk_first_blocks", "num_tensors",
        "num_chunks", "blocks_per_chunk", "partial_sums", "num_late_rows", "counts_on_device",
        "compute_dtype",
    )  # fmt: skip
    slots = {"slot_dtypes": by_slot([0] * 5, -1)}
    return module.DeviceTable(**dict.fromkeys(names, 0) | slots | fields)


NO_INPUTS = dict.fromkeys(
    ("sums", "num_sums", "grad_scale", "grad_scale_is_double", "found_inf",
     "found_inf_is_double", "norm", "norm_is_double", "skipped"), 0
)  # fmt: skip


def test_an_error_of_cuda_says_what_where_and_how_much():
    """There is no driver here; a module without CUDA has no such function."""
    table = native_table(num_tensors=3, num_chunks=1, blocks_per_chunk=1)
    if not WITH_CUDA:
        assert not hasattr(module, "cuda_architectures")
        return
    message = r"^CUDA failed to .* for 3 tensors on cuda:0: .+ \(cudaError\w+\)$"
    for launch in (module.step_cuda, module.sum_of_squares_cuda):
        with pytest.raises(RuntimeError, match=message):
            launch(table, 0, 0)
    with pytest.raises(RuntimeError, match=message):
        module.prepare_cuda(table, module.PrepareInputs(**NO_INPUTS), 0, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slot_dtypes": by_slot([7, 0, 0, 0, 0], -1)}, "^param: 7 is not a dtype"),
        ({"slot_dtypes": [0, 0, 0, 0]}, f"^slot_dtypes: expected {len(SLOTS)}, got 4"),
        ({"slot_dtypes": by_slot([0, -1], 0)}, "^grad: -1 says that it is absent"),
        ({"slot_dtypes": by_slot([1] * 5, -1)}, r"^param: 1 \(float64\) has no codec to float32"),
        ({"compute_dtype": 3}, "^compute_dtype: 3 is neither"),
        (
            {"slot_dtypes": by_slot([0, 2, 0, 0], -1)},
            "^no kernel is compiled for the signature param float32, grad bfloat16, "
            "exp_avg float32, exp_avg_sq float32, in float32$",
        ),
    ],
)
def test_a_signature_that_no_kernel_takes(fields, message):
    with pytest.raises(ValueError, match=message):
        native_table(**fields)


def test_blocks():
    assert [module.block_of(code) for code in (0, 1)] == [1024, 512]
    with pytest.raises(ValueError, match=r"^compute_dtype: 2 is neither float32"):
        module.block_of(2)


def test_the_report_names_the_architectures(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["padam_ext"])
    main()
    output = capsys.readouterr().out
    [line] = (line for line in output.splitlines() if line.startswith("CUDA"))
    expected = r"code for (sm_\d+ ?)+, by nvcc \d+" if WITH_CUDA else "not built in"
    assert re.search(expected, line)
