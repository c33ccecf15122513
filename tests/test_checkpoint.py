"""Saving and loading: exact, separate, and from other people's files."""

import copy
import io
import warnings

import pytest
import torch

from cases import each_dtype
from checking import step_and_check
from padam_ext import FusedPadam
from test_conventions import backward, equal, make_model, train

pytestmark = pytest.mark.gpu_variants


def through_file(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@each_dtype
@pytest.mark.parametrize("bias_correction", ["none", "adam"])
def test_resuming_gives_bitwise_the_run_that_was_not_interrupted(dtype, bias_correction, backend):
    options = {"weight_decay": 0.1, "partial": 0.3, "bias_correction": bias_correction}
    params = [torch.nn.Parameter(torch.randn(5, 3).to(dtype)) for _ in range(3)]

    def run(params, optimizer, steps):
        for step in steps:
            torch.manual_seed(step)
            for param in params:
                param.grad = torch.randn(5, 3).to(dtype)
            optimizer.step()

    optimizer = FusedPadam(params, **options, backend=backend)
    run(params, optimizer, range(3))
    saved = through_file({"params": [p.detach() for p in params], "opt": optimizer.state_dict()})
    run(params, optimizer, range(3, 6))

    resumed = [torch.nn.Parameter(p) for p in saved["params"]]
    other = FusedPadam(resumed, backend=backend)  # options come from the file
    other.load_state_dict(saved["opt"])
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    for param in resumed:
        state = other.state[param]
        assert state["step"].dtype == torch.float32
        assert state["exp_avg"].dtype == state["max_exp_avg_sq"].dtype == state_dtype
    run(resumed, other, range(3, 6))
    assert equal(params, resumed)


def test_a_load_shares_nothing_with_the_file_and_reaches_the_kernel(backend):
    model = make_model()
    optimizer = FusedPadam(model.parameters(), backend=backend)
    train(model, optimizer, 2)
    state_dict = optimizer.state_dict()
    kept = copy.deepcopy(state_dict)
    others = [FusedPadam(model.parameters(), backend=backend) for _ in range(2)]
    for other in others:
        other.load_state_dict(state_dict)
    train(model, others[0], 1, start=5)
    for key, state in others[1].state_dict()["state"].items():
        assert equal(state.values(), kept["state"][key].values())
    # A load in the middle of a run: the next step must use the loaded states, not stale addresses.
    optimizer.load_state_dict(kept)
    backward(model)
    step_and_check(optimizer)
    assert float(optimizer.state[model[0].weight]["step"]) == 3
    for key, state in kept["state"].items():
        assert state["step"] == 2, key


def test_a_load_reaches_the_kernel_though_nobody_has_read_the_state(backend):
    """Reading `optimizer.state` has later steps compare the states; a load must not need that."""
    model, other = make_model(), make_model()
    source = FusedPadam(model.parameters(), backend=backend)
    optimizer = FusedPadam(other.parameters(), backend=backend)
    train(model, source, 3)
    train(other, optimizer, 2, start=9)
    other.load_state_dict(model.state_dict())
    optimizer.load_state_dict(source.state_dict())
    expected = train(model, source, 1, start=5)
    assert equal(train(other, optimizer, 1, start=5), expected)


@pytest.mark.parametrize("theirs", ["Adam", "AdamW"])
def test_files_of_torch_optim(theirs, backend):
    model, mine = make_model(), make_model()
    adam = getattr(torch.optim, theirs)(model.parameters(), lr=1e-3, amsgrad=True, weight_decay=0.1)
    train(model, adam, 3)
    mine.load_state_dict(model.state_dict())
    optimizer = FusedPadam(mine.parameters(), partial=0.5, bias_correction="adam", backend=backend)
    optimizer.load_state_dict(through_file(adam.state_dict()))
    group = optimizer.param_groups[0]
    assert group["lr"] == 1e-3
    assert group["partial"] == 0.5
    assert group["decoupled_weight_decay"] == (theirs == "AdamW")
    assert not {"fused", "foreach", "capturable", "differentiable"} & set(group)
    train(model, adam, 3, start=3)
    train(mine, optimizer, 3, start=3)
    for one, other in zip(model.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    # and back again
    adam.load_state_dict(through_file(optimizer.state_dict()))
    train(model, adam, 1)


def test_a_file_of_adam_without_amsgrad_goes_on_without(backend):
    model = make_model()
    adam = torch.optim.Adam(model.parameters())
    train(model, adam, 2)
    optimizer = FusedPadam(model.parameters(), backend=backend)
    optimizer.load_state_dict(adam.state_dict())
    assert optimizer.param_groups[0]["amsgrad"] is False
    backward(model)
    step_and_check(optimizer)


def test_a_missing_running_maximum_starts_at_the_second_moment(backend):
    model = make_model()
    optimizer = FusedPadam(model.parameters(), backend=backend)
    train(model, optimizer, 2)
    state_dict = copy.deepcopy(optimizer.state_dict())
    for state in state_dict["state"].values():
        del state["max_exp_avg_sq"]
    optimizer.load_state_dict(state_dict)
    state = optimizer.state[model[0].weight]
    assert torch.equal(state["max_exp_avg_sq"], state["exp_avg_sq"])
    assert state["max_exp_avg_sq"].data_ptr() != state["exp_avg_sq"].data_ptr()
    backward(model)
    step_and_check(optimizer)


@pytest.mark.parametrize(
    "step", [7, 7.0, torch.tensor(7), torch.tensor([7.0]), torch.tensor(7.0, dtype=torch.float64)],
    ids=["int", "float", "int tensor", "shape (1,)", "float64"],
)  # fmt: skip
def test_files_of_the_authors_padam(step, backend):
    model = make_model()
    state_dict = {
        "state": {
            i: {
                "step": step,
                "exp_avg": torch.full_like(p, 0.1),
                "exp_avg_sq": torch.full_like(p, 0.02),
                "max_exp_avg_sq": torch.full_like(p, 0.03),
            }
            for i, p in enumerate(p.detach() for p in model.parameters())
        },
        "param_groups": [
            {
                "lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 5e-4,
                "amsgrad": True, "partial": 0.25, "params": [0, 1, 2, 3],
            }
        ],
    }  # fmt: skip
    optimizer = FusedPadam(model.parameters(), bias_correction="authors", backend=backend)
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["bias_correction"] == "authors"
    backward(model)
    step_and_check(optimizer)
    assert optimizer.state[model[0].weight]["step"] == 8


def test_counters_stay_float32_whatever_the_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        param = torch.nn.Parameter(torch.ones(2))
        optimizer = FusedPadam([param])
        for _ in range(300):
            param.grad = torch.ones(2, dtype=param.dtype)
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[param]["step"].dtype == torch.float32
    assert optimizer.state[param]["step"] == 300


def test_states_made_before_the_first_step(backend):
    """They change no step, whether the plan was made with them or finds them."""
    shapes = [(3, 4), (), (0,)]
    params, twins = ([torch.nn.Parameter(torch.ones(s)) for s in shapes] for _ in range(2))
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = FusedPadam([*params, frozen], weight_decay=0.1, backend=backend)
    twin = FusedPadam([*twins, frozen], weight_decay=0.1, backend=backend)
    optimizer.init_state()
    made = {param: dict(state) for param, state in optimizer.state.items()}
    assert set(made) == set(params)
    for state in made.values():
        assert all(not value.any() for value in state.values())
        assert set(state) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    for _ in range(3):
        for param, other in zip(params, twins, strict=True):
            param.grad = other.grad = torch.randn(param.shape)
        optimizer.step()
        twin.step()
        optimizer.init_state()  # leaves what is there
    for param, other in zip(params, twins, strict=True):
        assert torch.equal(param, other)
        for key, value in optimizer.state[param].items():
            assert torch.equal(value, twin.state[other][key])
            assert value is made[param][key]


def test_a_distributed_checkpoint_before_the_first_step_changes_nothing(backend):
    """torch.distributed.checkpoint makes a step of its own, to have a state that it can save."""
    models = [torch.nn.Linear(4, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        FusedPadam(model.parameters(), lr=torch.tensor(0.1), weight_decay=0.1,
                   bias_correction="adam", backend=backend)
        for model in models
    ]  # fmt: skip
    from torch.distributed.checkpoint.state_dict import get_state_dict

    _, saved = get_state_dict(models[0], optimizers[0])
    assert saved["state"]["weight"]["step"] == 0
    assert not saved["state"]["weight"]["exp_avg_sq"].any()
    for number in range(3):
        inputs = torch.randn(5, 4)
        for model, optimizer in zip(models, optimizers, strict=True):
            if number == 0:  # a learning rate that begins at 0 is no reason not to count
                optimizer.param_groups[0]["lr"] = 0.0
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = 0.1
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for key, value in optimizers[0].state[ours].items():
            assert torch.equal(value, optimizers[1].state[theirs][key])
    assert optimizers[1].state[theirs]["step"] == 3


def test_states_follow_the_layout_of_the_parameter(backend):
    param = torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    optimizer = FusedPadam([param], backend=backend)
    param.grad = torch.randn_like(param)
    optimizer.step()
    state_dict = copy.deepcopy(optimizer.state_dict())
    for key, value in state_dict["state"][0].items():
        state_dict["state"][0][key] = value.contiguous()
    optimizer.load_state_dict(state_dict)
    assert optimizer.state[param]["exp_avg"].stride() == param.stride()
    param.grad = torch.randn_like(param)
    step_and_check(optimizer)


def test_hooks_and_foreign_keys_survive(backend):
    model = make_model()
    optimizer = FusedPadam(model.parameters(), backend=backend)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    optimizer.param_groups[0]["my_key"] = "kept"
    train(model, optimizer, 1)
    seen = []
    optimizer.register_state_dict_post_hook(lambda _, state: seen.append("saved"))

    def before_load(_, state_dict):
        assert all(isinstance(t, torch.Tensor) for t in state_dict["state"][0].values())
        return {**state_dict, "state": {}}

    def after_load(loaded):
        seen.append("loaded")

    optimizer.register_load_state_dict_pre_hook(before_load)
    optimizer.register_load_state_dict_post_hook(after_load)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["saved", "loaded"]
    assert not optimizer.state
    assert optimizer.param_groups[0]["initial_lr"] == 0.1
    assert optimizer.param_groups[0]["my_key"] == "kept"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_distributed_checkpoint(dtype, tmp_path, backend):
    """torch.distributed.checkpoint, in one process: names instead of positions, dtypes kept."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def make():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3).to(dtype)
        return model, FusedPadam(model.parameters(), partial=0.3, backend=backend)

    def step(model, optimizer, seed):
        generator = torch.Generator(device=torch.get_default_device()).manual_seed(seed)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(dtype)
        optimizer.step()

    model, optimizer = make()
    step(model, optimizer, 0)
    saved_model, saved = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DCP about a single process
        dcp.save({"model": saved_model, "optimizer": saved}, checkpoint_id=tmp_path)
        resumed, other = make()
        into_model, into = get_state_dict(resumed, other)
        dcp.load({"model": into_model, "optimizer": into}, checkpoint_id=tmp_path)
    set_state_dict(resumed, other, model_state_dict=into_model, optim_state_dict=into)
    for seed in (1, 2):
        step(model, optimizer, seed)
        step(resumed, other, seed)
    for param, twin in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(param, twin)
        for key, value in optimizer.state[param].items():
            assert value.dtype == torch.float32
            assert torch.equal(value, other.state[twin][key]), key


@pytest.mark.parametrize(
    ("other", "options", "named"),
    [
        ("Adagrad", {}, "torch.optim.Adagrad"),
        ("RMSprop", {}, "torch.optim.RMSprop"),
        ("RMSprop", {"momentum": 0.9}, "torch.optim.RMSprop"),
        ("Adamax", {}, "torch.optim.Adamax"),
        ("SGD", {"momentum": 0.9}, "torch.optim.SGD"),
        ("Rprop", {}, "another optimizer"),
        ("ASGD", {}, "another optimizer"),
        ("Adafactor", {}, "another optimizer"),
    ],
)
def test_states_of_other_methods_are_refused(other, options, named):
    """Their moments would begin at zero, which nobody would notice."""
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    theirs = getattr(torch.optim, other)([param], lr=0.1, **options)
    theirs.step()
    ours = FusedPadam([param])
    with pytest.raises(ValueError, match=f"a state of {named}"):
        ours.load_state_dict(theirs.state_dict())
    assert not ours.state


@pytest.mark.parametrize("second_moment", ["sum", "max", "yogi"])
def test_means_do_not_become_another_second_moment(second_moment):
    """Files of Adam and of older versions do not say what theirs are."""
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    adam = torch.optim.Adam([param])
    ours = FusedPadam([param], amsgrad=False, second_moment=second_moment)
    ours.load_state_dict(adam.state_dict())  # no moments yet
    adam.step()
    with pytest.raises(ValueError, match="the checkpoint are means"):
        ours.load_state_dict(adam.state_dict())
    assert not ours.state
    ours.step()
    ours.load_state_dict(ours.state_dict())
