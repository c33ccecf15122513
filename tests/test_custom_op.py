"""torch.ops.padam_ext.step, and torch.compile around it and around FusedPadam.step."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

from padam_ext import FusedPadam
from test_clipping import NAMES, make_params, set_grads

pytestmark = pytest.mark.gpu_variants

STEP = torch.ops.padam_ext.step
LR, BETAS, EPS, DECAY = 0.1, (0.9, 0.999), 1e-8, 0.05


@pytest.fixture
def to_device(backend):
    device = torch.empty(0).device
    return lambda tensors: [tensor.detach().to(device) for tensor in tensors]


def arguments(params, grads, states, partial=1 / 8, **options):
    lists = [[state[name] for state in states] for name in NAMES if name in states[0]]
    moments, steps = lists[:-1], lists[-1]
    if len(moments) == 2:
        moments.append([])
    return (params, grads, *moments, steps, LR, *BETAS, EPS, DECAY, partial), options


def new_states(params, amsgrad=True):
    return [
        {name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
         for name in NAMES[: 2 + amsgrad]} | {"step": torch.tensor(0.0, device="cpu")}
        for p in params
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"partial": 0.3, "bias_correction": "adam"},
        {"decoupled_weight_decay": True, "maximize": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("amsgrad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_does_what_the_optimizer_does(dtype, amsgrad, options, backend, to_device):
    params = to_device(make_params(dtype))
    twins = [torch.nn.Parameter(param.clone()) for param in params]
    optimizer = FusedPadam(
        twins, LR, BETAS, EPS, DECAY, amsgrad=amsgrad, backend=backend, **options
    )
    states = new_states(params, amsgrad)
    for seed in range(3):
        set_grads(twins, seed)
        given, named = arguments(params, [p.grad for p in twins], states, **options)
        STEP(*given, **named, backend=backend)
        optimizer.step()
        for param, twin, state in zip(params, twins, states, strict=True):
            assert torch.equal(param, twin)
            for name, value in state.items():
                assert torch.equal(value, optimizer.state[twin][name].to(value.device))


def test_unscales_and_skips(backend, to_device):
    params = to_device(make_params())
    twins = copy.deepcopy(params)
    states, twin_states = new_states(params), new_states(twins)
    device = params[0].device
    for seed, found in enumerate((0.0, 1.0, 0.0)):
        grads = [torch.full_like(param, seed + 1.0) for param in params]
        given, _ = arguments(params, [grad * 512 for grad in grads], states)
        scale, found_inf = torch.tensor(512.0, device=device), torch.tensor(found, device=device)
        STEP(*given, grad_scale=scale, found_inf=found_inf, backend=backend)
        if not found:
            STEP(*arguments(twins, grads, twin_states)[0], backend=backend)
        for one, other in zip(params, twins, strict=True):
            assert torch.equal(one, other)
    assert [float(state["step"]) for state in states] == [2.0] * len(params)


def test_states_that_no_kernel_can_walk(backend, to_device):
    [param] = to_device([torch.randn(6, 5)])
    twin = param.clone()
    grads = to_device([torch.randn(6, 5)])
    states, twin_states = new_states([param]), new_states([twin])
    states[0]["exp_avg"] = states[0]["exp_avg"].t().contiguous().t()
    for _ in range(2):
        STEP(*arguments([param], grads, states)[0], backend=backend)
        STEP(*arguments([twin], grads, twin_states)[0], backend=backend)
    assert torch.equal(param, twin)
    assert torch.equal(states[0]["exp_avg"], twin_states[0]["exp_avg"])
    assert states[0]["step"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: []}, "there are 2 params, but 0 grads"),
        ({5: [torch.tensor(0.0)]}, "there are 2 params, but 1 steps"),
        ({6: -1.0}, r"lr must be in \[0, inf\), got -1.0"),
        ({11: 0.7}, r"partial must be in \[0, 0.5\], got 0.7"),
        ({2: [torch.zeros(3), torch.zeros(2)]}, r"'exp_avg' of .* has shape \(3,\)"),
    ],
    ids=str,
)
def test_refuses_before_anything_changes(change, message):
    params = [torch.ones(2), torch.ones(2)]
    given, _ = arguments(params, [torch.ones(2)] * 2, new_states(params))
    changed = [change.get(index, argument) for index, argument in enumerate(given)]
    with pytest.raises(ValueError, match=message):
        STEP(*changed)
    assert all(torch.equal(param, torch.ones(2)) for param in params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({2: [torch.zeros(2, dtype=torch.bfloat16)]}, "exp_avg must be torch.float32"),
        ({5: [torch.tensor(0)]}, "step must be torch.float32"),
    ],
    ids=str,
)
def test_refuses_states_that_lose_digits(change, message):
    given, _ = arguments([torch.ones(2)], [torch.ones(2)], new_states([torch.ones(2)]))
    changed = [change.get(index, argument) for index, argument in enumerate(given)]
    with pytest.raises(TypeError, match=message):
        STEP(*changed)


def test_refuses_expanded_states_and_unknown_backends():
    given, _ = arguments([torch.ones(2)], [torch.ones(2)], new_states([torch.ones(2)]))
    with pytest.raises(ValueError, match="backend must be one of"):
        STEP(*given, backend="zz")
    given = (*given[:2], [torch.zeros(1).expand(2)], *given[3:])
    with pytest.raises(ValueError, match="exp_avg is expanded"):
        STEP(*given)
    assert torch.equal(given[0][0], torch.ones(2))


def test_refuses_a_parameter_twice():
    params = [torch.ones(2)] * 2
    with pytest.raises(ValueError, match="more than once"):
        STEP(*arguments(params, [torch.ones(2)] * 2, new_states(params))[0])


@pytest.mark.parametrize("scaled", [False, True])
def test_keeps_the_promises_of_an_operator(scaled):
    params = [torch.randn(5, 4), torch.randn(7)]
    grads = [torch.randn(5, 4), torch.randn(7)]
    given, _ = arguments(params, grads, new_states(params))
    named = {"grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(0.0)} if scaled else {}
    torch.library.opcheck(STEP.default, given, named)


def test_compiled_whole():
    params = [torch.randn(5, 4)]
    twins = copy.deepcopy(params)
    states, twin_states = new_states(params), new_states(twins)

    def step(params, grads, states):
        STEP(*arguments(params, [grad * 2 for grad in grads], states)[0])
        return params[0].sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        grads = [torch.randn(5, 4)]
        assert compiled(params, grads, states) == step(twins, grads, twin_states)
    assert torch.equal(params[0], twins[0])
    assert torch.equal(states[0]["exp_avg"], twin_states[0]["exp_avg"])


def test_a_compiled_training_step_is_compiled_once(backend):
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    twin = copy.deepcopy(model)
    optimizers = [
        FusedPadam(m.parameters(), bias_correction="adam", max_grad_norm=1.0, backend=backend)
        for m in (model, twin)
    ]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]

    def train(model, optimizer, data):
        optimizer.zero_grad()
        loss = model(data).square().mean()
        value = loss.detach()
        loss.backward()
        optimizer.step()
        return value

    compiled = torch.compile(train, backend="aot_eager")
    graphs = []
    for _ in range(5):
        data = torch.randn(16, 4)
        loss = compiled(model, optimizers[0], data)
        torch.testing.assert_close(loss, train(twin, optimizers[1], data))
        for scheduler in schedulers:
            scheduler.step()
        graphs.append(counters["stats"]["unique_graphs"])
    assert len(set(graphs[1:])) == 1
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)
