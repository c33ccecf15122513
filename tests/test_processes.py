"""Forked processes, and threads that were there before: each in a process of its own."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from padam_ext import FusedPadam

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

# So large that several threads share the work.
MODEL = """
import os, sys, torch
from padam_ext import FusedPadam
torch.set_num_threads(2)
OPTIONS = {"lr": 0.1, "partial": 0.5, "bias_correction": "adam", "backend": BACKEND}
param, twin = (torch.nn.Parameter(torch.linspace(-1, 1, 300_000)) for _ in range(2))
grads = [torch.linspace(-1, 2, 300_000) * (i + 1) for i in range(3)]
optimizer = FusedPadam([param], **OPTIONS)
adam = torch.optim.Adam([twin], lr=0.1, amsgrad=True)
for p, o in ((param, optimizer), (twin, adam)):
    p.grad = grads[0]
    o.step()
    p.grad = grads[1]
"""


def run(code, backend="cpu", timeout=240):
    """Runs it in a new process. One that hangs is ended, with all the processes it has forked."""
    script = MODEL.replace("BACKEND", repr(backend)) + textwrap.dedent(code)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        pytest.fail(f"hangs after {timeout} s")
    assert process.returncode == 0, output


def slow_case(*values):
    """For `make test-all-cases`: each case starts a Python with torch."""
    return pytest.param(*values, marks=pytest.mark.slow)


@forks
@pytest.mark.parametrize(
    ("how", "norm"), [("step", 1e9), slow_case("step", None), slow_case("step_param", None)]
)
def test_a_step_in_a_forked_process(how, norm):
    step = "optimizer.step()" if how == "step" else "optimizer.step_param(param)"
    run(f"""
        optimizer.max_grad_norm = {norm}
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            {step}
            values = memoryview(param.detach().numpy()).cast("B")
            with os.fdopen(writer, "wb") as file:
                file.write(values)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            there = torch.frombuffer(bytearray(file.read()), dtype=torch.float32)
        assert os.waitpid(child, 0)[1] == 0
        adam.step()
        torch.testing.assert_close(there, twin.detach(), rtol=1e-5, atol=1e-6)
        {step}  # and the parent goes on as it was
        assert torch.equal(param, there)
    """)


@forks
def test_steps_in_a_pool_of_forked_processes():
    run("""
        import multiprocessing

        def work(number):
            param.grad = grads[2]
            for _ in range(2):
                optimizer.step()
            return param.detach().numpy()[::1000].copy()

        with multiprocessing.get_context("fork").Pool(2) as pool:
            there = pool.map(work, range(1))
        param.grad = grads[2]
        for _ in range(2):
            optimizer.step()
        assert torch.equal(param.detach()[::1000], torch.from_numpy(there[0]))
    """)


@forks
@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1,), "int64"),
        slow_case((), "float32"), slow_case((1,), "float32"), slow_case((), "float64"),
    ],
)  # fmt: skip
def test_forked_workers_share_states(shape, dtype, backend):
    """As A3C's do with a SharedAdam: each steps the same parameter with the same counter."""
    run(
        f"""
        torch.set_num_threads(1)
        shared = torch.nn.Parameter(torch.ones(5))
        twin = torch.nn.Parameter(torch.ones(5))
        optimizer = FusedPadam([shared], **OPTIONS)
        adam = torch.optim.Adam([twin], lr=0.1, amsgrad=True)
        step = torch.zeros({shape}, dtype=torch.{dtype})
        moments = {{k: torch.zeros(5) for k in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}}
        optimizer.state[shared] = {{"step": step, **moments}}
        for tensor in (shared.detach(), step, *moments.values()):
            tensor.share_memory_()
        shared.share_memory_()
        for number in range(4):
            child = os.fork()
            if child == 0:
                for _ in range(1 + number % 2):
                    shared.grad = torch.full((5,), 0.5 + number)
                    optimizer.step()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            for _ in range(1 + number % 2):
                twin.grad = torch.full((5,), 0.5 + number)
                adam.step()
            assert step.item() == adam.state[twin]["step"].item(), step
        torch.testing.assert_close(shared, twin, rtol=1e-5, atol=1e-6)
        """,
        backend,
    )


@pytest.fixture
def two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_denormals_are_flushed_in_every_thread_or_in_none(dtype, two_threads):
    """torch.set_flush_denormal is for the thread that calls it; threads already there have none."""
    size = 300_000
    param = torch.nn.Parameter(torch.zeros(size, dtype=dtype))
    optimizer = FusedPadam([param], lr=1.0, partial=0.0, eps=0.0, backend="cpu")
    param.grad = torch.zeros_like(param)
    optimizer.step()
    tiny = torch.finfo(dtype).tiny / 16
    kept = torch.full_like(param, tiny) * 0.9
    assert kept.all()
    for flushing in (True, False, True):
        optimizer.state[param]["exp_avg"].fill_(tiny)
        if not torch.set_flush_denormal(flushing):
            pytest.skip("this CPU has no such mode")
        try:
            optimizer.step()
        finally:
            torch.set_flush_denormal(False)
        expected = torch.zeros_like(kept) if flushing else kept
        assert torch.equal(optimizer.state[param]["exp_avg"], expected)
