"""Over which processes the norm of all gradients adds up, and how often they hold each gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from padam_ext.checks import ParamGroups, params_of
from padam_ext.gather import Reading
from padam_ext.layout import dtensor_type, placement
from padam_ext.norm import sums_on


class NormGroups:
    """The user's `norm_group`, checked: groups of processes that hold different plain tensors.

    Copies of an optimizer share it, since groups of processes cannot be copied.
    """

    def __init__(self, value: Any) -> None:
        """Raises TypeError or ValueError where these are no groups with this process."""
        self.value = value
        self.groups: tuple[Any, ...] = ()
        if value is None:
            return
        self.groups = tuple(value) if isinstance(value, list | tuple) else (value,)
        for group in self.groups:
            if not isinstance(group, dist.ProcessGroup):
                raise TypeError(
                    "norm_group must be a ProcessGroup with this process, a list of them, or None, "
                    f"got {value!r}"
                )
        _check_independent(self.groups, "norm_group has groups that")

    def __deepcopy__(self, memo: dict[int, Any]) -> NormGroups:
        """Itself."""
        return self

    def __reduce__(self) -> Any:
        """For pickle, which must not lose the groups without a word."""
        if not self.groups:
            return NormGroups, (self.value,)
        raise TypeError(
            "an optimizer with norm_group cannot be pickled: save its state_dict(), or set its "
            "attribute norm_group to None before and again after"
        )


def _check_independent(groups: Sequence[Any], which: str) -> None:
    """Raises ValueError if two groups share another process: it would count twice."""
    seen: set[int] = {dist.get_rank()} if groups else set()
    for group in groups:
        ranks = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
        if shared := seen & ranks:
            raise ValueError(
                f"{which} share the processes {sorted(shared)}: the norm would count them twice. "
                "Each group must be for another way of splitting the model, as tensor and pipeline "
                "parallelism are; DTensors add up over their meshes without norm_group"
            )
        seen |= ranks


class Sums(NamedTuple):
    """What all processes know after a reduction, the same in each.

    Attributes:
        squares: the sum of squares, float64 [1].
        found_inf: not 0 if GradScaler found an infinity in any process, float64 of no dimensions;
            None where it does not ask.
    """

    squares: Tensor
    found_inf: Tensor | None


@dataclass(frozen=True)
class Reduction:
    """Sums over groups of processes, one after the other.

    Attributes:
        mesh_group: the processes of all DTensors; None without DTensors.
        norm_groups: the user's, over which plain tensors and whole meshes differ.
        replicated: by param group, the indices of norm groups whose processes hold the same.
        device: where the groups' collectives take tensors.
    """

    mesh_group: Any  # dist.ProcessGroup, which not every build of torch has
    norm_groups: tuple[Any, ...]
    replicated: tuple[tuple[int, ...], ...]
    device: torch.device

    def copies(self, param: Tensor, group_index: int) -> int:
        """How many processes hold the same part of a parameter, and of its gradient.

        A plain tensor counts as the same in all processes of the DTensors.
        """
        copies = 1
        if self.mesh_group is not None:
            copies = int(self.mesh_group.size())
            if (where := placement(param)) is not None:
                mesh, placements = where
                shards = (
                    mesh.size(i) for i, how in enumerate(placements) if not how.is_replicate()
                )
                copies //= math.prod(map(int, shards))
        for index in self.replicated[group_index]:
            copies *= int(self.norm_groups[index].size())
        return copies

    def start(
        self,
        sums_of_squares: Sequence[Tensor],
        copies: Sequence[int],
        found_inf: Tensor | None,
    ) -> Callable[[], Sums]:
        """Starts to add up over all processes, with one collective to a group.

        Args:
            sums_of_squares: of each bucket, float64 [its own number] on its own device.
            copies: of each bucket's parameters.
            found_inf: as GradScaler found in this process.

        Returns:
            Waits for the sums, the host only where they are on the CPU.
        """
        parts = [
            sums if share == 1 else sums / share
            for sums, share in zip(sums_of_squares, copies, strict=True)
        ]
        zero = torch.zeros(1, dtype=torch.float64, device=self.device)
        total = sums_on(self.device, parts).sum(0, keepdim=True) if parts else zero
        if found_inf is not None:
            total = torch.cat([total, found_inf.reshape(1).to(self.device, torch.float64)])
        *others, last = filter(None, (self.mesh_group, *self.norm_groups))
        for group in others:
            dist.all_reduce(total, group=group)
        last_one = dist.all_reduce(total, group=last, async_op=True)

        def finish() -> Sums:
            last_one.wait()
            return Sums(total, None) if found_inf is None else Sums(total[:1], total[1])

        return finish


class Reductions:
    """Finds the reduction of each step, looking at the parameters only when they have changed."""

    def __init__(self) -> None:
        self._reading: Reading | None = None
        self._made_of: Any = None
        self._found: Reduction | None = None

    def find(
        self, param_groups: ParamGroups, norm_groups: NormGroups, reading: Reading | None
    ) -> Reduction | None:
        """Over all processes that hold a part of the parameters; None where that is this one alone.

        Depends on the parameters and not on which of them have gradients, so that every process
        takes part in every sum.

        Args:
            param_groups: the optimizer's.
            norm_groups: the user's.
            reading: of this step's parameters.

        Raises:
            RuntimeError: DTensors on meshes that no group of processes covers.
            ValueError: a norm group with processes of these meshes; or see `replicated_in`.
        """
        count = len(norm_groups.groups)
        replicated = tuple(replicated_in(group, count) for group in param_groups)
        sizes = [len(group["params"]) for group in param_groups]
        made_of = (sizes, norm_groups, replicated)
        if (
            self._made_of != made_of
            or self._reading is None
            or reading is None
            or not self._reading.same(reading)
        ):
            self._found = _reduction_of(param_groups, norm_groups.groups, replicated)
            self._made_of, self._reading = made_of, reading
        return self._found


def _reduction_of(
    param_groups: ParamGroups, groups: tuple[Any, ...], replicated: tuple[tuple[int, ...], ...]
) -> Reduction | None:
    meshes = _meshes_of(param_groups)
    if not meshes and not groups:
        return None
    if not meshes:
        return Reduction(None, groups, replicated, _device_for(groups[0], param_groups))
    mesh_group = _group_of(meshes)
    if groups:
        _check_independent((mesh_group, *groups), "norm_group and the meshes of DTensors")
    device = torch.device(next(iter(meshes)).device_type)
    return Reduction(mesh_group, groups, replicated, device)


def _meshes_of(param_groups: ParamGroups) -> set[Any]:
    dtensor = dtensor_type()
    if dtensor is None:
        return set()
    params: list[Any] = params_of(param_groups)
    types = {kind for kind in set(map(type, params)) if issubclass(kind, dtensor)}
    if not types:
        return set()
    # By their ids first: there are few, and asking a mesh for its hash takes a while.
    by_id = {id(p._spec.mesh): p._spec.mesh for p in params if type(p) in types}
    return set(by_id.values())


def _device_for(group: Any, param_groups: ParamGroups) -> torch.device:
    """A device whose tensors a group's collectives take, the parameters' if that is possible."""
    types = [device.type for device in group._device_types]
    for param_group in param_groups:
        for param in param_group["params"]:
            if param.device.type in types:
                device: torch.device = param.device
                return device
    return torch.device(types[0])


def replicated_in(param_group: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """The norm groups whose processes hold the same parameters of a param group.

    Raises:
        ValueError: `replicated` is neither a bool nor indices of norm groups.
    """
    value = param_group.get("replicated", False)
    if value is True or value is False:
        return tuple(range(count)) if value else ()
    is_indices = isinstance(value, list | tuple) and len(set(value)) == len(value)
    if not is_indices or not all(type(i) is int and 0 <= i < count for i in value):
        raise ValueError(
            f"replicated in a param group must be True, False or a list of indices of the {count} "
            f"groups in norm_group, got {value!r}"
        )
    return tuple(value)


def _group_of(meshes: set[Any]) -> Any:
    """The group of all processes of some meshes."""
    if any(mesh.size() == dist.get_world_size() for mesh in meshes):
        return dist.group.WORLD
    roots = {mesh._get_root_mesh() for mesh in meshes}
    if len(roots) > 1:
        raise RuntimeError(
            f"max_grad_norm, skip_nonfinite and GradScaler cannot add up over the unrelated meshes "
            f"{roots}: take them all from one device mesh"
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
