"""max_grad_norm, skip_nonfinite, and what GradScaler hands over, on every backend."""

import copy
import math
import pickle

import pytest
import torch

from cases import DTYPES, each_dtype
from checking import as_exact, exact_norm, step_and_check
from padam_ext import FusedPadam

pytestmark = [pytest.mark.numbers, pytest.mark.gpu_variants, pytest.mark.ptx_variants]

SIZES = [(3, 5), (1031,), (), (0,), (2 * 1024 + 3,)]
NAMES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")


def make_params(dtype=torch.float32, seed=0):
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(size, generator=generator, device="cpu").to(dtype))
        for size in SIZES
    ]


def set_grads(params, seed, factor=1.0):
    generator = torch.Generator(device="cpu").manual_seed(seed)
    for param in params:
        grad = torch.randn(param.shape, generator=generator, device="cpu") * factor
        param.grad = grad.to(param)


@pytest.fixture
def on_device(backend):
    """Makes parameters where the backend takes them."""

    def make(dtype=torch.float32, seed=0):
        device = torch.empty(0).device
        return [torch.nn.Parameter(p.detach().to(device)) for p in make_params(dtype, seed)]

    return make


def contents(optimizer):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = [optimizer.state[param] for param in params]
    return [p.detach().clone() for p in params] + [s[n].clone() for s in states for n in NAMES]


def assert_bitwise(these, those):
    assert all(torch.equal(one, other) for one, other in zip(these, those, strict=True))


@each_dtype
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.7, 30.0, 1e9, math.inf])
def test_clipping_agrees_with_the_oracle(max_grad_norm, dtype, backend, on_device):
    params = on_device(dtype)
    optimizer = FusedPadam(
        [{"params": params[:2], "lr": 0.01}, {"params": params[2:], "partial": 0.3}],
        weight_decay=0.1, bias_correction="adam", max_grad_norm=max_grad_norm, backend=backend,
    )  # fmt: skip
    for seed in range(3):
        set_grads(params, seed)
        step_and_check(optimizer)
        norm = float(exact_norm(params))
        assert optimizer.grad_norm.shape == ()
        assert optimizer.grad_norm.dtype == (
            torch.float64 if dtype == torch.float64 else torch.float32
        )
        assert float(optimizer.grad_norm) == pytest.approx(norm, rel=1e-6)


def test_clipping_can_be_turned_on_and_off(backend, on_device):
    params = on_device()
    optimizer = FusedPadam(params, weight_decay=0.1, backend=backend)
    for seed, bound in enumerate((None, 0.5, 0.5, None, 0.25, None, None)):
        optimizer.max_grad_norm = bound
        set_grads(params, seed)
        step_and_check(optimizer)


def test_tensors_of_several_dtypes_have_one_norm(backend, on_device):
    params = [param for dtype in DTYPES for param in on_device(dtype)]
    optimizer = FusedPadam(params, max_grad_norm=2.0, backend=backend)
    set_grads(params, 0)
    step_and_check(optimizer)
    assert optimizer.grad_norm.dtype == torch.float64
    assert float(optimizer.grad_norm) == pytest.approx(float(exact_norm(params)), rel=1e-6)


def test_gradients_that_no_kernel_can_read_are_in_the_norm(backend):
    param = torch.nn.Parameter(torch.randn(6, 5, dtype=torch.complex64))
    other = torch.nn.Parameter(torch.randn(6, 5))
    optimizer = FusedPadam([param, other], max_grad_norm=1.0, backend=backend)
    param.grad = torch.randn(5, 6, dtype=torch.complex64).t().conj()
    other.grad = torch.randn(5, 6).t()
    step_and_check(optimizer)
    assert float(optimizer.grad_norm) == pytest.approx(float(exact_norm([param, other])), rel=1e-6)


def test_without_gradients_the_norm_is_zero(backend, on_device):
    optimizer = FusedPadam(on_device(), max_grad_norm=1.0, backend=backend)
    assert optimizer.grad_norm is None
    optimizer.step()
    assert optimizer.grad_norm == 0


def test_the_norm_is_the_same_from_run_to_run(backend, on_device):
    norms = set()
    for _ in range(3):
        params = on_device()
        optimizer = FusedPadam(params, max_grad_norm=1.0, backend=backend)
        set_grads(params, 0)
        optimizer.step()
        norms.add(optimizer.grad_norm.item())
    assert len(norms) == 1


def test_a_norm_of_nan_reaches_everything_as_in_torch(backend, on_device):
    params = on_device()
    optimizer = FusedPadam(params, max_grad_norm=1.0, backend=backend)
    set_grads(params, 0)
    params[1].grad[7] = math.nan
    optimizer.step()
    assert optimizer.grad_norm.isnan()
    assert all(param.isnan().all() for param in params)
    assert optimizer.skipped_steps == 0


# Step counts that differ play a part with bias correction.
@pytest.mark.parametrize("bias_correction", ["none", "authors", "adam"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_step_of_nonfinite_norm_is_skipped(poison, bias_correction, backend, on_device):
    params, others = on_device(), on_device()
    options = {"weight_decay": 0.1, "bias_correction": bias_correction, "backend": backend}
    optimizer = FusedPadam(params, **options, skip_nonfinite=True)
    plain = FusedPadam(others, **options)
    for seed in range(7):
        for some in (params, others):
            set_grads(some, seed)
            if seed in (0, 3):
                some[0].grad = None
        if seed in (2, 4):
            params[1].grad[1030] = poison
            before = contents(optimizer)
            optimizer.step()
            assert_bitwise(before, contents(optimizer))
            assert not optimizer.grad_norm.isfinite()
        else:
            optimizer.step()
            plain.step()
            assert optimizer.grad_norm.isfinite()
    assert optimizer.skipped_steps == 2
    for one, other in zip(contents(optimizer), contents(plain), strict=True):
        # Corrections come from tensors in one optimizer, from numbers in the other.
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert [float(optimizer.state[p]["step"]) for p in params] == [3.0] + [5.0] * 4


def test_a_first_step_that_is_skipped(backend, on_device):
    params = on_device()
    optimizer = FusedPadam(params, bias_correction="adam", skip_nonfinite=True, backend=backend)
    before = [param.detach().clone() for param in params]
    set_grads(params, 0, math.inf)
    optimizer.step()
    assert_bitwise(before, [param.detach() for param in params])
    assert [float(optimizer.state[p]["step"]) for p in params] == [0.0] * 5
    set_grads(params, 1)
    step_and_check(optimizer)


class Scaled:
    """An optimizer that leaves all to the kernels, and one to which GradScaler shows its work."""

    def __init__(self, make, backend, monkeypatch, **options):
        self.monkeypatch = monkeypatch
        self.fused, self.plain = make(), make()
        device = self.fused[0].device.type
        self.optimizers = [
            FusedPadam(self.fused, **options, backend=backend),
            FusedPadam(self.plain, **options | {"max_grad_norm": None}, backend=backend),
        ]
        self.max_grad_norm = options.get("max_grad_norm")
        self.scalers = [torch.amp.GradScaler(device, init_scale=1000.0) for _ in range(2)]
        for scaler in self.scalers:
            scaler.scale(torch.ones((), device=device))  # makes its tensors

    def step(self, seed, factor=1.0, unscale_first=False):
        for params in (self.fused, self.plain):
            set_grads(params, seed, factor * float(self.scalers[0].get_scale()))
        grads = [param.grad.clone() for param in self.fused]
        if unscale_first:
            self.scalers[0].unscale_(self.optimizers[0])
            grads = [param.grad.clone() for param in self.fused]
        self.scalers[0].step(self.optimizers[0])
        self.scalers[0].update()
        for grad, param in zip(grads, self.fused, strict=True):
            assert torch.equal(grad.nan_to_num(), param.grad.nan_to_num())
        with self.monkeypatch.context() as context:
            context.setattr(FusedPadam, "_step_supports_amp_scaling", False)
            self.scalers[1].unscale_(self.optimizers[1])
            if self.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.plain, self.max_grad_norm)
            self.scalers[1].step(self.optimizers[1])
            self.scalers[1].update()

    def check(self):
        one, other = map(contents, self.optimizers)
        for mine, its in zip(one, other, strict=True):
            torch.testing.assert_close(mine, its, rtol=3e-6, atol=1e-7)
        assert self.scalers[0].get_scale() == self.scalers[1].get_scale()
        for name in ("grad_scale", "found_inf"):
            assert not hasattr(self.optimizers[0], name)


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("max_grad_norm", [None, 0.7])
@pytest.mark.parametrize("bias_correction", ["none", "adam"])
def test_steps_under_grad_scaler(
    bias_correction, max_grad_norm, unscale_first, backend, on_device, monkeypatch
):
    scaled = Scaled(
        on_device, backend, monkeypatch, weight_decay=0.1, bias_correction=bias_correction,
        max_grad_norm=max_grad_norm,
    )  # fmt: skip
    for seed in range(5):
        before = contents(scaled.optimizers[0]) if seed else []
        scaled.step(seed, math.inf if seed in (2, 3) else 1.0, unscale_first)
        if seed in (2, 3):
            assert_bitwise(before, contents(scaled.optimizers[0]))
        scaled.check()
    assert scaled.optimizers[0].skipped_steps == 2


def test_what_the_device_wrote_does_not_stay(backend, on_device):
    """With gradients that stay in place, so that nothing else has to be copied there."""
    params = on_device()
    optimizer = FusedPadam(params, skip_nonfinite=True, backend=backend)
    set_grads(params, 0, math.inf)
    optimizer.step()
    optimizer.skip_nonfinite = False
    with torch.no_grad():
        for param in params:
            param.grad.copy_(torch.randn(param.shape))
    step_and_check(optimizer)


def test_found_inf_counts_beside_a_finite_norm(backend, on_device):
    params = on_device()
    optimizer = FusedPadam(params, skip_nonfinite=True, backend=backend)
    set_grads(params, 0)
    optimizer.step()
    before = contents(optimizer)
    optimizer.found_inf = torch.tensor(1.0, device=params[0].device)
    optimizer.step()
    assert_bitwise(before, contents(optimizer))


def test_what_is_handed_over_may_have_a_dimension(backend, on_device):
    params = on_device()
    optimizer = FusedPadam(params, max_grad_norm=1.0, backend=backend)
    set_grads(params, 0)
    device = params[0].device
    optimizer.grad_scale = torch.ones(1, device=device)
    optimizer.found_inf = torch.zeros(1, device=device)
    step_and_check(optimizer)
    assert optimizer.grad_norm.shape == ()


def test_grad_scaler_comes_and_goes(backend, on_device, monkeypatch):
    """What the device wrote into the table for one step must not stay for the next."""
    scaled = Scaled(on_device, backend, monkeypatch, weight_decay=0.1, bias_correction="adam")
    optimizer = scaled.optimizers[0]
    scaled.step(0)
    set_grads(scaled.fused, 1)
    step_and_check(optimizer)
    for seed in (2, 3):
        set_grads(scaled.plain, seed - 1)
        scaled.optimizers[1].step()
        scaled.step(seed, math.inf if seed == 3 else 1.0)
        set_grads(scaled.fused, seed)
        step_and_check(optimizer)


def test_a_step_that_fails_leaves_nothing_of_grad_scaler(backend, on_device):
    """A plain step after it would divide its gradients by the scale."""
    params = make_params()
    optimizer = FusedPadam(params, eps=0.1, backend=backend)
    scaler = torch.amp.GradScaler(params[0].device.type)
    scaler.scale(sum(param.sum() for param in params)).backward()
    optimizer.param_groups[0]["eps"] = -1.0
    with pytest.raises(ValueError, match="eps"):
        scaler.step(optimizer)
    optimizer.param_groups[0]["eps"] = 0.1
    set_grads(params, 0)
    step_and_check(optimizer)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_grad_scaler_steps_an_optimizer_without_gradients(clip, backend, on_device):
    """It sets `found_inf` to the number 0 then."""
    params, unused = make_params(), make_params(seed=1)
    optimizers = [
        FusedPadam(those, max_grad_norm=clip, backend=backend) for those in (params, unused)
    ]
    scaler = torch.amp.GradScaler(params[0].device.type)
    for _ in range(2):
        scaler.scale(sum(param.sum() for param in params)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert all(optimizers[0].state[param]["step"] == 2 for param in params)
    assert not optimizers[1].state


def test_counts_outlive_a_change_of_backend_and_a_file(backend, on_device):
    params = on_device()
    optimizer = FusedPadam(params, skip_nonfinite=True, bias_correction="adam", backend=backend)
    for seed in range(2):
        set_grads(params, seed)
        step_and_check(optimizer)
    optimizer.backend = "eager"
    set_grads(params, 2)
    step_and_check(optimizer)
    optimizer.backend = backend
    set_grads(params, 3)
    step_and_check(optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.skip_nonfinite = False
    set_grads(params, 4)
    step_and_check(optimizer)
    assert all(optimizer.state[param]["step"] == 5 for param in params)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_grad_norm": -1.0}, r"max_grad_norm must be in \[0, inf\], got -1.0"),
        ({"max_grad_norm": math.nan}, r"max_grad_norm must be in \[0, inf\], got nan"),
    ],
    ids=["negative", "nan"],
)
def test_a_bound_that_is_none(option, message):
    with pytest.raises(ValueError, match=message):
        FusedPadam(make_params(), **option)


@pytest.mark.parametrize(
    "option", [{"max_grad_norm": "1"}, {"max_grad_norm": True}, {"skip_nonfinite": "yes"}], ids=str
)
def test_options_of_a_wrong_type(option):
    [[name, value]] = option.items()
    with pytest.raises(TypeError, match=f"{name} must be"):
        FusedPadam(make_params(), **option)
    assert_a_step_refuses(name, value, f"{name} must be")


@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
@pytest.mark.parametrize("value", [4.0, torch.ones(2)], ids=["a number", "two elements"])
def test_what_is_handed_over_must_be_one_element(value, name):
    assert_a_step_refuses(name, value, f"{name} must be a tensor of one element")


def test_a_scale_of_zero_is_no_scale():
    assert_a_step_refuses("grad_scale", 0, "grad_scale must be a tensor of one element")


def assert_a_step_refuses(attribute, value, message):
    params = make_params()
    optimizer = FusedPadam(params)
    set_grads(params, 0)
    setattr(optimizer, attribute, value)
    with pytest.raises(TypeError, match=message):
        optimizer.step()


def test_eager_sums_long_gradients_precisely():
    param = torch.nn.Parameter(torch.ones(5_000_000))
    optimizer = FusedPadam([param], max_grad_norm=1.0, backend="eager")
    param.grad = torch.full_like(param, 1e-3)
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(5_000_000**0.5 * 1e-3, rel=1e-6)


@pytest.mark.parametrize("option", [{"max_grad_norm": 1.0}, {"skip_nonfinite": True}], ids=str)
def test_groups_cannot_have_bounds_of_their_own(option):
    with pytest.raises(ValueError, match="is for the whole optimizer"):
        FusedPadam([{"params": make_params(), **option}])


@pytest.mark.parametrize("option", [{"max_grad_norm": 1.0}, {"skip_nonfinite": True}], ids=str)
def test_one_parameter_has_not_the_norm_of_all(option):
    [param, *_] = params = make_params()
    optimizer = FusedPadam(params, **option)
    set_grads(params, 0)
    before = param.detach().clone()
    with pytest.raises(RuntimeError, match="step_params cannot be used"):
        optimizer.step_param(param)
    assert torch.equal(before, param)


def test_copies_keep_the_bounds():
    optimizer = FusedPadam(make_params(), max_grad_norm=2.0, skip_nonfinite=True)
    for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert made.max_grad_norm == 2.0
        assert made.skip_nonfinite
        assert made.grad_norm is None
        assert made.skipped_steps == 0


def test_squares_beyond_float32_do_not_overflow_on_the_cpu():
    param = torch.nn.Parameter(torch.ones(100))
    optimizer = FusedPadam([param], max_grad_norm=1.0, backend="cpu")
    param.grad = torch.full((100,), 1e30)
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(1e31)
    expected = (as_exact(torch.tensor(0.1)) * 0.1).astype(float)
    assert optimizer.state[param]["exp_avg"][0] == pytest.approx(float(expected), rel=1e-6)
