"""Has backends for GPUs take tensors on the CPU, where what they launch is replaced."""

import dataclasses

from padam_ext import backends


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
