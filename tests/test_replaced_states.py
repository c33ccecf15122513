"""States that users replace, share or supply, and plans that must see it and hold nothing back."""

import copy
import gc
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cases import ON_CPU
from checking import AS_ADAM, Watched, step_and_check
from padam_ext import FusedPadam, IterateSampler, plan, step_during_backward

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def make_twins(backend, size=5, **options):
    """A parameter with its optimizer, and the same with torch's AMSGrad."""
    values = torch.linspace(-1, 1, size)
    param, twin = (torch.nn.Parameter(values.clone()) for _ in range(2))
    optimizer = FusedPadam([param], **AS_ADAM, backend=backend, **options)
    return param, optimizer, twin, torch.optim.Adam([twin], lr=0.1, amsgrad=True)


def assert_like_adam(param, optimizer, twin, adam):
    torch.testing.assert_close(param.detach().to(twin.dtype), twin.detach(), rtol=1e-5, atol=1e-6)
    for key, value in adam.state[twin].items():
        ours = optimizer.state[param][key].to(value.dtype)
        torch.testing.assert_close(ours, value, rtol=1e-5, atol=1e-6, msg=key)


# Whoever replaces a state, every plan must see it. `optimizer.state` is not touched until the end:
# whoever has had it may have replaced states, so then every step looks.


@pytest.mark.parametrize("how", ["plain", "scaled", "capturable"])
@pytest.mark.parametrize("order", ["one first", "all first"])
def test_step_param_and_step_in_turns(how, order, backend):
    capturable = how == "capturable"
    if capturable and backend in ("cpu", "eager"):
        pytest.skip(f"{backend} has no graphs")
    param, optimizer, twin, adam = make_twins(backend, capturable=capturable)
    for number in range(6):
        param.grad = twin.grad = torch.full((5,), 0.5 + number)
        if number % 2 == (order == "all first"):
            optimizer.step_param(param)
        else:
            if how == "scaled":
                param.grad = param.grad * 8
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
            optimizer.step()
            optimizer.grad_scale = optimizer.found_inf = None
        adam.step()
    assert optimizer.state[param]["step"] == 6
    assert_like_adam(param, optimizer, twin, adam)


@pytest.mark.parametrize("backend", ON_CPU, indirect=True)
def test_a_counter_that_one_step_moves_is_seen_by_all_plans(backend, monkeypatch):
    """On a GPU it moves there once a step may be skipped. Here it moves to another tensor."""
    moved = set()

    def move(bucket, inputs, *, on_device):
        params = [inputs.params[position] for position in bucket.positions]
        moving = [i for i, param in enumerate(params) if on_device and param not in moved]
        for i in moving:
            state = inputs.state[params[i]]
            state["step"] = state["step"].clone()
            bucket.records[i].take_counter(state["step"])
            moved.add(params[i])
        return len(moving) > 0

    monkeypatch.setattr(plan, "place_counters", move)
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = FusedPadam(params, backend=backend)
    for param in params:
        param.grad = torch.ones(3)
    optimizer.step()
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step_param(params[0])
    optimizer.found_inf = None
    optimizer.step()
    assert [float(optimizer.state[param]["step"]) for param in params] == [3, 2]


def to_double(param):
    param.data = param.data.double()


def transpose(param):
    param.data = param.data.t().contiguous().t()


@pytest.mark.parametrize("change", [to_double, transpose], ids=lambda f: f.__name__)
@pytest.mark.parametrize("order", ["one, all", "all, one"])
def test_data_of_another_kind_for_one_step(change, order, backend):
    """The step between may replace the states; the plan made before it fits the data again."""
    param = torch.nn.Parameter(torch.randn(3, 3))
    optimizer = FusedPadam([param], backend=backend)
    steps = [lambda: optimizer.step_param(param), optimizer.step]
    one, other = steps if order == "one, all" else steps[::-1]
    param.grad = torch.ones(3, 3)
    one()
    data = param.data
    param.grad = None
    change(param)
    param.grad = torch.ones_like(param)
    other()
    data.copy_(param.data)
    param.grad = None
    param.data = data
    param.grad = torch.ones(3, 3)
    before = param.detach().clone()
    one()
    state = optimizer.state[param]
    assert state["step"] == 3
    torch.testing.assert_close(state["exp_avg"].float(), torch.full((3, 3), 1 - 0.9**3))
    v = torch.full((3, 3), 1 - 0.999**3)
    for key in MOMENTS[1:]:
        torch.testing.assert_close(state[key].float(), v, rtol=1e-5, atol=0)
    moved = 0.1 * (1 - 0.9**3) / v.sqrt() ** 0.25
    torch.testing.assert_close(param.detach(), before - moved, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["step", "step_param"])
@pytest.mark.parametrize("through", ["copy", "original"])
def test_a_shallow_copy_shares_states_that_are_replaced(through, how, backend):
    param = torch.nn.Parameter(torch.ones(4))
    original = FusedPadam([param], backend=backend)
    param.grad = torch.ones(4)
    original.step()
    replacing, stepping = copy.copy(original), original
    if through == "original":
        replacing, stepping = stepping, replacing

    def step():
        stepping.step() if how == "step" else stepping.step_param(param)

    step()
    replacing.state[param]["exp_avg"] = torch.full((4,), 5.0)
    watched = Watched(replacing, param)
    step()
    watched.check(replacing)


def test_a_shallow_copy_and_its_original_step_in_turns(backend):
    param, optimizer, twin, adam = make_twins(backend)
    other = copy.copy(optimizer)
    for number in range(6):
        param.grad = twin.grad = torch.full((5,), 0.5 + number)
        stepping = optimizer if number % 2 else other
        if number in (2, 5):  # counts on the device, where there is one
            stepping.found_inf = torch.tensor(0.0)
        stepping.step()
        stepping.found_inf = None
        adam.step()
    assert_like_adam(param, other, twin, adam)
    assert_like_adam(param, optimizer, twin, adam)


# What the address does not tell.


def transposed(state):
    state["exp_avg"] = state["exp_avg"].t()


def as_integers(state):
    state["max_exp_avg_sq"].fill_(2.0)
    state["max_exp_avg_sq"] = state["max_exp_avg_sq"].view(torch.int32)  # 2**30


def every_other_row(state):
    state["exp_avg"].resize_(12, 6).copy_(torch.randn(12, 6))
    state["exp_avg"] = state["exp_avg"][::2]


def transposed_in_place(state):
    state["exp_avg"].t_()


CHANGES = [transposed, as_integers, every_other_row, transposed_in_place]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_state_at_the_same_address(change, backend):
    param = torch.nn.Parameter(torch.randn(6, 6))
    optimizer = FusedPadam([param], backend=backend)
    for number in range(4):
        if number == 2:
            address = optimizer.state[param]["exp_avg"].data_ptr()
            change(optimizer.state[param])
            assert (
                optimizer.state[param]["exp_avg"].data_ptr() == address or change == every_other_row
            )
        param.grad = torch.randn(6, 6)
        step_and_check(optimizer)


@pytest.mark.parametrize("shape", [(9, 4), (36,), (6, 3)], ids=str)
def test_a_state_of_another_shape_at_the_same_address(shape, backend):
    param = torch.nn.Parameter(torch.randn(6, 6))
    optimizer = FusedPadam([param], backend=backend)
    param.grad = torch.randn(6, 6)
    for _ in range(2):
        step_and_check(optimizer)
    before = param.detach().clone()
    moment = optimizer.state[param]["exp_avg"]
    size = shape[0] * (shape[1:] or (1,))[0]
    optimizer.state[param]["exp_avg"] = moment.flatten()[:size].view(shape)
    with pytest.raises(
        ValueError, match=r"exp_avg.* has shape \(.*the parameter has shape \(6, 6\)"
    ):
        optimizer.step()
    assert torch.equal(param, before)
    assert optimizer.state[param]["step"] == 2


# Supplied by the user: updated in place.


def counter(dtype, shape):
    return pytest.param(
        lambda: torch.full(shape, 3, dtype=dtype), id=f"{dtype} {shape}".removeprefix("torch.")
    )


each_counter = pytest.mark.parametrize(
    "make_counter",
    [
        counter(torch.float32, ()), counter(torch.float32, (1,)), counter(torch.float32, (1, 1)),
        counter(torch.float64, ()), counter(torch.float64, (1,)), counter(torch.int64, ()),
        counter(torch.int64, (1,)), counter(torch.int32, ()),
    ],
)  # fmt: skip


def supply(optimizer, param, step):
    optimizer.state[param] = {
        "step": step,
        "exp_avg": torch.full_like(param, 0.1),
        "exp_avg_sq": torch.full_like(param, 0.02),
        "max_exp_avg_sq": torch.full_like(param, 0.03),
    }


@each_counter
@pytest.mark.parametrize("how", ["step", "step_param", "found_inf"])
def test_a_supplied_counter_is_counted_in_place(how, make_counter, backend):
    param, optimizer, twin, adam = make_twins(backend)
    step = make_counter()
    supply(optimizer, param, step)
    supply(adam, twin, torch.tensor(3.0))
    for number in range(3):
        param.grad = twin.grad = torch.full((5,), 0.5 + number)
        if how == "step_param":
            optimizer.step_param(param)
        elif how == "step":
            optimizer.step()
        else:
            optimizer.found_inf = torch.tensor(0.0)
            optimizer.step()
            if number == 1:
                optimizer.found_inf = torch.tensor(1.0)
                optimizer.step()
        adam.step()
        assert step.flatten().tolist() == [4 + number]
    assert optimizer.state[param]["step"] is step
    step = step.reshape(())
    torch.testing.assert_close(param.detach(), twin.detach(), rtol=1e-5, atol=1e-6)


def test_a_counter_that_its_owner_sets_back(backend):
    """As one who shares it does; its value is read at each step."""
    param, optimizer, twin, adam = make_twins(backend)
    step = torch.tensor([3], dtype=torch.int64)
    supply(optimizer, param, step)
    supply(adam, twin, torch.tensor(3.0))
    for value in (None, 0, 40):
        if value is not None:
            step.fill_(value)
            adam.state[twin]["step"].fill_(value)
        param.grad = twin.grad = torch.ones(5)
        optimizer.step()
        adam.step()
    assert step.tolist() == [41]
    torch.testing.assert_close(param.detach(), twin.detach(), rtol=1e-5, atol=1e-6)


LAYOUTS = {
    "dense": lambda: torch.zeros(4, 6),
    "transposed": lambda: torch.zeros(6, 4).t(),
    "gaps": lambda: torch.zeros(4, 13)[:, 1::2],
    "transposed gaps": lambda: torch.zeros(13, 4).t()[:, 1::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_supplied_moments_are_updated_in_place(dtype, layout, backend):
    param = torch.nn.Parameter(torch.randn(4, 6).to(dtype))
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    moments = {key: LAYOUTS[layout]().to(state_dtype) for key in MOMENTS}
    if "gaps" in layout:
        moments = {key: gaps_of(LAYOUTS[layout](), state_dtype) for key in MOMENTS}
    optimizer = FusedPadam([param], weight_decay=0.1, backend=backend)
    optimizer.state[param] = {"step": torch.tensor(0.0), **moments}
    strides = {key: moment.stride() for key, moment in moments.items()}
    for _ in range(3):
        param.grad = torch.randn(4, 6).to(dtype)
        step_and_check(optimizer)
        for key, moment in moments.items():
            assert optimizer.state[param][key] is moment
            assert moment.stride() == strides[key]
            assert moment.all()


def gaps_of(view, dtype):
    """The same strides and offset in memory of its own of another dtype."""
    memory = torch.zeros(view.untyped_storage().nbytes() // view.itemsize, dtype=dtype)
    return memory.as_strided(view.shape, view.stride(), view.storage_offset())


# Memory that comes back.


@pytest.fixture
def no_collector():
    """What has to be freed at once must not wait for it."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("how", ["step", "step_param"])
@pytest.mark.parametrize("replaced", ["in the state", "as data"])
def test_replaced_tensors_are_freed_at_once(replaced, how, backend, no_collector):
    """Moments and parameters that are put elsewhere for a while, as between phases of RLHF."""
    param = torch.nn.Parameter(torch.randn(300))
    optimizer = FusedPadam([param], backend=backend)
    for _ in range(2):
        param.grad = torch.randn(300)
        optimizer.step() if how == "step" else optimizer.step_param(param)
    state = optimizer.state[param]
    storages = {
        key: StorageWeakRef(tensor.untyped_storage())
        for key, tensor in {"data": param, **{key: state[key] for key in MOMENTS}}.items()
    }
    kept = {key: state[key].clone() for key in MOMENTS} | {"data": param.detach().clone()}
    param.grad = None
    param.data = torch.empty(0)
    for key in MOMENTS:
        if replaced == "as data":
            state[key].data = torch.empty(0)
        else:
            state[key] = torch.empty(0)
    assert [key for key, storage in storages.items() if not storage.expired()] == []
    # and back again
    param.data = kept.pop("data")
    state.update(kept)
    param.grad = torch.randn(300)
    step_and_check(optimizer)


@pytest.mark.parametrize("how", ["step", "step_param"])
def test_a_removed_parameter_is_freed(how, backend):
    params = [torch.nn.Parameter(torch.randn(5)) for _ in range(2)]
    optimizer = FusedPadam(params, backend=backend)
    for param in params:
        param.grad = torch.randn(5)
        if how == "step_param":
            optimizer.step_param(param)
    if how == "step":
        optimizer.step()
    gone = weakref.ref(params[1])
    del optimizer.state[params[1]], optimizer.param_groups[0]["params"][1], params[1], param
    step_and_check(optimizer)  # a plan may hold it until then
    gc.collect()
    assert gone() is None


def test_a_sampler_and_its_optimizer_are_freed_at_once(no_collector):
    param = torch.nn.Parameter(torch.randn(5))
    optimizer = FusedPadam([param])
    sampler = IterateSampler(optimizer)
    param.grad = torch.randn(5)
    optimizer.step()
    gone = weakref.ref(optimizer), weakref.ref(sampler)
    del optimizer, sampler
    assert [ref() for ref in gone] == [None, None]


def test_hooks_that_nobody_closed_are_collected():
    model = torch.nn.Linear(3, 2)
    optimizer = FusedPadam(model.parameters())
    hooks = step_during_backward(optimizer)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert model.weight.grad is None
    gone = weakref.ref(model.weight), weakref.ref(optimizer)
    del model, optimizer, hooks
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


class Wrapper(torch.optim.Optimizer):
    """Takes over another optimizer's attributes, as Lightning Fabric's does."""

    def __init__(self, optimizer):
        self.__class__ = type("Wrapper", (Wrapper, type(optimizer)), {})
        self.__dict__ = {k: v for k, v in optimizer.__dict__.items() if k != "step"}
        self.wrapped = optimizer

    def step(self, closure=None):
        return self.wrapped.step(closure)


class Collecting(FusedPadam):
    """Keeps the states while it is made."""

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self.kept = self.state


def keep_in_a_hook_after_loading(optimizer):
    kept = []
    optimizer.register_load_state_dict_post_hook(lambda o: kept.append(o.state), prepend=True)
    optimizer.load_state_dict(optimizer.state_dict())
    return kept[0]


@pytest.mark.parametrize(
    ("kind", "keep"),
    [
        (FusedPadam, keep_in_a_hook_after_loading),
        (FusedPadam, lambda optimizer: Wrapper(optimizer).state),
        (Collecting, lambda optimizer: optimizer.kept),
    ],
    ids=["hook", "wrapper", "constructor"],
)
def test_states_may_be_replaced_by_whoever_has_got_hold_of_them(kind, keep, backend):
    param = torch.nn.Parameter(torch.zeros(1000))
    param.grad = torch.ones(1000)
    optimizer = kind([param], backend=backend)
    step_and_check(optimizer)
    states = keep(optimizer)
    for _ in range(2):
        optimizer.step()
    states[param]["exp_avg"] = torch.full((1000,), 1e3)
    optimizer.step()
    assert states[param]["exp_avg"][0].item() == pytest.approx(900.1)
