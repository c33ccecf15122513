"""PyTorch's own tables of optimizer inputs and errors, through FusedPadam where they apply.

They ship with torch, for its tests: torch.testing._internal.common_optimizers.
"""

import warnings

import pytest
import torch

from padam_ext import FusedPadam

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_optimizers as theirs

AS_ADAM = {"partial": 0.5, "bias_correction": "adam", "amsgrad": False}
PEERS = {
    "Adam": (torch.optim.Adam, theirs.optim_inputs_func_adam, AS_ADAM | {"lr": 1e-3}),
    "AdamW": (
        torch.optim.AdamW,
        theirs.optim_inputs_func_adamw,
        AS_ADAM | {"lr": 1e-3, "weight_decay": 1e-2, "decoupled_weight_decay": True},
    ),
}
INPUTS = [
    pytest.param(peer, ours, case.kwargs, id=f"{name}, {case.desc}")
    for name, (peer, inputs, ours) in PEERS.items()
    for case in inputs("cpu", torch.float32)
]


@pytest.mark.parametrize(("peer", "ours", "kwargs"), INPUTS)
def test_inputs(peer, ours, kwargs, backend):
    models = [torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        peer(models[0].parameters(), **kwargs),
        FusedPadam(models[1].parameters(), **ours | kwargs, backend=backend),
    ]
    for seed in range(7):
        generator = torch.Generator(device=torch.get_default_device()).manual_seed(seed)
        inputs = torch.randn(4, 5, generator=generator)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
    for expected, actual in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


# What FusedPadam answers otherwise, and why.
OTHERWISE = {
    "a param group cannot have duplicate parameters": (
        ValueError, "appears more than once",  # torch warns; stepping a parameter twice is no use
    ),
    "beta1 should be between 0 and 1": (ValueError, r"betas\[0\] must be .* got 1.0"),
    "weight_decay should > 0": (ValueError, "weight_decay must be .* got -1"),
    "Tensor lr must be 1-element": (ValueError, r"lr must have 1 element, got shape \(2,\)"),
    # There is one implementation, so nothing to choose and nothing that excludes a tensor lr.
    "lr as Tensor doesn't work with foreach & not capturable": (TypeError, "argument 'foreach'"),
    r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True": (
        TypeError, "argument 'foreach'",
    ),
    "betas must be either both floats or both Tensors": (TypeError, r"betas\[\d\] must be .*numb"),
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    theirs.optim_error_inputs_func_adam("cpu", torch.float32),
    ids=lambda case: case.optimizer_error_input.desc,
)
def test_errors(case):
    given = case.optimizer_error_input
    params = [torch.nn.Parameter(torch.ones(1))] if given.params is None else given.params
    error, message = OTHERWISE.get(given.desc, (case.error_type, case.error_regex))
    with pytest.raises(error, match=message):
        FusedPadam(params, **given.kwargs)
