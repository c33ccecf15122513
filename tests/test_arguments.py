"""Bad input: an error that names the value, before anything has changed."""

import copy
import math

import numpy as np
import pytest
import torch

from padam_ext import FusedPadam


def parameter():
    return torch.nn.Parameter(torch.ones(3))


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
    ({"bias_correction": True}, ValueError, "bias_correction must be one of .* got True"),
    ({"amsgrad": 1}, TypeError, "amsgrad must be True or False, got 1"),
    ({"maximize": "no"}, TypeError, "maximize must be True or False, got 'no'"),
    ({"decoupled_weight_decay": None}, TypeError, "decoupled_weight_decay must be .* got None"),
]
each_bad_option = pytest.mark.parametrize(
    ("option", "error", "message"), BAD_OPTIONS, ids=[str(o) for o, _, _ in BAD_OPTIONS]
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


@each_bad_option
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


def test_a_sparse_gradient_is_refused_before_any_parameter_has_moved(backend):
    first, embedding = parameter(), torch.nn.Embedding(5, 2, sparse=True)
    optimizer = FusedPadam([("w", first), ("emb", embedding.weight)], backend=backend)
    first.grad = torch.ones(3)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"'emb' .* sparse=False"):
        optimizer.step()
    assert first.tolist() == [1, 1, 1]
    assert not optimizer.state
    # and again after steps that worked
    embedding.weight.grad = None
    optimizer.step()
    moved = first.detach().clone()
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()
    assert torch.equal(first, moved)
    assert optimizer.state[first]["step"] == 1


def test_a_dtype_that_is_not_supported(backend):
    param = torch.nn.Parameter(torch.zeros(3, dtype=torch.float8_e4m3fn))
    optimizer = FusedPadam([param], backend=backend)
    param.grad = torch.zeros(3, dtype=torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"float8_e4m3fn; supported are torch.float32"):
        optimizer.step()


def test_a_parameter_resized_under_its_gradient(backend):
    first, param = parameter(), parameter()
    optimizer = FusedPadam([first, param], backend=backend)
    for p in (first, param):
        p.grad = torch.ones(3)
    optimizer.step()
    moved = first.detach().clone()
    param.data = torch.ones(5)
    with pytest.raises(RuntimeError, match=r"shape \(5,\) .* gradient has shape \(3,\)"):
        optimizer.step()
    param.grad = torch.ones(5)
    with pytest.raises(ValueError, match=r"state 'exp_avg' of parameter 1 .* \(3,\)"):
        optimizer.step()
    assert torch.equal(first, moved)


def test_a_tensor_subclass_without_memory_of_its_own(backend):
    from torch.testing._internal.two_tensor import TwoTensor

    param = torch.nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
    optimizer = FusedPadam([param], backend=backend)
    param.grad = TwoTensor(torch.ones(3), torch.ones(3))
    with pytest.raises(TypeError, match=r"parameter 0 of param group 0 is a .*subclass"):
        optimizer.step()
