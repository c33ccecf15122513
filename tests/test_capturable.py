"""capturable, and options that only a device knows, with kernels that run on the CPU.

Real CUDA graphs are in test_gpu.py.
"""

import gc
import weakref
from collections import defaultdict

import pytest
import torch

from cases import ON_CPU
from checking import step_and_check
from padam_ext import FusedPadam
from padam_ext.backends import device
from padam_ext.backends.device_table import DeviceTable
from padam_ext.control import ControlInputs
from padam_ext.plan import ALL_PARAMS
from padam_ext.step_control import StepControl

device_kernels = pytest.mark.parametrize("backend", ON_CPU, indirect=True)


def make_params():
    return [torch.nn.Parameter(torch.randn(size)) for size in (3, 1031, 0, 64)]


def set_grads(params):
    for param in params:
        param.grad = torch.randn(param.shape)


@pytest.fixture
def capture(monkeypatch):
    """Turns on and off what a stream says that is being captured."""

    def set_to(value):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: value)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    return set_to


@device_kernels
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("bias_correction", ["none", "adam"])
def test_options_that_the_device_has(bias_correction, decoupled, backend):
    params = make_params()
    lr, weight_decay = torch.tensor(0.1), torch.tensor([0.25], dtype=torch.float64)
    optimizer = FusedPadam(
        [{"params": params[:2]}, {"params": params[2:], "lr": 0.5, "partial": 0.4}],
        lr=lr, weight_decay=weight_decay, bias_correction=bias_correction,
        decoupled_weight_decay=decoupled, capturable=True, backend=backend,
    )  # fmt: skip
    for step in range(4):
        set_grads(params)
        params[step].grad = None  # their counts differ
        step_and_check(optimizer)
        lr.mul_(0.5)
        weight_decay.mul_(0.5)


@device_kernels
def test_their_values_are_never_asked_for(backend, monkeypatch):
    params = make_params()
    optimizer = FusedPadam(
        params, lr=torch.tensor(0.1), weight_decay=torch.tensor(0.1), bias_correction="authors",
        max_grad_norm=1.0, skip_nonfinite=True, capturable=True, backend=backend,
    )  # fmt: skip
    set_grads(params)
    optimizer.step()

    def refuse(tensor):
        raise AssertionError("the host would have to wait")

    skipped = optimizer._skipped[torch.device("cpu")]
    for name in ("item", "__float__", "__bool__", "__int__", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    optimizer.step()
    assert optimizer._skipped[torch.device("cpu")] is skipped  # a graph adds to it where it is


def counters_of_the_kernel(optimizer):
    """Addresses of the counters that the prepare kernel adds to; 0 for none."""
    [step] = optimizer._planner._plans[ALL_PARAMS][0].steps
    return step._device_table.counters.tolist()


@device_kernels
def test_steps_are_counted_on_the_device(backend):
    params = make_params()
    optimizer = FusedPadam(params, capturable=True, backend=backend)
    set_grads(params)
    step_and_check(optimizer)
    addresses = [optimizer.state[param]["step"].data_ptr() for param in params]
    assert counters_of_the_kernel(optimizer) == addresses


@device_kernels
def test_counting_moves_to_the_device_once_it_may_skip_and_then_stays(backend):
    params = make_params()
    optimizer = FusedPadam(params, backend=backend)
    set_grads(params)
    optimizer.step()
    assert counters_of_the_kernel(optimizer) == [0] * 4
    optimizer.found_inf = torch.tensor(0.0)
    step_and_check(optimizer)
    addresses = [optimizer.state[param]["step"].data_ptr() for param in params]
    assert counters_of_the_kernel(optimizer) == addresses
    for params_with_grads in (params[:2], params[1:], params):
        for param in params:
            param.grad = None
        set_grads(params_with_grads)
        step_and_check(optimizer)
        assert [optimizer.state[param]["step"].data_ptr() for param in params] == addresses


class Graph:
    """What a CUDA graph repeats of a step: the copy of the table, and what follows."""

    def __init__(self, optimizer):
        [step] = optimizer._planner._plans[ALL_PARAMS][0].steps
        self.table = step._device_table
        self.source = self.table._captured[-1]
        self.content = self.source.clone()

    def check(self):
        assert torch.equal(self.source, self.content)


@device_kernels
def test_a_captured_step_has_a_table_of_its_own(backend, capture):
    params = make_params()
    optimizer = FusedPadam(params, max_grad_norm=1.0, capturable=True, backend=backend)
    graphs = []
    for _ in range(3):
        set_grads(params)
        step_and_check(optimizer)
        capture(True)
        set_grads(params)
        kept = [param.grad for param in params]
        step_and_check(optimizer)
        capture(False)
        graphs.append((Graph(optimizer), kept))
    assert len({graph.source.data_ptr() for graph, _ in graphs}) == 3
    for graph, kept in graphs:
        graph.check()
        begin, end = graph.table._spans["addresses"]
        count = len(params)
        addresses = graph.source[begin:end][count : 2 * count].tolist()
        assert addresses == [grad.data_ptr() for grad in kept]


@device_kernels
def test_a_step_after_a_replay_brings_its_table_back(backend, capture):
    params = make_params()
    optimizer = FusedPadam(params, capturable=True, backend=backend)
    set_grads(params)
    optimizer.step()
    capture(True)
    set_grads(params)
    optimizer.step()
    capture(False)
    kept = [param.grad for param in params]
    graph = Graph(optimizer)
    set_grads(params)
    for _ in range(2):
        step_and_check(optimizer)
        graph.table._device.copy_(graph.source)  # as a replay would
    del kept


@device_kernels
def test_what_cannot_be_captured(backend, capture):
    params = make_params()
    lr = torch.tensor(0.1, device="meta")
    plain = FusedPadam(params, backend=backend)
    optimizer = FusedPadam(params, capturable=True, backend=backend)
    set_grads(params)
    capture(True)
    before = [param.detach().clone() for param in params]
    with pytest.raises(RuntimeError, match="make the optimizer with capturable=True"):
        plain.step()
    with pytest.raises(RuntimeError, match=r"first for these parameters, states and gradients"):
        optimizer.step()
    capture(False)
    assert all(torch.equal(one, other) for one, other in zip(before, params, strict=True))
    optimizer.step()
    before = [param.detach().clone() for param in params]
    capture(True)
    params[0].grad = None
    with pytest.raises(RuntimeError, match="gradients for the same parameters"):
        optimizer.step()
    params[0].grad = torch.ones(3)
    optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(TypeError, match="lr"):
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(before, params, strict=True))
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"second step .* is being captured"):
        optimizer.step()


@device_kernels
@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer: optimizer.param_groups[0].update(partial=0.3),
        lambda optimizer: setattr(optimizer, "max_grad_norm", 1.0),
        lambda optimizer: setattr(optimizer, "grad_scale", torch.tensor(2.0)),
    ],
    ids=["another power", "a norm", "a scale"],
)
def test_a_kernel_that_has_not_run_is_not_captured(change, backend, capture, monkeypatch):
    """The first run loads it."""
    monkeypatch.setattr(device, "_loaded", defaultdict(set))
    params = make_params()
    optimizer = FusedPadam(params, capturable=True, backend=backend)
    set_grads(params)
    optimizer.step()
    change(optimizer)
    before = [param.detach().clone() for param in params]
    capture(True)
    with pytest.raises(RuntimeError, match=r"other options than all steps before.* Make a step"):
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(before, params, strict=True))
    capture(False)
    change(optimizer)
    optimizer.step()
    change(optimizer)
    capture(True)
    optimizer.step()


@device_kernels
def test_what_a_graph_changes_outlives_loading(backend, capture):
    params = make_params()
    optimizer = FusedPadam(
        params, skip_nonfinite=True, max_grad_norm=1.0, capturable=True, backend=backend
    )
    set_grads(params)
    optimizer.step()
    capture(True)
    optimizer.step()
    capture(False)
    state = optimizer.state[params[0]]
    used = [state["exp_avg"], state["step"], optimizer.grad_norm, *optimizer._skipped.values()]
    gone = [weakref.ref(tensor) for tensor in used]
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[params[0]]["exp_avg"] is not used[0]
    del state, used
    gc.collect()
    assert all(tensor() is not None for tensor in gone)


def test_skips_are_counted_where_they_are_found_out(capture):
    """A tensor for each device: a graph adds to it wherever the next step finds out."""
    here, there = torch.device("cpu"), torch.device("meta")
    skipped = {}
    control = StepControl(ControlInputs(skip_nonfinite=True), [], torch.float32, skipped)
    first = control._count_skips_on(here)
    control._count_skips_on(there)
    assert control._count_skips_on(here) is first
    assert set(skipped) == {here, there}
    capture(True)
    with pytest.raises(RuntimeError, match="none has been made on cpu before: make one"):
        StepControl(control.inputs, [], torch.float32, {})._count_skips_on(here)


@device_kernels
def test_memory_for_a_capture_is_pinned_in_time(backend, capture, monkeypatch):
    tables = []
    original = DeviceTable.prepare_capture
    monkeypatch.setattr(
        DeviceTable, "prepare_capture", lambda table: (tables.append(table), original(table))
    )
    params = make_params()
    for flag in (False, True):
        optimizer = FusedPadam(params, capturable=flag, backend=backend)
        set_grads(params)
        optimizer.step()
        assert len(tables) == flag


@pytest.mark.parametrize("name", ["cpu", "eager"])
def test_capturable_is_for_gpus(name):
    params = make_params()
    optimizer = FusedPadam(params, capturable=True, backend=name)
    set_grads(params)
    before = [param.detach().clone() for param in params]
    with pytest.raises(RuntimeError, match=f"on cpu are stepped by '{name}': leave it out"):
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(before, params, strict=True))
    assert not optimizer.state


def test_capturable_of_a_wrong_type():
    with pytest.raises(TypeError, match="capturable must be True or False, got 'yes'"):
        FusedPadam(make_params(), capturable="yes")
