"""Over which processes the norm of all gradients adds up, and how often they hold each gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from padam_ext.layout import dtensor_type, placement


@dataclass(frozen=True)
class Reduction:
    """One sum over a group of processes.

    Attributes:
        group: the processes, all of which make each step.
        device: where its collectives take tensors.
    """

    group: Any  # dist.ProcessGroup, which not every build of torch has
    device: torch.device

    def copies(self, param: Tensor) -> int:
        """How many processes hold the same part of a parameter, and of its gradient.

        A plain tensor counts as the same in all of them.
        """
        where = placement(param)
        if where is None:
            return self._size
        mesh, placements = where
        shards = [int(mesh.size(i)) for i, how in enumerate(placements) if not how.is_replicate()]
        return self._size // math.prod(shards)

    @property
    def _size(self) -> int:
        return int(self.group.size())

    def all_reduce(self, sums_of_squares: Sequence[Tensor], copies: Sequence[int]) -> Tensor:
        """The sum of squares over all processes, float64 [1], the same in each. One collective.

        Args:
            sums_of_squares: of each bucket, float64 [its own number] on its own device.
            copies: of each bucket's parameters.
        """
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        for sums, share in zip(sums_of_squares, copies, strict=True):
            total += (sums.sum() / share).to(self.device)
        dist.all_reduce(total, group=self.group)
        return total


def reduction_of(params: Iterable[Tensor]) -> Reduction | None:
    """Over all processes that hold a part of the parameters; None where there are no DTensors.

    Depends on the parameters and not on which of them have gradients, so that every process takes
    part in every sum.

    Raises:
        RuntimeError: DTensors on meshes that no group of processes covers.
    """
    dtensor = dtensor_type()
    if dtensor is None:
        return None
    sharded: list[Any] = [param for param in params if issubclass(type(param), dtensor)]
    # By their ids first: there are few, and asking a mesh for its hash takes a while.
    by_id = {id(mesh): mesh for mesh in [param.device_mesh for param in sharded]}
    if not by_id:
        return None
    meshes = set(by_id.values())
    return Reduction(_group_of(meshes), torch.device(next(iter(meshes)).device_type))


def _group_of(meshes: set[Any]) -> Any:
    """The group of all processes of some meshes."""
    if any(mesh.size() == dist.get_world_size() for mesh in meshes):
        return dist.group.WORLD
    roots = {mesh._get_root_mesh() for mesh in meshes}
    if len(roots) > 1:
        raise RuntimeError(
            f"max_grad_norm and skip_nonfinite cannot add up over the unrelated meshes {roots}: "
            "take them all from one device mesh"
        )
    [root] = roots
    if len(meshes) == 1:
        [mesh] = meshes
    else:
        used = {name for mesh in meshes for name in mesh.mesh_dim_names}
        mesh = root[tuple(name for name in root.mesh_dim_names if name in used)]
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
