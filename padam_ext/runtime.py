"""What is asked of a device's runtime: streams, captures, pinned memory, dtypes.

For the CPU, on which kernels for GPUs run in tests, there is little to ask.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def cpu_only_reason() -> str | None:
    """Why this torch knows no GPU, and what to do; None where it knows one."""
    if any(getattr(torch.version, name, None) is not None for name in ("cuda", "hip", "xpu")):
        return None
    return "this torch is for the CPU only; for a GPU install one for CUDA, ROCm or XPU"


def capturing() -> bool:
    """Whether work of the current stream goes into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream to which work on a device goes now; None on the CPU."""
    if device.type == "cpu":
        return None
    stream: torch.Stream = torch.get_device_module(device).current_stream(device)
    return stream


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device the current one, since Triton launches there."""
    if device.type == "cpu":
        return nullcontext()
    guard: AbstractContextManager[object] = torch.get_device_module(device).device(device)
    return guard


def empty_on(device: torch.device, words: int) -> Tensor:
    """Memory on a device, int64 [words], that may be given out again once it is dropped.

    Work that was queued before on the stream of now may still use it then.
    """
    return torch.empty(words, dtype=torch.int64, device=device)


def pinned_copy(words: Tensor, device: torch.device) -> Tensor:
    """A copy in memory from which a device can copy while the host goes on.

    That memory is not given out again before such copies have been made.
    """
    return words if device.type == "cpu" else words.pin_memory()


def pinned_like(words: Tensor, device: torch.device) -> Tensor:
    """Room for such a copy."""
    return torch.empty_like(words, pin_memory=device.type != "cpu")


def record_stream(tensor: Tensor, stream: torch.Stream) -> None:
    """Keeps memory from being given out again before what is queued on a stream now is done."""
    tensor.record_stream(stream)


def copy_later(to: Tensor, source: Tensor) -> None:
    """Queues a copy to a device on its current stream; the host does not wait."""
    to.copy_(source, non_blocking=True)


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    if device.type == "cpu":
        return 1
    properties = torch.get_device_module(device).get_device_properties(device)
    for name in ("multi_processor_count", "gpu_subslice_count"):  # CUDA and ROCm; XPU
        if hasattr(properties, name):
            return int(getattr(properties, name))
    return 64


def moved_to(value: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device. Waits for a copy to the CPU, since the host may read it next.

    Pinned memory would be read later, when the host may have written to it again.
    """
    if value.device.type == "cpu" != device.type and value.is_pinned():
        value = value.clone()
    return value.to(device, non_blocking=device.type != "cpu")


def widest_float(device: torch.device) -> torch.dtype:
    """float64, but on devices that have none: Apple's, and some of Intel's."""
    if device.type == "mps":
        return torch.float32
    if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
        return torch.float32
    return torch.float64


def widened(value: Tensor) -> Tensor:
    """A tensor in the widest dtype that its device has."""
    return value.to(widest_float(value.device))
