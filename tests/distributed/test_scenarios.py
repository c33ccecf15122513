"""Each way to spread a model x each thing that needs all processes: as in one process, or an error.

`make test-distributed` prints the table.
"""

import copy
import math
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from launch import in_processes
from padam_ext import FusedPadam, step_during_backward
from scenarios import NEED_NORM_GROUP, SCENARIOS, SHAPES, quietly, values

pytestmark = pytest.mark.distributed
OPTIONS = {"lr": 0.05, "weight_decay": 0.1, "partial": 0.3}


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name, capfd):
    in_processes(SCENARIOS[name].processes, check_scenario, name)
    with capfd.disabled():
        sys.stdout.write(f"\n{capfd.readouterr().out.strip()}\n")


def check_scenario(rank, name):
    row = [f"{name:<25}"]
    with quietly():
        for check in CHECKS:
            row.append(f"{check.__name__} {check(SCENARIOS[name], name)}")
    if rank == 0:
        sys.stdout.write(" | ".join(row))


class InOneProcess:
    """The same in float64, with whole parameters."""

    def __init__(self, options):
        self.params = [torch.nn.Parameter(value.double()) for value in values(0)]
        self.optimizer = FusedPadam(self.params, **options, backend="eager")

    def step(self, grads):
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad.double()
        self.optimizer.step()

    def check(self, scenario):
        offsets = torch.tensor([math.prod(shape) for shape in SHAPES]).cumsum(0).tolist()
        whole = torch.cat([w.flatten() for w in scenario.whole()])[: offsets[-1]]
        expected = torch.cat([p.detach().flatten() for p in self.params])
        torch.testing.assert_close(whole.double(), expected, rtol=2e-5, atol=2e-6)


def numbers(make, name):
    scenario, expected = make(values(0), **OPTIONS), InOneProcess(OPTIONS)
    for seed in range(1, 4):
        scenario.backward(values(seed))
        scenario.optimizer.step()
        expected.step(values(seed))
        expected.check(scenario)
    return "right"


def make_with_norm(make, name, options):
    """Where this process alone cannot know the norm, an error says so and changes nothing."""
    if name not in NEED_NORM_GROUP:
        return make(values(0), **options)
    if name != "ByHand":  # nothing tells that those are shards
        scenario = make(values(0), **options)
        scenario.backward(values(1))
        before = scenario.whole()
        with pytest.raises(RuntimeError, match="norm_group"):
            scenario.optimizer.step()
        for old, new in zip(before, scenario.whole(), strict=True):
            assert torch.equal(old, new)
    return make(values(0), **options, norm_group=dist.group.WORLD)


def right(name):
    return "right with norm_group" if name in NEED_NORM_GROUP else "right"


def max_grad_norm(make, name):
    options = OPTIONS | {"max_grad_norm": 0.7}
    scenario, expected = make_with_norm(make, name, options), InOneProcess(options)
    for seed in range(1, 4):
        scenario.backward(values(seed))
        scenario.optimizer.step()
        expected.step(values(seed))
        norm = expected.optimizer.grad_norm
        torch.testing.assert_close(
            scenario.padam.grad_norm.double().reshape(()), norm, rtol=1e-6, atol=0
        )
        expected.check(scenario)
    return right(name)


def with_one(value, seed):
    """Only one process has this element in its part, and not the one with rank 0."""
    grads = values(seed)
    grads[1][-1, -1] = value
    return grads


def skip_nonfinite(make, name):
    options = OPTIONS | {"skip_nonfinite": True}
    scenario, expected = make_with_norm(make, name, options), InOneProcess(options)
    for seed, value in ((1, 1.0), (2, math.nan), (3, math.inf), (4, 1.0)):
        scenario.backward(with_one(value, seed))
        scenario.optimizer.step()
        if math.isfinite(value):
            expected.step(with_one(value, seed))
        expected.check(scenario)
    assert scenario.padam.skipped_steps == 2
    return right(name)


def grad_scaler(make, name):
    """A step with an infinity is left out by all, and all of them lower the scale."""
    for options in ({}, {"max_grad_norm": 0.7}, {"unscale_grads": False}):
        options = OPTIONS | options
        expected = InOneProcess(options)
        group = {"norm_group": dist.group.WORLD} if name in NEED_NORM_GROUP else {}
        scenario = make(values(0), **options, **group)
        scaler = make.make_scaler("cpu", init_scale=1024.0, growth_interval=3)
        if name == "ByHand" and not options.get("unscale_grads", True):
            scenario.backward(values(1), scaler)
            with pytest.raises(RuntimeError, match="ShardedGradScaler"):
                scaler.step(scenario.optimizer)
            continue
        if name == "TensorParallel":
            scenario.backward(values(1), scaler)
            with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
                scaler.step(scenario.optimizer)
            return "torch's error for DTensors beside plain tensors"
        for seed, value in ((1, 1.0), (2, math.inf), (3, 1.0)):
            scenario.backward(with_one(value, seed), scaler)
            scaler.step(scenario.optimizer)
            scaler.update()
            if math.isfinite(value):
                expected.step(with_one(value, seed))
            expected.check(scenario)
        assert scaler.get_scale() == 512
    return right(name)


def during_backward(make, name):
    scenario, expected = make(values(0), **OPTIONS), InOneProcess(OPTIONS)
    if name == "ZeRO":
        with pytest.raises(TypeError, match="needs a FusedPadam, got ZeroRedundancyOptimizer"):
            step_during_backward(scenario.optimizer)
        return "error"
    if name == "DDP":
        with step_during_backward(scenario.optimizer), pytest.raises(RuntimeError, match="ddp=mod"):
            scenario.backward(values(1))
        scenario = make(values(0), **OPTIONS)
    ddp = scenario.model if name == "DDP" else None
    with step_during_backward(scenario.optimizer, ddp=ddp):
        for seed in range(1, 4):
            scenario.backward(values(seed))
            scenario.optimizer.step()
            expected.step(values(seed))
            expected.check(scenario)
    return "right with ddp=" if name == "DDP" else "right"


def checkpoint(make, name):
    first = make(values(0), **OPTIONS)
    second = make(values(9), **OPTIONS)
    for scenario, seed in ((first, 1), (second, 8)):
        scenario.backward(values(seed))
        scenario.optimizer.step()
    if name == "ByHand":
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(first.optimizer.state_dict())
    elif name == "ZeRO":
        first.optimizer.consolidate_state_dict(0)
        collected = [first.optimizer.state_dict() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(collected)
        second.model.load_state_dict(first.model.state_dict())
        # ZeroRedundancyOptimizer takes the tensors themselves.
        second.optimizer.load_state_dict(copy.deepcopy(collected[0]))
    else:
        model, optimizer = get_state_dict(first.model, first.optimizer)
        set_state_dict(
            second.model, second.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
    for scenario in (first, second):
        scenario.backward(values(2))
        scenario.optimizer.step()
    for one, other in zip(first.whole(), second.whole(), strict=True):
        assert torch.equal(one, other)
    return "resumed bitwise"


CHECKS = (numbers, max_grad_norm, skip_nonfinite, grad_scaler, during_backward, checkpoint)
