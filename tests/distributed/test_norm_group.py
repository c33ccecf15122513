"""The norm over groups of processes that hold other plain tensors."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from launch import in_processes
from padam_ext import FusedPadam

pytestmark = pytest.mark.distributed
OPTIONS = {"weight_decay": 0.1, "partial": 0.3, "lr": 0.05, "max_grad_norm": 0.7}


def test_in_two_processes():
    in_processes(2, in_one_of_two)


def in_one_of_two(rank):
    warnings.simplefilter("ignore")  # torch deprecates some of this
    for lacking in ([], [0], [1], [0, 1], [2], [0, 1, 2]):
        processes_may_lack_gradients(rank, lacking)
    scales_stay_the_same_where_a_process_lacks_gradients(rank)
    what_cannot_be_right_is_an_error(rank)
    what_shards_is_recognised(rank)
    fsdp1_says_over_which_processes_it_shards(rank)
    copies_share_the_group_and_files_lack_it()


def randn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(rank, **options):
    """Two parameters of its own and one that both processes have."""
    own = [torch.nn.Parameter(randn((3, 4), 10 * rank + i)) for i in range(2)]
    common = torch.nn.Parameter(randn((5,), 7))
    groups = [{"params": own}, {"params": [common], "replicated": True}]
    optimizer = FusedPadam(groups, **OPTIONS | {"norm_group": dist.group.WORLD} | options)
    return [*own, common], optimizer


def set_gradients(params, rank, seed):
    for index, param in enumerate(params):
        param.grad = randn(param.shape, 100 * seed + index + (0 if index == 2 else 50 * rank))


def norm_of_all(params, copies):
    """What each process has, counted once."""
    squares = torch.zeros((), dtype=torch.float64)
    for param, count in zip(params, copies, strict=True):
        if param.grad is not None:
            squares += param.grad.double().square().sum() / count
    dist.all_reduce(squares)
    return squares.sqrt().float()


def processes_may_lack_gradients(rank, lacking):
    params, optimizer = make(rank, skip_nonfinite=True)
    for seed in range(3):
        set_gradients(params, rank, seed)
        for index in lacking if rank == 1 else ():
            params[index].grad = None
        optimizer.step()
        expected = norm_of_all(params, (1, 1, 2))
        torch.testing.assert_close(optimizer.grad_norm, expected, rtol=1e-6, atol=0)


def scales_stay_the_same_where_a_process_lacks_gradients(rank):
    """Only one has gradients, and an infinity among them."""
    for options in ({}, {"max_grad_norm": None}):
        params, optimizer = make(rank, **options)
        scaler = ShardedGradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        for value in (1.0, torch.inf, 1.0):
            for param in params:
                param.grad = torch.full_like(param, value) if rank == 1 else None
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0
        assert optimizer.skipped_steps == 1
        assert all(optimizer.state[p]["step"] == 2 for p in params if rank == 1)


def what_cannot_be_right_is_an_error(rank):
    world = dist.group.WORLD
    params = [torch.nn.Parameter(torch.ones(2))]
    only_first = dist.new_group([0])
    bad = ["dp", 3, [world, None], only_first if rank == 1 else "dp"]
    for value in bad:
        with pytest.raises(TypeError, match="norm_group must be a ProcessGroup with this process"):
            FusedPadam(params, norm_group=value)
    with pytest.raises(ValueError, match="norm_group has groups that share the processes"):
        FusedPadam(params, norm_group=[world, dist.new_group([0, 1])])
    for value in (2, "yes", [0, 0], [1], [-1], None):
        groups = [{"params": params, "replicated": value}]
        with pytest.raises(ValueError, match=r"replicated in a param group .* got"):
            FusedPadam(groups, norm_group=world)
        optimizer = FusedPadam(groups, max_grad_norm=1.0)
        optimizer.norm_group = world
        params[0].grad = torch.ones(2)
        with pytest.raises(ValueError, match=r"replicated in a param group .* got"):
            optimizer.step()
    mesh = init_device_mesh("cpu", (2,))
    param = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    optimizer = FusedPadam([param], norm_group=world, max_grad_norm=1.0)
    with pytest.raises(ValueError, match=r"DTensors share the processes \[\d\]"):
        optimizer.step()
    optimizer.norm_group = None
    optimizer.step()
    assert optimizer.grad_norm == 2


def what_shards_is_recognised(rank):
    layer = torch.nn.Linear(2, 2)
    stage = PipelineStage(layer, rank, 2, torch.device("cpu"))
    marked = torch.nn.Parameter(torch.ones(2))
    marked.tensor_model_parallel = True
    for params, by in ((layer.parameters(), "a pipeline stage"), ([marked], "Megatron-LM")):
        params = list(params)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = FusedPadam(params, max_grad_norm=1.0)
        with pytest.raises(RuntimeError, match=rf"{by}.* gives this one .* norm_group"):
            optimizer.step()
        assert not optimizer.state
        optimizer.norm_group = []  # whoever says so knows that the norm is this process's
        optimizer.step()
        mine = optimizer.grad_norm.clone()
        optimizer.norm_group = dist.group.WORLD
        optimizer.step()
        torch.testing.assert_close(optimizer.grad_norm, mine * 2**0.5)
    del stage


def fsdp1_says_over_which_processes_it_shards(rank):
    alone = [dist.new_group([r]) for r in range(2)]
    for strategy, right, wrong in (
        (ShardingStrategy.NO_SHARD, (None, []), (dist.group.WORLD,)),
        (ShardingStrategy.FULL_SHARD, (dist.group.WORLD,), (None, [], alone[rank])),
    ):
        model = FullyShardedDataParallel(
            torch.nn.Linear(3, 4), sharding_strategy=strategy, device_id=torch.device("cpu")
        )
        optimizer = FusedPadam(model.parameters(), max_grad_norm=1.0)
        model(torch.ones(2, 3)).sum().backward()
        squares = torch.zeros(())
        for param in model.parameters():
            squares += param.grad.square().sum()
        if strategy is ShardingStrategy.FULL_SHARD:
            dist.all_reduce(squares)
        for group in wrong:
            optimizer.norm_group = group
            with pytest.raises(RuntimeError, match=r"FullyShardedDataParallel .* norm_group"):
                optimizer.step()
        for group in right:
            optimizer.norm_group = group
            optimizer.step()
            torch.testing.assert_close(optimizer.grad_norm, squares.sqrt())


def copies_share_the_group_and_files_lack_it():
    params, optimizer = make(0)
    twin = copy.deepcopy(optimizer)
    assert twin.norm_group is dist.group.WORLD
    assert twin.param_groups[1]["replicated"] is True
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(optimizer)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        assert "replicated" not in group
    optimizer.load_state_dict(saved | {"param_groups": copy.deepcopy(saved["param_groups"])})
    assert optimizer.param_groups[1]["replicated"] is True
    optimizer.param_groups[1]["replicated"] = False  # takes effect at the next step
    set_gradients(params, 0, 1)
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, norm_of_all(params, (1, 1, 1)))
    optimizer.norm_group = None
    assert pickle.loads(pickle.dumps(optimizer)).norm_group is None


def test_in_four_processes():
    """Two ways of splitting the model at once: tensor-parallel pairs, pipeline pairs."""
    in_processes(4, in_one_of_four)


def in_one_of_four(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    pp, tp = mesh.get_group("pp"), mesh.get_group("tp")
    where = {(): rank, (0,): rank // 2, (1,): rank % 2, (0, 1): 0}  # by replicated in [tp, pp]
    params = [torch.nn.Parameter(randn((3, 4), 10 * len(r) + at)) for r, at in where.items()]
    groups = [
        {"params": [param], "replicated": list(replicated)}
        for param, replicated in zip(params, where, strict=True)
    ]
    optimizer = FusedPadam(groups, **OPTIONS, norm_group=[tp, pp])
    for seed in range(3):
        for param, (replicated, at) in zip(params, where.items(), strict=True):
            param.grad = randn((3, 4), 1000 * seed + 10 * len(replicated) + at)
        optimizer.step()
        expected = norm_of_all(params, (1, 2, 2, 4))
        torch.testing.assert_close(optimizer.grad_norm, expected, rtol=1e-6, atol=0)
        norms = [torch.zeros(()) for _ in range(4)]
        dist.all_gather(norms, optimizer.grad_norm)
        assert len(set(map(float, norms))) == 1
    dtensors_in_pipeline_stages(rank, mesh)
    fsdp1_in_replicas(tp, pp)


def fsdp1_in_replicas(sharding, replicas):
    """Replicas have the same gradients, which must not count twice."""
    warnings.simplefilter("ignore")  # torch deprecates it
    model = FullyShardedDataParallel(
        torch.nn.Linear(3, 4), process_group=(sharding, replicas), device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    )  # fmt: skip
    model(torch.ones(2, 3)).sum().backward()
    expected = torch.full((4, 4), 2.0).norm()  # weight and bias
    optimizer = FusedPadam(model.parameters(), max_grad_norm=1.0, norm_group=dist.group.WORLD)
    with pytest.raises(RuntimeError, match=r"FullyShardedDataParallel .* norm_group"):
        optimizer.step()
    optimizer.norm_group = sharding
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, expected)


def dtensors_in_pipeline_stages(rank, mesh):
    """Each stage has its own parameters, sharded or replicated over its two processes."""
    stage = rank // 2
    wholes = [randn((4, 6), 20 * stage + i) for i in range(3)]
    params = [
        torch.nn.Parameter(distribute_tensor(wholes[0], mesh["tp"], [Shard(0)])),
        torch.nn.Parameter(distribute_tensor(wholes[1], mesh["tp"], [Replicate()])),
        torch.nn.Parameter(wholes[2].clone()),
    ]
    optimizer = FusedPadam(params, **OPTIONS, norm_group=mesh.get_group("pp"))
    params[0].grad = distribute_tensor(wholes[0], mesh["tp"], [Shard(0)])
    params[1].grad = distribute_tensor(wholes[1], mesh["tp"], [Replicate()])
    params[2].grad = wholes[2]
    optimizer.step()
    both_stages = [randn((4, 6), 20 * s + i) for s in range(2) for i in range(3)]
    squares = sum(whole.double().square().sum() for whole in both_stages)
    torch.testing.assert_close(optimizer.grad_norm, squares.sqrt().float(), rtol=1e-6, atol=0)
