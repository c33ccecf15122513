"""Has backends for GPUs take tensors on the CPU, where what they launch is replaced."""

import dataclasses

from cases import EXECUTED
from padam_ext import backends, native
from padam_ext.backends import cuda


def use_variant(variant, monkeypatch):
    """Has a backend run as one of conftest.py's VARIANTS says; the backend's name."""
    name, _, how = variant.partition("-")
    if name == "cpu":
        monkeypatch.setattr(native, "simd_level", lambda: how)
    if how == "on-host":
        run_cuda_on_host(monkeypatch)
    if EXECUTED:
        from ptx import launches

        run = launches.run_triton if name == "triton" else launches.run_cuda
        run(monkeypatch, how)
    return name


def take_the_cpu(monkeypatch, name):
    """The backend of this name says that it can run, and takes tensors on the CPU."""
    calls = {
        "unavailable_reason": lambda: None,
        "takes": lambda: frozenset({"cpu"}),
        "needs_trial": False,
    }
    changed = tuple(
        dataclasses.replace(b, **calls) if b.name == name else b for b in backends.BACKENDS
    )
    monkeypatch.setattr(backends, "BACKENDS", changed)


def replace_cuda_launches(monkeypatch, norm, prepare, step):
    """Has the cuda backend take tensors on the CPU and call these in place of its launches."""
    take_the_cpu(monkeypatch, "cuda")
    for kernel, launch in (("norm", norm), ("prepare", prepare), ("step", step)):
        monkeypatch.setattr(cuda, f"_launch_{kernel}", launch)


def run_cuda_on_host(monkeypatch):
    """Has the cuda backend take tensors on the CPU and run its kernel's code there."""

    def norm(table):
        native.module.sum_of_squares_on_host(cuda.native_table(table))

    def prepare(table, inputs):
        native.module.prepare_on_host(cuda.native_table(table), cuda.native_inputs(inputs))

    def step(table, root):
        native.module.step_on_host(cuda.native_table(table))

    replace_cuda_launches(monkeypatch, norm, prepare, step)
