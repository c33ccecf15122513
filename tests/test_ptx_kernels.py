"""What Triton and nvcc make of the kernels, executed side by side."""

import re

import pytest
import torch

from cases import STORAGES, describe_storage
from checking import step_and_check
from padam_ext import FusedPadam
from ptx import launches
from ptx.program import Module

pytestmark = [pytest.mark.ptx, pytest.mark.nvcc]
ROOTS = (0.0, 1 / 16, 1 / 8, 0.3)
PLAIN = [(dtype, {}) for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)]


def results(run, where, backend, lean, dtype, options, **others):
    """Parameters and states after two steps, each of which agrees with the oracle."""
    generator = torch.Generator().manual_seed(0)
    with pytest.MonkeyPatch.context() as patched:
        run(patched, where, lean)
        params = [
            torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype))
            for size in (1, 1029, 1024)
        ]
        optimizer = FusedPadam(params, weight_decay=0.1, backend=backend, **options, **others)
        for _ in range(2):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).to(dtype)
            step_and_check(optimizer)
        states = [optimizer.state[param] for param in params]
        return [*params, *(s[key] for s in states for key in s if isinstance(s[key], torch.Tensor))]


@pytest.mark.parametrize("partial", ROOTS)
@pytest.mark.parametrize("storage", PLAIN + STORAGES, ids=describe_storage)
def test_they_agree(storage, partial):
    """To the bit, but for powers and roots of doubles: each has its own way to these."""
    dtype, options = storage
    others = {"partial": partial, "max_grad_norm": 1e9, "bias_correction": "none"}
    of_triton = results(launches.run_triton, "sm_90", "triton", 0, dtype, options, **others)
    of_nvcc = results(launches.run_cuda, "90", "cuda", 0, dtype, options, **others)
    exact = partial in (0.0, 1 / 4, 1 / 2) or (partial != 0.3 and dtype != torch.float64)
    for one, other in zip(of_triton, of_nvcc, strict=True):
        if exact:
            assert torch.equal(one, other)
        elif one.is_floating_point():
            bound = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(one, other, rtol=bound, atol=bound)


@pytest.mark.parametrize("lean", [-1, 1])
@pytest.mark.parametrize("partial", [0.2, 0.45])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("run", "where", "backend"),
    [
        *((launches.run_triton, target, "triton") for target in ("sm_80", "sm_90", "sm_100")),
        (launches.run_cuda, "90", "cuda"),
    ],
    ids=["sm_80", "sm_90", "sm_100", "nvcc"],
)
def test_the_bounds_hold_at_either_end_of_the_error_of_approximations(
    run, where, backend, dtype, partial, lean
):
    """The device works corrections out, too: their logarithms have approximations."""
    others = {"partial": partial, "bias_correction": "authors", "lr": torch.tensor(0.1)}
    results(run, where, backend, lean, dtype, {}, **others)


@pytest.mark.parametrize(("run", "where", "backend"), [
    (launches.run_triton, "sm_90", "triton"), (launches.run_cuda, "90", "cuda"),
])  # fmt: skip
@pytest.mark.parametrize("partial", ROOTS)
def test_maxima_are_written_only_where_they_rise(run, where, backend, partial, monkeypatch):
    writes = {}

    class Watching(launches.GlobalMemory):
        def write_back(self):
            super().write_back()
            for region, place in zip(self.regions, self._places, strict=True):
                if region.name.startswith(("max_exp_avg_sq", "exp_avg 0")):
                    span = slice(place // 2, (place + region.size) // 2)
                    writes[region.name] = int((self._writer[span] != 0).sum()) * 2 // 4

    monkeypatch.setattr(launches, "GlobalMemory", Watching)
    run(monkeypatch, where, 0)
    param = torch.nn.Parameter(torch.randn(2048 + 5))
    optimizer = FusedPadam([param], partial=partial, backend=backend)
    param.grad = torch.full_like(param, 0.1)
    optimizer.step()
    optimizer.state[param]["max_exp_avg_sq"].fill_(1.0)
    optimizer.state[param]["max_exp_avg_sq"][[5, 1024, 2052]] = 0.0
    step_and_check(optimizer)
    # Of whole blocks four neighbours are written together, of the rest each by itself.
    assert writes == {"exp_avg 0": 2053, "max_exp_avg_sq 0": 4 + 4 + 1}


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_only_a_reciprocal_of_doubles_flushes_subnormal_numbers(target, monkeypatch):
    texts = []
    original = Module.__init__

    def keep(self, text, *arguments):
        texts.append(text)
        original(self, text, *arguments)

    monkeypatch.setattr(Module, "__init__", keep)
    launches.triton_machine.cache_clear()
    launches.run_triton(monkeypatch, target, 0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        param = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        param.grad = torch.ones_like(param)
        for partial in (1 / 8, 0.3):
            FusedPadam([param], partial=partial, max_grad_norm=1.0, backend="triton").step()
    found = set(re.findall(r"\b[a-z]\w*(?:\.\w+)*\.ftz(?:\.\w+)*", "\n".join(texts)))
    assert found == {"rcp.approx.ftz.f64"}  # which has no other form
