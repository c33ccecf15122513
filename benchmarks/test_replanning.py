"""Time of steps before which something has changed, and of stepping during backward.

A mixture of experts, layers that are dropped or frozen, losses in turns: gradients that are there
only sometimes. Beside it runs torch's fused AMSGrad, which computes the same here: p = 1/2 with
Adam's bias correction. For stepping during backward that is one fused AMSGrad per parameter, called
by hooks, as PyTorch's tutorial has it.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from benchmarks import measure
from benchmarks.implementations import OPTIONS
from padam_ext import FusedPadam, step_during_backward

pytestmark = pytest.mark.skipif(
    measure.ON_GPU, reason="measures the CPU; test_step_benchmark.py has the host's time of GPUs"
)
OURS, TORCHS = "FusedPadam, cpu", "torch AMSGrad, fused"
SHAPE = (32, 32)
COUNT = 1000
TURNS, STEPS_PER_TURN = 6, 16
VERIFIED_STEPS = 6


def make_params(count: int, shape: tuple[int, ...]) -> list[Parameter]:
    """The same for every implementation."""
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.rand(shape, generator=generator)) for _ in range(count)]


def make_optimizer(name: str, params: list[Parameter]) -> Optimizer:
    """FusedPadam that computes AMSGrad, or torch's, fused or (as the reference) not."""
    if name == OURS:
        return FusedPadam(params, **OPTIONS, partial=1 / 2, bias_correction="adam", backend="cpu")
    return torch.optim.Adam(params, amsgrad=True, fused=name == TORCHS, **OPTIONS)


def assert_same_params(params: list[Parameter], others: list[Parameter]) -> None:
    """Within what rounding of a few steps may make."""
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-4, atol=1e-6)


class Steps:
    """Parameters with gradients, and what changes about them before each step."""

    def __init__(self, name: str, change: Callable[[Steps], None]) -> None:
        """Makes an optimizer and its first step."""
        self.name = name
        self.params = make_params(COUNT, SHAPE)
        self.grads = [torch.rand_like(param) - 0.5 for param in make_params(COUNT, SHAPE)]
        self.optimizer = make_optimizer(name, self.params)
        self.number = 0
        generator = torch.Generator().manual_seed(1)
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad.uniform_(-1, 1, generator=generator)
        self.optimizer.step()
        self._change = change

    def change(self) -> None:
        """What happens before the next step."""
        self.number += 1
        self._change(self)


def one_gradient_comes_and_goes(steps: Steps) -> None:
    """None every other step, as that of an expert to whom no token was sent."""
    at = COUNT // 2
    steps.params[at].grad = None if steps.number % 2 else steps.grads[at]


def halves_take_turns(steps: Steps) -> None:
    """Only one half has gradients, as with two losses in turns."""
    for i, (param, grad) in enumerate(zip(steps.params, steps.grads, strict=True)):
        param.grad = grad if (i < COUNT // 2) == (steps.number % 2 == 0) else None


def one_gradient_is_strided_at_times(steps: Steps) -> None:
    """Transposed, every other step.

    On the CPU torch's fused step goes through memory as if it were dense (2.13), so it is spared.
    """
    at = COUNT // 2
    grad = steps.grads[at]
    transposed = grad.t().contiguous() if steps.name == TORCHS else grad.t()
    steps.params[at].grad = transposed if steps.number % 2 else grad


def one_parameter_gets_new_data(steps: Steps) -> None:
    """Other memory in each step."""
    param = steps.params[COUNT // 2]
    param.data = param.data.clone()


LARGE = torch.zeros(2**22)


def torch_has_just_used_all_threads(steps: Steps) -> None:
    """As backward does; a second OpenMP runtime would find the processors busy with waiting."""
    torch.exp(LARGE, out=LARGE)
    LARGE.zero_()


CHANGES = (
    one_gradient_comes_and_goes,
    halves_take_turns,
    one_gradient_is_strided_at_times,
    one_parameter_gets_new_data,
    torch_has_just_used_all_threads,
)


def verify_steps(name: str, change: Callable[[Steps], None]) -> None:
    """The first steps must be those of torch's AMSGrad that is not fused."""
    ours, reference = Steps(name, change), Steps("reference", change)
    for _ in range(VERIFIED_STEPS):
        for steps in (ours, reference):
            steps.change()
            steps.optimizer.step()
    assert_same_params(ours.params, reference.params)


# The uppermost changes fastest: implementations take turns.
@pytest.mark.parametrize("name", [OURS, TORCHS])
@pytest.mark.parametrize("turn", range(TURNS))
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_change_before_each_step(benchmark, change, turn, name):
    """One step, after something has changed about one or some of many tensors."""
    if turn == 0:
        verify_steps(name, change)
    steps = Steps(name, change)
    for _ in range(4):
        steps.change()
        steps.optimizer.step()
    workload = f"{COUNT} x {SHAPE[0] * SHAPE[1]}"
    benchmark.group = f"{workload}, {change.__name__}"
    benchmark.extra_info.update(
        workload=workload, change=change.__name__, implementation=name, turn=turn
    )
    benchmark.pedantic(steps.optimizer.step, setup=steps.change, rounds=STEPS_PER_TURN)


PER_PARAMETER = "torch AMSGrad, one per parameter, by hooks"


class Backward:
    """Parameters that are stepped during backward."""

    def __init__(self, name: str, num_groups: int, group_size: int) -> None:
        """Makes one optimizer with groups, or one optimizer for each parameter."""
        self.params = make_params(num_groups * group_size, (64,))
        self.optimizer: FusedPadam | None = None
        if name == OURS:
            groups = [{"params": self.params[i::num_groups]} for i in range(num_groups)]
            options = {**OPTIONS, "partial": 1 / 2, "bias_correction": "adam"}
            self.optimizer = FusedPadam(groups, **options)
            self.hooks = step_during_backward(self.optimizer)
        else:
            fused = name == PER_PARAMETER
            optimizers = {p: torch.optim.Adam([p], amsgrad=True, fused=fused, **OPTIONS)
                          for p in self.params}  # fmt: skip

            def step(param: torch.Tensor) -> None:
                optimizers[param].step()
                param.grad = None

            for param in self.params:
                param.register_post_accumulate_grad_hook(step)
        self.factors = torch.rand(64 * len(self.params), generator=torch.Generator().manual_seed(1))

    def loss(self) -> torch.Tensor:
        """Of the parameters as they are, behind `optimizer.step()` where there is one for all."""
        if self.optimizer is not None:
            self.optimizer.step()
        return ((torch.cat(self.params) - 0.5) * self.factors).sum()

    def touch_state(self) -> torch.Tensor:
        """As a checkpoint does, before each backward."""
        if self.optimizer is not None:
            assert len(self.optimizer.state) == len(self.params)
        return self.loss()


def verify_backward(name: str, num_groups: int, group_size: int) -> None:
    """After three passes the parameters must be where torch's AMSGrad has them."""
    backward = Backward(name, num_groups, group_size)
    params = make_params(num_groups * group_size, (64,))
    reference = make_optimizer("reference", params)
    for _ in range(3):
        backward.loss().backward()
        reference.zero_grad()
        ((torch.cat(params) - 0.5) * backward.factors).sum().backward()
        reference.step()
    assert all(param.grad is None for param in backward.params)
    assert_same_params(backward.params, params)


def memory_per_parameter(name: str, num_groups: int, group_size: int) -> float:
    """Bytes of Python's that two passes leave behind: states and plans."""
    tracemalloc.start()
    backward = Backward(name, num_groups, group_size)
    before = tracemalloc.get_traced_memory()[0]
    for make_loss in (backward.loss, backward.touch_state):
        make_loss().backward()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return (after - before) / len(backward.params)


# Groups, parameters in each, and in how many turns they are measured.
LISTS = {"465 groups of 1": (465, 1, 4), "1 group of 10,000": (1, 10_000, 2)}
ROUNDS = {"the first": 1, "later": 4, "after .state was touched": 4}


@pytest.mark.parametrize("name", [OURS, PER_PARAMETER])
@pytest.mark.parametrize(
    ("workload", "turn"),
    [(name, turn) for name, (*_, turns) in LISTS.items() for turn in range(turns)],
)
@pytest.mark.parametrize("which", ROUNDS)
def test_stepping_during_backward(benchmark, which, workload, turn, name):
    """One pass backward, in which each parameter is stepped and its gradient freed."""
    num_groups, group_size, _ = LISTS[workload]
    info = benchmark.extra_info
    if turn == 0 and which == "the first":
        verify_backward(name, num_groups, group_size)
        info["memory_per_parameter"] = memory_per_parameter(name, num_groups, group_size)
    backward = Backward(name, num_groups, group_size)
    if which != "the first":
        backward.loss().backward()
    make_loss = backward.touch_state if which.startswith("after") else backward.loss
    info.update(
        workload=workload, change=f"backward, {which}", implementation=name, turn=turn,
    )  # fmt: skip
    benchmark.group = f"{workload}, backward, {which}"
    benchmark.pedantic(
        lambda loss: loss.backward(),
        setup=lambda: ((make_loss(),), {}),
        rounds=ROUNDS[which],
    )
