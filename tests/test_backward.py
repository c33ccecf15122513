"""Stepping one parameter, and each during backward."""

import pytest
import torch

from checking import Watched
from padam_ext import FusedPadam, step_during_backward

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


def test_the_same_as_a_step_of_all(backend):
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


def test_hardly_any_gradient_is_alive_at_any_time():
    """Elements of all gradients: the peak with and without."""
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
    assert peaks[1] <= largest


def test_closing_it_gives_gradients_back():
    model = make_model()
    optimizer = FusedPadam(model.parameters())
    step_during_backward(optimizer).close()
    loss_of(model, 0).backward()
    assert all(param.grad is not None for param in model.parameters())
    assert not optimizer.state


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


def test_one_parameter_and_no_other_is_stepped(backend):
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = FusedPadam([{"params": params[:1]}, {"params": params[1:], "lr": 0.5}],
                           backend=backend)  # fmt: skip
    for param in params:
        param.grad = torch.ones(3)
    for _ in range(3):
        watched = Watched(optimizer, params[2])
        optimizer.step_param(params[2])
        watched.check(optimizer)
    assert set(optimizer.state) == {params[2]}
    assert params[0].tolist() == params[1].tolist() == [1, 1, 1]
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [1, 1, 4]


def test_groups_that_change_are_seen(backend):
    first, second, third = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = FusedPadam([first, second], lr=0.0, backend=backend)
    for param in (first, second, third):
        param.grad = torch.ones(3)
    optimizer.step_param(second)
    optimizer.add_param_group({"params": [third], "lr": 0.5})
    optimizer.step_param(third)
    assert third[0] < 1
    optimizer.param_groups[0]["params"] = [first]
    optimizer.param_groups[1]["params"].insert(0, second)
    optimizer.step_param(second)
    assert second[0] < 1
    optimizer.param_groups[1]["params"].remove(second)
    with pytest.raises(ValueError, match=r"a tensor of shape \(3,\) is in no param group"):
        optimizer.step_param(second)


def test_loading_reaches_the_plans_of_single_parameters(backend):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedPadam([param], backend=backend)
    param.grad = torch.ones(3)
    optimizer.step_param(param)
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = torch.full((3,), 5.0)
    optimizer.load_state_dict(saved)
    optimizer.step_param(param)
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], torch.full((3,), 4.6))


def test_no_gradient_no_step(backend):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedPadam([param], backend=backend)
    optimizer.step_param(param)
    assert not optimizer.state
