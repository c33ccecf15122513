"""Bad input: an error that names the value, before anything has changed."""

import copy
import math

import numpy as np
import pytest
import torch

from padam_ext import FusedPadam


def parameter():
    return torch.nn.Parameter(torch.ones(3))


HUGE = 10**5000  # beyond floats, and beyond what Python prints

BAD_OPTIONS = [
    ({"lr": -0.1}, ValueError, r"lr must be in \[0, inf\), got -0.1"),
    ({"lr": math.nan}, ValueError, "lr must be .* got nan"),
    ({"lr": math.inf}, ValueError, "lr must be .* got inf"),
    ({"lr": "0.1"}, TypeError, "lr must be a number, got '0.1' of type str"),
    ({"lr": True}, TypeError, "lr must be a number, got True"),
    ({"lr": [0.1]}, TypeError, "lr must be a number, got \\[0.1\\]"),
    ({"partial": {}}, TypeError, "partial must be a number, got {}"),
    ({"lr": None}, TypeError, "lr must be a number, got None"),
    ({"lr": torch.tensor(-1.0)}, ValueError, "lr must be .* got -1.0"),
    ({"lr": torch.ones(2)}, ValueError, r"tensor lr must have 1 element, got shape \(2,\)"),
    ({"lr": torch.tensor(0.1, device="meta")}, TypeError, "tensor lr .* read, got .*device='meta'"),
    ({"lr": torch.tensor(0.1j)}, TypeError, "lr must be a number, got 0.1.*j"),
    ({"lr": 10**400}, ValueError, r"lr must be in \[0, inf\), got 1000"),
    ({"lr": -(10**400)}, ValueError, r"lr must be in \[0, inf\), got -1000"),
    ({"lr": HUGE}, ValueError, r"lr must be in \[0, inf\), got about 2\*\*16609"),
    ({"eps": HUGE}, ValueError, "eps must be .* got about"),
    ({"weight_decay": HUGE}, ValueError, "weight_decay must be .* got about"),
    ({"partial": HUGE}, ValueError, "partial must be .* got about"),
    ({"betas": (0.9, HUGE)}, ValueError, r"betas\[1\] must be in \[0, 1\), got about"),
    ({"eps": torch.ones(2)}, ValueError, r"tensor eps must have 1 element, got shape \(2,\)"),
    ({"betas": (0.9,)}, ValueError, r"betas must be a pair .* got \(0.9,\)"),
    ({"betas": 0.9}, ValueError, "betas must be a pair .* got 0.9"),
    ({"betas": (1.0, 0.9)}, ValueError, r"betas\[0\] must be in \[0, 1\), got 1.0"),
    ({"betas": (0.9, -0.1)}, ValueError, r"betas\[1\] must be in \[0, 1\), got -0.1"),
    ({"betas": (0.9, math.nan)}, ValueError, r"betas\[1\] must be .* got nan"),
    ({"betas": ("0.9", 0.9)}, TypeError, r"betas\[0\] must be a number, got '0.9'"),
    ({"eps": -1e-8}, ValueError, r"eps must be in \[0, inf\), got -1e-08"),
    ({"eps": math.nan}, ValueError, "eps must be .* got nan"),
    ({"eps": "1e-8"}, TypeError, "eps must be a number"),
    ({"weight_decay": -1}, ValueError, r"weight_decay must be in \[0, inf\), got -1"),
    ({"weight_decay": math.inf}, ValueError, "weight_decay must be .* got inf"),
    ({"partial": -1}, ValueError, r"partial must be in \[0, 0.5\], got -1"),
    ({"partial": 0.50001}, ValueError, r"partial must be in \[0, 0.5\], got 0.50001"),
    ({"partial": math.nan}, ValueError, "partial must be .* got nan"),
    ({"partial": 0.1j}, TypeError, "partial must be a number"),
    ({"bias_correction": "yes"}, ValueError, "bias_correction must be one of .* got 'yes'"),
    ({"bias_correction": np.ones(2)}, ValueError, "bias_correction must be one of .* got array"),
    ({"bias_correction": True}, ValueError, "bias_correction must be one of .* got True"),
    ({"amsgrad": 2}, TypeError, "amsgrad must be True or False, got 2"),
    ({"amsgrad": 1.0}, TypeError, "amsgrad must be True or False, got 1.0"),
    ({"maximize": "no"}, TypeError, "maximize must be True or False, got 'no'"),
    ({"decoupled_weight_decay": None}, TypeError, "decoupled_weight_decay must be .* got None"),
]
each_bad_option = pytest.mark.parametrize(
    ("option", "error", "message"), BAD_OPTIONS, ids=[m for _, _, m in BAD_OPTIONS]
)


@each_bad_option
def test_the_constructor_refuses(option, error, message):
    with pytest.raises(error, match=message):
        FusedPadam([parameter()], **option)
    with pytest.raises(error, match=message):
        FusedPadam([{"params": [parameter()], **option}])


@each_bad_option
def test_add_param_group_refuses_and_adds_nothing(option, error, message):
    optimizer = FusedPadam([parameter()])
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": [parameter()], **option})
    assert len(optimizer.param_groups) == 1


# Schedulers make what they make of a learning rate: only its type is checked later.
LATER = [bad for bad in BAD_OPTIONS if "lr" not in bad[0] or "element" in bad[2]]
LATER += [bad for bad in BAD_OPTIONS if "lr" in bad[0] and bad[1] is TypeError]


@pytest.mark.parametrize(
    ("option", "error", "message"), LATER, ids=[message for _, _, message in LATER]
)
def test_a_step_refuses_before_anything_changes(option, error, message, backend):
    params = [parameter(), parameter()]
    optimizer = FusedPadam([{"params": [p]} for p in params], backend=backend)
    for param in params:
        param.grad = torch.ones(3)
    optimizer.step()
    before = copy.deepcopy((params, dict(optimizer.state)))
    optimizer.param_groups[1].update(option)
    with pytest.raises(error, match=message):
        optimizer.step()
    assert torch.equal(params[0], before[0][0])
    assert optimizer.state[params[0]]["step"] == 1


@pytest.mark.parametrize(
    "option",
    [
        {"lr": 0}, {"lr": np.float32(0.1)}, {"lr": torch.tensor(0.1)}, {"lr": torch.tensor([0.1])},
        {"betas": [0, 0]}, {"eps": 0}, {"partial": 0}, {"partial": 0.5}, {"weight_decay": 1},
    ],
    ids=str,
)  # fmt: skip
def test_the_ends_of_the_ranges_are_allowed(option, backend):
    param = parameter()
    optimizer = FusedPadam([param], **option, backend=backend)
    param.grad = torch.ones(3)
    optimizer.step()
    assert param.isfinite().all()


def test_an_unknown_backend():
    with pytest.raises(ValueError, match=r"backend must be one of \('auto', .* got 'gpu'"):
        FusedPadam([parameter()], backend="gpu")


@pytest.mark.parametrize("value", [np.ones(2), None, 1], ids=["array", "None", "int"])
def test_a_backend_of_another_type(value):
    with pytest.raises(ValueError, match="backend must be one of"):
        FusedPadam([parameter()], backend=value)


def test_a_backend_for_one_param_group():
    message = "param group has backend='eager', but .* whole optimizer, here 'auto'"
    group = {"params": [parameter()], "backend": "eager"}
    with pytest.raises(ValueError, match=message):
        FusedPadam([group])
    optimizer = FusedPadam([parameter()])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    # Wrappers of optimizers copy all arguments into their groups: the same again is no error.
    FusedPadam([group], backend="eager")


def test_a_param_group_keeps_keys_that_are_no_options():
    group = {"params": [parameter()], "name": "head", "initial_lr": 0.2}
    optimizer = FusedPadam([group])
    assert optimizer.param_groups[0]["name"] == "head"
    assert optimizer.param_groups[0]["initial_lr"] == 0.2


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="momentum"):
        FusedPadam([parameter()], momentum=0.9)


def test_duplicate_parameters():
    param = parameter()
    with pytest.raises(ValueError, match="parameter 1 appears more than once"):
        FusedPadam([param, param])
    with pytest.raises(ValueError, match="parameter 'b' appears more than once"):
        FusedPadam([("a", param), ("b", param)])
    with pytest.raises(ValueError, match="more than one parameter group"):
        FusedPadam([{"params": [param]}, {"params": param}])


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ([], ValueError, "empty parameter list"),
        ([torch.ones(2, requires_grad=True) * 2], ValueError, "non-leaf"),
        ([1.0], TypeError, "Tensors"),
        (torch.ones(2), TypeError, "iterable"),
        ([{"params": {parameter()}}], TypeError, "ordered"),
    ],
    ids=["empty", "non-leaf", "not a tensor", "a tensor", "a set"],
)
def test_lists_that_torch_refuses(params, error, message):
    with pytest.raises(error, match=message):
        FusedPadam(params)
