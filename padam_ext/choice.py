"""Which backend takes the tensors of a device."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from padam_ext import backends, trial
from padam_ext.caller import level_of_the_caller

NAMES = ("auto", *(backend.name for backend in backends.BACKENDS))

_warned: set[str] = set()


def available_backends() -> tuple[str, ...]:
    """Names of the backends that can run on this machine, best first.

    `python -m padam_ext` prints the reason for each that cannot.
    """
    available = (b for b in backends.BACKENDS if b.unavailable_reason() is None)
    return tuple(backend.name for backend in available)


def check_name(name: object) -> None:
    """Refuses the name of a backend that does not exist or cannot run on this machine.

    Raises:
        ValueError: there is no such backend; lists the names.
        RuntimeError: it cannot run here; says why, and what to do.
    """
    if not isinstance(name, str) or name not in NAMES:
        raise ValueError(f"backend must be one of {NAMES}, got {name!r}")
    for backend in backends.BACKENDS:
        if name == backend.name and (reason := backend.unavailable_reason()) is not None:
            raise RuntimeError(
                f"backend={name!r} cannot run here: {reason}. "
                'backend="auto" takes the best that can.'
            )


def choose(name: str, device: torch.device) -> backends.Backend:
    """The backend for tensors of one device.

    With "auto", falling back to eager warns once per process and device type.

    Raises:
        RuntimeError: the backend asked for by name cannot take these tensors; says why.
    """
    reasons: list[str] = []
    for backend in backends.BACKENDS:
        if not (backend.is_for(device) if name == "auto" else name == backend.name):
            continue
        reason = backend.reason_against(device) or trial.broken_reason(backend, device)
        if reason is None:
            if backend.name == "eager" and name == "auto":
                _warn_once(device, reasons)
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise RuntimeError(
        f"backend={name!r} cannot step tensors on {device}: {'; '.join(reasons)}. "
        'backend="auto" takes the best that can.'
    )


def _warn_once(device: torch.device, reasons: Sequence[str]) -> None:
    if device.type in _warned:
        return
    _warned.add(device.type)
    warnings.warn(
        f"FusedPadam steps tensors on {device.type} with plain PyTorch operations, which is "
        f"slower ({'; '.join(reasons) or 'no kernel takes them'}). "
        'backend="eager" silences this.',
        stacklevel=level_of_the_caller(),
    )
