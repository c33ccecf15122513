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
