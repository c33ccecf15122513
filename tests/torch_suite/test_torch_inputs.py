"""PyTorch's own table of errors, through FusedPadam where it applies, and unusual tensors.

It ships with torch, for its tests: torch.testing._internal.common_optimizers. Its table of inputs
is in test_torch_suite.py.
"""

import warnings
import weakref

import pytest
import torch

from padam_ext import FusedPadam

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_optimizers as theirs


# What FusedPadam answers otherwise, and why.
OTHERWISE = {
    "a param group cannot have duplicate parameters": (
        ValueError, "appears more than once",  # torch warns; stepping a parameter twice is no use
    ),
    "beta1 should be between 0 and 1": (ValueError, r"betas\[0\] must be .* got 1.0"),
    "weight_decay should > 0": (ValueError, "weight_decay must be .* got -1"),
    "Tensor lr must be 1-element": (ValueError, r"lr must have 1 element, got shape \(2,\)"),
}  # fmt: skip
# There is one implementation, and nothing that excludes tensors.
ACCEPTED = {
    "lr as Tensor doesn't work with foreach & not capturable",
    r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True",
}


@pytest.mark.parametrize(
    "case",
    theirs.optim_error_inputs_func_adam("cpu", torch.float32),
    ids=lambda case: case.optimizer_error_input.desc,
)
def test_errors(case):
    given = case.optimizer_error_input
    params = [torch.nn.Parameter(torch.ones(1))] if given.params is None else given.params
    if given.desc in ACCEPTED:
        params[0].grad = torch.ones_like(params[0])
        FusedPadam(params, **given.kwargs).step()
        assert params[0].item() < 1
        return
    error, message = OTHERWISE.get(given.desc, (case.error_type, case.error_regex))
    with pytest.raises(error, match=message):
        FusedPadam(params, **given.kwargs)


def test_states_of_parameters_that_are_not_there_yet(backend):
    """A lazy module's, loaded before its first forward has told the shapes."""
    options = {"lr": 0.1, "partial": 0.5, "bias_correction": "adam", "backend": backend}
    models = [torch.nn.Linear(4, 3), torch.nn.LazyLinear(3)]
    inputs = [torch.linspace(-1, 1 + i, 8).view(2, 4) for i in range(3)]

    def train(model, optimizer, of):
        optimizer.zero_grad()
        model(of).square().sum().backward()
        optimizer.step()

    adam = torch.optim.Adam(models[0].parameters(), lr=0.1, amsgrad=True)
    train(models[0], adam, inputs[0])
    optimizer = FusedPadam(models[1].parameters(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.load_state_dict(adam.state_dict())
    models[1].load_state_dict(models[0].state_dict())
    for of in inputs[1:]:
        train(models[0], adam, of)
        train(models[1], optimizer, of)
    for param, twin in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)
        assert optimizer.state[param]["step"] == 3
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            torch.testing.assert_close(
                optimizer.state[param][key], adam.state[twin][key], rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize("materialised_by", ["forward", "load_state_dict"])
def test_a_lazy_parameter_with_a_state_of_another_shape(materialised_by, backend):
    """Only when it is there can that be seen: by the step, which changes nothing then."""
    other = torch.nn.Linear(5, 3)
    saved = FusedPadam(other.parameters(), backend=backend)
    other(torch.ones(2, 5)).sum().backward()
    saved.step()
    lazy = torch.nn.LazyLinear(3)
    optimizer = FusedPadam(lazy.parameters(), backend=backend)
    optimizer.load_state_dict(saved.state_dict())
    if materialised_by == "forward":
        lazy(torch.ones(2, 4))
    else:
        lazy.load_state_dict(torch.nn.Linear(4, 3).state_dict())
    before = lazy.weight.detach().clone()
    lazy(torch.ones(2, 4)).sum().backward()
    with pytest.raises(
        ValueError, match=r"has shape \(3, 5\), but the parameter has shape \(3, 4\)"
    ):
        optimizer.step()
    assert torch.equal(lazy.weight, before)


# No trace on tensors of the user's: torch.utils.swap_tensors refuses those with weak references.


def test_gradients_can_be_swapped_when_modules_are_converted(backend):
    model, twin = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    twin.load_state_dict(model.state_dict())
    inputs = torch.linspace(-1, 1, 8).view(2, 4)
    optimizer = FusedPadam(
        model.parameters(), lr=0.1, partial=0.5, bias_correction="adam", backend=backend
    )
    adam = torch.optim.Adam(twin.parameters(), lr=0.1, amsgrad=True)
    swapping = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for number in range(4):
            dtype = torch.float64 if number >= 2 else torch.float32
            for m, o in ((model, optimizer), (twin, adam)):
                if number == 2:
                    m.double()
                    if o is adam:  # which does not convert its states
                        for state in adam.state.values():
                            state.update({k: v.double() for k, v in state.items() if k != "step"})
                o.zero_grad(set_to_none=False)
                m(inputs.to(dtype)).square().sum().backward()
                o.step()
                o.zero_grad(set_to_none=False)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapping)
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert param.dtype == param.grad.dtype == torch.float64
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["step", "step_param"])
def test_a_step_leaves_no_weak_reference(how, backend):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedPadam([param], backend=backend)
    param.grad = torch.ones(3)
    for _ in range(2):
        optimizer.step() if how == "step" else optimizer.step_param(param)
    tensors = {"param": param, "grad": param.grad, **optimizer.state[param]}
    assert {
        name: weakref.getweakrefcount(tensor) for name, tensor in tensors.items()
    } == dict.fromkeys(tensors, 0)
    for tensor in tensors.values():
        torch.utils.swap_tensors(tensor, torch.nn.Parameter(torch.ones(tensor.shape))
                                 if tensor is param else torch.ones(tensor.shape))  # fmt: skip
