"""The order of events on a device, with a stand-in that executes what is queued later.

Each scenario is run on the stand-in in many orders, and once without it, in the order of the code.
Parameters and states must be the same, bit for bit.
"""

from contextlib import nullcontext

import pytest
import torch

from padam_ext import FusedPadam, runtime
from padam_ext.backends import device_table
from padam_ext.plan import Planner
from pretending import run_cuda_on_host
from queued_device import Choices, Device, every_order, use
from totals import totals

SIZES = (5, 1030)
SEEDS = range(100)
MOST_ORDERS = 400


class Run:
    """An optimizer on the stand-in, or without it: then a graph is what it repeats."""

    def __init__(self, device=None, **options):
        self.device = device
        generator = torch.Generator().manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in SIZES]
        self.generator = generator
        self.kept = []  # a GPU's streams keep their memory in order
        options = {"weight_decay": 0.1, "bias_correction": "adam"} | options
        self.optimizer = FusedPadam(self.params, **options, backend="cuda")

    def move_grads(self, missing=()):
        """Other gradients at other addresses."""
        for i, param in enumerate(self.params):
            grad = torch.randn(param.shape, generator=self.generator)
            self.kept.append(grad)
            param.grad = None if i in missing else grad

    def step(self, missing=()):
        """A step with other gradients."""
        self.move_grads(missing)
        self.optimizer.step()

    def capture(self, missing=()):
        """A step that is captured; a function that repeats it."""
        self.move_grads(missing)
        grads = [param.grad for param in self.params]
        if self.device is not None:
            with self.device.capture() as graph:
                self.optimizer.step()
            return graph.replay

        rate = self.optimizer.param_groups[0]["lr"]

        def replay():
            before_rate = self.optimizer.param_groups[0]["lr"]
            self.optimizer.param_groups[0]["lr"] = rate
            before = [param.grad for param in self.params]
            for param, grad in zip(self.params, [*grads, *before[len(grads) :]], strict=True):
                param.grad = grad
            for param in self.params[len(grads) :]:
                param.grad = None
            self.optimizer.step()
            for param, grad in zip(self.params, before, strict=True):
                param.grad = grad
            self.optimizer.param_groups[0]["lr"] = before_rate

        return replay

    def add_group(self):
        """One more parameter."""
        self.params.append(torch.nn.Parameter(torch.randn(7, generator=self.generator)))
        self.optimizer.add_param_group({"params": [self.params[-1]], "lr": 0.05})

    def on(self, stream):
        """Makes a stream the current one, behind the one before."""
        if self.device is None:
            return nullcontext()
        while len(self.device.streams) <= stream:
            self.device.new_stream()
        self.device.streams[stream].wait_stream(self.device.current)
        return self.device.on_stream(self.device.streams[stream])

    def result(self):
        """Everything that steps have changed."""
        if self.device is not None:
            self.device.synchronize()
        states = [self.optimizer.state[param] for param in self.params]
        return [
            *[param.detach().clone() for param in self.params],
            *[state[key].clone() for state in states for key in sorted(state)],
        ]


def eager_steps(run):
    for rate in (0.1, 0.05, 0.02):
        run.optimizer.param_groups[0]["lr"] = rate
        run.step()


def gradients_come_and_go(run):
    for missing in ((), (1,), (), (0,), (1,), ()):
        run.step(missing)


def other_streams(run):
    for stream in (0, 1, 2, 1):
        with run.on(stream):
            run.step()
    if run.device is not None:  # as a program would before it reads
        run.device.current.wait_stream(run.device.streams[1])


def dropped_behind_another_stream(run):
    run.step()
    with run.on(1):
        run.step()
    run.optimizer._planner.forget()  # as loading a checkpoint does
    with run.on(1):
        run.step()
    if run.device is not None:
        run.device.current.wait_stream(run.device.streams[1])


def replays_between_steps(run):
    run.step()
    replay = run.capture()
    replay()
    replay()
    run.optimizer.param_groups[0]["lr"] = 0.05
    run.step()
    replay()
    run.step()
    run.step()
    replay()


def two_graphs(run):
    run.step()
    first = run.capture()
    run.step()
    second = run.capture()
    for replay in (first, second, first):
        replay()
    run.step()
    second()


def graphs_outlive_plans(run):
    run.step()
    replay = run.capture()
    for missing in ((0,), (1,), (), (0,)):  # the plan is dropped behind others, or made anew
        run.step(missing)
        replay()
    run.add_group()
    for missing in ((), (0,), (1,), (2,), (0, 1), ()):
        run.step(missing)
        replay()


def graphs_of_other_gradients(run):
    run.step()
    of_all = run.capture()
    run.step((0,))
    of_one = run.capture((0,))
    for replay in (of_all, of_one, of_one, of_all):
        replay()
    run.step((1,))
    of_one()
    of_all()


SCENARIOS = {
    eager_steps: {"max_grad_norm": 1.0},
    gradients_come_and_go: {"max_grad_norm": 1.0, "skip_nonfinite": True},
    other_streams: {"max_grad_norm": 1.0},
    dropped_behind_another_stream: {"max_grad_norm": 1.0},
    replays_between_steps: {"capturable": True, "max_grad_norm": 1.0, "skip_nonfinite": True},
    two_graphs: {"capturable": True},
    graphs_outlive_plans: {"capturable": True, "max_grad_norm": 1.0},
    graphs_of_other_gradients: {"capturable": True},
}
pytestmark = pytest.mark.order
each_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda f: f.__name__)


def two_steps(run):
    run.step()
    run.step()


def one_replay(run):
    run.step()
    run.capture()()


SMALL = {two_steps: {}, one_replay: {"capturable": True}}


def run_in_order(scenario, monkeypatch):
    with monkeypatch.context() as patched:
        run_cuda_on_host(patched)
        run = Run(**(SCENARIOS | SMALL)[scenario])
        scenario(run)
        return run.result()


def run_on_device(scenario, choices, monkeypatch):
    device = Device(choices)
    with monkeypatch.context() as patched:
        use(device, patched)
        run = Run(device, **(SCENARIOS | SMALL)[scenario])
        scenario(run)
        found = run.result()
    totals["orders"] += 1
    totals["events"] += device.num_executed
    return found


def check(scenario, choices, expected, monkeypatch):
    found = run_on_device(scenario, choices, monkeypatch)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@each_scenario
def test_in_random_orders(scenario, monkeypatch):
    expected = run_in_order(scenario, monkeypatch)
    for seed in SEEDS:
        check(scenario, Choices(seed=seed), expected, monkeypatch)


@each_scenario
def test_in_every_order_of_the_first_choices(scenario, monkeypatch):
    expected = run_in_order(scenario, monkeypatch)
    for choices in every_order(MOST_ORDERS):
        check(scenario, choices, expected, monkeypatch)


@pytest.mark.parametrize("scenario", SMALL, ids=lambda f: f.__name__)
def test_small_cases_in_every_order(scenario, monkeypatch):
    expected = run_in_order(scenario, monkeypatch)
    most = 5000
    number = 0
    for choices in every_order(most):
        check(scenario, choices, expected, monkeypatch)
        number += 1
    assert 10 < number < most


def fails(scenario, monkeypatch, match):
    """Some order must show what has been planted."""

    def run_all():
        for seed in SEEDS:
            check(scenario, Choices(seed=seed), expected, monkeypatch)

    expected = run_in_order(scenario, monkeypatch)
    with pytest.raises(AssertionError, match=match):
        run_all()


def test_a_copy_from_the_table_itself_is_found(monkeypatch):
    """It is written to again while the device may still read it."""
    monkeypatch.setattr(Device, "pinned_copy", lambda self, words, device: words)
    # Copies read what the host has, when they are executed.
    original = Device.copy_later

    def copy_later(self, to, source):
        block, begin = self.block_of(to.data_ptr()), to.storage_offset()
        if self.capturing():
            original(self, to, source)
        else:
            self.queue(lambda: block.words.__setitem__(slice(begin, begin + len(source)), source))

    monkeypatch.setattr(Device, "copy_later", copy_later)
    fails(eager_steps, monkeypatch, "finds other addresses")


def test_a_captured_table_that_is_not_kept_is_found(monkeypatch):
    original = device_table.DeviceTable.copy_changed

    def forgetful(self):
        original(self)
        self._captured[:] = [None] * len(self._captured)

    monkeypatch.setattr(device_table.DeviceTable, "copy_changed", forgetful)
    fails(two_graphs, monkeypatch, "finds other")


def test_a_graph_that_copies_from_the_table_itself_is_found(monkeypatch):
    original = device_table.DeviceTable.copy_changed

    def copy_changed(self):
        if runtime.capturing():
            runtime.copy_later(self._device, self._host)
        else:
            original(self)

    monkeypatch.setattr(device_table.DeviceTable, "copy_changed", copy_changed)
    fails(replays_between_steps, monkeypatch, "finds other")


def test_a_capture_that_waits_for_other_work_is_found(monkeypatch):
    def follow(self):
        stream = runtime.current_stream(self._device.device)
        if stream is not self._stream:
            stream.wait_stream(self._stream)
            self._stream = stream

    monkeypatch.setattr(device_table.DeviceTable, "_follow_stream", follow)
    fails(one_replay, monkeypatch, "waits for work outside")


def test_pinned_memory_that_is_allocated_too_late_is_found(monkeypatch):
    original = device_table.DeviceTable.begin_step

    def begin_step(self):
        self._spare = None
        self.prepare_capture()
        original(self)

    monkeypatch.setattr(device_table.DeviceTable, "begin_step", begin_step)
    fails(one_replay, monkeypatch, "during a capture")


def test_sums_that_are_not_kept_for_another_stream_are_found(monkeypatch):
    original = Device.record_stream

    def only_tables(self, tensor, stream):
        if tensor.dtype == torch.int64:
            original(self, tensor, stream)

    monkeypatch.setattr(Device, "record_stream", only_tables)
    fails(dropped_behind_another_stream, monkeypatch, "was given back")


def test_a_replay_that_is_not_reckoned_with_is_found(monkeypatch):
    monkeypatch.setattr(device_table.DeviceTable, "begin_step", lambda self: (
        self._captured.append(self._spare) if runtime.capturing() else self.prepare_capture()
    ))  # fmt: skip
    fails(replays_between_steps, monkeypatch, "finds other")


def test_memory_that_is_not_kept_for_another_stream_is_found(monkeypatch):
    monkeypatch.setattr(Device, "record_stream", lambda self, tensor, stream: None)
    fails(dropped_behind_another_stream, monkeypatch, "was given back")


def test_a_graph_that_outlives_its_table_is_found(monkeypatch):
    monkeypatch.setattr(Planner, "keep_captured", lambda self, *used: None)
    fails(graphs_outlive_plans, monkeypatch, "was given back")
