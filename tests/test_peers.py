"""Against other people's code, torch.optim, over 20 steps."""

import pytest
import torch

from padam_ext import FusedPadam

pytestmark = pytest.mark.numbers

STEPS = 20


def run_both(ours, theirs, scale=1.0):
    """Trains two copies of the same parameters on the same gradients."""
    torch.manual_seed(0)
    mine = [torch.nn.Parameter(torch.randn(shape)) for shape in ((33, 5), (7,), (2, 3, 4))]
    other = [torch.nn.Parameter(p.detach().clone()) for p in mine]
    optimizers = ours(mine), theirs(other)
    for _ in range(STEPS):
        for one, two in zip(mine, other, strict=True):
            one.grad = torch.randn_like(one)
            two.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, two in zip(mine, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("amsgrad", [True, False])
@pytest.mark.parametrize("theirs", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_and_adamw(weight_decay, maximize, amsgrad, theirs, backend):
    options = {
        "lr": 1e-2, "weight_decay": weight_decay, "maximize": maximize, "amsgrad": amsgrad,
    }  # fmt: skip
    run_both(
        lambda params: FusedPadam(
            params, partial=0.5, bias_correction="adam", backend=backend,
            decoupled_weight_decay=theirs is torch.optim.AdamW, **options,
        ),
        lambda params: theirs(params, **options),
    )  # fmt: skip


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("maximize", [False, True])
def test_adagrad(weight_decay, maximize, backend):
    options = {"lr": 1e-2, "weight_decay": weight_decay, "maximize": maximize, "eps": 1e-10}
    run_both(
        lambda params: FusedPadam(
            params, betas=(0.0, 0.999), partial=0.5, amsgrad=False, second_moment="sum",
            backend=backend, **options,
        ),
        lambda params: torch.optim.Adagrad(params, **options),
    )  # fmt: skip


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_adamax(weight_decay, backend):
    """Its bias correction goes into lr; its eps is added to the norm before that decays."""
    beta1, lr = 0.9, 1e-2

    class Corrected(FusedPadam):
        def step(self):
            count = next((int(s["step"]) for s in self.state.values()), 0) + 1
            self.param_groups[0]["lr"] = lr / (1 - beta1**count)
            super().step()

    run_both(
        lambda params: Corrected(
            params, betas=(beta1, 0.999), partial=0.5, amsgrad=False, second_moment="max",
            weight_decay=weight_decay, backend=backend, eps=1e-10,
        ),
        lambda params: torch.optim.Adamax(params, lr=lr, weight_decay=weight_decay, eps=1e-10),
    )  # fmt: skip


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_rmsprop(weight_decay, backend):
    options = {"lr": 1e-2, "weight_decay": weight_decay, "eps": 1e-8}
    run_both(
        lambda params: FusedPadam(
            params, betas=(0.0, 0.99), partial=0.5, amsgrad=False, backend=backend, **options
        ),
        lambda params: torch.optim.RMSprop(params, alpha=0.99, **options),
    )


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_sgd_with_momentum(weight_decay, backend):
    """At p=0 Padam is SGD with momentum whose learning rate is scaled by 1 - b1."""
    run_both(
        lambda params: FusedPadam(
            params, lr=0.1, betas=(0.9, 0.999), partial=0.0, weight_decay=weight_decay,
            backend=backend,
        ),
        lambda params: torch.optim.SGD(
            params, lr=0.1 * (1 - 0.9), momentum=0.9, weight_decay=weight_decay
        ),
    )  # fmt: skip
