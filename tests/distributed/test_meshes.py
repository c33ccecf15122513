"""One norm over several device meshes at once, in four gloo processes."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from launch import in_processes
from padam_ext import FusedPadam
from test_dtensor import randn

pytestmark = pytest.mark.distributed
OPTIONS = {"weight_decay": 0.1, "partial": 0.3, "lr": 0.05, "max_grad_norm": 0.7}


def test_in_four_processes():
    in_processes(4, in_one_of_four)


def in_one_of_four(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    both = [
        (mesh, (Shard(0), Shard(1))),
        (mesh, (Replicate(), Shard(0))),  # as hybrid sharding has it
        (mesh, (Shard(0), Replicate())),
        (mesh, (Replicate(), Replicate())),
    ]
    by_dp = [(mesh["dp"], (Shard(0),)), (mesh["dp"], (Replicate(),))]
    by_tp = [(mesh["tp"], (Shard(1),)), (mesh["tp"], (Replicate(),))]
    for places in (both, by_dp, by_tp, [*by_dp, *by_tp], [*both, *by_dp, *by_tp, None]):
        compare_with_wholes(places)
    half = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp", "one"))
    compare_with_wholes([(half["dp", "one"], (Shard(0), Replicate()))])


def compare_with_wholes(places):
    wholes = [torch.nn.Parameter(randn((5, 6), i)) for i in range(len(places))]
    params = [
        torch.nn.Parameter(distribute(whole.detach().clone(), place))
        for whole, place in zip(wholes, places, strict=True)
    ]
    optimizer, expected = (FusedPadam(those, **OPTIONS) for those in (params, wholes))
    for seed in range(3):
        for param, whole, place in zip(params, wholes, places, strict=True):
            whole.grad = randn((5, 6), 10 + seed)
            param.grad = distribute(whole.grad, place)
        optimizer.step()
        expected.step()
        torch.testing.assert_close(optimizer.grad_norm, expected.grad_norm, rtol=1e-6, atol=0)
    for param, whole in zip(params, wholes, strict=True):
        full = param.full_tensor() if isinstance(param, DTensor) else param
        torch.testing.assert_close(full, whole, rtol=1e-5, atol=1e-6)


def distribute(tensor, place):
    return tensor if place is None else distribute_tensor(tensor, *place)
