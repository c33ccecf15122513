"""The edges of the specification: infinities, NaN, gradients that come and go, lists."""

import pytest
import torch

from cases import SLOWLY, each_dtype, each_partial
from checking import assert_same, step_and_check
from padam_ext import FusedPadam

pytestmark = [
    pytest.mark.numbers,
    pytest.mark.sanitize,
    pytest.mark.gpu_variants,
    pytest.mark.ptx_variants,
]


def parameter(values, dtype=torch.float32):
    return torch.nn.Parameter(torch.as_tensor(values, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_a_zero_gradient_in_a_half_type_changes_nothing(dtype, backend):
    param = parameter([1.0, -3.0, 0.0], dtype)
    before = param.detach().clone()
    optimizer = FusedPadam([param], backend=backend)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(param, before)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@each_partial
@each_dtype
def test_a_gradient_that_is_not_finite_is_seen_and_stays_in_its_coordinate(
    bad, partial, dtype, backend
):
    param = parameter(torch.ones(40), dtype)
    optimizer = FusedPadam([param], partial=partial, backend=backend)
    param.grad = torch.ones_like(param)
    param.grad[7] = bad
    step_and_check(optimizer)
    state = optimizer.state[param]
    assert not param[7].isfinite() or partial > 0
    assert not state["exp_avg"][7].isfinite()
    others = torch.arange(40) != 7
    assert param[others].isfinite().all()
    # The running maximum keeps what it saw, NaN included.
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert state["max_exp_avg_sq"][7].isnan() if bad != bad else state["max_exp_avg_sq"][7].isinf()
    assert not param[7].isfinite()


@pytest.mark.parametrize("where", ["exp_avg_sq", "max_exp_avg_sq"])
@each_dtype
def test_nan_in_either_second_moment_stays(where, dtype, backend):
    param = parameter(torch.ones(41), dtype)
    optimizer = FusedPadam([param], backend=backend)
    for step in range(3):
        param.grad = torch.ones_like(param)
        step_and_check(optimizer)
        if step == 0:
            optimizer.state[param][where][[7, 40]] = torch.nan  # in a vector and in what follows
    assert optimizer.state[param]["max_exp_avg_sq"].isnan().nonzero().flatten().tolist() == [7, 40]


@pytest.mark.parametrize("second_moment", ["mean", "sum", "max", "yogi"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@each_dtype
def test_what_is_not_finite_stays_in_every_second_moment(bad, second_moment, dtype, backend):
    param = parameter(torch.ones(41), dtype)
    optimizer = FusedPadam(
        [param], amsgrad=False, second_moment=second_moment, weight_decay=0.1, backend=backend
    )
    for value in (0.5, bad, 0.25, bad):
        param.grad = torch.ones_like(param)
        param.grad[[7, 40]] = value  # in a vector and in what follows
        step_and_check(optimizer)
    v = optimizer.state[param]["exp_avg_sq"]
    assert (~v.isfinite()).nonzero().flatten().tolist() == [7, 40]


@pytest.mark.parametrize("second_moment", ["mean", "sum", "max", "yogi"])
def test_a_square_that_is_too_large_leaves_an_infinity(second_moment, backend):
    """And not a NaN, by a difference of two of them: the element stops."""
    param = parameter(torch.ones(41))
    optimizer = FusedPadam([param], amsgrad=False, second_moment=second_moment, backend=backend)
    for _ in range(3):
        param.grad = torch.full_like(param, 1e21)
        optimizer.step()
    assert (optimizer.state[param]["exp_avg_sq"] == torch.inf).all()
    assert (param == 1).all()


@each_dtype
def test_yogi_leaves_v_where_it_is_the_square(dtype, backend):
    """The oracle's bounds take either sign there."""
    param = parameter(torch.ones(41), dtype)
    optimizer = FusedPadam([param], amsgrad=False, second_moment="yogi", backend=backend)
    optimizer.init_state()
    v = optimizer.state[param]["exp_avg_sq"].fill_(4.0)
    param.grad = torch.full_like(param, -2.0)
    optimizer.step()
    assert (v == 4.0).all()


@pytest.mark.parametrize("decoupled", [False, True])
def test_without_weight_decay_an_infinite_parameter_makes_no_nan(decoupled, backend):
    param = parameter([torch.inf, 1.0])
    optimizer = FusedPadam([param], decoupled_weight_decay=decoupled, backend=backend)
    param.grad = torch.ones(2)
    optimizer.step()
    assert param[0] == torch.inf
    assert optimizer.state[param]["exp_avg"].isfinite().all()


@each_partial
@each_dtype
@pytest.mark.parametrize("tensor_options", [False, True])
def test_an_infinite_parameter_stays_infinite_under_decoupled_decay(
    tensor_options, partial, dtype, backend
):
    """As with AdamW: x * (1 - lr * wd), not x - x * lr * wd."""
    values = torch.tensor([-torch.inf, torch.inf, 1.0] * 7)
    param, twin = parameter(values, dtype), parameter(values, dtype)
    decay = torch.tensor(0.25) if tensor_options else 0.25
    optimizer = FusedPadam(
        [param], weight_decay=decay, decoupled_weight_decay=True, partial=partial,
        bias_correction="adam", backend=backend,
    )  # fmt: skip
    adam = torch.optim.AdamW([twin], lr=0.1, weight_decay=0.25, amsgrad=True)
    for _ in range(2):
        param.grad, twin.grad = torch.ones_like(param), torch.ones_like(twin)
        step_and_check(optimizer)
        adam.step()
    infinite = twin.isinf()
    assert infinite.sum() == 14
    assert torch.equal(param[infinite], twin[infinite])
    if partial == 0.5:
        torch.testing.assert_close(param, twin, rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=0)


def test_parameters_without_a_gradient_keep_everything_and_get_no_state(backend):
    always, later, never = parameter([1.0]), parameter([2.0]), parameter([3.0])
    optimizer = FusedPadam(
        [always, later, never], bias_correction="adam", weight_decay=0.1, backend=backend
    )
    for step in range(6):
        always.grad = torch.ones(1)
        later.grad = torch.full((1,), 0.5) if step in (2, 3, 5) else None
        step_and_check(optimizer)
    assert never.item() == 3.0
    assert never not in optimizer.state
    assert optimizer.state[always]["step"] == 6
    assert optimizer.state[later]["step"] == 3


def test_a_step_without_any_gradient_does_nothing(backend):
    param = parameter([1.0])
    optimizer = FusedPadam([param], backend=backend)
    optimizer.step()
    assert param.item() == 1.0
    assert not optimizer.state


@pytest.mark.parametrize(
    "sizes",
    [[0], [0, 5], [5, 0], [5, 0, 7], [0, 0, 5, 0, 0, 3, 0]],
    ids=["alone", "first", "last", "between", "everywhere"],
)
def test_empty_tensors_stop_nobody(sizes, backend):
    params = [parameter(torch.randn(size)) for size in sizes]
    optimizer = FusedPadam(params, weight_decay=0.1, backend=backend)
    for _ in range(2):
        for param in params:
            param.grad = torch.randn_like(param)
        step_and_check(optimizer)
    assert all(optimizer.state[param]["step"] == 2 for param in params)


def test_scalars(backend):
    param = parameter(2.5)
    optimizer = FusedPadam([param], weight_decay=0.1, backend=backend)
    for _ in range(2):
        param.grad = torch.tensor(0.7)
        step_and_check(optimizer)
    assert optimizer.state[param]["exp_avg"].shape == ()


def test_groups_keep_their_own_options(backend):
    options = [
        {"lr": 0.5, "weight_decay": 0.1},
        {"betas": (0.5, 0.9), "partial": 0.4, "amsgrad": False},
        {"eps": 1e-2, "partial": 0.5, "bias_correction": "adam"},
        {"maximize": True, "decoupled_weight_decay": True, "weight_decay": 0.2},
        {"bias_correction": "authors", "partial": 0.0},
    ]
    groups = [
        {"params": [parameter(torch.randn(size)) for size in (3, 100)], **option}
        for option in options
    ]
    optimizer = FusedPadam(groups, backend=backend)
    for _ in range(3):
        for group in groups:
            for param in group["params"]:
                param.grad = torch.randn_like(param)
        step_and_check(optimizer)


def test_dtypes_mix_in_one_optimizer(backend):
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32]
    params = [parameter(torch.randn(50), dtype) for dtype in dtypes]
    optimizer = FusedPadam(params, weight_decay=0.1, partial=0.2, backend=backend)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        step_and_check(optimizer)


def test_thousands_of_tensors(backend):
    params = [parameter(torch.randn(1 + i % 13)) for i in range(200 if SLOWLY else 2000)]
    reference = [parameter(torch.cat([p.detach() for p in params]))]
    optimizer = FusedPadam(params, weight_decay=0.1, backend=backend)
    joined = FusedPadam(reference, weight_decay=0.1, backend=backend)
    for _ in range(1 if SLOWLY else 2):
        for param in params:
            param.grad = torch.randn_like(param)
        reference[0].grad = torch.cat([p.grad for p in params])
        optimizer.step()
        joined.step()
    assert_same(torch.cat([p.detach() for p in params]), reference[0], backend)


def test_options_changed_between_steps_take_effect(backend):
    param = parameter(torch.randn(20))
    lr = torch.tensor(0.05)
    optimizer = FusedPadam([param], lr=lr, backend=backend)
    for change in (
        {}, {"lr": 0.01}, {"lr": lr}, {"betas": [0.5, 0.9]}, {"partial": 0.3},
        {"weight_decay": 0.2}, {"eps": 1e-3}, {"maximize": True}, {"bias_correction": "adam"},
    ):  # fmt: skip
        optimizer.param_groups[0].update(change)
        lr.mul_(0.5)
        param.grad = torch.randn_like(param)
        step_and_check(optimizer)
    assert lr.item() == pytest.approx(0.05 * 0.5**9)


def test_amsgrad_switched_on_later_starts_from_the_second_moment(backend):
    param = parameter(torch.randn(20))
    optimizer = FusedPadam([param], amsgrad=False, backend=backend)
    param.grad = torch.randn_like(param)
    step_and_check(optimizer)
    assert "max_exp_avg_sq" not in optimizer.state[param]
    before = optimizer.state[param]["exp_avg_sq"].clone()
    optimizer.param_groups[0]["amsgrad"] = True
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(optimizer.state[param]["max_exp_avg_sq"], before)
    optimizer.param_groups[0]["amsgrad"] = False
    param.grad = torch.randn_like(param)
    step_and_check(optimizer)
