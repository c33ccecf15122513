"""Tensors that cannot be stepped: an error that names the parameter, before anything changes."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

from padam_ext import FusedPadam
from padam_ext.gather import NativeGatherer, PythonGatherer


def parameter():
    return torch.nn.Parameter(torch.ones(3))


def state_of(size):
    moments = {key: torch.zeros(size) for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
    return {"step": torch.tensor(0.0), **moments}


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
    with pytest.raises(TypeError, match=r"float8_e4m3fn; supported are torch.float32.*complex64"):
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


class Wrapper(torch.Tensor):
    """A subclass around a tensor, with only what its authors needed."""

    @staticmethod
    def __new__(cls, tensor, **options):
        return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, **options)

    def __init__(self, tensor, **options):
        self.tensor, self.options = tensor, options

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].tensor, **args[0].options)
        raise NotImplementedError(function)


WRAPPERS = {
    "Wrapper": Wrapper,
    "TwoTensor": lambda tensor: TwoTensor(tensor, tensor),
    "FakeTensor": lambda tensor: FakeTensorMode().from_tensor(tensor),
    "MaskedTensor": lambda tensor: masked_tensor(tensor, tensor > 0),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
@pytest.mark.parametrize("gatherer", [NativeGatherer, PythonGatherer])
@pytest.mark.parametrize("with_states", [False, True], ids=["new", "with states"])
@pytest.mark.parametrize("which", ["param", "grad"])
@pytest.mark.parametrize("size", [3, 0])
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_subclass_without_memory_of_its_own(
    name, size, which, with_states, gatherer, backend, monkeypatch
):
    monkeypatch.setattr("padam_ext.plan.best_gatherer", gatherer)
    first, plain, wrapped = parameter(), torch.ones(size), WRAPPERS[name](torch.ones(size))
    param = torch.nn.Parameter(wrapped if which == "param" else plain)
    optimizer = FusedPadam([("first", first), ("wrapped", param)], backend=backend)
    first.grad, param.grad = torch.ones(3), wrapped
    if with_states:
        optimizer.state[first] = state_of(3)
        optimizer.state[param] = state_of(size)
    before = copy.deepcopy(optimizer.state[first]) if with_states else None
    whose = {"param": "parameter", "grad": "the gradient of parameter"}[which]
    message = f"^{whose} 'wrapped' is a {type(wrapped).__name__}, a tensor subclass without memory"
    with pytest.raises(TypeError, match=message):
        optimizer.step()
    assert first.tolist() == [1, 1, 1]
    if with_states:
        assert all(torch.equal(before[key], optimizer.state[first][key]) for key in before)
    else:
        assert not optimizer.state


def test_a_subclass_without_memory_of_its_own_on_a_device_without_memory():
    param = torch.nn.Parameter(Wrapper(torch.ones(3), device="meta"))
    optimizer = FusedPadam([param], backend="eager")
    param.grad = Wrapper(torch.ones(3), device="meta")
    with pytest.raises(TypeError, match="is a Wrapper"):
        optimizer.step()
    assert not optimizer.state


def test_a_state_of_a_subclass_without_memory_of_its_own(backend):
    param = parameter()
    optimizer = FusedPadam([param], backend=backend)
    param.grad = torch.ones(3)
    for key in state_of(3):
        optimizer.state[param] = state = state_of(3)
        state[key] = Wrapper(state[key])
        with pytest.raises((TypeError, ValueError), match=f"state '{key}' of .* got a Wrapper of"):
            optimizer.step()
        del state[key]
        assert all((value == 0).all() for value in state.values())


class WithMemory(torch.Tensor):
    """A subclass that looks at each operation but has memory like any tensor."""

    @staticmethod
    def __new__(cls, tensor):
        return torch.Tensor._make_subclass(cls, tensor)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return super().__torch_dispatch__(function, types, args, kwargs or {})


def test_a_subclass_with_memory_of_its_own_is_stepped(backend):
    param = WithMemory(torch.ones(3)).requires_grad_()
    optimizer = FusedPadam([param], backend=backend)
    param.grad = torch.ones(3)
    optimizer.step()
    assert (param < 1).all()


DENSE_ONLY = "FusedPadam takes dense parameters and gradients only: convert it to a dense one"
LAYOUTS = {
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), f"'w' has layout torch._mkldnn. {DENSE_ONLY}"),
    "coo": (lambda: torch.ones(3).to_sparse(), f"'w' has layout torch.sparse_coo. {DENSE_ONLY}"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_parameter_that_is_not_strided(layout, backend):
    make, message = LAYOUTS[layout]
    param = torch.nn.Parameter(make())
    optimizer = FusedPadam([("w", param)], backend=backend)
    param.grad = make()
    with pytest.raises(RuntimeError, match=f"^parameter {message}"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_parameter(backend):
    param = torch.nn.Parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    optimizer = FusedPadam([("w", param)], backend=backend)
    param.to_padded_tensor(0.0).sum().backward()
    with pytest.raises(RuntimeError, match=f"^parameter 'w' is nested. {DENSE_ONLY}"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize(
    ("param_dtype", "grad_dtype"),
    [(torch.complex64, torch.float32), (torch.float32, torch.complex64)],
    ids=["real gradient", "complex gradient"],
)
def test_complex_beside_real(param_dtype, grad_dtype, backend):
    first, param = parameter(), parameter()
    optimizer = FusedPadam([first, param], backend=backend)
    first.grad, param.grad = torch.ones(3), torch.ones(3)
    param.data = torch.ones(3, dtype=param_dtype)
    param.grad.data = torch.ones(3, dtype=grad_dtype)
    message = f"dtype {param_dtype} on cpu, but its gradient has shape .* dtype {grad_dtype} on"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert not optimizer.state
    assert first.tolist() == [1, 1, 1]
