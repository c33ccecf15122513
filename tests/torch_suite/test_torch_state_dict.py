"""What PyTorch's test_state_dict.py checks of get_state_dict and set_state_dict, for FusedPadam.

Its VerifyStateDictMixin and its model ship with torch: torch.testing._internal. That file runs them
on GPUs; here they run in one process and in two gloo processes. Left out: FSDP1, which FusedPadam
steps as plain tensors; compiled models; and what is about the model's state only.
"""

# ruff: noqa: PT009 (the mixin asks for a TestCase, whose assertEqual compares nested tensors)

import copy
import warnings

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from launch import in_processes
from padam_ext import FusedPadam

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_dist_composable import CompositeParamModel
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed.common_state_dict import VerifyStateDictMixin

OPTIONS = {"lr": 1e-3, "weight_decay": 0.1, "partial": 0.3}


class Verify(VerifyStateDictMixin, TestCase):
    def plain(self):
        """Their model, an optimizer that trains it, and another that only loads."""
        torch.manual_seed(0)
        model = CompositeParamModel(torch.device("cpu"))
        return model, self.optimizer(model), self.optimizer(model)

    def optimizer(self, model):
        return FusedPadam(model.parameters(), **OPTIONS, backend=self.backend)

    def wrapped(self, wrap, steps=3):
        """The same model in a wrapper, after the same training."""
        model, optimizer, other = self.plain()
        wrapped = wrap(copy.deepcopy(model))
        its = self.optimizer(wrapped)
        for number in range(steps):
            inputs = torch.linspace(-1, 1 + number, 800).view(8, 100)
            for m, o in ((model, optimizer), (wrapped, its)):
                o.zero_grad()
                m(inputs).mean().backward()
                o.step()
        for o in (optimizer, its):
            o.zero_grad()
        return (model, optimizer, other), (wrapped, its)

    def saving_and_loading(self, wrap, steps):
        for flatten in (False, True):
            options = StateDictOptions(flatten_optimizer_state_dict=flatten)
            (model, optimizer, other), (wrapped, its) = self.wrapped(wrap, steps)
            fresh = wrap(self.plain()[0])
            fresh_optimizer = self.optimizer(fresh)
            saved = get_state_dict(wrapped, its, options=options)
            self.verify(model, optimizer, other, saved, flatten)
            set_state_dict(
                fresh, fresh_optimizer,
                model_state_dict=saved[0], optim_state_dict=saved[1], options=options,
            )  # fmt: skip
            again = get_state_dict(fresh, fresh_optimizer, options=options)
            self.verify(model, optimizer, other, again, flatten)

    def verify(self, model, optimizer, other, saved, flatten):
        of_model, of_optimizer = saved
        if not optimizer.state:  # get_state_dict has made those of the other
            optimizer.init_state()
        self._verify_msd(model.state_dict(), of_model)
        self._verify_osd_by_load(model, optimizer, other, of_optimizer)
        if not flatten:
            self._verify_osd(model, optimizer, optimizer.state_dict(), of_optimizer)

    def whole_states(self, wrap, rank):
        """All of it in the first process, or broadcast from there."""
        (model, optimizer, _), (wrapped, its) = self.wrapped(wrap)
        _, expected = get_state_dict(model, optimizer)
        whole = StateDictOptions(full_state_dict=True)
        actual = get_optimizer_state_dict(wrapped, its, options=whole)
        assert not any(
            isinstance(value, DTensor) for of in actual["state"].values() for value in of.values()
        )
        self.assertEqual(actual, expected)
        offloaded = get_optimizer_state_dict(
            wrapped, its, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        self.assertEqual(offloaded, expected if rank == 0 else {})

        fresh = wrap(self.plain()[0])
        fresh_optimizer = self.optimizer(fresh)
        set_optimizer_state_dict(
            fresh, fresh_optimizer, copy.deepcopy(expected) if rank == 0 else {},
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        )  # fmt: skip
        self.assertEqual(get_optimizer_state_dict(fresh, fresh_optimizer, options=whole), expected)

    def keys_of_schedulers(self, wrap):
        """A scheduler's `initial_lr` comes back with the group that it is in."""
        _, (wrapped, its) = self.wrapped(wrap)
        torch.optim.lr_scheduler.LambdaLR(its, lambda epoch: 0.95**epoch)
        saved = get_optimizer_state_dict(wrapped, its)
        other = self.optimizer(wrapped)
        assert "initial_lr" not in other.param_groups[0]
        set_optimizer_state_dict(wrapped, other, saved)
        assert other.param_groups[0]["initial_lr"] == OPTIONS["lr"]
        self.assertEqual(other.state_dict(), its.state_dict())


def verifier(backend):
    verify = Verify()
    verify.backend = backend
    return verify


@pytest.mark.parametrize("steps", [0, 3])
def test_in_one_process(steps, backend):
    verifier(backend).saving_and_loading(lambda model: model, steps)
    verifier(backend).keys_of_schedulers(lambda model: model)


@pytest.mark.distributed
@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_in_two_processes(backend):
    in_processes(2, in_one_of_two, backend)


def in_one_of_two(rank, backend):
    mesh = init_device_mesh("cpu", (2,))
    verify = verifier(backend)
    for wrap in (lambda model: fully_shard(model, mesh=mesh), DistributedDataParallel):
        for steps in (0, 3):
            verify.saving_and_loading(wrap, steps)
        verify.whole_states(wrap, rank)
        verify.keys_of_schedulers(wrap)
