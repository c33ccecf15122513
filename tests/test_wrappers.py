"""Parameters and gradients of subclasses that wrap one plain tensor."""

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils import _pytree as pytree

from checking import AS_ADAM, assert_same
from padam_ext import FusedPadam, plan
from padam_ext.gather import NativeGatherer, PythonGatherer


class Wraps(torch.Tensor):
    """As torchao's float8 weights: operations take the tensor inside."""

    @staticmethod
    def __new__(cls, tensor, scale=None):
        return torch.Tensor._make_wrapper_subclass(
            cls, tensor.shape, dtype=tensor.dtype, device=tensor.device
        )

    def __init__(self, tensor, scale=None):
        self._tensor = tensor
        self._precomputed_scale = scale

    def __tensor_flatten__(self):
        scale = [] if self._precomputed_scale is None else ["_precomputed_scale"]
        return ["_tensor", *scale], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        inside = pytree.tree_map_only(cls, lambda t: t._tensor, (args, kwargs or {}))
        result = function(*inside[0], **inside[1])
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(result)
        return result


class WrapsTwo(Wraps):
    """Nobody can tell what the elements are."""

    def __tensor_flatten__(self):
        self._other = self._tensor * 2
        return ["_tensor", "_other"], None


class WrapsAnotherDtype(Wraps):
    """Its elements are not those inside."""

    def __tensor_flatten__(self):
        self._half = self._tensor.bfloat16()
        return ["_half"], None


@pytest.fixture(params=[NativeGatherer, PythonGatherer])
def either_gatherer(request, monkeypatch):
    monkeypatch.setattr(plan, "best_gatherer", request.param)


VALUES = torch.linspace(-1, 1, 12).reshape(3, 4)
WAYS = {
    "one": Wraps,
    "one in another": lambda tensor: Wraps(Wraps(tensor)),
    "with torchao's scale": lambda tensor: Wraps(tensor, torch.ones(())),
}


@pytest.mark.usefixtures("either_gatherer")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapped", ["param", "grad", "both"])
def test_what_is_inside_is_stepped(way, wrapped, backend):
    inside = VALUES.clone()
    param = nn.Parameter(WAYS[way](inside) if wrapped != "grad" else inside)
    twin = nn.Parameter(VALUES.clone())
    optimizer, expected = (FusedPadam([p], **AS_ADAM, backend=backend) for p in (param, twin))
    for seed in range(3):
        torch.manual_seed(seed)
        twin.grad = torch.randn(3, 4)
        param.grad = WAYS[way](twin.grad.clone()) if wrapped != "param" else twin.grad
        optimizer.step()
        expected.step()
        assert_same(inside, twin, backend)
    for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        assert type(optimizer.state[param][key]) is torch.Tensor
    assert optimizer.state[param]["step"] == 3
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    for each in (optimizer, expected):
        each.step()
    assert_same(inside, twin, backend)


@pytest.mark.usefixtures("either_gatherer")
def test_a_tensor_that_takes_its_place_is_seen(backend):
    first, second = VALUES.clone(), VALUES.clone()
    param = nn.Parameter(Wraps(first))
    param.grad = torch.ones(3, 4)
    optimizer = FusedPadam([param], **AS_ADAM, backend=backend)
    optimizer.step()
    param._tensor = second
    kept = first.clone()
    optimizer.step()
    assert torch.equal(first, kept)
    assert not torch.equal(second, VALUES)


@pytest.mark.usefixtures("either_gatherer")
@pytest.mark.parametrize("kind", [WrapsTwo, WrapsAnotherDtype])
def test_others_are_refused(kind, backend):
    param = nn.Parameter(kind(VALUES.clone()))
    param.grad = torch.ones(3, 4)
    optimizer = FusedPadam([("w", param)], backend=backend)
    with pytest.raises(TypeError, match=f"'w' is a {kind.__name__}, a tensor subclass without mem"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.usefixtures("either_gatherer")
def test_a_gradient_that_a_collective_computes_is_waited_for(backend):
    param, twin = (nn.Parameter(VALUES.clone()) for _ in range(2))
    twin.grad = torch.ones(3, 4)
    param.grad = AsyncCollectiveTensor(torch.ones(3, 4))
    for p in (param, twin):
        FusedPadam([p], **AS_ADAM, backend=backend).step()
    assert param.grad.completed
    assert_same(param, twin, backend)
