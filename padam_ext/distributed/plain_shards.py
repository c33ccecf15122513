"""Recognises software that gives each process other parameters or gradients, as plain tensors.

Nothing at such a tensor tells what the other processes have, so a norm or an infinity of this
process alone would be used without a word. The user has to say `norm_group`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from padam_ext.checks import params_of
from padam_ext.distributed.reduction import NormGroups

# Optimizers that give a part of the parameters to another one: module, class, where they keep it.
_WRAPPERS = (
    ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer", "optim"),
    ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", "optimizer"),
    ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", "optimizer"),
    ("deepspeed.runtime.bf16_optimizer", "BF16_Optimizer", "optimizer"),
)
_PIPELINE = ("torch.distributed.pipelining.stage", "_PipelineStageBase")
_FSDP1 = ("torch.distributed.fsdp._flat_param", "FlatParamHandle")


def check_norm_groups(optimizer: Optimizer, norm_groups: NormGroups) -> None:
    """Raises RuntimeError if the norm groups are known not to hold all parts of the model."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    params = params_of(optimizer.param_groups)
    _check_fsdp1(set(map(id, params)), norm_groups)
    by = None if norm_groups.value is not None else _sharded_by(optimizer, params)
    if by is not None:
        # An argument to ZeroRedundancyOptimizer would get into its checkpoints, which it breaks.
        raise RuntimeError(
            "max_grad_norm, skip_nonfinite and GradScaler need the gradients of all processes, but "
            f"{by} gives this one a part of them as plain tensors. Set the attribute norm_group of "
            "this FusedPadam (zero.optim.norm_group for ZeroRedundancyOptimizer): the group of "
            "processes that hold the other parts; [] if they all hold the same"
        )


def _check_fsdp1(params: set[int], norm_groups: NormGroups) -> None:
    """Of FullyShardedDataParallel it is known over which processes each parameter is sharded."""
    groups = [tuple(dist.get_process_group_ranks(group)) for group in norm_groups.groups]
    for handle in _living_if_imported(*_FSDP1):
        flat = handle.flat_param
        if not _has_one_of(params, [flat, *(flat._params or ())]):
            continue
        ranks = tuple(dist.get_process_group_ranks(handle.process_group))
        if handle.uses_sharded_strategy and len(ranks) > 1 and ranks not in groups:
            raise RuntimeError(
                "max_grad_norm, skip_nonfinite and GradScaler need the gradients of all processes, "
                f"but FullyShardedDataParallel shards parameters over the processes {list(ranks)}, "
                f"and norm_group has those of {[list(group) for group in groups]}. Pass FusedPadam "
                "norm_group=, or set its attribute norm_group: the module's process_group"
            )
        if not handle.uses_sharded_strategy and any(len(set(ranks) & set(g)) > 1 for g in groups):
            raise RuntimeError(
                "FullyShardedDataParallel with NO_SHARD gives all processes the same gradients: "
                "the norm would count them more than once. Leave out norm_group"
            )


def living(cls: type) -> list[Any]:
    """All objects of a class that there are."""
    # By their types only: asking isinstance could wake lazy objects.
    return [it for it in gc.get_objects() if issubclass(type(it), cls)]


def _sharded_by(optimizer: Optimizer, params: Sequence[Tensor]) -> str | None:
    if any(getattr(param, "tensor_model_parallel", False) for param in params):
        return "Megatron-LM's tensor parallelism"
    for module, name, place in _WRAPPERS:
        for wrapper in _living_if_imported(module, name):
            if getattr(wrapper, place, None) is optimizer:
                return name
    mine = set(map(id, params))
    for stage in _living_if_imported(*_PIPELINE):
        if stage.num_stages > 1 and _has_one_of(mine, stage.submod.parameters()):
            return "a pipeline stage"
    return None


def _living_if_imported(module: str, name: str) -> list[Any]:
    cls = getattr(sys.modules.get(module), name, None)
    return [] if cls is None else living(cls)


def _has_one_of(ids: set[int], params: Iterable[Tensor]) -> bool:
    return any(id(param) in ids for param in params)
