"""Holds steps of an optimizer against the oracle, within the bounds that the project promises."""

import os

import numpy as np
import torch

import oracle
from cases import DEFAULTS
from padam_ext.slots import SLOTS

STEP_BOUND = {torch.float32: 4e-6, torch.float64: 1e-14}
MOMENT_ULPS = 2
# PyTorch's operations round the scalar factor and both products of v's second term: with b2 = 0.999
# and v = 0 that adds up to 2.3 units on one element in 3000.
EAGER_MOMENT_ULPS = 3
# Triton's interpreter has no fused multiply-add and rounds twice, too.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FACTOR_ERROR = 1e-6
# Counters of these dtypes that somebody supplied stay as they are.
COUNTING_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
STATE_DTYPE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


# FusedPadam that computes torch.optim.Adam(lr=0.1, amsgrad=True).
AS_ADAM = {"lr": 0.1, "partial": 0.5, "bias_correction": "adam"}


class Fails(torch.autograd.Function):
    """In backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("out of luck")


def make_twin_parameters(count=3):
    """Parameters, and the same for torch's AMSGrad."""
    values = [torch.linspace(-1, 1, 4 + i) for i in range(count)]
    return tuple([torch.nn.Parameter(v.clone()) for v in values] for _ in range(2))


def by_slot(first, rest):
    """One value for each slot: those given, in SLOTS' order, then another one for all others."""
    return [*first, *[rest] * (len(SLOTS) - len(first))]


def as_exact(tensor: torch.Tensor) -> np.ndarray:
    """Elements in index order, in extended precision; complex as (real, imag) pairs."""
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return oracle.exact(tensor.to(torch.float64).numpy())


def spacing(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """One unit in the last place of |values| in a dtype, at its smallest for values near 0."""
    info = torch.finfo(dtype)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.floor(np.log2(np.abs(values)))
    smallest = np.log2(oracle.exact(info.smallest_normal))
    exponent = np.maximum(np.where(np.isfinite(exponent), exponent, smallest), smallest)
    return np.exp2(exponent) * info.eps


def assert_within(actual, expected, tolerance, what: str) -> None:
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    with np.errstate(invalid="ignore", over="ignore"):
        good = same | (np.abs(actual - expected) <= tolerance)
    if not good.all():
        with np.errstate(invalid="ignore", divide="ignore"):
            excess = np.where(good, 0, np.abs(actual - expected) / tolerance)
        worst = np.unravel_index(np.nanargmax(excess), excess.shape)
        raise AssertionError(
            f"{what}: {np.count_nonzero(~good)} of {good.size} elements out of bounds, worst at "
            f"{worst}: got {actual[worst]!r}, expected {expected[worst]!r}, "
            f"allowed {np.broadcast_to(tolerance, good.shape)[worst]!r}"
        )


def assert_same(actual: torch.Tensor, expected: torch.Tensor, backend: str) -> None:
    """Bitwise for kernels; PyTorch's own operations round ends of vectors differently."""
    if backend == "eager":
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(actual, expected)


class Watched:
    """A parameter's values and states as they are before a step."""

    def __init__(self, optimizer, param, grad_factor=1.0):
        state = optimizer.state.get(param, {})
        zeros = torch.zeros_like(param)
        self.param = param
        self.x = as_exact(param)
        self.moments = [
            as_exact(state.get(key, zeros)) for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        ]
        self.step = float(state["step"]) if "step" in state else 0.0
        counter = state.get("step")
        counts = isinstance(counter, torch.Tensor) and counter.dtype in COUNTING_DTYPES
        self.counter_kind = (counter.dtype, counter.shape) if counts else (torch.float32, ())
        self.grad = None if param.grad is None else as_exact(param.grad) * grad_factor
        # The factor comes out of a norm that was itself summed up and rounded.
        self.grad_error = 0.0 if grad_factor == 1 else FACTOR_ERROR
        group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
        rounds_twice = optimizer.backend == "eager" or INTERPRETED
        self.moment_ulps = EAGER_MOMENT_ULPS if rounds_twice else MOMENT_ULPS
        values = {key: group[key] for key in DEFAULTS}
        self.options = {
            k: v.item() if isinstance(v, torch.Tensor) else v for k, v in values.items()
        }

    @np.errstate(invalid="ignore", over="ignore")
    def check(self, optimizer) -> None:
        """Compares what the step made of them with the oracle."""
        state = optimizer.state.get(self.param, {})
        if self.grad is None:
            assert np.array_equal(as_exact(self.param), self.x, equal_nan=True)
            assert float(state.get("step", 0.0)) == self.step
            return
        want = oracle.padam(self.x, self.grad, *self.moments, int(self.step) + 1, self.options)
        dtype = self.param.dtype.to_real()
        state_dtype = STATE_DTYPE.get(dtype, dtype)

        assert (state["step"].dtype, state["step"].shape) == self.counter_kind
        assert float(state["step"]) == self.step + 1
        keys = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * self.options["amsgrad"]
        for key in keys:
            assert state[key].dtype.to_real() == state_dtype, key
        b1, b2 = map(oracle.exact, self.options["betas"])
        g, g_unit = abs(want.g), spacing(want.g_scale, state_dtype) * (want.g_scale != 0)
        g_unit = g_unit + self.grad_error * abs(self.grad)
        tolerance = self.moment_ulps * spacing(want.m_scale, state_dtype) + (1 - b1) * g_unit
        assert_within(as_exact(state["exp_avg"]), want.m, tolerance, "exp_avg")
        tolerance = self.moment_ulps * spacing(want.v, state_dtype)
        tolerance = tolerance + (1 - b2) * ((g + g_unit) ** 2 - g**2)
        assert_within(as_exact(state["exp_avg_sq"]), want.v, tolerance, "exp_avg_sq")
        if self.options["amsgrad"]:
            actual = as_exact(state["max_exp_avg_sq"])
            assert_within(actual, want.h, tolerance, "max_exp_avg_sq")

        # The movement is judged from the moments as stored, whose own bounds were checked above:
        # where terms of m cancel, m's rounding is large beside the step.
        h = state["max_exp_avg_sq" if self.options["amsgrad"] else "exp_avg_sq"]
        decay = self.options["lr"] * self.options["weight_decay"]
        kept = self.x * (1 - decay) if self.options["decoupled_weight_decay"] else self.x
        moved = oracle.movement(
            as_exact(state["exp_avg"]), as_exact(h), int(self.step) + 1, self.options
        )
        x = kept + moved
        # Beside the change of x its two sums are rounded, each by half a unit.
        changed = np.abs(moved) + np.abs(kept - self.x)
        rounding = spacing(np.maximum(abs(x), abs(kept)), dtype)
        tolerance = changed * STEP_BOUND[state_dtype] + rounding
        assert_within(as_exact(self.param), x, tolerance, "parameter")


def exact_norm(params) -> np.longdouble:
    """The norm of all gradients together."""
    grads = [as_exact(param.grad) for param in params if param.grad is not None]
    return np.sqrt(sum((grad**2).sum() for grad in grads))


def step_and_check(optimizer) -> None:
    """Makes one step and checks every parameter of every group, and that gradients were kept."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    factor = 1.0
    if optimizer.max_grad_norm is not None:
        factor = min(1.0, optimizer.max_grad_norm / (exact_norm(params) + oracle.exact(1e-6)))
    watched = [Watched(optimizer, param, factor) for param in params]
    grads = [None if p.grad is None else p.grad.clone() for p in params]
    optimizer.step()
    for before, param, grad in zip(watched, params, grads, strict=True):
        before.check(optimizer)
        if grad is not None:
            assert torch.equal(param.grad.nan_to_num(), grad.nan_to_num())
