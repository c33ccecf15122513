"""Every scheduler of torch.optim.lr_scheduler, and averaging of weights."""

import pytest
import torch

from checking import step_and_check
from padam_ext import FusedPadam
from test_conventions import backward, make_model

pytestmark = pytest.mark.gpu_variants

SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "ConstantLR": lambda o: torch.optim.lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
        o, 3
    ),
    "PolynomialLR": lambda o: torch.optim.lr_scheduler.PolynomialLR(o),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=6),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "ChainedScheduler": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [
            torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
            torch.optim.lr_scheduler.ConstantLR(o, total_iters=2),
        ]
    ),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
        ],
        [2],
    ),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


def test_no_scheduler_is_left_out():
    module = torch.optim.lr_scheduler
    bases = {module.LRScheduler, module._LRScheduler}
    there = {
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, module.LRScheduler) and value not in bases
    }
    assert there == set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
def test_schedulers(name, tensor_lr, backend):
    model = make_model()
    lr = torch.tensor(0.1) if tensor_lr else 0.1
    optimizer = FusedPadam(model.parameters(), lr=lr, backend=backend)
    scheduler = SCHEDULERS[name](optimizer)
    rates = []
    for seed in range(5):
        backward(model, seed)
        step_and_check(optimizer)
        rates.append(float(optimizer.param_groups[0]["lr"]))
        arguments = (1.0,) if name == "ReduceLROnPlateau" else ()
        scheduler.step(*arguments)
    assert len(set(rates)) > 1


def test_a_rate_that_rounds_below_zero_is_taken_as_it_comes(backend):
    """LinearLR ends at -2.96e-18, not at 0."""
    model, twin = make_model(), make_model()
    optimizer = FusedPadam(
        model.parameters(), lr=0.1, partial=0.5, bias_correction="adam", backend=backend
    )
    adam = torch.optim.Adam(twin.parameters(), lr=0.1, amsgrad=True)
    schedulers = [
        torch.optim.lr_scheduler.LinearLR(o, end_factor=0.0, total_iters=10)
        for o in (optimizer, adam)
    ]
    rates = []
    for seed in range(13):
        for m, o in ((model, optimizer), (twin, adam)):
            backward(m, seed)
            o.step()
        for scheduler in schedulers:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert -1e-16 < min(rates) < 0
    assert rates[-1] == adam.param_groups[0]["lr"]
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)
    resumed = FusedPadam(model.parameters(), lr=0.1, backend=backend)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0]["lr"] == rates[-1]
    backward(model)
    step_and_check(resumed)


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("lr", [-0.1, -torch.inf, torch.inf, torch.nan])
@pytest.mark.parametrize("from_file", [False, True])
def test_a_rate_that_is_set_later_is_taken_as_it_comes(lr, tensor_lr, from_file, backend):
    param, twin = (torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0])) for _ in range(2))
    optimizer = FusedPadam([param], partial=0.5, bias_correction="adam", backend=backend)
    adam = torch.optim.Adam([twin], lr=0.1, amsgrad=True)
    for step in range(3):
        if step == 1:
            new = torch.tensor(lr) if tensor_lr else lr
            if from_file:
                state_dict = optimizer.state_dict()
                state_dict["param_groups"][0]["lr"] = new
                optimizer.load_state_dict(state_dict)
            else:
                optimizer.param_groups[0]["lr"] = new
            adam.param_groups[0]["lr"] = lr
        for p, o in ((param, optimizer), (twin, adam)):
            p.grad = torch.tensor([0.5, -1.0, 2.0]) * (1 + step)
            o.step()
    torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert optimizer.state[param]["step"] == 3
    with pytest.raises(ValueError, match="lr must be in"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr})
    with pytest.raises(ValueError, match="lr must be in"):
        FusedPadam([param], lr=lr)


def test_swa_and_ema(backend):
    model = make_model()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = FusedPadam(model.parameters(), backend=backend)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)
    for seed in range(3):
        backward(model, seed)
        step_and_check(optimizer)
        average.update_parameters(model)
        scheduler.step()
    assert average.n_averaged == 3
