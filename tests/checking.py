"""Holds steps of an optimizer against the oracle, within the bounds that the project promises."""

import numpy as np
import torch

import oracle
import packed_oracle
from cases import DEFAULTS, INTERPRETED
from padam_ext.slots import SLOTS

STEP_BOUND = {torch.float32: 4e-6, torch.float64: 1e-14}
MOMENT_ULPS = 2
# Triton's interpreter has no fused multiply-add and rounds twice: that adds up to 2.3 units on one
# element in 3000.
INTERPRETED_MOMENT_ULPS = 3
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


MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def _is_packed(state) -> str | None:
    """The slot of packed moments, if that is how they are held."""
    return next((key for key in ("packed_mvh", "packed_mv") if key in state), None)


def _as_words(tensor: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.numpy()).view(f"u{tensor.dtype.itemsize}")


def moments_of(state, like: torch.Tensor) -> list[np.ndarray]:
    """The moments in a state, exactly, zeros where there are none; of h the upper end if packed."""
    if slot := _is_packed(state):
        values = packed_oracle.unpack(_as_words(state[slot]), slot == "packed_mvh")
        return [oracle.exact(value) for value in values]
    zeros = torch.zeros_like(like)
    return [as_exact(state.get(key, zeros)) for key in MOMENTS]


def value_of(param: torch.Tensor, state) -> np.ndarray:
    """A parameter with what its state holds of it, exactly."""
    if "param_low" not in state:
        return as_exact(param)
    high = _as_words(param.detach().view(torch.int16))
    return oracle.exact(packed_oracle.join(high, _as_words(state["param_low"])))


def added_to_v(v, g, g_unit, options):
    """How far an error of g may take v."""
    error = (g + g_unit) ** 2 - g**2
    if options["second_moment"] in ("sum", "max"):
        return error
    weight = 1 - oracle.exact(options["betas"][1])
    if options["second_moment"] == "yogi":
        # Where g**2 is v but for rounding, it may be added or subtracted.
        is_close = np.abs(g**2 - v) <= 2 * (error + spacing(v, torch.float32))
        error = error + np.where(is_close, 2 * g**2, 0)
    return weight * error


class Watched:
    """A parameter's values and states as they are before a step."""

    def __init__(self, optimizer, param, grad_factor=1.0):
        state = optimizer.state.get(param, {})
        self.param = param
        self.x = value_of(param, state)
        self.moments = moments_of(state, param)
        self.step = float(state["step"]) if "step" in state else 0.0
        counter = state.get("step")
        counts = isinstance(counter, torch.Tensor) and counter.dtype in COUNTING_DTYPES
        self.counter_kind = (counter.dtype, counter.shape) if counts else (torch.float32, ())
        self.grad = None if param.grad is None else as_exact(param.grad) * grad_factor
        # The factor comes out of a norm that was itself summed up and rounded.
        self.grad_error = 0.0 if grad_factor == 1 else FACTOR_ERROR
        group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
        self.moment_ulps = INTERPRETED_MOMENT_ULPS if INTERPRETED else MOMENT_ULPS
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
        b1 = oracle.exact(self.options["betas"][0])
        g, g_unit = abs(want.g), spacing(want.g_scale, state_dtype) * (want.g_scale != 0)
        g_unit = g_unit + self.grad_error * abs(self.grad)
        m_error = self.moment_ulps * spacing(want.m_scale, state_dtype) + (1 - b1) * g_unit
        v_error = self.moment_ulps * spacing(want.v, state_dtype)
        v_error = v_error + added_to_v(self.moments[1], g, g_unit, self.options)
        if _is_packed(state):
            m, h = self._check_words(state, want, m_error, v_error)
        else:
            m, h = self._check_moments(state, want, m_error, v_error, state_dtype)
            m_error = 0.0

        decay = self.options["lr"] * self.options["weight_decay"]
        kept = self.x * (1 - decay) if self.options["decoupled_weight_decay"] else self.x
        moved = oracle.movement(m, h, int(self.step) + 1, self.options)
        x = kept + moved
        # Beside the change of x its two sums are rounded, each by half a unit; stochastically the
        # second one by a whole unit, and the first not at all beside it.
        stored = state_dtype if self.options["master"] == "split" else dtype
        changed = np.abs(moved) + np.abs(kept - self.x)
        rounding = spacing(np.maximum(abs(x), abs(kept)), stored)
        tolerance = changed * STEP_BOUND[state_dtype] + rounding
        if np.any(m_error):
            of_m = oracle.movement(m_error, h, int(self.step) + 1, self.options)
            tolerance = tolerance + np.where(m_error > 0, abs(of_m), 0.0)
        if self.options["param_rounding"] == "stochastic" and dtype == torch.bfloat16:
            tolerance = tolerance + spacing(abs(x), state_dtype)
        assert_within(value_of(self.param, state), x, tolerance, "parameter")

    def _check_moments(self, state, want, m_error, v_error, state_dtype):
        """Checks moments that are stored each by itself; those that the movement was made from.

        The movement is judged from the moments as stored, whose own bounds are checked: where terms
        of m cancel, m's rounding is large beside the step.
        """
        keys = MOMENTS if self.options["amsgrad"] else MOMENTS[:2]
        for key in keys:
            assert state[key].dtype.to_real() == state_dtype, key
        assert_within(as_exact(state["exp_avg"]), want.m, m_error, "exp_avg")
        assert_within(as_exact(state["exp_avg_sq"]), want.v, v_error, "exp_avg_sq")
        if self.options["amsgrad"]:
            assert_within(as_exact(state[keys[-1]]), want.h, v_error, keys[-1])
        return as_exact(state["exp_avg"]), as_exact(state[keys[-1]])

    def _check_words(self, state, want, m_error, v_error):
        """Checks packed moments; those that the movement was made from, before rounding."""
        amsgrad = self.options["amsgrad"]
        keys = {"step", "salt", "packed_mvh" if amsgrad else "packed_mv"}
        assert set(state) == keys | ({"param_low"} if self.options["master"] else set())
        m, v, h = moments_of(state, self.param)
        if amsgrad:
            ends = [
                oracle.exact(packed_oracle.floats(packed_oracle.upper_bits(one)))
                for one in (np.maximum(want.v - v_error, 0), want.v + v_error)
            ]
            low, high = (np.maximum(end, self.moments[2]) for end in ends)
            assert_within(h, (low + high) / 2, (high - low) / 2, "the running maximum")
            assert_within(v, want.v, v_error + packed_oracle.v_bound(h), "exp_avg_sq")
            used = h * packed_oracle.CENTRE
        else:
            assert_within(v, want.v, v_error + abs(want.v) * 2.0**-11, "exp_avg_sq")
            used = want.v
        most = packed_oracle.largest_m(h, amsgrad)
        m_bound = packed_oracle.m_bound(want.m, h, amsgrad)
        held = np.sign(want.m) * np.minimum(abs(want.m), most)
        assert_within(m, held, m_error + m_bound, "exp_avg")
        return want.m, used


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
