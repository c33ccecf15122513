"""Packed states and bfloat16 parameters with every other feature, on every backend."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch

import packed_vectors as vectors
from cases import STORAGES, each_storage
from padam_ext import FusedPadam, precision, step_during_backward
from padam_ext.random_bits import SALT_FACTOR

pytestmark = [pytest.mark.sanitize, pytest.mark.gpu_variants, pytest.mark.ptx_variants]
F32, BF16 = torch.float32, torch.bfloat16


def words(tensor):
    return tensor.detach().cpu().numpy().view(np.uint32).tolist()


def run(params, optimizer, steps=3, factor=1.0, dtype=None):
    """Steps with gradients that depend on the step's number only."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for param in params:
            grad = torch.randn(param.numel(), generator=generator).to(dtype or param.dtype) * factor
            param.grad = grad.view(param.shape).to(param.device)
        optimizer.step()


def everything(params, optimizer):
    """All bits of parameters and states, in the order in which they lie in memory."""
    tensors = [param.detach() for param in params]
    for param in params:
        tensors += [t for key, t in sorted(optimizer.state[param].items()) if key != "salt"]
    return [tensor.cpu() for tensor in tensors]


def same(one, other):
    return all(map(torch.equal, one, other))


def make(storage, backend, sizes=(1031, 70), **options):
    dtype, how = storage
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]
    options = {"weight_decay": 0.1, "lr": 0.01} | how | options
    return params, FusedPadam(params, **options, backend=backend)


@pytest.mark.parametrize("amsgrad", [True, False], ids=["amsgrad", "no amsgrad"])
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16], ids=str)
def test_words_of_whole_steps(dtype, amsgrad, backend):
    param = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
    optimizer = FusedPadam([param], amsgrad=amsgrad, **vectors.STEP_OPTIONS, backend=backend)
    for grads, mvh, mv in vectors.STEPS:
        param.grad = torch.tensor(grads, dtype=dtype)
        optimizer.step()
        word = optimizer.state[param]["packed_mvh" if amsgrad else "packed_mv"]
        assert words(word) == (mvh if amsgrad else mv).tolist()
    assert optimizer.state[param].keys() == {
        "step",
        "salt",
        "packed_mvh" if amsgrad else "packed_mv",
    }


@each_storage
def test_each_run_is_the_same_and_each_seed_another(storage, backend):
    results = []
    for seed in (1, 1, 2):
        params, optimizer = make(storage, backend, seed=seed)
        run(params, optimizer)
        results.append(everything(params, optimizer))
    assert same(*results[:2])
    assert same(results[0], results[2]) == (not draws(storage))


def draws(storage):
    return "state_dtype" in storage[1] or "param_rounding" in storage[1]


@each_storage
def test_random_numbers_depend_on_the_position_among_all_parameters(storage, backend):
    """Not on the group, nor on which parameters have a gradient."""
    sizes = (200, 200, 200)
    params, optimizer = make(storage, backend, sizes)
    with torch.no_grad():
        for param in params[1:]:
            param.copy_(params[0])
    for param in params:
        param.grad = torch.full_like(param, 0.37)
    optimizer.step()
    optimizer.step()
    one, other, _ = ([param.detach(), *tensors(optimizer.state[param])] for param in params)
    assert same(one, other) == (not draws(storage))
    if draws(storage):
        salts = [optimizer.state[param]["salt"] for param in params]
        assert salts == [SALT_FACTOR * i % 2**32 for i in range(3)]

    again, _ = make(storage, backend, sizes)
    with torch.no_grad():
        for param in again[1:]:
            param.copy_(again[0])
    groups = [{"params": again[:1]}, {"params": again[1:2]}, {"params": again[2:]}]
    optimizer = FusedPadam(groups, weight_decay=0.1, lr=0.01, **storage[1], backend=backend)
    for param in again:
        param.grad = None
    for _ in range(2):  # one after the other, the last one first
        for param in reversed(again):
            param.grad = torch.full_like(param, 0.37)
            optimizer.step()
            param.grad = None
    assert same(params, again)


@each_storage
def test_each_group_has_its_own_seed(storage, backend):
    """And is stepped as by an optimizer of its own."""
    dtype, how = storage
    how = {key: value for key, value in how.items() if key != "seed"}
    start = torch.linspace(-1, 1, 300).to(dtype)
    together = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    groups = [{"params": [param], "seed": seed} for seed, param in enumerate(together)]
    optimizer = FusedPadam(groups, lr=0.01, **how, backend=backend)
    optimizer.init_state()
    for param in together if draws(storage) else ():
        optimizer.state[param]["salt"] = 0  # that of the first parameter
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        grad = torch.randn(300, generator=generator).to(dtype)
        for param in together:
            param.grad = grad.to(param.device)
        optimizer.step()
    for seed, param in enumerate(together):
        alone = torch.nn.Parameter(start.clone())
        run([alone], FusedPadam([alone], lr=0.01, seed=seed, **how, backend=backend))
        assert torch.equal(param, alone)
    assert torch.equal(*together) == (not draws(storage))


def tensors(state):
    return [value for key, value in sorted(state.items()) if key not in ("salt", "step")]


@each_storage
def test_a_step_that_is_skipped_leaves_its_random_numbers_to_the_next(storage, backend):
    plain, optimizer = make(storage, backend)
    run(plain, optimizer)
    skipping, other = make(storage, backend, skip_nonfinite=True)
    for param in skipping:
        param.grad = torch.full_like(param, torch.inf)
    before = copy.deepcopy(skipping)
    other.step()
    assert same(before, skipping)
    run(skipping, other)
    assert same(everything(plain, optimizer), everything(skipping, other))


@each_storage
@pytest.mark.parametrize("how", ["scaler", "clipping", "float32 gradients"])
def test_a_power_of_two_in_the_gradients_is_taken_out_exactly(how, storage, backend):
    """Bit for bit, whether the host or the device counts steps."""
    if storage[0] == torch.float16:
        storage = (torch.float16, storage[1] | {"eps": 1e-4})
    plain, optimizer = make(storage, backend)
    run(plain, optimizer)
    others, other = make(storage, backend)
    if how == "scaler":
        other.grad_scale, other.found_inf = torch.tensor(4.0), torch.tensor(0.0)
        run(others, other, factor=4.0)
    elif how == "clipping":
        other.max_grad_norm = 1e6
        run(others, other)
        assert float(other.grad_norm) > 1
    else:
        if storage[0] == F32:
            return
        generator_dtype = storage[0]
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for param in others:
                grad = torch.randn(param.numel(), generator=generator).to(generator_dtype)
                param.grad_dtype = None
                param.grad = grad.float().to(param.device)
            other.step()
    assert same(everything(plain, optimizer), everything(others, other))


@each_storage
def test_stepping_during_backward_draws_the_same(storage, backend):
    plain, optimizer = make(storage, backend)
    run(plain, optimizer)
    others, other = make(storage, backend)
    with step_during_backward(other):
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            loss = 0.0
            for param in others:
                grad = torch.randn(param.numel(), generator=generator).to(param.dtype)
                loss = loss + (param * grad.to(param.device)).sum()
            loss.backward()
            other.step()
    assert same(everything(plain, optimizer), everything(others, other))


@each_storage
@pytest.mark.parametrize("shape", [(4, 3, 5, 6), (30, 7)], ids=str)
def test_elements_are_counted_as_they_lie_in_memory(shape, storage, backend):
    """A parameter of permuted dimensions steps as its memory in one row does."""
    order = (0, *range(2, len(shape)), 1) if len(shape) == 4 else (1, 0)
    inverse = [order.index(i) for i in range(len(shape))]
    dtype, how = storage
    values = torch.randn(shape).to(dtype).permute(order).contiguous()
    flat = torch.nn.Parameter(values.flatten().clone())
    permuted = torch.nn.Parameter(values.permute(inverse))
    assert not permuted.is_contiguous()
    results = []
    for param in (flat, permuted):
        optimizer = FusedPadam([param], lr=0.01, **how, backend=backend)
        for step in range(2):
            torch.manual_seed(step)
            grad = torch.randn(values.numel()).to(dtype)
            param.grad = grad if param is flat else grad.view(values.shape).permute(inverse)
            optimizer.step()
        state = [param.detach(), *tensors(optimizer.state[param])]
        results.append([t.flatten() if t.dim() == 1 else t.permute(order).flatten() for t in state])
    assert same(*results)


@each_storage
def test_any_alignment_and_nothing_beside_is_written(storage, backend):
    dtype, how = storage
    size = 1024 + 37
    plain = torch.nn.Parameter(torch.linspace(-1, 1, size).to(dtype))
    optimizer = FusedPadam([plain], lr=0.01, **how, backend=backend)
    run([plain], optimizer)
    expected = everything([plain], optimizer)
    state_keys = [key for key in optimizer.state[plain] if key not in ("step", "salt")]
    kinds = [dtype, *(optimizer.state[plain][key].dtype for key in state_keys)]
    for moved in range(len(kinds)):
        buffers = [torch.full((size + 32,), 77, dtype=kind) for kind in kinds]
        views = [b[16 + (i == moved) :][:size] for i, b in enumerate(buffers)]
        param = torch.nn.Parameter(views[0].copy_(torch.linspace(-1, 1, size)))
        other = FusedPadam([param], lr=0.01, **how, backend=backend)
        other.state[param] = {"step": torch.tensor(0.0), "salt": 0} | {
            key: view.zero_() for key, view in zip(state_keys, views[1:], strict=True)
        }
        run([param], other)
        assert same(expected, everything([param], other))
        for i, buffer in enumerate(buffers):
            start = 16 + (i == moved)
            assert (buffer[:start] == 77).all()
            assert (buffer[start + size :] == 77).all()


def test_words_of_elements_without_gradients_stay_zero(backend):
    embedding = torch.nn.Parameter(torch.randn(6, 3))
    optimizer = FusedPadam([embedding], state_dtype="packed32", backend=backend)
    before = embedding.detach().clone()
    for _ in range(20):
        embedding.grad = torch.zeros(6, 3)
        embedding.grad[1] = 0.5
        optimizer.step()
    word = optimizer.state[embedding]["packed_mvh"]
    untouched = [0, 2, 3, 4, 5]
    assert (word[untouched] == 0).all()
    assert (word[1] != 0).all()
    assert torch.equal(embedding[untouched], before[untouched])


@pytest.mark.parametrize("amsgrad", [True, False], ids=["amsgrad", "no amsgrad"])
def test_what_is_not_finite_shows(amsgrad, backend):
    """As with float32 states: NaN for good at once; infinity at once, NaN from the next step on."""
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedPadam([param], state_dtype="packed32", amsgrad=amsgrad, backend=backend)
    param.grad = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    optimizer.step()
    assert param[0].isnan()
    assert not param[1:3].isfinite().any()
    for _ in range(2):
        param.grad = torch.ones(4)
        optimizer.step()
    assert param[:3].isnan().all() if amsgrad else not param[:3].isfinite().any()
    assert param[3].isfinite()


@pytest.mark.parametrize("storage", [s for s in STORAGES if "master" in s[1]], ids=str)
def test_a_split_parameter_that_somebody_writes_to(storage, backend):
    """What is written counts, but for half a unit; zero counts exactly, and never reads as NaN."""
    [param], optimizer = make(storage, backend, (512,))
    run([param], optimizer, 4)
    low = optimizer.state[param]["param_low"]
    assert (low < 0).any()
    assert (low > 0).any()
    with torch.no_grad():
        param.zero_()
        param[1] = 1.0
    kept = low.clone()
    param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert param.isfinite().all()
    assert param[1] == 1
    assert (param.abs() < 1e-38).sum() == 511
    assert torch.equal(low[kept >= 0], kept[kept >= 0])


def test_a_split_parameter_that_somebody_masks_with_infinity(backend):
    [param], optimizer = make((BF16, {"master": "split"}), backend, (512,))
    run([param], optimizer, 4)
    masked = optimizer.state[param]["param_low"] > 0  # negative ones are of the largest numbers
    with torch.no_grad():
        param[masked] = -float("inf")
    param.grad = torch.zeros_like(param)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    optimizer.step()
    assert masked.any()
    assert (param[masked] == -float("inf")).all()
    assert param[~masked].isfinite().all()


def test_memory_that_replaces_a_split_parameters_starts_without_lower_bits(backend):
    [param], optimizer = make((BF16, {"master": "split"}), backend, (64,))
    run([param], optimizer)
    low = optimizer.state[param]["param_low"]
    assert low.count_nonzero() > 30
    with torch.no_grad():  # the lower bits are still of these values, or nearly
        param.copy_(param.clone())
    optimizer.param_groups[0]["lr"] = 0.0
    kept = low.clone()
    optimizer.step()
    assert torch.equal(low, kept)
    param.data = torch.ones(64, dtype=BF16)
    optimizer.step()
    assert low.count_nonzero() == 0
    assert (param == 1).all()


def test_memory_that_replaces_a_split_parameters_is_never_taken_for_the_old(backend):
    """An allocator likes to give out again what was just freed."""
    params, optimizer = make((BF16, {"master": "split"}), backend, (64, 100_000))
    for _ in range(3):
        run(params, optimizer, 1)
        for param in params:
            assert optimizer.state[param]["param_low"].any()
            param.data = param.data.float()
            param.data = param.data.bfloat16()
        optimizer.param_groups[0]["lr"] = 0.0
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
        assert not any(optimizer.state[param]["param_low"].any() for param in params)
        optimizer.param_groups[0]["lr"] = 0.01


def test_the_exact_value_of_a_split_parameter(backend):
    """That of a float32 parameter which is stepped with the same gradients."""
    storage = (BF16, {"master": "split"})
    [param], optimizer = make(storage, backend, (300,))
    exact = torch.nn.Parameter(param.detach().float())
    options = {k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "master")}
    other = FusedPadam([exact], **options, backend=backend)
    for step in range(3):
        param.grad = torch.randn(300, generator=torch.Generator().manual_seed(step)).to(BF16)
        exact.grad = param.grad.float()
        optimizer.step()
        other.step()
    assert torch.equal(optimizer.unpacked_state(param)["param"], exact)


def test_options_of_storage_may_change_between_steps(backend):
    """As a step with the new ones on the converted state."""
    [param], optimizer = make((BF16, {}), backend, (300,))
    group = optimizer.param_groups[0]
    for change, keys in (
        ({"state_dtype": "packed32"}, {"packed_mvh", "salt"}),
        ({"amsgrad": False}, {"packed_mv", "salt"}),
        ({"master": "split"}, {"packed_mv", "salt", "param_low"}),
        ({"amsgrad": True}, {"packed_mvh", "salt", "param_low"}),
        ({"master": None, "param_rounding": "stochastic"}, {"packed_mvh", "salt"}),
        ({"state_dtype": "float32"}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "salt"}),
    ):
        run([param], optimizer, 2)
        before = optimizer.unpacked_state(param)
        group.update(change)
        param.grad = torch.zeros_like(param)
        optimizer.step()
        assert optimizer.state[param].keys() == keys | {"step"}
        after = optimizer.unpacked_state(param)
        for name in before.keys() & after.keys() - {"param"}:
            decay = 0.9 if name == "exp_avg" else 0.999 if name == "exp_avg_sq" else 1.0
            bound = 0.07 * before["exp_avg_sq"].sqrt() + 0.07 * before[name].abs()
            if name != "exp_avg":
                bound = 0.07 * before.get("max_exp_avg_sq", before["exp_avg_sq"])
            weight = 0.1 * 0.1 * param.detach().float().abs()
            assert ((after[name] - decay * before[name]).abs() <= bound + weight).all(), name
    assert optimizer.state[param]["step"] == 18


@each_storage
@pytest.mark.parametrize("how", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_goes_on_alike(how, storage, backend):
    params, optimizer = make(storage, backend)
    run(params, optimizer)
    others, other = how((params, optimizer))
    run(params, optimizer)
    run(others, other)
    assert same(everything(params, optimizer), everything(others, other))


def test_one_warning_for_bfloat16_parameters_that_may_stall(backend, monkeypatch):
    monkeypatch.setattr(precision, "_has_warned", False)
    for storage in STORAGES[3:]:
        params, optimizer = make(storage, backend)
        run(params, optimizer, 1)
    params, optimizer = make((F32, {}), backend)
    run(params, optimizer, 1)
    assert not precision._has_warned
    params, optimizer = make((BF16, {}), backend)
    with pytest.warns(UserWarning, match="master='split' .* param_rounding='stoch") as told:
        run(params, optimizer, 1)
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(params, optimizer, 1)
        params, optimizer = make((BF16, {"state_dtype": "packed32"}), backend)
        run(params, optimizer, 1)
