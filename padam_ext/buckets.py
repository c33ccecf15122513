"""From parameters to buckets: which tensors one launch can take together.

Here, and only here, a parameter becomes the plain memory that kernels work on: real instead of
complex, dense, gradient and states laid out alike. A bucket keeps addresses, never tensors, so it
does not keep tensors alive.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from padam_ext.gather import StepInputs
from padam_ext.layout import (
    is_plain,
    like_plain,
    local,
    local_like,
    placement,
    real_view,
    same_layout,
)
from padam_ext.slots import SLOTS, STATE_SLOTS, Signature, Storage, signature
from padam_ext.state import ParamState, is_direct

PARAM, GRAD = SLOTS.index("param"), SLOTS.index("grad")


class LaunchKind(NamedTuple):
    """What all tensors of one launch share. `launch_kind` gives one object for equal ones."""

    device: torch.device
    signature: Signature


launch_kind = cache(LaunchKind)


@dataclass(slots=True)
class ParamRecord:
    """How kernels reach one parameter and its state, valid until a reading of them differs.

    Attributes:
        reading: of the parameter and its gradient, see gather.py; None if it is not to be kept.
        state_reading: of its state.
        storage: how it is stored.
        owns_state: nobody but the optimizer can hold its moments.
        kind: where it lies, and what a kernel for it is compiled for.
        numel: in real numbers.
        addresses: int64 by slot, 0 for what is absent, the gradient and what is staged.
        staged: indices of slots that a kernel cannot walk as they are.
        needs_grad_copy: whether a kernel needs a copy of the gradient.
        grad_dtype: its dtype.
        counter_device: where the step counter is.
        counter_address: its address; 0 where kernels cannot add to it, since it is not float32.
        place: the parameter's device and address.
        memory: the parameter's, kept alive where its lower bits are a state of their own: other
            memory then is at another address.
        salt: for its random numbers, 32 bits; 0 where it needs none.
    """

    reading: Any
    state_reading: Any
    storage: Storage
    owns_state: bool
    kind: LaunchKind
    numel: int
    addresses: tuple[int, ...]
    staged: tuple[int, ...]
    needs_grad_copy: bool
    grad_dtype: torch.dtype
    counter_device: torch.device = torch.device("cpu")  # noqa: RUF009 - cannot change
    counter_address: int = 0
    place: tuple[torch.device, int] | None = None
    memory: torch.UntypedStorage | None = None
    salt: int = 0

    def take_counter(self, counter: Tensor) -> None:
        """Notes where the step counter is."""
        self.counter_device = counter.device
        self.counter_address = address_of(counter) if counter.dtype == torch.float32 else 0


def make_record(
    param: Tensor,
    grad: Tensor,
    state: ParamState,
    storage: Storage,
    *,
    owns_state: bool,
    plain: bool = False,
) -> ParamRecord:
    """The record of a parameter that has been checked and whose state fits it.

    `plain`: whether nothing is unusual about it and its gradient, see gather.py's Reading, and its
    state is new.
    """
    mine = signature(param.dtype, grad.dtype, storage)
    shard = param if plain else local(param).detach()
    walked = param if plain else like_plain(shard)
    tensors: list[Tensor | None] = [shard if walked is shard else None, None]
    staged = [] if walked is shard else [PARAM]
    for index, (slot, is_present) in enumerate(
        zip(STATE_SLOTS, storage.slots, strict=True), start=GRAD + 1
    ):
        direct = is_present and (plain or is_direct(state[slot.name], walked))
        tensors.append(local(state[slot.name]) if direct else None)
        if is_present and not direct:
            staged.append(index)
    addresses = tuple([0 if tensor is None else address_of(tensor) for tensor in tensors])
    needs_grad_copy = not plain and (
        placement(grad) != placement(param)
        or not _is_readable(local(grad), shard, mine.dtypes[GRAD])
    )
    record = ParamRecord(
        reading=None,
        state_reading=None,
        storage=storage,
        owns_state=owns_state,
        kind=launch_kind(param.device, mine),
        numel=shard.numel() * (2 if shard.is_complex() else 1),
        addresses=addresses,
        staged=tuple(staged),
        needs_grad_copy=needs_grad_copy,
        grad_dtype=grad.dtype,
        place=(param.device, addresses[PARAM] or address_of(shard)),
        memory=shard.untyped_storage() if "param_low" in state else None,
        salt=state["salt"] if storage.draws and mine.draws else 0,
    )
    record.take_counter(state["step"])
    return record


@dataclass
class Bucket:
    """Tensors of one device and one signature, as parallel lists: one launch."""

    device: torch.device
    signature: Signature
    records: list[ParamRecord]
    positions: list[int]  # in StepInputs
    group_indices: list[int]
    copies: int = 1  # how many processes of a Reduction hold the same

    def columns(self) -> list[tuple[int, ...]]:
        """By slot the address of each tensor; see ParamRecord."""
        return list(zip(*(record.addresses for record in self.records), strict=True))

    @cached_property
    def norm_dtype(self) -> torch.dtype:
        """The dtype of the norm of these gradients: float64 for such ones, else float32."""
        dtypes = {record.grad_dtype.to_real() for record in self.records}
        return torch.float64 if torch.float64 in dtypes else torch.float32

    @cached_property
    def _to_copy(self) -> list[int]:
        """Indices of tensors that a kernel cannot take as they are."""
        return [
            i for i, record in enumerate(self.records) if record.needs_grad_copy or record.staged
        ]

    def counter(self, index: int, inputs: StepInputs) -> Tensor:
        """The step counter of one tensor."""
        counter: Tensor = inputs.state[inputs.params[self.positions[index]]]["step"]
        return counter

    def bind(self, inputs: StepInputs) -> Bound:
        """The bucket's tensors in this step, with copies of those that no kernel can walk."""
        bound = Bound(self, inputs, {}, {})
        for index in self._to_copy:
            if self.records[index].needs_grad_copy:
                bound.copy_grad(index)
            for slot in self.records[index].staged:
                bound.stage(slot, index)
        return bound


@dataclass
class Bound:
    """A bucket's tensors, held only during one step.

    Attributes:
        bucket: the bucket.
        inputs: what was gathered.
        grads: copies of gradients that no kernel could read, by index.
        staged: by slot and index, tensors that no kernel can walk, and the copies that it works on.
    """

    bucket: Bucket
    inputs: StepInputs
    grads: dict[int, Tensor]
    staged: dict[tuple[int, int], tuple[Tensor, Tensor]]

    def copy_grad(self, index: int) -> None:
        """Makes the copy of a gradient."""
        like = like_plain(self._original(PARAM, index))
        dtype = self.bucket.signature.dtypes[GRAD]
        position = self.bucket.positions[index]
        grad = local_like(self.inputs.grads[position], self.inputs.params[position])
        self.grads[index] = _readable_grad(grad, like, dtype)

    def stage(self, slot: int, index: int) -> None:
        """Makes room for the copy of a parameter or state."""
        original = self._original(slot, index)
        like = like_plain(self._original(PARAM, index))
        working = torch.empty_like(like, dtype=original.dtype, device=original.device)
        self.staged[slot, index] = (original, working)

    def load(self) -> None:
        """Copies what is staged to where the kernel works."""
        for original, working in self.staged.values():
            working.copy_(original)

    def store(self) -> None:
        """Copies it back."""
        for original, working in self.staged.values():
            original.copy_(working)

    def grad_addresses(self) -> array[int]:
        """The addresses of the gradients, int64 [tensor]."""
        positions, known = self.bucket.positions, self.inputs.grad_addresses
        if known is None:
            addresses = [address_of(local(self.inputs.grads[i])) for i in positions]
            return self._with_copies(array("q", addresses))
        addresses_of_all = array("q", known)
        if positions[-1] + 1 == len(positions) == len(addresses_of_all):
            return self._with_copies(addresses_of_all)
        return self._with_copies(array("q", [addresses_of_all[i] for i in positions]))

    def staged_addresses(self) -> list[tuple[int, int, int]]:
        """Slot, index and address of each copy that is worked on."""
        return [(*place, address_of(working)) for place, (_, working) in self.staged.items()]

    def tensor(self, slot: int, index: int) -> Tensor:
        """A tensor to work on: real, dense, laid out as all others of its parameter."""
        if slot == GRAD and index in self.grads:
            return self.grads[index]
        if (slot, index) in self.staged:
            return real_view(self.staged[slot, index][1])
        return real_view(self._original(slot, index))

    def _original(self, slot: int, index: int) -> Tensor:
        """A tensor as its user has it; of a DTensor the local shard."""
        position = self.bucket.positions[index]
        param = self.inputs.params[position]
        if slot == PARAM:
            return local(param).detach()
        if slot == GRAD:
            return local(self.inputs.grads[position])
        moment: Tensor = local(self.inputs.state[param][SLOTS[slot]])
        return moment

    def _with_copies(self, addresses: array[int]) -> array[int]:
        for index, copy in self.grads.items():
            addresses[index] = address_of(copy)
        return addresses


def make_buckets(
    records: Sequence[ParamRecord],
    group_indices: Sequence[int],
    copies: Sequence[int] | None = None,
) -> list[Bucket]:
    """Sorts parameters into buckets; those with other `copies` into others."""
    by_kind: dict[tuple[int, int], list[int]] = {}
    copies = copies or [1] * len(records)
    for position, (record, count) in enumerate(zip(records, copies, strict=True)):
        by_kind.setdefault((id(record.kind), count), []).append(position)
    return [
        Bucket(
            *records[positions[0]].kind,
            records=[records[i] for i in positions],
            positions=positions,
            group_indices=[group_indices[i] for i in positions],
            copies=copies[positions[0]],
        )
        for positions in by_kind.values()
    ]


def address_of(tensor: Tensor) -> int:
    """An address as int64; one of 2**63 or more, as on some devices, becomes negative."""
    address = tensor.data_ptr()
    return address - 2**64 if address >= 2**63 else address


def _readable_grad(grad: Tensor, param: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The gradient as a kernel can read it beside a plain parameter: itself or a view, or a copy.

    Real, of the dtype, laid out as the parameter.
    """
    real = real_view(grad)
    real_param = torch.view_as_real(param) if param.is_complex() else param
    if _is_readable(grad, param, dtype):
        return real
    return torch.empty_like(real_param, dtype=dtype, device=grad.device).copy_(real)


def _is_readable(grad: Tensor, param: Tensor, dtype: torch.dtype | None) -> bool:
    if not is_plain(grad) or grad.dtype.to_real() != dtype:
        return False
    return same_layout(grad, like_plain(param))
