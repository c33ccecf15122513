"""What the host reads of a device, and devices that lack float64, without such a device."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from checking import step_and_check
from padam_ext import FusedPadam, runtime, state
from padam_ext.control import scalar_on
from padam_ext.norm import sums_on

CPU = torch.device("cpu")


class Copies(TorchDispatchMode):
    """Notes whether the host waits for each copy to the CPU."""

    def __init__(self):
        super().__init__()
        self.waited = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        to_the_cpu = kwargs.get("device") == CPU
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.to.device) and to_the_cpu:
            self.waited.append(not kwargs.get("non_blocking", False))
        return function(*args, **kwargs)


@pytest.mark.parametrize(
    "read",
    [
        lambda value: scalar_on(value, CPU),
        lambda value: runtime.moved_to(value, CPU),
        lambda value: sums_on(CPU, [value.double().reshape(1), torch.zeros(1).double()]),
    ],
    ids=["a scalar", "a tensor", "sums"],
)
def test_the_host_waits_for_what_it_may_read(read):
    with FakeTensorMode(), Copies() as copies:
        read(torch.ones((), device="cuda"))
    assert copies.waited == [True]


def test_pinned_memory_is_copied_before_a_device_may_read_it(monkeypatch):
    """The host may write to it before the device comes to the copy."""
    clones = []
    original = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(
        torch.Tensor, "clone", lambda tensor: clones.append(tensor) or original(tensor)
    )
    lr = torch.tensor(0.1)
    runtime.moved_to(lr, torch.device("meta"))
    assert clones == [lr]


def test_a_step_count_on_a_device_is_not_read(monkeypatch):
    """Of ten thousand parameters each would be waited for."""
    param = torch.ones(3)
    with FakeTensorMode():
        step = torch.ones((), device="cuda")
    moments = {name: torch.ones(3) for name in ("exp_avg", "exp_avg_sq")}
    monkeypatch.setattr(state, "_is_dense", lambda tensor: True)  # a fake one is a wrapper
    monkeypatch.setattr(state, "lacks_memory", lambda tensor: False)
    state.check_state({"step": step, **moments}, param, "it", waits=False)
    with pytest.raises(DataDependentOutputException):
        state.check_state({"step": step, **moments}, param, "it")


class NoDoubles(TorchDispatchMode):
    """A device that has no float64."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            assert not (isinstance(one, torch.Tensor) and one.dtype == torch.float64), function
        return result


@pytest.mark.parametrize("options", [
    {"max_grad_norm": 1.0}, {"skip_nonfinite": True}, {"bias_correction": "adam"},
    {"lr": torch.tensor(0.1), "max_grad_norm": float("inf")},
], ids=lambda options: "-".join(options))  # fmt: skip
@pytest.mark.parametrize("scaled", [False, True])
def test_devices_without_float64(options, scaled, monkeypatch):
    monkeypatch.setattr(runtime, "widest_float", lambda device: torch.float32)
    params = [torch.nn.Parameter(torch.randn(n)) for n in (3, 1000)]
    optimizer = FusedPadam(params, **options, backend="eager")
    for param in params:
        param.grad = torch.randn_like(param)
    step_and_check(optimizer)
    if scaled:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    with NoDoubles():
        optimizer.step()


def test_which_devices_lack_float64():
    assert runtime.widest_float(torch.device("mps")) == torch.float32
    assert runtime.widest_float(CPU) == torch.float64
