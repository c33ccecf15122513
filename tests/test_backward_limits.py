"""What stepping during backward refuses, a backward that fails, and where its hooks end."""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from checking import AS_ADAM, Fails, make_twin_parameters
from padam_ext import FusedPadam, backward, step_during_backward

pytestmark = pytest.mark.gpu_variants


def test_a_second_backward_before_the_step_is_an_error(backend):
    """Otherwise accumulated gradients would be as many steps."""
    params, _ = make_twin_parameters()
    optimizer = FusedPadam(params, **AS_ADAM, backend=backend)
    with step_during_backward(optimizer):
        for _ in range(2):  # a step between two of them is all it takes
            sum(param.sum() for param in params).backward()
            optimizer.step()
        sum(param.sum() for param in params).backward()
        before = [param.detach().clone() for param in params]
        with pytest.raises(RuntimeError, match=r"optimizer\.step\(\)"):
            sum(param.sum() for param in params).backward()
    for param, stepped in zip(params, before, strict=True):
        assert torch.equal(param, stepped)
        assert optimizer.state[param]["step"] == 3


def test_a_weight_shared_with_a_reentrant_checkpoint_is_an_error(backend):
    """Its gradient is completed once in the checkpoint's own backward, and again outside."""
    from torch.utils.checkpoint import checkpoint

    weight = torch.nn.Parameter(torch.eye(4) + 0.1)
    optimizer = FusedPadam([weight], **AS_ADAM, backend=backend)
    inputs = torch.ones(2, 4, requires_grad=True)

    def layer(x):
        return torch.tanh(x @ weight)

    with step_during_backward(optimizer):
        hidden = checkpoint(layer, inputs, use_reentrant=True)
        hidden = checkpoint(layer, hidden, use_reentrant=True)
        with pytest.raises(RuntimeError, match=r"optimizer\.step\(\)"):
            layer(hidden).square().sum().backward()
    assert optimizer.state[weight].get("step", 0) <= 1


def loss_that_may_fail(first, second, fails):
    # The branch that was made last goes backward first.
    failing = (Fails.apply(first) if fails else first).sum()
    return failing + (2 * second).sum()


def test_a_backward_that_failed_leaves_gradients_to_the_step(backend):
    """Those that were complete by then; torch would step them as well."""
    params, twins = make_twin_parameters(2)
    optimizer = FusedPadam(params, **AS_ADAM, backend=backend)
    adam = torch.optim.Adam(twins, lr=0.1, amsgrad=True)
    with step_during_backward(optimizer):
        for fails in (True, False):
            for those, stepping in ((params, optimizer), (twins, adam)):
                stepping.zero_grad()
                if fails:
                    with pytest.raises(ValueError, match="out of luck"):
                        loss_that_may_fail(*those, fails).backward()
                else:
                    loss_that_may_fail(*those, fails).backward()
                stepping.step()
            assert all(param.grad is None for param in params)
    assert [float(optimizer.state[param]["step"]) for param in params] == [1, 2]
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dropped", [True, False])
@pytest.mark.parametrize("batch_bytes", [1, backward.BATCH_BYTES])
def test_after_a_backward_that_failed_the_next_works(batch_bytes, dropped, backend, monkeypatch):
    """Without a step between them, with zero_grad() and without."""
    monkeypatch.setattr(backward, "BATCH_BYTES", batch_bytes)
    params, twins = make_twin_parameters(2)
    optimizer = FusedPadam(params, **AS_ADAM, backend=backend)
    adam = torch.optim.Adam(twins, lr=0.1, amsgrad=True)
    with step_during_backward(optimizer):
        for fails in (True, True, False, True, False):
            with pytest.raises(ValueError, match="luck") if fails else contextlib.nullcontext():
                loss_that_may_fail(*params, fails).backward()
            if fails and dropped:
                optimizer.zero_grad()
            if not fails:
                assert all(param.grad is None for param in params)
                optimizer.step()
            if batch_bytes == 1:  # the second parameter was stepped before the failure
                twins[1].grad = torch.full_like(twins[1], 2.0)
                adam.step()
                adam.zero_grad()
            with pytest.raises(ValueError, match="luck") if fails else contextlib.nullcontext():
                loss_that_may_fail(*twins, fails).backward()
            if (fails and dropped) or batch_bytes == 1:
                twins[1].grad = None
            if not fails:
                adam.step()
                adam.zero_grad()
    for param, twin in zip(params, twins, strict=True):
        assert optimizer.state[param]["step"] == adam.state[twin]["step"]
        torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("option", [{"max_grad_norm": 1.0}, {"skip_nonfinite": True}], ids=str)
def test_what_needs_the_norm_is_an_error(option):
    param = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="step_during_backward cannot be used with max_grad_nor"):
        step_during_backward(FusedPadam([param], **option))
    assert not param._post_accumulate_grad_hooks


@pytest.mark.parametrize("unscaled", [True, False])
def test_a_grad_scaler_is_an_error(unscaled, backend):
    """It has scaled what was used already; a step would seem to have worked."""
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedPadam([param], backend=backend)
    scaler = torch.amp.GradScaler(param.device.type)
    with step_during_backward(optimizer):
        scaler.scale(param.sum()).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="cannot be used with GradScaler"):
            scaler.step(optimizer)
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))
    disabled = torch.amp.GradScaler(param.device.type, enabled=False)
    with step_during_backward(optimizer):
        disabled.scale(param.sum()).backward()
        disabled.step(optimizer)
    assert optimizer.state[param]["step"] == 2


@pytest.fixture(params=["one process", "two processes"])
def process_group(request):
    """Of this process alone, or with another one that does nothing."""
    if request.param == "one process":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("wrapped", ["before", "after"])
def test_distributed_data_parallel_is_an_error(wrapped, process_group):
    """It averages gradients after they were used, and the processes would part ways."""
    model = torch.nn.Linear(3, 2)
    before = [param.detach().clone() for param in model.parameters()]
    parallel = DistributedDataParallel(model) if wrapped == "before" else None
    optimizer = FusedPadam(model.parameters())
    with step_during_backward(optimizer):
        parallel = parallel or DistributedDataParallel(model)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="DistributedDataParallel, which has"):
                parallel(torch.ones(4, 3)).sum().backward()
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    other = torch.nn.Linear(3, 2)  # what it does not have is stepped
    optimizer = FusedPadam(other.parameters())
    with step_during_backward(optimizer):
        other(torch.ones(4, 3)).sum().backward()
    assert all(param.grad is None for param in other.parameters())


@pytest.mark.parametrize("process_group", ["one process"], indirect=True)
def test_a_gradient_that_comes_back_is_an_error(process_group):
    """As by DistributedDataParallel, here of a module that was wrapped late."""
    model = torch.nn.Linear(3, 2)
    optimizer = FusedPadam(model.parameters())
    with step_during_backward(optimizer):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        parallel = DistributedDataParallel(model)
        parallel(torch.ones(4, 3)).sum().backward()
        with pytest.raises(RuntimeError, match=r"has a gradient again: .* would step it twice"):
            optimizer.step()
    assert all(optimizer.state[param]["step"] == 2 for param in model.parameters())


@pytest.mark.parametrize("value", [None, torch.optim.SGD([torch.ones(1)])], ids=["None", "SGD"])
def test_another_optimizer_is_refused(value):
    with pytest.raises(TypeError, match=r"needs a FusedPadam, got (None|SGD)"):
        step_during_backward(value)


def test_a_parameter_of_two_optimizers_is_an_error():
    """The first would leave no gradient to the second."""
    shared, own = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    first, second = FusedPadam([shared]), FusedPadam([own, shared])
    with step_during_backward(first):
        with pytest.raises(RuntimeError, match="stepped during backward by another optimizer"):
            step_during_backward(second)
        assert not own._post_accumulate_grad_hooks
    with step_during_backward(second):
        (own + shared).sum().backward()
    assert set(second.state) == {own, shared}


def test_lazy_parameters_are_stepped_once_they_have_a_shape(backend):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LazyLinear(2))
    optimizer = FusedPadam(model.parameters(), backend=backend)
    with step_during_backward(optimizer):
        for number in range(3):
            model(torch.ones(4, 3)).sum().backward()
            assert (model[1].weight.grad is None) == (number > 0)
            optimizer.step()
    assert all(optimizer.state[param]["step"] == 3 for param in model.parameters())


def test_closing_it_gives_gradients_back():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedPadam([param])
    step_during_backward(optimizer).close()
    param.sum().backward()
    assert param.grad is not None
    assert not optimizer.state


def test_hooks_end_with_their_optimizer():
    """Also where nobody closed them; those who can close them keep the optimizer."""
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedPadam([param])
    gone = weakref.ref(optimizer)
    hooks = step_during_backward(optimizer)
    del optimizer
    param.sum().backward()
    assert param.grad is None
    assert gone().state[param]["step"] == 1
    del hooks
    gc.collect()
    assert gone() is None
    for _ in range(2):
        param.sum().backward()
    assert param.grad.tolist() == [2, 2, 2]
    assert not param._post_accumulate_grad_hooks


def test_a_parameter_that_has_left_the_optimizer_keeps_its_gradient(backend):
    left, stays = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = FusedPadam([left, stays], backend=backend)
    with step_during_backward(optimizer):
        optimizer.param_groups[0]["params"] = [stays]
        for _ in range(2):
            (left + stays).sum().backward()
            optimizer.step()
    assert left.tolist() == [1, 1, 1]
    assert left.grad.tolist() == [2, 2, 2]
    assert optimizer.state[stays]["step"] == 2
