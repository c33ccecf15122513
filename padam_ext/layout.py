"""How a tensor lies in memory: local shards, real views, density, overlap, sameness of layout."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

# Types of tensors that are what they seem, as most are: nothing else is asked of them.
_ORDINARY = (Tensor, torch.nn.Parameter)
# Inner tensors that torchao's float8 weights compute of their elements beforehand.
_NO_ELEMENTS = ("_precomputed_scale",)


def dtensor_type() -> Any:
    """torch.distributed.tensor.DTensor; None where nobody has imported it: then there are none."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def _as_dtensor(tensor: Tensor) -> Any:
    dtensor = dtensor_type()
    # isinstance would call a method of DTensor's metaclass.
    return tensor if dtensor is not None and issubclass(type(tensor), dtensor) else None


def local(tensor: Tensor) -> Tensor:
    """What lies in this process: the shard of a DTensor, and what a wrapper wraps."""
    if type(tensor) in _ORDINARY:
        return tensor
    dtensor = _as_dtensor(tensor)
    return unwrapped(tensor if dtensor is None else dtensor._local_tensor)


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor in which one of a wrapper subclass keeps its elements; any other as it is.

    That is the only inner tensor, of the same shape and dtype. Of a result that a collective is
    still computing it is the finished one.
    """
    if not _has_dispatch(tensor) or not hasattr(tensor, "__tensor_flatten__"):
        return tensor
    if hasattr(tensor, "trigger_wait"):  # AsyncCollectiveTensor
        finished: Tensor = tensor.trigger_wait()
        return finished
    names = [name for name in tensor.__tensor_flatten__()[0] if name not in _NO_ELEMENTS]
    inner = [getattr(tensor, name) for name in names]
    if len(inner) != 1 or inner[0].shape != tensor.shape or inner[0].dtype != tensor.dtype:
        return tensor
    return unwrapped(inner[0])


def placement(tensor: Tensor) -> Any:
    """How a DTensor is laid out over devices; None for any other tensor."""
    if type(tensor) in _ORDINARY:
        return None
    dtensor = _as_dtensor(tensor)
    return None if dtensor is None else (dtensor.device_mesh, dtensor.placements)


def can_be_redistributed(tensor: Tensor, like: Tensor) -> bool:
    """Whether two are DTensors on the same mesh."""
    mine, its = placement(tensor), placement(like)
    return mine is not None and its is not None and mine[0] == its[0]


def local_like(tensor: Tensor, like: Tensor) -> Tensor:
    """The local shard of a tensor that is first distributed over its mesh as another one."""
    dtensor = _as_dtensor(tensor)
    if dtensor is None or placement(tensor) == placement(like):
        return local(tensor)
    return local(dtensor.redistribute(placements=_as_dtensor(like).placements))


def _has_dispatch(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def real_view(tensor: Tensor) -> Tensor:
    """A complex tensor as (real, imag) pairs of the same memory; a real one as it is.

    A lazily conjugated or negated tensor is materialised first.
    """
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor is of a subclass that has no memory itself, only tensors that it wraps."""
    if type(tensor) in _ORDINARY or not _has_dispatch(tensor):
        return False
    return tensor.untyped_storage().device.type == "meta" or tensor.data_ptr() == 0


def is_strided(tensor: Tensor) -> bool:
    """Whether strides tell where a tensor's elements are: not so in sparse and nested tensors."""
    return tensor.layout == torch.strided and not tensor.is_nested


def same_layout(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of the same shape put their elements in the same order and gaps."""
    if one.stride() == other.stride() or one.numel() == 0:
        return True
    # The stride of a dimension of size 1 never counts.
    strides = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size == 1 or mine == theirs for size, mine, theirs in strides)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's memory is its elements: without gaps, in any order of dimensions."""
    if tensor.is_neg() or tensor._is_zerotensor() or (tensor.is_complex() and tensor.is_conj()):
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in _by_stride(tensor):
        if stride != expected:
            return False
        expected *= size
    return True


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a plain tensor as they lie in memory, in one dimension."""
    return tensor.as_strided((tensor.numel(),), (1,))


def like_plain(tensor: Tensor) -> Tensor:
    """A tensor with the layout in which kernels walk this one: itself where it is plain."""
    return tensor if is_plain(tensor) else torch.empty_like(tensor, device="meta")


def lacks_memory(tensor: Tensor) -> bool:
    """Whether a tensor has elements but no address, as after its storage was freed."""
    if tensor.is_meta or tensor.numel() == 0 or tensor._is_zerotensor():
        return False
    return tensor.data_ptr() == 0


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements share memory, as in an expanded tensor."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in _by_stride(tensor):
        if stride == 0:
            return True
        if stride <= reach:  # unusual: interleaved dimensions, which may or may not collide
            return _elements_collide(tensor)
        reach += stride * (size - 1)
    return False


def _by_stride(tensor: Tensor) -> list[tuple[int, int]]:
    if tensor.numel() == 0:
        return []
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    return sorted((stride, size) for stride, size in dimensions if size > 1)


def _elements_collide(tensor: Tensor) -> bool:
    offsets = torch.zeros((), dtype=torch.int64, device="cpu")
    for stride, size in _by_stride(tensor):
        steps = torch.arange(size, dtype=torch.int64, device="cpu") * stride
        offsets = offsets.unsqueeze(-1) + steps
    return int(offsets.unique().numel()) < offsets.numel()
