"""Reads in one pass what a step has to know about its tensors.

The native module does this in C++ where torch offers DLPack's C exchange interface, elsewhere
Python does. Readings are only ever compared with readings that were made the same way. Nothing that
is read is kept alive.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from padam_ext import native
from padam_ext.layout import dtensor_type, is_wrapper, local, placement, unwrapped
from padam_ext.slots import STATE_KEYS
from padam_ext.state import OptimizerState

# (index of a param group, parameters of it)
Selection = list[tuple[int, list[Tensor]]]


class Reading(Protocol):
    """All that decides which memory a kernel would touch, of several parameters.

    That is the parameter and its group, and of each tensor its address, device, dtype, sizes,
    strides, lazy conjugation and negation, and how a DTensor is placed; all else that is read of a
    DTensor is read of its local shard. The addresses of gradients are left out, since they move
    with each `zero_grad(set_to_none=True)`.
    """

    def same(self, other: Any) -> bool:
        """Whether another reading is the same; False if a tensor has no address."""

    def pieces(self) -> list[Any]:
        """The reading of each parameter, to be compared by ==; None where it has no address."""

    def plain(self) -> bytes:
        """For each parameter a byte: 1 only if nothing is unusual about it and its gradient.

        Both are of torch's own classes, of the same floating point dtype, device and shape, have
        memory, and their elements lie in a row there. So much then need not be checked, but for
        lazy negation, which is not always asked for (see csrc/gather.cpp).
        """


class StepInputs(NamedTuple):
    """The parameters that have a gradient in this step, in order, as parallel lists.

    Attributes:
        params: parameters.
        grads: their gradients.
        group_indices: index of the param group of each, int64 as bytes.
        state: the optimizer's states.
        reading: of parameters and gradients; None where nothing is to be kept.
        grad_addresses: int64 as bytes, 0 where a gradient has none; None where they were not read.
    """

    params: list[Tensor]
    grads: list[Tensor]
    group_indices: bytes
    state: OptimizerState
    reading: Reading | None = None
    grad_addresses: bytes | None = None


class PythonReading:
    """See Reading."""

    def __init__(self, pieces: list[Any]) -> None:
        self._pieces = pieces

    def same(self, other: PythonReading) -> bool:
        """See Reading."""
        return None not in self._pieces and self._pieces == other._pieces

    def pieces(self) -> list[Any]:
        """See Reading."""
        return self._pieces

    def plain(self) -> bytes:
        """See Reading. Here it is not looked for."""
        return bytes(len(self._pieces))


class PythonGatherer:
    """Gathers with methods of torch.Tensor."""

    def gather(self, selection: Selection, state: OptimizerState) -> StepInputs:
        """Those of the selected parameters that have a gradient."""
        params, grads, group_indices, pieces = [], [], array("q"), []
        grad_addresses = array("Q")
        for group_index, members in selection:
            for param in members:
                grad = param.grad
                if grad is None:
                    continue
                params.append(param)
                grads.append(grad)
                group_indices.append(group_index)
                piece, grad_address = None, 0
                try:
                    grad_address = _address(grad)
                    piece = (id(param), group_index, _layout(param), _address(param),
                             _layout(grad), grad_address == 0)  # fmt: skip
                except RuntimeError:
                    pass
                pieces.append(piece)
                grad_addresses.append(grad_address)
        return StepInputs(
            params, grads, group_indices.tobytes(), state, PythonReading(pieces),
            grad_addresses.tobytes(),
        )  # fmt: skip

    def read_states(self, state: OptimizerState, params: Sequence[Tensor]) -> Reading:
        """Reads the states of parameters, tensors and ints, where a parameter has a state."""
        return PythonReading([_state_piece(state.get(param)) for param in params])


def _state_piece(state: Any) -> Any:
    if not isinstance(state, dict):
        return None
    try:
        return [_state_value(state[key]) if key in state else None for key in STATE_KEYS]
    except (AttributeError, TypeError, RuntimeError):
        return None  # no tensor, or one without an address


def _state_value(value: Any) -> Any:
    return value if isinstance(value, int) else (_layout(value), _address(value))


def _address(tensor: Tensor) -> int:
    tensor = local(tensor)
    # data_ptr() of such a tensor is 0, with at most a warning.
    if is_wrapper(tensor):
        raise RuntimeError("a tensor subclass has no memory of its own")
    return tensor.data_ptr()


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    t = local(tensor)
    return t.device, t.dtype, t.shape, t.stride(), t.is_neg(), t.is_conj(), placement(tensor)


class NativeGatherer:
    """The same through csrc/gather.cpp."""

    def __init__(self) -> None:
        """Raises AttributeError or ValueError if torch lacks the interface it needs."""
        self._native = native.module.Gatherer(Tensor, torch.nn.Parameter, unwrapped)

    def gather(self, selection: Selection, state: OptimizerState) -> StepInputs:
        """See PythonGatherer."""
        # Otherwise reading `.grad` of a DTensor looks for a method that DTensor has disabled.
        with torch._C.DisableTorchFunctionSubclass():
            params, grads, group_indices, reading, grad_addresses = self._native.gather(
                selection, dtensor_type()
            )
        return StepInputs(params, grads, group_indices, state, reading, grad_addresses)

    def read_states(self, state: OptimizerState, params: Sequence[Tensor]) -> Reading:
        """See PythonGatherer."""
        reading: Reading = self._native.read_states(state, params, STATE_KEYS, dtensor_type())
        return reading


Gatherer = PythonGatherer | NativeGatherer


def best_gatherer() -> Gatherer:
    """The native one where there is a native module and torch is 2.11 or later."""
    try:
        return NativeGatherer()
    except (AttributeError, ValueError):
        return PythonGatherer()
