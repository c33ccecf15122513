"""Recognises software that gives each process other parameters or gradients, as plain tensors.

Nothing at such a tensor tells what the other processes have, so a norm or an infinity of this
process alone would be used without a word. The user has to say `norm_group`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# Attributes of parameters that are shards.
_MARKS = {
    "_fsdp_flattened": "FullyShardedDataParallel",
    "tensor_model_parallel": "Megatron-LM's tensor parallelism",
}
# Optimizers that give a part of the parameters to another one: module, class, where they keep it.
_WRAPPERS = (
    ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer", "optim"),
    ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", "optimizer"),
    ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", "optimizer"),
    ("deepspeed.runtime.bf16_optimizer", "BF16_Optimizer", "optimizer"),
)
_PIPELINE = ("torch.distributed.pipelining.stage", "_PipelineStageBase")


def check_not_sharded(optimizer: Optimizer) -> None:
    """Raises RuntimeError if the optimizer's parameters are known to be a part of the model."""
    if not several_processes():
        return
    by = _sharded_by(optimizer)
    if by is not None:
        raise RuntimeError(
            "max_grad_norm, skip_nonfinite and GradScaler need the gradients of all processes, but "
            f"{by} gives this one a part of them as plain tensors. Pass FusedPadam norm_group=, or "
            "set its attribute norm_group: the group of processes that hold the other parts; [] if "
            "they all hold the same"
        )


def several_processes() -> bool:
    """Whether there are other processes that train the same model."""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def living(cls: type) -> list[Any]:
    """All objects of a class that there are."""
    # By their types only: asking isinstance could wake lazy objects.
    return [it for it in gc.get_objects() if issubclass(type(it), cls)]


def _sharded_by(optimizer: Optimizer) -> str | None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for mark, by in _MARKS.items():
        if any(getattr(param, mark, False) for param in params):
            return by
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
