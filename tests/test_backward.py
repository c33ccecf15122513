"""Stepping parameters during backward."""

import sys

import pytest
import torch

from checking import AS_ADAM, make_twin_parameters
from padam_ext import FusedPadam, backward, native, step_during_backward

pytestmark = pytest.mark.gpu_variants
OPTIONS = {"weight_decay": 0.1, "partial": 0.3, "bias_correction": "adam"}
NUM_LAYERS = 6


def make_model():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16) for _ in range(NUM_LAYERS)]
    return torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))


def groups_of(model):
    biases = [layer.bias for layer in model[::2]]
    weights = [layer.weight for layer in model[::2]]
    return [{"params": biases, "weight_decay": 0.0, "lr": 0.05}, {"params": weights}]


def loss_of(model, seed):
    generator = torch.Generator(device=torch.get_default_device()).manual_seed(seed)
    return model(torch.randn(8, 16, generator=generator)).square().mean()


@pytest.mark.parametrize("batch_bytes", [1, 2500, backward.BATCH_BYTES])
def test_the_same_as_a_step_of_all(backend, batch_bytes, monkeypatch):
    monkeypatch.setattr(backward, "BATCH_BYTES", batch_bytes)
    model, twin = make_model(), make_model()
    optimizer = FusedPadam(groups_of(model), **OPTIONS, backend=backend)
    expected = FusedPadam(groups_of(twin), **OPTIONS, backend=backend)
    with step_during_backward(optimizer):
        for seed in range(3):
            loss_of(model, seed).backward()
            optimizer.step()
            loss_of(twin, seed).backward()
            expected.step()
            expected.zero_grad()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(param, other)
        for key, value in optimizer.state[param].items():
            assert torch.equal(value, expected.state[other][key]), key


@pytest.mark.parametrize("kept", [1, 600, 1500])
def test_few_gradients_are_alive_at_any_time(kept, monkeypatch):
    """Elements of all gradients: the peak with and without."""
    monkeypatch.setattr(backward, "BATCH_BYTES", kept * 4)
    peaks = []
    for in_backward in (False, True):
        model, alive = make_model(), [0]

        def count(_, model=model, alive=alive):
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            alive.append(sum(grad.numel() for grad in grads))

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(count)  # before the one that frees
        optimizer = FusedPadam(model.parameters())
        hooks = step_during_backward(optimizer) if in_backward else None
        loss_of(model, 0).backward()
        peaks.append(max(alive))
        if hooks is not None:
            hooks.close()
    largest, everything = 16 * 16, NUM_LAYERS * (16 * 16 + 16)
    assert peaks[0] == everything
    assert kept <= peaks[1] < kept + largest
    assert all(param.grad is None for param in model.parameters())


def test_one_launch_steps_many(monkeypatch):
    """Small parameters are not worth a launch each."""
    model = make_model()
    optimizer = FusedPadam(groups_of(model))
    launches = []
    step_cpu = native.module.step_cpu
    monkeypatch.setattr(native.module, "step_cpu",
                        lambda **table: launches.append(step_cpu(**table)))  # fmt: skip
    with step_during_backward(optimizer):
        loss_of(model, 0).backward()
        assert all(param.grad is None for param in model.parameters())
    assert len(launches) == 1


def test_schedulers_and_hooks_see_the_step_behind_backward(recwarn):
    model = make_model()
    optimizer = FusedPadam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    with step_during_backward(optimizer):
        for seed in range(2):
            loss_of(model, seed).backward()
            optimizer.step()
            scheduler.step()
    assert calls == ["post", "post"]
    assert optimizer.param_groups[0]["lr"] == 0.025
    assert len(recwarn) == 0


def test_a_weight_shared_with_any_other_checkpoint_is_stepped_once(backend):
    from torch.utils.checkpoint import checkpoint

    weights = [torch.nn.Parameter(torch.eye(4) + 0.1) for _ in range(2)]
    optimizer = FusedPadam(weights[:1], **AS_ADAM, backend=backend)
    adam = torch.optim.Adam(weights[1:], lr=0.1, amsgrad=True)
    for _ in range(3):
        with step_during_backward(optimizer):
            for weight, stepping in zip(weights, (optimizer, adam), strict=True):

                def layer(x, weight=weight):
                    return torch.tanh(x @ weight)

                hidden = checkpoint(layer, torch.ones(2, 4), use_reentrant=False)
                stepping.zero_grad()
                layer(hidden).square().sum().backward()
                stepping.step()
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_a_parameter_that_takes_part_later(how, backend):
    """optimizer.step() steps it once; from then on it is stepped during backward."""
    params, twins = make_twin_parameters()
    if how == "unfrozen":
        params[2].requires_grad_(False)
        optimizer = FusedPadam(params, **AS_ADAM, backend=backend)
    else:
        optimizer = FusedPadam(params[:2], **AS_ADAM, backend=backend)
    adam = torch.optim.Adam(twins, lr=0.1, amsgrad=True)

    def go_backward(those, number):
        sum(((1 + number) * p).square().sum() for p in those if p.requires_grad).backward()

    with step_during_backward(optimizer):
        for number in range(5):
            if number == 2:
                params[2].requires_grad_(True)
                if how == "added":
                    optimizer.add_param_group({"params": [params[2]], **AS_ADAM})
            used = slice(0, 2 if number < 2 else 3)
            go_backward(params[used], number)
            assert params[0].grad is params[1].grad is None
            assert (params[2].grad is not None) == (number == 2)
            optimizer.step()
            assert params[2].grad is None
            adam.zero_grad()
            go_backward(twins[used], number)
            adam.step()
    assert [float(optimizer.state[param]["step"]) for param in params] == [5, 5, 3]
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)
    go_backward(params, 0)  # and all hooks are gone, the later one, too
    assert all(param.grad is not None for param in params)


def calls_of_a_backward(num_groups, params_per_group):
    """Calls of functions for each parameter, in Python and from there into C."""
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(num_groups * params_per_group)]
    groups = [
        {"params": params[i * params_per_group : (i + 1) * params_per_group]}
        for i in range(num_groups)
    ]
    optimizer = FusedPadam(groups)
    calls = []
    with step_during_backward(optimizer):
        for number in range(3):
            optimizer.state  # noqa: B018 -- whoever has had it may replace tensors
            loss = torch.stack([param.sum() for param in params]).sum()
            if number == 2:
                sys.setprofile(lambda frame, event, _: calls.append(event))
            try:
                loss.backward()
            finally:
                sys.setprofile(None)
            optimizer.step()
    assert all(param.grad is None for param in params)
    return sum(event in ("call", "c_call") for event in calls) / len(params)


def test_the_work_for_a_parameter_does_not_grow_with_the_groups():
    assert calls_of_a_backward(150, 1) < 1.5 * calls_of_a_backward(10, 1)
    assert calls_of_a_backward(1, 150) < 1.5 * calls_of_a_backward(1, 10)
