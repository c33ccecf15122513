"""What every optimizer of torch.optim does: lists, closures, hooks, copies, scaling."""

import copy
import pickle

import pytest
import torch

from checking import assert_same, step_and_check
from padam_ext import FusedPadam

pytestmark = pytest.mark.gpu_variants


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def backward(model, seed=0, scale=lambda loss: loss):
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(torch.randn(16, 4)).square().mean()
    scale(loss).backward()
    return loss


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        backward(model, step)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def equal(ones, others):
    return all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


@pytest.mark.parametrize(
    "params",
    [
        lambda model: model.parameters(),
        lambda model: list(model.parameters()),
        lambda model: tuple(model.parameters()),
        lambda model: model.named_parameters(),
        lambda model: [{"params": model.parameters()}],
        lambda model: [{"params": model.named_parameters()}],
        lambda model: [{"params": p} for p in model.parameters()],
        lambda model: ({"params": [p]} for p in model.parameters()),
    ],
    ids=[
        "generator",
        "list",
        "tuple",
        "named",
        "group",
        "named group",
        "groups",
        "group generator",
    ],
)
def test_parameter_lists_of_every_kind_give_the_same(params, backend):
    plain, model = make_model(), make_model()
    expected = train(plain, FusedPadam(plain.parameters(), backend=backend), 3)
    optimizer = FusedPadam(params(model), weight_decay=0.0, backend=backend)
    assert equal(train(model, optimizer, 3), expected)


def test_names_are_kept():
    optimizer = FusedPadam(make_model().named_parameters())
    assert optimizer.param_groups[0]["param_names"][0] == "0.weight"
    assert optimizer.state_dict()["param_groups"][0]["param_names"][0] == "0.weight"


def test_groups_can_be_added_later(backend):
    model = make_model()
    optimizer = FusedPadam(model[0].parameters(), backend=backend)
    train(model, optimizer, 2)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.01, "partial": 0.4})
    optimizer.add_param_group({"params": []})
    for seed in range(2):
        backward(model, seed)
        step_and_check(optimizer)
    assert optimizer.state[model[0].weight]["step"] == 4
    assert optimizer.state[model[2].weight]["step"] == 2


def test_frozen_parameters_stay(backend):
    model = make_model()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    optimizer = FusedPadam(model.parameters(), weight_decay=0.1, backend=backend)
    train(model, optimizer, 2)
    assert torch.equal(model[0].weight, before)
    assert model[0].weight not in optimizer.state


def test_the_closure_runs_with_gradients_and_its_loss_is_returned(backend):
    model = make_model()
    optimizer = FusedPadam(model.parameters(), backend=backend)

    def closure():
        assert torch.is_grad_enabled()
        return backward(model)

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() > 0
    assert optimizer.step() is None
    assert torch.is_grad_enabled()


def test_zero_grad(backend):
    model = make_model()
    optimizer = FusedPadam(model.parameters(), backend=backend)
    backward(model)
    optimizer.zero_grad(set_to_none=False)
    assert all((p.grad == 0).all() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_step_hooks_run(backend):
    model = make_model()
    optimizer = FusedPadam(model.parameters(), backend=backend)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    train(model, optimizer, 1)
    assert calls == ["pre", "post"]


def test_the_version_counter_moves_so_that_autograd_sees_the_change(backend):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedPadam([param], backend=backend)
    loss = (param * param).sum()
    param.grad = torch.ones(3)
    version = param._version
    optimizer.step()
    assert param._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_do_not_share_anything(how, backend):
    model = make_model()
    optimizer = FusedPadam(model.parameters(), partial=0.3, weight_decay=0.1, backend=backend)
    train(model, optimizer, 2)
    backward(model, 7)
    # copied together with the model, so that the copy steps the copied parameters
    model_copy, optimizer_copy = how((model, optimizer))
    assert optimizer_copy.backend == backend
    backward(model_copy, 7)
    before = [p.detach().clone() for p in model.parameters()]
    expected_states = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer_copy.step()
    assert equal([p.detach() for p in model.parameters()], before)
    for key, state in optimizer.state_dict()["state"].items():
        assert equal(state.values(), expected_states[key].values())
    optimizer.step()
    assert equal(model.parameters(), model_copy.parameters())


def test_a_differentiable_step_is_refused():
    param = torch.nn.Parameter(torch.ones(3))
    for make in (
        lambda: FusedPadam([param], differentiable=True),
        lambda: FusedPadam([{"params": [param], "differentiable": True}]),
    ):
        with pytest.raises(ValueError, match=r"differentiable=True: a step .* leave it out"):
            make()


def test_repr_shows_the_options():
    text = repr(FusedPadam([torch.nn.Parameter(torch.ones(1))], partial=0.25))
    assert "FusedPadam" in text
    assert "partial: 0.25" in text


def test_the_bias_corrections_are_those_of_the_documentation():
    from padam_ext.constants import bias_correction_factors

    factors = [bias_correction_factors("authors", 0.9, 0.999, t)[0] for t in (1, 12, 1000)]
    assert factors == pytest.approx([0.316, 0.152, 0.795], abs=5e-4)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_zero_redundancy_optimizer(tmp_path):
    import torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        model, plain = make_model(), make_model()
        sharded = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=FusedPadam, lr=0.05, partial=0.25
        )
        expected = train(plain, FusedPadam(plain.parameters(), lr=0.05, partial=0.25), 3)
        assert equal(train(model, sharded, 3), expected)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("unscale_first", [False, True])
def test_grad_scaler(unscale_first, backend):
    device = torch.get_default_device().type
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    model, twin = make_model(), make_model()
    optimizer = FusedPadam(model.parameters(), weight_decay=0.1, backend=backend)
    expected = FusedPadam(twin.parameters(), weight_decay=0.1, backend=backend)
    for seed in range(5):
        backward(model, seed, scaler.scale)
        overflow = seed == 3
        if overflow:
            model[0].weight.grad[0, 0] = torch.inf
        before = copy.deepcopy([*model.parameters(), optimizer.state_dict()["state"]])
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if overflow:
            assert equal(model.parameters(), before[:-1])
            for key, state in optimizer.state_dict()["state"].items():
                assert equal(state.values(), before[-1][key].values())
            continue
        backward(twin, seed)
        expected.step()
    assert scaler.get_scale() == 2.0**9  # halved once, for the overflow
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same(param, other, backend)


def test_torch_compile_leaves_the_step_alone(backend):
    """Traced, a kernel that writes through addresses looks like one that changes nothing."""
    param, twin = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    optimizer, expected = (FusedPadam([p], backend=backend) for p in (param, twin))
    compiled = torch.compile(optimizer.step, backend="aot_eager")
    for i in range(3):
        for p, step in ((param, compiled), (twin, expected.step)):
            p.grad = torch.full((5,), 1.0 + i)
            step()
        assert torch.equal(param, twin)
        optimizer.param_groups[0]["lr"] = expected.param_groups[0]["lr"] = 0.1 / (i + 1)
    assert param[0] < 1


@pytest.mark.parametrize("name", ["foreach", "fused"])
@pytest.mark.parametrize("value", [None, True, False])
def test_options_of_torch_that_have_no_effect(value, name):
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizers = [
        FusedPadam(params[:1]),
        FusedPadam(params[1:2], **{name: value}),
        FusedPadam([{"params": params[2:], name: value}], differentiable=False),
    ]
    for param, optimizer in zip(params, optimizers, strict=True):
        param.grad = torch.ones(3)
        optimizer.step()
        assert torch.equal(param, params[0])
    assert name not in optimizers[1].param_groups[0]
    for bad in (2, "yes"):
        with pytest.raises(TypeError, match=f"{name} must be True or False, got {bad!r}"):
            FusedPadam(params, **{name: bad})
