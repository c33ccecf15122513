"""Parameters that are sharded over processes: DTensor, as FSDP2 makes them. Two gloo processes."""

import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)  # fmt: skip

from checking import assert_same
from launch import in_processes
from padam_ext import FusedPadam, plan, step_during_backward
from padam_ext.gather import NativeGatherer, PythonGatherer
from test_wrappers import Wraps

pytestmark = pytest.mark.distributed
OPTIONS = {"weight_decay": 0.1, "partial": 0.3, "lr": 0.05}
# Shapes and how they lie on two processes; the second has no part of the third.
SHARDED = [((5, 3), Shard(0)), ((4, 6), Shard(1)), ((1, 7), Shard(0)), ((2, 3), Replicate())]


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_in_two_processes(backend, tmp_path):
    in_processes(2, in_one_of_two, backend, str(tmp_path))


def in_one_of_two(rank, backend, folder):
    mesh = init_device_mesh("cpu", (2,))
    each_process_steps_its_shard(mesh, backend)
    gradients_placed_otherwise_are_redistributed(mesh, backend)
    what_lies_elsewhere_is_refused(mesh, backend)
    shards_may_be_wrappers(mesh, backend)
    fully_sharded_training_and_its_checkpoint(mesh, backend, folder)
    fully_sharded_stepping_during_backward(mesh, backend, rank)
    the_norm_is_that_of_all_processes(mesh, backend)
    processes_may_lack_gradients(mesh, backend, rank)
    what_is_added_later_joins_the_norm(mesh, backend, rank)


def randn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def each_process_steps_its_shard(mesh, backend):
    for gatherer in (NativeGatherer, PythonGatherer):
        plan.best_gatherer = gatherer
        compare_with_wholes(mesh, backend)


def compare_with_wholes(mesh, backend):
    wholes = [torch.nn.Parameter(randn(shape, 1)) for shape, _ in SHARDED]
    params = [
        torch.nn.Parameter(distribute_tensor(whole.detach().clone(), mesh, [how]))
        for whole, (_, how) in zip(wholes, SHARDED, strict=True)
    ]
    plain = torch.nn.Parameter(randn((3,), 2))
    optimizer = FusedPadam([*params, plain], **OPTIONS, backend=backend)
    expected = FusedPadam(wholes, **OPTIONS, backend=backend)
    for seed in range(3):
        for whole, param, (shape, how) in zip(wholes, params, SHARDED, strict=True):
            whole.grad = randn(shape, seed)
            param.grad = distribute_tensor(whole.grad, mesh, [how])
        plain.grad = torch.ones(3)
        optimizer.step()
        expected.step()
    for whole, param in zip(wholes, params, strict=True):
        assert_same(param.full_tensor(), whole, backend)
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            state = optimizer.state[param][key]
            assert isinstance(state, DTensor)
            assert state.placements == param.placements
            assert_same(state.full_tensor(), expected.state[whole][key], backend)
        assert float(optimizer.state[param]["step"]) == 3


def gradients_placed_otherwise_are_redistributed(mesh, backend):
    """As torch's optimizers do: Partial ones of sequence parallelism, and replicated ones."""
    params = [
        torch.nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [how]))
        for how in (Replicate(), Shard(0), Shard(1))
    ]
    whole = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = FusedPadam(params, **OPTIONS, backend=backend)
    expected = FusedPadam([whole], **OPTIONS, backend=backend)
    values = randn((4, 3), 3)
    partial = DTensor.from_local(values / 2, mesh, [Partial()])  # each process has a half
    replicated = distribute_tensor(values.clone(), mesh, [Replicate()])
    sharded = distribute_tensor(values.clone(), mesh, [Shard(1)])
    whole.grad = values
    for grads in (
        (replicated, partial, sharded),
        (partial, replicated, replicated),
        (partial, sharded, partial),
        (sharded, sharded, sharded),
    ):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        before = [grad.to_local().clone() for grad in grads]
        optimizer.step()
        expected.step()
        for param, grad, was in zip(params, grads, before, strict=True):
            assert_same(param.full_tensor(), whole, backend)
            assert torch.equal(grad.to_local(), was)


def what_lies_elsewhere_is_refused(mesh, backend):
    param = torch.nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Replicate()]))
    optimizer = FusedPadam([("w", param)], backend=backend)
    other_mesh = init_device_mesh("cpu", (2, 1))
    param.grad = distribute_tensor(torch.ones(4, 3), other_mesh, [Replicate(), Replicate()])
    with pytest.raises(RuntimeError, match=r"'w' is a DTensor .* Put the gradient on the param"):
        optimizer.step()
    assert not optimizer.state
    param.grad = distribute_tensor(torch.ones(4, 3), mesh, [Replicate()])
    optimizer.step()
    optimizer.state[param]["exp_avg"] = torch.zeros(4, 3)
    with pytest.raises(TypeError, match=r"'exp_avg' of .*'w' must be placed over devices as the"):
        optimizer.step()


def shards_may_be_wrappers(mesh, backend):
    """As torchao's float8 weights under FSDP2 are."""
    inside = randn((3, 4), 5)
    twin = torch.nn.Parameter(inside.clone())
    param = torch.nn.Parameter(DTensor.from_local(Wraps(inside), mesh, [Shard(0)]))
    optimizer, expected = (
        FusedPadam([p], **OPTIONS, max_grad_norm=9.0, backend=backend) for p in (param, twin)
    )
    for seed in range(3):
        twin.grad = randn((3, 4), seed)
        param.grad = DTensor.from_local(twin.grad.clone(), mesh, [Shard(0)])
        optimizer.step()
        expected.step()
        assert_same(inside, twin, backend)
    assert isinstance(optimizer.state[param]["exp_avg"], DTensor)


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def train(model, optimizer, seeds):
    for seed in seeds:
        optimizer.zero_grad()
        model(randn((8, 6), seed)).square().mean().backward()
        optimizer.step()


def fully_sharded_training_and_its_checkpoint(mesh, backend, folder):
    plain = make_model()
    train(plain, FusedPadam(plain.parameters(), **OPTIONS, backend=backend), range(5))

    def make():
        model = make_model()
        fully_shard(model, mesh=mesh)
        return model, FusedPadam(model.parameters(), **OPTIONS, backend=backend)

    model, optimizer = make()
    train(model, optimizer, range(3))
    saved_model, saved = get_state_dict(model, optimizer)
    resumed, other = make()
    into_model, into = get_state_dict(resumed, other)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": saved_model, "optimizer": saved}, checkpoint_id=f"{folder}/checkpoint")
        dcp.load({"model": into_model, "optimizer": into}, checkpoint_id=f"{folder}/checkpoint")
    set_state_dict(resumed, other, model_state_dict=into_model, optim_state_dict=into)
    train(model, optimizer, range(3, 5))
    train(resumed, other, range(3, 5))
    for param, twin, whole in zip(
        model.parameters(), resumed.parameters(), plain.parameters(), strict=True
    ):
        assert torch.equal(param.to_local(), twin.to_local())
        torch.testing.assert_close(param.full_tensor(), whole, rtol=1e-5, atol=1e-6)


def fully_sharded_stepping_during_backward(mesh, backend, rank):
    """A gradient is complete once the processes have reduced it: the same as a step of all."""
    models = [make_model() for _ in range(2)]
    for model in models:
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizers = [FusedPadam(m.parameters(), **OPTIONS, backend=backend) for m in models]
    with step_during_backward(optimizers[0]):
        for seed in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(randn((8, 6), 2 * seed + rank)).square().mean().backward()
                assert (optimizer is optimizers[0]) == all(
                    param.grad is None for param in model.parameters()
                )
                optimizer.step()
    for param, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(param.to_local(), other.to_local())
        assert optimizers[0].state[param]["step"] == 3


CLIPPED = {"max_grad_norm": 0.7, "skip_nonfinite": True}


def make_clipped(mesh, backend):
    """Sharded and replicated parameters beside a plain one, and the same as wholes."""
    wholes = [torch.nn.Parameter(randn(shape, 1)) for shape, _ in [*SHARDED, ((3,), None)]]
    params = [
        torch.nn.Parameter(distribute_tensor(whole.detach().clone(), mesh, [how]))
        for whole, (_, how) in zip(wholes, SHARDED, strict=False)
    ]
    params.append(torch.nn.Parameter(wholes[-1].detach().clone()))
    return [
        (those, FusedPadam(those, **OPTIONS, **CLIPPED, backend=backend))
        for those in (params, wholes)
    ]


def set_gradients(params, wholes, mesh, seed, factor=1.0):
    for param, whole in zip(params, wholes, strict=True):
        whole.grad = randn(whole.shape, seed) * factor
        param.grad = whole.grad
        if isinstance(param, DTensor):
            param.grad = distribute_tensor(whole.grad, mesh, param.placements)


def the_norm_is_that_of_all_processes(mesh, backend):
    (params, optimizer), (wholes, expected) = make_clipped(mesh, backend)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        for seed, factor in enumerate((1.0, 1e-3, float("nan"), 1.0)):
            set_gradients(params, wholes, mesh, seed, factor)
            if seed == 3:  # as after sequence parallelism, on one of them
                halves = DTensor.from_local(wholes[3].grad / 2, mesh, [Partial()])
                params[3].grad = halves
            all_reduce.reset_mock()
            optimizer.step()
            expected.step()
            assert all_reduce.call_count == 1
            torch.testing.assert_close(
                optimizer.grad_norm, expected.grad_norm, rtol=1e-6, atol=0, equal_nan=True
            )
            for param, whole in zip(params, wholes, strict=True):
                full = param.full_tensor() if isinstance(param, DTensor) else param
                torch.testing.assert_close(full, whole, rtol=1e-5, atol=1e-6)
                assert optimizer.state[param]["step"] == expected.state[whole]["step"]
    assert optimizer.skipped_steps == 1


def processes_may_lack_gradients(mesh, backend, rank):
    """Each sum is entered by all, whoever has gradients; those that lack count as zero."""
    (params, optimizer), (wholes, _) = make_clipped(mesh, backend)
    for seed, lacking in enumerate(([0], [2], [0, 1, 2, 3, 4], [4], [1, 3], [])):
        set_gradients(params, wholes, mesh, seed)
        if rank == 1:
            for index in lacking:
                params[index].grad = None
        squares = torch.zeros((), dtype=torch.float64)
        for param, copies in zip(params, (1, 1, 1, 2, 2), strict=True):
            if param.grad is not None:
                mine = param.grad.to_local() if isinstance(param, DTensor) else param.grad
                squares += mine.double().square().sum() / copies
        dist.all_reduce(squares)
        optimizer.step()
        torch.testing.assert_close(optimizer.grad_norm, squares.sqrt().float(), rtol=1e-6, atol=0)


def what_is_added_later_joins_the_norm(mesh, backend, rank):
    """Also in a process that has no gradient of it, and reads the same as before."""
    plain = torch.nn.Parameter(torch.zeros(3))
    plain.grad = torch.ones(3)
    optimizer = FusedPadam([plain], **CLIPPED, backend=backend)
    optimizer.step()
    assert optimizer.grad_norm == 3**0.5
    added = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)]))
    optimizer.add_param_group({"params": [added]})
    if rank == 0:
        added.grad = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)], src_data_rank=None)
    optimizer.step()
    assert optimizer.grad_norm == 3  # 3 of the plain one, 6 of the half that one process has
