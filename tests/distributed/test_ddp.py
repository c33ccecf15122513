"""Stepping during backward under DistributedDataParallel, in two processes."""

import contextlib
import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from checking import Fails
from launch import in_processes
from padam_ext import FusedPadam, step_during_backward

pytestmark = pytest.mark.distributed
OPTIONS = {"weight_decay": 0.1, "partial": 0.3, "lr": 0.05}


def test_in_two_processes():
    in_processes(2, in_one_of_two)


def in_one_of_two(rank):
    for options in (
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True, "static_graph": True},
        {"broadcast_buffers": False, "bucket_cap_mb": 25},
    ):
        same_as_a_step_after_backward(rank, **options)
    accumulation_under_no_sync(rank)
    parameters_of_nobody_and_of_others(rank)
    gradients_that_are_not_averaged_are_refused(rank)
    a_copy_of_the_module_averages(rank)
    what_it_refuses(rank)
    the_hook_outlives_nothing(rank)


def make(**options):
    """A model of several buckets, and another one that does the same."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(40, 40), nn.Tanh())]
    model = nn.Sequential(*layers)
    options = {"bucket_cap_mb": 0.01} | options
    models = [DistributedDataParallel(m, **options) for m in (model, copy.deepcopy(model))]
    return models, [FusedPadam(m.parameters(), **OPTIONS) for m in models]


def batch(rank, seed):
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * seed + rank))


def check_same(one, other, processes=2):
    for param, twin in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(param, twin)
        everywhere = [torch.empty_like(param) for _ in range(processes)]
        dist.all_gather(everywhere, param.detach())
        assert all(torch.equal(param, there) for there in everywhere)


def same_as_a_step_after_backward(rank, **options):
    (model, expected), (optimizer, its) = make(**options)
    stepped_early = []
    with step_during_backward(optimizer, ddp=model):
        step_params = optimizer.step_params
        optimizer.step_params = lambda params: (
            stepped_early.append(len(params)),
            step_params(params),
        )
        for seed in range(5):
            model(batch(rank, seed)).square().mean().backward()
            assert all(param.grad is None for param in model.parameters())
            assert sum(stepped_early) == 8 * (seed + 1)
            optimizer.step()
            its.zero_grad()
            expected(batch(rank, seed)).square().mean().backward()
            its.step()
            check_same(model, expected)
    assert options.get("bucket_cap_mb") or len(stepped_early) > 10  # several buckets
    assert all(optimizer.state[param]["step"] == 5 for param in model.parameters())
    optimizer.step_params = step_params
    # Without it, as any other.
    model(batch(rank, 7)).square().mean().backward()
    assert all(param.grad is not None for param in model.parameters())
    optimizer.step()
    its.zero_grad()
    expected(batch(rank, 7)).square().mean().backward()
    its.step()
    check_same(model, expected)


def accumulation_under_no_sync(rank):
    (model, expected), (optimizer, its) = make()
    with step_during_backward(optimizer, ddp=model):
        for seed in range(4):
            for m, o in ((model, optimizer), (expected, its)):
                with m.no_sync() if seed % 2 == 0 else contextlib.nullcontext():
                    m(batch(rank, seed)).square().mean().backward()
                if seed % 2 == 1:
                    o.step()
                    o.zero_grad()
    check_same(model, expected)
    assert all(optimizer.state[param]["step"] == 2 for param in model.parameters())


def parameters_of_nobody_and_of_others(rank):
    """Some of the module's are in no optimizer, some of the optimizer's in no module."""
    (model, expected), _ = make()
    params, twins = ([p for p in m.parameters() if p.dim() == 2] for m in (model, expected))
    extra, other = (nn.Parameter(torch.ones(8, 40)) for _ in range(2))
    optimizer = FusedPadam([*params, extra], **OPTIONS)
    its = FusedPadam([*twins, other], **OPTIONS)
    with step_during_backward(optimizer, ddp=model):
        for seed in range(3):
            model.zero_grad()
            (model(batch(rank, seed)) * extra).square().mean().backward()
            assert all((p.grad is None) == (p.dim() == 2) for p in model.parameters())
            assert extra.grad is None
            optimizer.step()
            expected.zero_grad()
            other.grad = None
            (expected(batch(rank, seed)) * other).square().mean().backward()
            its.step()
    for one, twin in zip(
        [*model.parameters(), extra], [*expected.parameters(), other], strict=True
    ):
        assert torch.equal(one, twin)


class FailsInBackward(nn.Module):
    def forward(self, x):
        return Fails.apply(x)


def gradients_that_are_not_averaged_are_refused(rank):
    layers = nn.Sequential(nn.Linear(40, 40), FailsInBackward(), nn.Linear(40, 40))
    model = DistributedDataParallel(layers)
    optimizer = FusedPadam(model.parameters(), **OPTIONS)
    before = [param.detach().clone() for param in model.parameters()]
    with step_during_backward(optimizer, ddp=model):
        with pytest.raises(ValueError, match="out of luck"):
            model(batch(rank, 0)).sum().backward()
        with pytest.raises(RuntimeError, match=r"drop them by optimizer\.zero_grad\(\)"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    (model, _), (optimizer, _) = make()
    with step_during_backward(optimizer, ddp=model):
        model(batch(rank, 0)).sum().backward()
        optimizer.step()
        with model.no_sync():
            model(batch(rank, 0)).sum().backward()
        with pytest.raises(RuntimeError, match="make a backward without no_sync"):
            optimizer.step()


def a_copy_of_the_module_averages(rank):
    (model, _), (optimizer, _) = make()
    step_during_backward(optimizer, ddp=model).close()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(batch(rank, 0)).square().mean().backward()
        for param in twin.parameters():
            everywhere = [torch.empty_like(param) for _ in range(2)]
            dist.all_gather(everywhere, param.grad)
            assert torch.equal(*everywhere)


def what_it_refuses(rank):
    (model, another), (optimizer, _) = make()
    for wrong in (model.module, "ddp"):
        with pytest.raises(TypeError, match="ddp must be a DistributedDataParallel module, got"):
            step_during_backward(optimizer, ddp=wrong)
    with pytest.raises(ValueError, match="ddp has none of the optimizer's parameters"):
        step_during_backward(optimizer, ddp=another)
    unused = DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True)
    with pytest.raises(ValueError, match="cannot be used with find_unused_parameters=True"):
        step_during_backward(FusedPadam(unused.parameters()), ddp=unused)
    compressed = DistributedDataParallel(nn.Linear(2, 2))
    compressed.register_comm_hook(None, fp16_compress_hook)
    with pytest.raises(RuntimeError, match="has one already, such as one that compresses"):
        step_during_backward(FusedPadam(compressed.parameters()), ddp=compressed)
    with step_during_backward(optimizer, ddp=model):
        with pytest.raises(RuntimeError, match="is stepped during backward already"):
            step_during_backward(optimizer, ddp=model)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(batch(rank, 0)).sum()).backward()
        with pytest.raises(RuntimeError, match="cannot be used with GradScaler"):
            scaler.step(optimizer)
        model(batch(rank, 0)).sum().backward()
        with pytest.raises(RuntimeError, match="got a second gradient before"):
            model(batch(rank, 0)).sum().backward()
    both = FusedPadam([*model.parameters(), *another.parameters()])
    broken = step_during_backward(both, ddp=another)
    with pytest.raises(RuntimeError, match="does not know of the DistributedDataParallel, which"):
        # The other module's: it was not passed.
        (another.module(batch(rank, 1)) + model.module(batch(rank, 1))).sum().backward()
    broken.close()


def the_hook_outlives_nothing(rank):
    (model, _), (optimizer, _) = make()
    step_during_backward(optimizer, ddp=model).close()
    step_during_backward(optimizer, ddp=model)
    model(batch(rank, 0)).sum().backward()
    optimizer.step()
    gone = [weakref.ref(it) for it in (model, optimizer)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
