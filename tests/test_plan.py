"""Nothing stale: whatever happens to tensors between steps, the next step sees what is there."""

import collections
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from checking import step_and_check
from padam_ext import FusedPadam, buckets, plan
from padam_ext.gather import NativeGatherer, PythonGatherer, best_gatherer
from padam_ext.plan import ALL_PARAMS

pytestmark = [pytest.mark.sanitize, pytest.mark.gpu_variants]


@pytest.fixture(params=[NativeGatherer, PythonGatherer], autouse=True)
def gatherer(request, monkeypatch):
    """Either way of reading tensors; without DLPack's interface torch allows the second only."""
    if request.param is NativeGatherer and not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip(f"torch {torch.__version__} lacks the interface that this one needs")
    monkeypatch.setattr("padam_ext.plan.best_gatherer", request.param)


def replace_data(param, optimizer):
    param.data = torch.randn_like(param)


def transpose_data_in_place(param, optimizer):
    param.data = param.data.t()  # square: same address, same shape


def shrink_and_grow_data(param, optimizer):
    values = torch.randn(12, 12)
    param.data = values[2:8, 2:8]  # now with gaps


def cast_to_half(param, optimizer):
    param.data = param.data.bfloat16()


def cast_to_double(param, optimizer):
    param.data = param.data.double()


def replace_states(param, optimizer):
    state = optimizer.state[param]
    for key in state:
        state[key] = state[key].clone() + 1


def replace_state_data(param, optimizer):
    for value in optimizer.state[param].values():
        value.data = value.data.clone() + 1


def states_in_another_layout(param, optimizer):
    state = optimizer.state[param]
    for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        state[key] = state[key].t().contiguous().t()


def states_in_another_dtype(param, optimizer):
    state = optimizer.state[param]
    for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        state[key] = state[key].double()


def replace_state_dict_of_the_parameter(param, optimizer):
    optimizer.state[param] = {key: value + 1 for key, value in optimizer.state[param].items()}


def set_the_counter(param, optimizer):
    optimizer.state[param]["step"].fill_(41)


def counter_as_a_number(param, optimizer):
    optimizer.state[param]["step"] = 41


def forget_the_state(param, optimizer):
    optimizer.state.clear()


def forget_one_moment_of_amsgrad(param, optimizer):
    del optimizer.state[param]["max_exp_avg_sq"]
    optimizer.state[param]["max_exp_avg_sq"] = optimizer.state[param]["exp_avg_sq"].clone()


def assign_a_new_state(param, optimizer):
    optimizer.state = collections.defaultdict(dict)


def negate_lazily(param, optimizer):
    param.data = torch.view_as_complex(torch.randn(*param.shape, 2)).conj().imag
    assert param.is_neg()


def remove_from_the_group(param, optimizer):
    del optimizer.param_groups[0]["params"][1]
    optimizer.add_param_group({"params": [param], "lr": 0.01})


def swap_the_order(param, optimizer):
    optimizer.param_groups[0]["params"].reverse()


def another_backend(param, optimizer):
    optimizer.backend = "eager" if optimizer.backend != "eager" else "auto"


def freeze_the_other(param, optimizer):
    optimizer.param_groups[0]["params"][0].requires_grad_(False)


CHANGES = [
    replace_data, transpose_data_in_place, shrink_and_grow_data, cast_to_half, cast_to_double,
    replace_states, replace_state_data, states_in_another_layout, states_in_another_dtype,
    replace_state_dict_of_the_parameter, set_the_counter, counter_as_a_number, forget_the_state,
    forget_one_moment_of_amsgrad, assign_a_new_state, negate_lazily,
    remove_from_the_group, swap_the_order,
    another_backend, freeze_the_other,
]  # fmt: skip


# torch refuses a gradient of another dtype, so a cast cannot keep the old one
STEPS = [(change, False) for change in CHANGES] + [
    (change, True) for change in CHANGES if change not in (cast_to_half, cast_to_double)
]


@pytest.mark.parametrize(
    ("change", "keep_gradient"),
    STEPS,
    ids=[f"{change.__name__}-{'same' if keep else 'new'}-gradients" for change, keep in STEPS],
)
def test_the_next_step_sees(change, keep_gradient, backend):
    torch.manual_seed(0)
    other = torch.nn.Parameter(torch.randn(5))
    param = torch.nn.Parameter(torch.randn(6, 6))
    optimizer = FusedPadam(
        [other, param], weight_decay=0.1, bias_correction="adam", backend=backend
    )
    for step in range(6):
        if step == 3:
            change(param, optimizer)
        for p in (other, param):
            if not p.requires_grad:
                p.grad = None
            elif keep_gradient and p.grad is not None:
                p.grad.normal_()
            else:
                p.grad = torch.randn(p.shape).to(p.dtype)
        step_and_check(optimizer)


def test_a_parameter_that_is_conjugated_between_steps(backend):
    """Lazily, so that only one bit of the tensor changes: not its address, nor its strides."""
    param = torch.nn.Parameter(torch.randn(5, dtype=torch.complex64))
    optimizer = FusedPadam([param], weight_decay=0.1, backend=backend)
    for step in range(4):
        assert param.is_conj() == step % 2
        param.grad = torch.randn(5, dtype=torch.complex64)
        step_and_check(optimizer)
        param.data = param.data.conj()


@pytest.mark.parametrize("which", ["param", "grad"])
@pytest.mark.parametrize("order", ["01", "10", "0110"])
def test_a_tensor_whose_data_is_negated_at_the_same_address(order, which, backend):
    """c.imag and c.conj().imag differ in one bit of the tensor only."""
    c = torch.randn(5, dtype=torch.complex64)
    param = torch.nn.Parameter(torch.randn(5))
    optimizer = FusedPadam([param], weight_decay=0.1, backend=backend)
    param.grad = torch.randn(5)
    for negated in order:
        view = (c.conj() if negated == "1" else c).imag
        assert view.is_neg() == (negated == "1")
        (param if which == "param" else param.grad).data = view
        step_and_check(optimizer)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.detach(),
        lambda t: t.t(),
        lambda t: t[0, ::3],
        lambda t: t[0, 0],
        lambda t: t[0, 0].view(1, 1).contiguous(),
        lambda t: t[:1].expand(5, 6),
        lambda t: t.diagonal(),
        lambda t: t.unfold(0, 2, 1),
        lambda t: t.reshape(3, 2, 5),
        lambda t: t.unflatten(1, (2, 3)).permute(2, 0, 1),
        lambda t: torch.nn.Parameter(t),
    ],
)
def test_only_tensors_of_even_strides_are_negated_lazily(view):
    """The native gatherer asks only those. In all else torch negates the values themselves."""
    lazy = view(torch.randn(5, 6, dtype=torch.complex64).conj().imag)
    assert lazy.is_neg()
    strides = zip(lazy.shape, lazy.stride(), strict=True)
    assert all(stride % 2 == 0 for size, stride in strides if size > 1)
    for other in (lazy.clone(), lazy.double(), lazy.neg(), lazy.resolve_neg(), lazy + 1):
        assert not other.is_neg()


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_that_move_or_stay(set_to_none, backend):
    param = torch.nn.Parameter(torch.randn(40, 40))
    optimizer = FusedPadam([param], weight_decay=0.1, backend=backend)
    hoard = []
    for step in range(6):
        optimizer.zero_grad(set_to_none)
        (param * torch.randn(40, 40)).sum().backward()
        if step % 2:
            hoard.append(torch.empty(40, 40))  # moves the allocator along
        step_and_check(optimizer)


def test_gradients_that_change_layout_at_the_same_address(backend):
    param = torch.nn.Parameter(torch.randn(6, 6))
    optimizer = FusedPadam([param], backend=backend)
    memory = torch.randn(6, 6)
    for _ in range(2):
        for grad in (memory, memory.t(), memory[:1].expand(6, 6)):
            param.grad = grad
            step_and_check(optimizer)


@pytest.mark.parametrize("order", ["0001110101", "0000000001"])
def test_a_gradient_negated_where_another_was(order):
    """At the same address, and as a Python object at the same place."""
    param = torch.nn.Parameter(torch.randn(5))
    memory = torch.randn(5, dtype=torch.complex64)
    views = memory.imag, memory.conj().imag
    gatherer = best_gatherer()
    read = {"0": set(), "1": set()}
    places = set()
    for negated in order:
        param.grad = None
        param.grad = views[int(negated)].detach()
        places.add(id(param.grad))
        read[negated].add(gatherer.gather([(0, [param])], {}).reading.pieces()[0])
    assert len(places) < len(order)
    assert len(read["0"]) == len(read["1"]) == 1
    assert read["0"] != read["1"]


def test_the_set_of_gradients_changes_every_step(backend):
    params = [torch.nn.Parameter(torch.randn(5)) for _ in range(4)]
    optimizer = FusedPadam(params, bias_correction="authors", backend=backend)
    for step in range(12):
        for i, param in enumerate(params):
            param.grad = torch.randn(5) if (step >> i) & 1 or i == step % 4 else None
        step_and_check(optimizer)


def strided_gradient(params):
    params[3].grad = torch.ones(8, 4).t()


def new_data(params):
    params[3].data = params[3].data.clone()


def no_gradient(params):
    params[3].grad = None


def no_gradient_of_half(params):
    for param in params[::2]:
        param.grad = None


@pytest.mark.parametrize(
    ("change", "remade"),
    [(strided_gradient, 1), (new_data, 1), (no_gradient, 0), (no_gradient_of_half, 0)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_change_of_one_parameter_leaves_the_records_of_the_others(
    change, remade, backend, monkeypatch
):
    params = [torch.nn.Parameter(torch.ones(4, 8)) for _ in range(7)]
    optimizer = FusedPadam(params, backend=backend)
    made = []

    def make_record(*args, **kwargs):
        made.append(args[0])
        return buckets.make_record(*args, **kwargs)

    monkeypatch.setattr(plan, "make_record", make_record)
    for expected in (len(params), remade):
        for param in params:
            param.grad = torch.ones(4, 8)
        if expected != len(params):
            change(params)
        optimizer.step()
        assert len(made) == expected
        made.clear()


def test_gradients_are_not_kept_alive(backend):
    import weakref

    param = torch.nn.Parameter(torch.randn(5))
    optimizer = FusedPadam([param], backend=backend)
    param.grad = torch.randn(5)
    optimizer.step()
    gone = weakref.ref(param.grad)
    param.grad = None
    gc.collect()
    assert gone() is None


def test_a_gradient_of_zeros_without_memory(backend):
    param = torch.nn.Parameter(torch.randn(4))
    optimizer = FusedPadam([param], backend=backend)
    zeros = torch._efficientzerotensor((4,), device=param.device)  # takes no default device
    for grad in (torch.ones(4), zeros, torch.ones(4)):
        param.grad = grad
        step_and_check(optimizer)


@pytest.mark.parametrize("which", ["param", "grad", "exp_avg"])
def test_a_tensor_whose_storage_was_freed_is_refused(which, backend):
    param = torch.nn.Parameter(torch.randn(4))
    param.grad = torch.ones(4)
    optimizer = FusedPadam([param], backend=backend)
    optimizer.step()
    tensors = {"param": param, "grad": param.grad, **optimizer.state[param]}
    tensors[which].untyped_storage().resize_(0)
    with pytest.raises((RuntimeError, TypeError), match="has no memory"):
        optimizer.step()


def test_hundreds_of_groups_keep_their_plan():
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(300)]
    optimizer = FusedPadam([{"params": [param]} for param in params])
    for _ in range(2):
        for param in params:
            param.grad = torch.ones(2)
        optimizer.step()
    plan = optimizer._planner._plans[ALL_PARAMS][0]
    optimizer.step()
    assert optimizer._planner._plans[ALL_PARAMS][0] is plan


@pytest.mark.parametrize("options", [{}, {"bias_correction": "adam"}, {"max_grad_norm": 1.0}])
def test_sets_of_gradients_that_alternate_keep_their_plans(options, backend, monkeypatch):
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(4)]
    optimizer = FusedPadam(params, weight_decay=0.1, backend=backend, **options)
    sets = [params, params[:2], params[1:]]
    made = []
    original = plan.make_buckets
    monkeypatch.setattr(plan, "make_buckets", lambda *args: made.append(1) or original(*args))
    for step in range(9):
        optimizer.zero_grad()
        for param in sets[step % 3]:
            param.grad = torch.full((3,), 0.5 + step)
        step_and_check(optimizer)
    assert len(made) == 3
    for kept in sets[:2] * 3:  # and many others, of which few are kept
        for count in range(1, 4):
            optimizer.zero_grad()
            for param in kept[:count]:
                param.grad = torch.ones(3)
            step_and_check(optimizer)
    assert len(optimizer._planner._plans[ALL_PARAMS]) <= plan.MOST_PLANS


def test_a_replaced_parameter_is_seen_by_every_plan(backend):
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = FusedPadam(params, weight_decay=0.1, backend=backend)
    for step in range(6):
        optimizer.zero_grad()
        for param in params[step % 2 :]:
            param.grad = torch.full((3,), 0.5 + step)
        if step >= 2:
            params[1].data = params[1].data.clone()
        step_and_check(optimizer)


def test_steps_of_two_threads_do_not_share_what_they_read():
    """Asking torch about a tensor lets other threads run."""
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(500)]
    for param in params:
        param.grad = torch.ones(2)
    gatherer = FusedPadam(params)._planner._gatherer
    lengths = set()

    def gather():
        for _ in range(40):
            for param in params[::7]:
                param.grad = torch.ones(2)
            lengths.add(len(gatherer.gather([(0, params)], {}).grad_addresses))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(gather) for _ in range(4)]:
            done.result()
    assert lengths == {500 * 8}


@pytest.mark.parametrize("negated", ["param", "grad"])
def test_a_tensor_negated_lazily_in_a_row(negated, backend):
    """Only torch's private `_neg_view` makes one without gaps; a reading does not look for it."""
    values, grad = torch.randn(4), torch.randn(4)
    param = torch.nn.Parameter(torch._neg_view(values) if negated == "param" else values)
    param.grad = torch._neg_view(grad) if negated == "grad" else grad
    step_and_check(FusedPadam([param], backend=backend))
