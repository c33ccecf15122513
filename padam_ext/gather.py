"""Reads in one pass what a step has to know about its tensors.

The native module does this in C++ where torch offers DLPack's C exchange interface, elsewhere
Python does. Readings are only ever compared with readings that were made the same way.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from torch import Tensor

from padam_ext import native
from padam_ext.layout import dtensor_type, is_wrapper, local, placement


class Live(NamedTuple):
    """The parameters that have a gradient in this step, in order: parallel lists and readings.

    Layouts tell device, dtype, sizes, strides, lazy conjugation and negation, and how a DTensor is
    placed; all else that is read of a DTensor is read of its local shard. Readings are None where a
    tensor has no address or no strides.
    """

    params: list[Tensor]
    grads: list[Tensor]
    group_indices: list[int]
    param_reading: Any = None  # addresses and layouts
    grad_layouts: Any = None
    grad_addresses: bytes | None = None  # int64
    null_grads: int = 0  # gradients at no address: empty ones, and ones that no kernel must reach


class PythonGatherer:
    """Gathers with methods of torch.Tensor."""

    def gather(self, param_lists: list[list[Tensor]]) -> Live:
        """Parameters that have a gradient, from one list of parameters per param group."""
        live = Live([], [], [])
        for group_index, params in enumerate(param_lists):
            for param in params:
                grad = param.grad
                if grad is not None:
                    live.params.append(param)
                    live.grads.append(grad)
                    live.group_indices.append(group_index)
        try:
            grad_addresses = _addresses(live.grads)
            return live._replace(
                param_reading=(_addresses(live.params), _layouts(live.params)),
                grad_layouts=_layouts(live.grads),
                grad_addresses=grad_addresses.tobytes(),
                null_grads=grad_addresses.count(0),
            )
        except RuntimeError:
            return live

    def state_addresses(self, states: list[dict[str, Any]], keys: tuple[str, ...]) -> Any:
        """Addresses of the tensors in states, in the order of states, then keys.

        Raises:
            KeyError: a state lacks one of the keys.
            AttributeError: a value is not a tensor.
        """
        return _addresses([state[key] for state in states for key in keys])


def _addresses(tensors: list[Tensor]) -> array[int]:
    tensors = list(map(local, tensors))
    # Asked for its address, such a tensor answers 0, with a warning at best.
    if any(map(is_wrapper, tensors)):
        raise RuntimeError("a tensor subclass has no memory of its own")
    return array("Q", map(Tensor.data_ptr, tensors))


def _layouts(tensors: list[Tensor]) -> list[tuple[Any, ...]]:
    return [
        (t.device, t.dtype, t.shape, t.stride(), t.is_neg(), t.is_conj(), placement(tensor))
        for tensor, t in zip(tensors, map(local, tensors), strict=True)
    ]


class NativeGatherer:
    """The same through csrc/gather.cpp."""

    def __init__(self) -> None:
        """Raises AttributeError or ValueError where torch has not the interface it needs."""
        self._native = native.module.Gatherer(Tensor)
        self._then: Live | None = None

    def gather(self, param_lists: list[list[Tensor]]) -> Live:
        """See PythonGatherer. What is as it was in the last pass is the same object as there."""
        live = Live(*self._native.gather(param_lists, self._then, dtensor_type()))
        self._then = live._replace(grads=[])  # which must not be kept alive
        return live

    def state_addresses(self, states: list[dict[str, Any]], keys: tuple[str, ...]) -> Any:
        """See PythonGatherer; TypeError for a value that is not a tensor."""
        return self._native.state_addresses(states, keys, dtensor_type())


Gatherer = PythonGatherer | NativeGatherer


def best_gatherer() -> Gatherer:
    """The native one where there is a native module and torch is 2.11 or later.

    Each optimizer has its own, which remembers where things were.
    """
    try:
        return NativeGatherer()
    except (AttributeError, ValueError):
        return PythonGatherer()
