"""Checkpoints and conversions of packed states, and what is refused, before anything changes."""

import contextlib
import copy

import pytest
import torch

from cases import STORAGES, each_storage
from padam_ext import FusedPadam
from padam_ext.packed_states import CENTRE, Moments, pack_mvh, unpack_mvh, upper_end
from test_checkpoint import through_file
from test_low_precision import everything, make, run, same, tensors

F32, BF16 = torch.float32, torch.bfloat16
PACKED = {"state_dtype": "packed32"}


@each_storage
@pytest.mark.parametrize("model_first", [True, False])
def test_a_resumed_run_is_bitwise_the_same(model_first, storage, backend):
    params, optimizer = make(storage, backend, seed=9)
    run(params, optimizer)
    saved = through_file([[p.detach() for p in params], optimizer.state_dict()])
    run(params, optimizer)
    others, other = make(storage, backend)  # the seed comes from the file
    run(others, other, 1)

    def load_model():
        with torch.no_grad():
            for param, value in zip(others, saved[0], strict=True):
                param.copy_(value)

    if model_first:
        load_model()
    other.load_state_dict(saved[1])
    if not model_first:
        load_model()
    run(others, other)
    assert same(everything(params, optimizer), everything(others, other))


def test_salts_come_from_the_file(backend):
    """A parameter that has moved to another position goes on with its numbers."""
    params, optimizer = make((F32, PACKED), backend, (50, 50, 50))
    run(params, optimizer)
    last = copy.deepcopy(params[2])
    state = copy.deepcopy(optimizer.state[params[2]])
    run(params, optimizer)
    other = FusedPadam([last], weight_decay=0.1, lr=0.01, **PACKED, backend=backend)
    other.state[last] = state
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        grads = [torch.randn(50, generator=generator) for _ in range(3)]
        last.grad = grads[2]
        other.step()
    assert torch.equal(last, params[2])


WAYS = {
    "float32": {},
    "float32, no amsgrad": {"amsgrad": False},
    "packed": PACKED,
    "packed, no amsgrad": PACKED | {"amsgrad": False},
}


def warns_of_conversion(expected):
    """Where a file has such an option and this run has not."""
    message = "was saved with (state_dtype='packed32'|master='split'), which this optimizer was not"
    return pytest.warns(UserWarning, match=message) if expected else contextlib.nullcontext()


@pytest.mark.parametrize("to", WAYS)
@pytest.mark.parametrize("origin", WAYS)
def test_a_file_becomes_what_this_run_stores(origin, to, backend):
    [param], optimizer = make((F32, WAYS[origin]), backend, (500,))
    run([param], optimizer)
    before = optimizer.unpacked_state(param)
    saved = through_file(optimizer.state_dict())
    [param], other = make((F32, WAYS[to]), backend, (500,))
    with warns_of_conversion("packed" in origin and "packed" not in to):
        other.load_state_dict(saved)
    group = other.param_groups[0]
    assert group["state_dtype"] == WAYS[to].get("state_dtype", "float32")
    assert group["amsgrad"] == ("no amsgrad" not in origin)  # a file's
    after = other.unpacked_state(param)
    assert after.keys() == before.keys()
    reference = before.get("max_exp_avg_sq", before["exp_avg_sq"])
    for name, bound in (
        ("exp_avg", before["exp_avg"].abs() / 32 + 3e-5 * reference.sqrt()),
        ("exp_avg_sq", reference * 2**-9),
        ("max_exp_avg_sq", reference * 0.04),
    ):
        if name in before:
            assert ((after[name] - before[name]).abs() <= bound).all(), name
    if ("packed" in origin) == ("packed" in to):
        assert same([before[name] for name in before], [after[name] for name in before])
    assert other.state[param]["step"] == 3
    run([param], other, 1)


def test_words_survive_the_way_through_floats():
    [param], optimizer = make((F32, PACKED), "cpu", (5000,))
    run([param], optimizer, 5)
    word = optimizer.state[param]["packed_mvh"]
    m, v, upper = unpack_mvh(word)
    unpacked = optimizer.unpacked_state(param)
    assert torch.equal(unpacked["exp_avg"], m)
    assert torch.equal(unpacked["max_exp_avg_sq"], torch.maximum(upper * CENTRE, v))
    again = pack_mvh(Moments(m, v, upper_end(unpacked["max_exp_avg_sq"])))
    assert torch.equal(again, word)


@pytest.mark.parametrize("amsgrad", [True, False])
def test_a_file_of_adam_is_packed(amsgrad, backend):
    theirs = torch.nn.Parameter(torch.linspace(-1, 1, 77))
    adam = torch.optim.Adam([theirs], lr=0.01, amsgrad=amsgrad)
    run([theirs], adam)
    param = torch.nn.Parameter(theirs.detach().clone())
    optimizer = FusedPadam([param], **PACKED, partial=0.5, bias_correction="adam", backend=backend)
    optimizer.load_state_dict(adam.state_dict())
    state = optimizer.state[param]
    assert state.keys() == {"step", "salt", "packed_mvh" if amsgrad else "packed_mv"}
    moved = [p.detach().clone() for p in (theirs, param)]
    run([theirs], adam, 1)
    run([param], optimizer, 1)
    steps = [p.detach() - before for p, before in zip((theirs, param), moved, strict=True)]
    assert (steps[0] - steps[1]).norm() < 0.03 * steps[0].norm()
    # and back
    optimizer.param_groups[0]["state_dtype"] = "float32"
    run([param], optimizer, 1)
    plain = {key: v for key, v in optimizer.state_dict()["state"][0].items() if key != "salt"}
    adam.load_state_dict({**adam.state_dict(), "state": {0: plain}})
    run([theirs], adam, 1)


@each_storage
def test_bytes_of_state(storage, backend):
    how = storage[1]
    [param], optimizer = make(storage, backend, (1000,))
    run([param], optimizer, 1)
    size = sum(t.numel() * t.element_size() for t in tensors(optimizer.state[param])) / 1000
    expected = 4 if "state_dtype" in how else 12
    assert size == expected + 2 * ("master" in how)


def test_states_before_the_first_step(backend):
    for storage in STORAGES:
        params, optimizer = make(storage, backend)
        optimizer.init_state()
        keys = optimizer.state[params[0]].keys()
        assert all(not tensor.any() for tensor in tensors(optimizer.state[params[0]]))
        run(params, optimizer)
        assert optimizer.state[params[0]].keys() == keys
        others, other = make(storage, backend)
        run(others, other)
        assert same(everything(params, optimizer), everything(others, other))


def test_the_unpacked_state_of_a_parameter_without_one():
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedPadam([param])
    with pytest.raises(KeyError, match="no state yet; make a step"):
        optimizer.unpacked_state(param)
    assert not optimizer.state


BAD_OPTIONS = [
    (torch.float64, PACKED, r"is torch.float64, but state_dtype='packed32' is for float32"),
    (torch.complex64, PACKED, r"is torch.complex64, but state_dtype='packed32' is for"),
    (F32, {"master": "split"}, "is torch.float32, but master='split' is for bfloat16"),
    (torch.float16, {"master": "split"}, "is torch.float16, but master='split' is for"),
    (
        torch.float16,
        {"param_rounding": "stochastic"},
        "is torch.float16, but param_rounding='stoch",
    ),
]


@pytest.mark.parametrize(("dtype", "options", "message"), BAD_OPTIONS, ids=str)
def test_parameters_that_cannot_be_stored_so(dtype, options, message, backend):
    good = torch.nn.Parameter(torch.ones(2, dtype=BF16))
    bad = torch.nn.Parameter(torch.ones(2, dtype=dtype))
    with pytest.raises(ValueError, match=f"parameter 'bad' {message}"):
        FusedPadam([("good", good), ("bad", bad)], **options, backend=backend)
    optimizer = FusedPadam([("good", good)], **options, backend=backend)
    with pytest.raises(ValueError, match=f"parameter 'bad' {message}"):
        optimizer.add_param_group({"params": [("bad", bad)]})
    assert len(optimizer.param_groups) == 1
    # and set later
    optimizer = FusedPadam([("good", good), ("bad", bad)], backend=backend)
    for param in (good, bad):
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = copy.deepcopy((good, bad, optimizer.state_dict()["state"]))
    optimizer.param_groups[0].update(options)
    with pytest.raises(ValueError, match=f"parameter 'bad' {message}"):
        optimizer.step()
    assert torch.equal(good, before[0])
    assert torch.equal(bad, before[1])
    assert optimizer.state[good].keys() == before[2][0].keys()
    assert optimizer.state[good]["step"] == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"state_dtype": "int8"}, ValueError, r"state_dtype .*'float32', 'packed32'\), got 'int8'"),
        ({"state_dtype": torch.float32}, ValueError, "state_dtype must be .* got torch.float32"),
        ({"param_rounding": "up"}, ValueError, "param_rounding must be one of .* got 'up'"),
        ({"master": "float32"}, ValueError, r"master .* \(None, 'split'\), got 'float32'"),
        ({"seed": -1}, ValueError, r"seed must be in \[0, 2\*\*32\), got -1"),
        ({"seed": 2**32}, ValueError, r"seed must be in .* got 4294967296"),
        ({"seed": 0.5}, TypeError, "seed must be an integer, got 0.5"),
        ({"seed": True}, TypeError, "seed must be an integer, got True"),
        ({"master": "split", "param_rounding": "stochastic"}, ValueError, "leave out param_"),
        (PACKED | {"betas": (0.5, 0.9999)}, ValueError, "grow to 57.7 .* holds 23 times"),
        (PACKED | {"betas": (0.9, 0.5)}, ValueError, "grow to inf times .* take a smaller beta1"),
    ],
)  # fmt: skip
def test_options_that_are_refused(options, error, message):
    param = torch.nn.Parameter(torch.ones(2, dtype=BF16))
    with pytest.raises(error, match=message):
        FusedPadam([param], **options)
    optimizer = FusedPadam([param])
    param.grad = torch.ones_like(param)
    optimizer.param_groups[0].update(options)
    with pytest.raises(error, match=message):
        optimizer.step()
    assert not optimizer.state
    assert param.tolist() == [1, 1]


BAD_STATES = [
    (lambda s: s | {"packed_mvh": s["packed_mvh"].float()}, TypeError, "must be torch.int32, got"),
    (lambda s: s | {"packed_mvh": s["packed_mvh"].long()}, TypeError, "must be torch.int32, got"),
    (lambda s: s | {"packed_mvh": s["packed_mvh"][:3]}, ValueError, r"has shape \(3,\)"),
    (lambda s: s | {"packed_mvh": 3}, TypeError, "must be a tensor, got 3"),
    (lambda s: s | {"param_low": s["param_low"].int()}, TypeError, "must be torch.int16, got"),
    (lambda s: s | {"param_low": s["param_low"][:3]}, ValueError, r"has shape \(3,\)"),
    (lambda s: s | {"packed_mv": s["packed_mvh"]}, ValueError, "twice, as packed_mvh and"),
    (lambda s: s | {"exp_avg": torch.zeros(8)}, ValueError, "twice, as exp_avg and as packed_mvh"),
    (lambda s: s | {"salt": -1}, ValueError, r"'salt' of .* in \[0, 2\*\*32\), got -1"),
    (lambda s: s | {"salt": 0.5}, ValueError, "'salt' of .* got 0.5"),
    (lambda s: {"param_low": s["param_low"]}, ValueError, "needs exp_avg and exp_avg_sq"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "message"), BAD_STATES, ids=[m for *_, m in BAD_STATES]
)
def test_states_that_are_refused(change, error, message, backend):
    storage = (BF16, PACKED | {"master": "split"})
    params, optimizer = make(storage, backend, (8, 8))
    run(params, optimizer)
    before = copy.deepcopy(everything(params, optimizer))
    file = copy.deepcopy(optimizer.state_dict())
    file["state"][1] = change(file["state"][1])
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(file)
    good = optimizer.state[params[1]]
    optimizer.state[params[1]] = change(good)
    with pytest.raises(error, match=message):
        run(params, optimizer, 1)
    optimizer.state[params[1]] = good
    assert same(before, everything(params, optimizer))


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.9999), (0.0, 0.999999), (0.9, 0.82)])
def test_betas_with_which_packed_states_hold_the_momentum(betas):
    param = torch.nn.Parameter(torch.ones(2))
    FusedPadam([param], **PACKED, betas=betas)


def test_lower_halves_that_have_been_through_adam():
    """It casts them to bfloat16 and steps without them: they start at 0."""
    [param], optimizer = make((BF16, {"master": "split"}), "eager", (50,))
    run([param], optimizer)
    adam = torch.optim.Adam([param], amsgrad=True)
    adam.load_state_dict(optimizer.state_dict())
    run([param], adam, 1)
    for options in ({"master": "split"}, {"param_rounding": "stochastic"}):
        other = FusedPadam([param], **options)
        with warns_of_conversion("master" not in options):
            other.load_state_dict(adam.state_dict())
        assert other.state[param]["step"] == 4
        if "param_low" in other.state[param]:
            assert not other.state[param]["param_low"].any()
        run([param], other, 1)


def test_an_optimizer_pickled_before_there_were_these_options():
    params, optimizer = make((F32, {}), "cpu")
    run(params, optimizer)
    state = optimizer.__getstate__()
    for options in (state["defaults"], *state["param_groups"]):
        for name in ("state_dtype", "param_rounding", "master", "seed"):
            del options[name]
    other = FusedPadam.__new__(FusedPadam)
    other.__setstate__(state)
    assert other.param_groups[0]["state_dtype"] == "float32"
    run(params, other, 1)
    other.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    other.load_state_dict(other.state_dict())
    run(params, other, 1)
