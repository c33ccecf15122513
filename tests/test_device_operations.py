"""How much a step asks of a device: one copy and three launches, whatever it has to do.

The device is the CPU. A dispatch mode sees what PyTorch would put into the device's queue; launches
are counted where the backend makes them.
"""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cases import INTERPRETED, ON_CPU
from padam_ext import FusedPadam
from padam_ext.backends import cuda, device_table, triton
from padam_ext.plan import ALL_PARAMS

pytestmark = pytest.mark.parametrize("backend", ON_CPU, indirect=True)

# Operations that only look at a tensor, or make one without writing to it: no work for a device.
NO_WORK = {
    "alias", "as_strided", "detach", "empty", "empty_like", "lift_fresh", "new_empty", "slice",
    "select", "unbind", "view", "_reshape_alias", "unsqueeze", "squeeze", "expand", "reshape",
    "is_pinned", "_record_function_enter_new", "_record_function_exit",
}  # fmt: skip


class Operations(TorchDispatchMode):
    """Counts what PyTorch does, apart from preparing on the host what a copy then brings over."""

    def __init__(self, table):
        super().__init__()
        self.table = table
        self.counted = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        on_host = any(
            isinstance(arg, torch.Tensor)
            and arg.untyped_storage().data_ptr() == self.table._host.untyped_storage().data_ptr()
            for arg in args[:1]
        )
        if name not in NO_WORK and not on_host and not self.is_comparing:
            self.counted[name] += 1
        return function(*args, **(kwargs or {}))

    is_comparing = False


@pytest.fixture
def launches(backend, monkeypatch):
    """Names of the kernels launched."""
    counted = Counter()
    module = triton if INTERPRETED else cuda
    for kernel in ("norm", "prepare", "step"):
        original = getattr(module, f"_launch_{kernel}")

        def counting(*arguments, original=original, kernel=kernel):
            counted[kernel] += 1
            # What it does on the CPU is not what a device would do.
            with torch.utils._python_dispatch._disable_current_modes():
                original(*arguments)

        monkeypatch.setattr(module, f"_launch_{kernel}", counting)
    return counted


@pytest.fixture
def comparing(monkeypatch):
    """Comparing the table with what the device has of it is the host's work."""
    original = device_table.DeviceTable._set

    def quietly(self, *arguments):
        Operations.is_comparing = True
        try:
            original(self, *arguments)
        finally:
            Operations.is_comparing = False

    monkeypatch.setattr(device_table.DeviceTable, "_set", quietly)


KINDS = {
    "plain": {},
    "GradScaler": {},
    "clipping": {"max_grad_norm": 1.0, "skip_nonfinite": True},
    "device lr and weight decay": {"capturable": True},
    "capturable": {"capturable": True},
}
LAUNCHES = {
    "plain": {"step": 1},
    "GradScaler": {"prepare": 1, "step": 1},
    "clipping": {"norm": 1, "prepare": 1, "step": 1},
    "device lr and weight decay": {"prepare": 1, "step": 1},
    "capturable": {"prepare": 1, "step": 1},
}


def make(kind, num_groups, bias_correction, backend):
    groups = []
    for i in range(num_groups):
        lr, weight_decay = 0.1 / (i + 1), 0.01 * i
        if kind == "device lr and weight decay":
            lr, weight_decay = torch.tensor(lr), torch.tensor(weight_decay, dtype=torch.float64)
        params = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
        groups.append({"params": params, "lr": lr, "weight_decay": weight_decay})
    return FusedPadam(groups, bias_correction=bias_correction, backend=backend, **KINDS[kind])


@pytest.mark.parametrize("bias_correction", ["none", "authors", "adam"])
@pytest.mark.parametrize("num_groups", [1, 10, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_one_copy_and_three_launches(
    kind, num_groups, bias_correction, backend, launches, comparing
):
    optimizer = make(kind, num_groups, bias_correction, backend)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if kind == "GradScaler":
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)

    def set_grads():
        for param in params:
            param.grad = torch.ones(3)

    for _ in range(2):
        set_grads()
        optimizer.step()
    kept = [param.grad for param in params]
    set_grads()  # elsewhere, so that the table has to be copied
    launches.clear()
    [step] = optimizer._planner._plans[ALL_PARAMS][0].steps
    with Operations(step._device_table) as operations:
        optimizer.step()
    assert dict(operations.counted) == {"copy_": 1}
    assert dict(launches) == LAUNCHES[kind]
    del kept
