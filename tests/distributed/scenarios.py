"""Ways to spread one small model over processes, each with the same four parameters.

The loss is such that each parameter's gradient is what the test wants it to be.
"""

import warnings
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from padam_ext import FusedPadam

SHAPES = ((5, 3), (4, 6), (1, 7), (3,))


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


class Weights(nn.Module):
    """The gradient of parameter i is `grads[i]`."""

    def __init__(self, start):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(value.clone()) for value in start)

    def forward(self, grads):
        return sum(_product(w, g) for w, g in zip(self.weights, grads, strict=True))


def _product(weight, grad):
    if not isinstance(weight, DTensor):
        return (weight * grad).sum()
    grad = distribute_tensor(grad, weight.device_mesh, weight.placements)
    return (weight * grad).sum().full_tensor()


class Scenario:
    """A model, and an optimizer of what this process has of it."""

    processes = 2
    make_scaler = torch.amp.GradScaler

    def __init__(self, start, **options):
        self.model = self.wrap(Weights(start))
        self.optimizer = self.make_optimizer(options)

    def wrap(self, model):
        return model

    def make_optimizer(self, options):
        return FusedPadam(self.model.parameters(), **options)

    @property
    def padam(self):
        return self.optimizer

    def backward(self, grads, scaler=None):
        self.optimizer.zero_grad()
        loss = self.model(grads)
        (loss if scaler is None else scaler.scale(loss)).backward()

    def whole(self):
        """All parameters as they would be in one process."""
        return [self.full(param).detach().clone() for param in self.model.parameters()]

    @staticmethod
    def full(param):
        return param.full_tensor() if isinstance(param, DTensor) else param


class DDP(Scenario):
    def wrap(self, model):
        return DistributedDataParallel(model)


class FSDP2(Scenario):
    """Of the third parameter, with one row, some processes have no part."""

    def wrap(self, model):
        return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


class HybridFSDP2(Scenario):
    processes = 4

    def wrap(self, model):
        names = ("replicate", "shard")
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=names))


class TensorParallel(Scenario):
    """Some parameters are DTensors, the last two plain and the same in all processes."""

    def wrap(self, model):
        return split_by_tensors(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def split_by_tensors(model, mesh):
    for index, dim in enumerate((0, 1)):
        whole = model.weights[index].detach()
        model.weights[index] = nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)]))
    return model


class FSDP2WithTensorParallel(FSDP2):
    """Sharded over two mesh dimensions; plain ones by the first only."""

    processes = 4

    def wrap(self, model):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return fully_shard(split_by_tensors(model, mesh["tp"]), mesh=mesh["dp"])


class FSDP1(Scenario):
    """Flat parameters, or with `original` their names and views of this process's part."""

    original = False
    make_scaler = ShardedGradScaler

    def wrap(self, model):
        return FullyShardedDataParallel(
            model, use_orig_params=self.original, device_id=torch.device("cpu")
        )

    def whole(self):
        with FullyShardedDataParallel.summon_full_params(self.model):
            return [param.detach().clone() for param in self.model.parameters()]


class FSDP1WithOriginalParams(FSDP1):
    original = True


class ZeRO(DDP):
    """Each process has some of the parameters in its optimizer, whole ones."""

    def make_optimizer(self, options):
        group = options.pop("norm_group", None)
        optimizer = ZeroRedundancyOptimizer(self.model.parameters(), FusedPadam, **options)
        optimizer.optim.norm_group = group
        return optimizer

    @property
    def padam(self):
        return self.optimizer.optim


class ByHand(Scenario):
    """Rows as plain tensors, as Megatron-LM has them, and one parameter that all processes have."""

    def wrap(self, model):
        for index in range(3):
            mine = self.part(model.weights[index].detach()).clone()
            model.weights[index] = nn.Parameter(mine)
        return model

    @staticmethod
    def part(whole):
        return whole.tensor_split(dist.get_world_size())[dist.get_rank()]

    def make_optimizer(self, options):
        *sharded, replicated = self.model.parameters()
        groups = [{"params": sharded}, {"params": [replicated], "replicated": True}]
        return FusedPadam(groups, **options)

    def backward(self, grads, scaler=None):
        super().backward([*map(self.part, grads[:3]), grads[3]], scaler)

    def whole(self):
        parts = [param.detach() for param in self.model.parameters()]
        wholes = []
        for part in parts[:3]:
            gathered = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, part)
            wholes.append(torch.cat(gathered))
        return [*wholes, parts[3].clone()]


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        DDP, FSDP2, HybridFSDP2, TensorParallel, FSDP2WithTensorParallel, FSDP1,
        FSDP1WithOriginalParams, ZeRO, ByHand,
    )
}  # fmt: skip
NEED_NORM_GROUP = ("FSDP1", "FSDP1WithOriginalParams", "ZeRO", "ByHand")


def quietly():
    """Without the warnings of what torch deprecates."""
    stack = ExitStack()
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    return stack
