"""FunctionalPadam against FusedPadam."""

import pytest
import torch
from torch.distributed.optim.utils import as_functional_optim, register_functional_optim

from padam_ext import FusedPadam
from padam_ext.distributed.functional import FunctionalPadam

OPTIONS = {"lr": 0.05, "weight_decay": 0.1, "partial": 0.3}


def make():
    params, twins = (
        [torch.nn.Parameter(torch.linspace(-1, 1, size)) for size in (3, 8)] for _ in range(2)
    )
    return params, twins, FusedPadam(twins, **OPTIONS)


def grads(seed):
    torch.manual_seed(seed)
    return [torch.randn(3), torch.randn(8)]


def test_the_registered_form_steps_parameters_as_they_come():
    register_functional_optim(FusedPadam, FunctionalPadam)
    params, twins, expected = make()
    optimizer = as_functional_optim(FusedPadam, **OPTIONS)
    own = torch.ones(3)
    params[0].grad = own
    for seed in range(3):
        for param, twin, grad in zip(params, twins, grads(seed), strict=True):
            optimizer.step_param(param, grad)
            twin.grad = grad
        expected.step()
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(param, twin)
        assert optimizer.state[param]["step"] == 3
    assert params[0].grad is own
    assert params[1].grad is None


def test_step_takes_a_gradient_or_none_for_each():
    params, twins, expected = make()
    optimizer = FunctionalPadam(params, **OPTIONS)
    first, second = grads(0)
    for values in ([first, second], [None, second], [first, None]):
        optimizer.step(values)
        for twin, value in zip(twins, values, strict=True):
            twin.grad = value
        expected.step()
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(param, twin)
    with pytest.raises(ValueError, match="each of 2 parameters, got 1"):
        optimizer.step([first])
    with pytest.raises(ValueError, match="empty parameter list"):
        FunctionalPadam([], **OPTIONS)
    assert optimizer.param_group["lr"] == 0.05
