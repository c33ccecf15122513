"""What PyTorch's test/test_optim.py checks of its optimizers, for FusedPadam.

That file does not ship with torch, but its table does: an OptimizerInfo for each optimizer, with
inputs for the constructor, in torch.testing._internal.common_optimizers. FusedPadam gets one made
of Adam's. Left out of what that file checks:

- sparse gradients and steps that call the closure several times: only for optimizers that have them
- memory, tensors of 2**32 elements, several GPUs: they need GPUs
- which implementation is the default: there is one
- half types beside Adam's: states are float32 here (test_update.py compares with the oracle)
- the counter follows the default dtype: here it is always float32 (test_checkpoint.py)
"""

import copy
import io
import itertools
import warnings

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from padam_ext import FusedPadam

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_optimizers as theirs

AS_ADAM = {"lr": 1e-3, "partial": 0.5, "bias_correction": "adam", "amsgrad": False}
AS = {
    torch.optim.Adam: AS_ADAM,
    torch.optim.AdamW: AS_ADAM | {"weight_decay": 1e-2, "decoupled_weight_decay": True},
}
PEERS = {info.optim_cls: info for info in theirs.optim_db}


def info_like(peer, ours):
    """FusedPadam's OptimizerInfo: all of a peer's, after the given options of FusedPadam's own."""

    def inputs(device, dtype=None):
        return [
            theirs.OptimizerInput(None, ours | case.kwargs, case.desc)
            for case in peer.optim_inputs_func(device, dtype)
        ]

    return theirs.OptimizerInfo(
        FusedPadam,
        optim_inputs_func=inputs,
        optim_error_inputs_func=peer.optim_error_inputs_func,
        scheduler_inputs=peer.scheduler_inputs,
        supported_impls=peer.supported_impls,
        supports_fused_on=peer.supports_fused_on,
        not_og_supported_flags=peer.not_og_supported_flags,
        has_capturable_arg=peer.has_capturable_arg,
    )


INFO = info_like(PEERS[torch.optim.Adam], {"lr": 1e-2})


def inputs_of(info):
    """Those for any device, each with none or one of foreach, fused and differentiable."""
    every = theirs._get_optim_inputs_including_global_cliquey_kwargs
    return {
        case.desc: case.kwargs
        for device in ("cpu", "cuda", "mps")
        for case in every(device, torch.float32, info)
    }


# Why options are left out, as the error says it: with all inputs that have them, and alone where
# the backend is not one for GPUs.
REFUSED = {"differentiable": "a step of FusedPadam cannot be differentiated"}
REFUSED_ON_CPU = {"capturable": "capturable=True needs a kernel for GPUs"}


def reason(kwargs, reasons):
    return next((why for name, why in reasons.items() if kwargs.get(name)), None)


INPUTS = inputs_of(INFO)
RUN = {desc: kwargs for desc, kwargs in INPUTS.items() if not reason(kwargs, REFUSED)}
# Since foreach and fused have no effect, one input with each is enough for `make test`.
CASES = [
    pytest.param(desc, marks=[pytest.mark.slow] * (" & " in desc and "default &" not in desc))
    for desc in RUN
]


def test_inputs_are_run_or_refused():
    counts = dict.fromkeys(("as they are", "on a CPU without one option", "never"), 0)
    for kwargs in INPUTS.values():
        params = [torch.nn.Parameter(torch.ones(1))]
        with_fresh_gradients(params, 0)
        if why := reason(kwargs, REFUSED):
            with pytest.raises(ValueError, match=why):
                FusedPadam(params, **kwargs)
            counts["never"] += 1
        elif why := reason(kwargs, REFUSED_ON_CPU):
            with pytest.raises(RuntimeError, match=why):
                FusedPadam(params, **kwargs).step()
            counts["on a CPU without one option"] += 1
        else:
            counts["as they are"] += 1
    assert list(counts.values()) == [17, 15, 11], counts


class Given:
    """An input on a backend."""

    def __init__(self, kwargs, backend):
        self.kwargs = kwargs
        self.backend = backend

    def optimizer(self, params, **changes):
        # Schedulers write to a learning rate that is a tensor, so each optimizer has its own.
        return FusedPadam(params, **copy.deepcopy(self.kwargs) | changes, backend=self.backend)

    def group(self, params, **changes):
        """A param group with the options. `capturable` is of the whole optimizer only."""
        kwargs = {k: v for k, v in copy.deepcopy(self.kwargs).items() if k != "capturable"}
        return {"params": params, **kwargs, **changes}

    def trained(self, names=False, steps=3):
        problem = Problem()
        optimizer = self.optimizer(problem.named() if names else problem.params)
        problem.train(optimizer, steps)
        return problem, optimizer


class Problem:
    """A least squares problem. The parameters may be every second element of something larger."""

    def __init__(self, contiguous=True):
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape):
            values = torch.randn(*shape, 2, generator=generator)[..., 0]
            return torch.nn.Parameter(values.contiguous() if contiguous else values)

        self.params = [parameter(10, 5), parameter(10)]
        self.inputs = torch.randn(5, generator=generator)

    def named(self):
        return list(zip(("weight", "bias"), self.params, strict=True))

    def backward(self):
        weight, bias = self.params
        weight.grad = bias.grad = None
        loss = (weight.mv(self.inputs) + bias).square().sum()
        loss.backward()
        return loss

    def train(self, optimizer, steps):
        for _ in range(steps):
            self.backward()
            optimizer.step()

    def copy(self):
        other = copy.copy(self)
        other.params = [torch.nn.Parameter(param.detach().clone()) for param in self.params]
        return other


def assert_equal(actual, expected):
    """Bitwise, of anything that a state_dict holds."""
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(actual[key], value)
    elif isinstance(expected, list | tuple):
        for item, other in zip(actual, expected, strict=True):
            assert_equal(item, other)
    else:
        assert actual == expected


def without_names(state_dict):
    groups = [
        {k: v for k, v in group.items() if k != "param_names"}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "param_groups": groups}


def with_fresh_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, dtype=param.dtype, generator=generator)


# The checks. Each takes what is given and is called for each input.


def goes_the_right_way(given):
    schedulers = [(), *INFO.scheduler_inputs]
    for contiguous, makers in [(False, ()), *((True, makers) for makers in schedulers)]:
        problem = Problem(contiguous)
        optimizer = given.optimizer(problem.params)
        assert_goes_the_right_way(given, problem, optimizer, [make(optimizer) for make in makers])


def assert_goes_the_right_way(given, problem, optimizer, schedulers):
    first = problem.backward().item()
    for _ in range(8):
        loss = problem.backward()
        optimizer.step()
        for scheduler in schedulers:
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*[loss.item()] * plateau)
    last = problem.backward().item()
    assert last > first if given.kwargs.get("maximize") else last < first


def a_tensor_as_learning_rate_is_that_number(given):
    one, other = Problem(), Problem()
    one.train(given.optimizer(one.params, lr=2**-10), 5)
    other.train(given.optimizer(other.params, lr=torch.tensor(2**-10)), 5)
    assert_equal(other.params, one.params)


def groups_are_like_optimizers_of_their_own(given):
    apart, together = Problem(), Problem()
    one = given.optimizer(apart.params[:1])
    other = given.optimizer(apart.params[1:], weight_decay=0.0, lr=1e-3)
    still = torch.nn.Parameter(torch.ones(2))
    both = FusedPadam(
        [
            given.group(together.params[:1]),
            given.group(together.params[1:], weight_decay=0.0, lr=1e-3),
            {"params": [still]},
        ],
        lr=1e-28,
        capturable=given.kwargs.get("capturable", False),
        backend=given.backend,
    )
    for seed in range(4):
        apart.backward()
        together.backward()
        with_fresh_gradients([still], seed)
        for optimizer in (one, other, both):
            optimizer.step()
    assert_equal(together.params, apart.params)
    assert_equal(still.detach(), torch.ones(2))

    problem = Problem()
    groups = [given.group(problem.params[:1]), given.group(problem.params[1:], weight_decay=0.0)]
    assert_goes_the_right_way(given, problem, FusedPadam(groups, backend=given.backend), [])


def complex_numbers_are_pairs_of_real_ones(given):
    generator = torch.Generator().manual_seed(0)
    complexes = [
        torch.nn.Parameter(torch.randn(shape, dtype=dtype, generator=generator))
        for shape, dtype in (((10, 5), torch.complex64), (10, torch.complex64), (5, torch.float32))
    ]
    pairs = [
        torch.nn.Parameter(
            torch.view_as_real(param.detach()).clone()
            if param.is_complex()
            else param.detach().clone()
        )
        for param in complexes
    ]
    apart = [torch.nn.Parameter(part.detach().clone()) for part in pairs[0].unbind(-1)]
    optimizers = [given.optimizer(params) for params in (complexes, pairs, apart)]
    for seed in range(3):
        with_fresh_gradients(complexes, seed)
        for param, pair in zip(complexes, pairs, strict=True):
            pair.grad = torch.view_as_real(param.grad) if param.is_complex() else param.grad
        apart[0].grad, apart[1].grad = pairs[0].grad.unbind(-1)
        for optimizer in optimizers:
            optimizer.step()
        for param, pair in zip(complexes, pairs, strict=True):
            assert_equal(torch.view_as_real(param) if param.is_complex() else param, pair)
        assert_equal(torch.stack(apart, -1), pairs[0])


def dtypes_beside_each_other_do_not_matter(given):
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    apart, together = (
        [torch.nn.Parameter(torch.linspace(-1, 1, 6).to(dtype)) for dtype in dtypes]
        for _ in range(2)
    )
    optimizers = [given.optimizer(together), *(given.optimizer([param]) for param in apart)]
    for seed in range(3):
        with_fresh_gradients(together, seed)
        for param, other in zip(together, apart, strict=True):
            other.grad = param.grad
        for optimizer in optimizers:
            optimizer.step()
    assert_equal(together, apart)
    for param, optimizer in zip(together, optimizers[1:], strict=True):
        (state,) = optimizer.state.values()
        assert_equal(optimizers[0].state[param], state)


def without_gradients_nothing_happens(given):
    frozen = [torch.ones(2, 3) for _ in range(2)]
    optimizer = given.optimizer(frozen)
    assert optimizer.step(lambda: torch.tensor(1.0)) == 1
    assert_equal(frozen, [torch.ones(2, 3)] * 2)
    assert not optimizer.state

    param = torch.nn.Parameter(torch.ones(5, 1))
    optimizer = given.optimizer([param], weight_decay=0.0)
    param.grad = torch.zeros(5, 1)
    assert optimizer.step(lambda: torch.tensor(1.0)) == 1
    assert_equal(param.detach(), torch.ones(5, 1))


def every_state_is_there_after_a_step(given):
    _, optimizer = given.trained(steps=1)
    names = {"step", "exp_avg", "exp_avg_sq"}
    if given.kwargs.get("amsgrad", True):
        names.add("max_exp_avg_sq")
    assert [set(state) for state in optimizer.state.values()] == [names, names]
    assert "FusedPadam" in repr(optimizer)


def an_infinity_that_was_found_stops_the_step(given):
    """GradScaler tells a fused optimizer so."""
    for scale in (None, torch.ones(1)):
        params = [torch.nn.Parameter(torch.ones(1)) for _ in range(5)]
        with_fresh_gradients(params, 0)
        optimizer = given.optimizer(params)
        optimizer.grad_scale, optimizer.found_inf = scale, torch.ones(())
        optimizer.step()
        assert_equal([param.detach() for param in params], [torch.ones(1)] * 5)
        assert all(float(optimizer.state[param]["step"]) == 0 for param in params)


def tensors_without_memory_are_refused(given):
    """By kernels. PyTorch's operations go through the motions, as they do for Adam."""
    param = torch.nn.Parameter(torch.ones(2, device="meta"))
    param.grad = torch.ones(2, device="meta")
    optimizer = given.optimizer([param])
    if given.backend == "eager" and not given.kwargs.get("capturable"):
        optimizer.step()
        assert optimizer.state[param]["exp_avg"].is_meta
        return
    with pytest.raises(RuntimeError, match="meta"):
        optimizer.step()
    assert not optimizer.state
    param.grad = None
    optimizer.step()


def what_was_saved_goes_on_as_it_was(given):
    for names in itertools.product((False, True), repeat=2):
        problem, optimizer = given.trained(names[0])
        twin = problem.copy()
        resumed = given.optimizer(twin.named() if names[1] else twin.params)
        saved = optimizer.state_dict()
        file = io.BytesIO()
        torch.save(saved, file)
        for weights_only in (True, False):
            file.seek(0)
            loaded = torch.load(file, weights_only=weights_only)
            assert_equal(loaded, saved)
        resumed.load_state_dict(loaded)
        assert_equal(loaded, saved)
        for it, its in ((problem, optimizer), (twin, resumed)):
            it.train(its, 3)
        assert_equal(twin.params, problem.params)
        assert_equal(without_names(resumed.state_dict()), without_names(optimizer.state_dict()))
        group = resumed.state_dict()["param_groups"][0]
        assert group.get("param_names") == (["weight", "bias"] if any(names) else None)
        # A parameter that is listed again keeps its number.
        resumed.param_groups.extend(resumed.param_groups)
        again = without_names(resumed.state_dict())["param_groups"]
        assert_equal(again[-1], without_names(optimizer.state_dict())["param_groups"][-1])
        assert len(again) == 2


def what_older_versions_saved_can_be_loaded(given):
    """Before they had some of the options, and when counters were plain numbers."""
    problem, optimizer = given.trained()
    for counter in (float, lambda tensor: tensor):
        saved = copy.deepcopy(optimizer.state_dict())
        for group in saved["param_groups"]:
            for flag in INFO.not_og_supported_flags:
                group.pop(flag, None)
        for state in saved["state"].values():
            state["step"] = counter(state["step"])
        twin = problem.copy()
        resumed = given.optimizer(twin.params)
        resumed.load_state_dict(saved)
        for it, its in ((problem, optimizer), (twin, resumed)):
            it.train(its, 1)
        assert_equal(twin.params, problem.params)
        assert_equal(resumed.state_dict(), optimizer.state_dict())


def hooks_of_state_dicts_run_in_order(given):
    problem, optimizer = given.trained(steps=1)

    def note(optimizer):
        optimizer.state["noted"] = 1

    def tell(optimizer, state_dict):
        return state_dict | {"told": state_dict["state"].pop("noted", None)}

    def in_place(optimizer, state_dict):
        state_dict["param_groups"][0]["lr"] = 0.002

    def in_a_copy(optimizer, state_dict):
        state_dict = copy.deepcopy(state_dict)
        state_dict["param_groups"][0]["lr"] = 0.003
        return state_dict

    after = optimizer.register_state_dict_post_hook(tell)
    assert optimizer.state_dict()["told"] is None
    before = optimizer.register_state_dict_pre_hook(note)
    assert optimizer.state_dict()["told"] == 1
    after.remove()
    assert optimizer.state_dict()["state"]["noted"] == 1
    before.remove()
    problem.train(optimizer, 1)  # whatever else is in the state
    del optimizer.state["noted"]

    rates = []
    optimizer.register_load_state_dict_post_hook(lambda o: rates.append(o.param_groups[0]["lr"]))
    saved = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(in_place)
    optimizer.load_state_dict(copy.deepcopy(saved))
    optimizer.register_load_state_dict_pre_hook(in_a_copy, prepend=True)
    optimizer.load_state_dict(copy.deepcopy(saved))
    optimizer.register_load_state_dict_pre_hook(in_a_copy)
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert rates == [0.002, 0.002, 0.003]


def hooks_of_steps_run_in_order(given):
    problem, optimizer = given.trained(steps=1)
    calls = []

    def hook(name):
        return lambda *_: calls.append(name)

    handles = [
        register_optimizer_step_pre_hook(hook("all, before")),
        register_optimizer_step_post_hook(hook("all, after")),
        optimizer.register_step_pre_hook(hook("before")),
        optimizer.register_step_post_hook(hook("after")),
    ]
    in_order = ["all, before", "before", "after", "all, after"]
    try:
        problem.train(optimizer, 2)
        assert calls == 2 * in_order
        other = torch.optim.SGD(problem.params)
        other.step()
        assert calls == 2 * in_order + ["all, before", "all, after"]
    finally:
        for handle in handles:
            handle.remove()
    problem.train(optimizer, 1)
    assert len(calls) == 10


def a_copy_has_all_attributes(given):
    _, optimizer = given.trained()
    twin = copy.deepcopy(optimizer)
    assert {k for k in vars(optimizer) if k[0] != "_"} == {k for k in vars(twin) if k[0] != "_"}
    assert_equal(twin.state_dict(), optimizer.state_dict())


CHECKS = [
    goes_the_right_way,
    a_tensor_as_learning_rate_is_that_number,
    groups_are_like_optimizers_of_their_own,
    complex_numbers_are_pairs_of_real_ones,
    dtypes_beside_each_other_do_not_matter,
    without_gradients_nothing_happens,
    every_state_is_there_after_a_step,
    an_infinity_that_was_found_stops_the_step,
    tensors_without_memory_are_refused,
    what_was_saved_goes_on_as_it_was,
    what_older_versions_saved_can_be_loaded,
    hooks_of_state_dicts_run_in_order,
    hooks_of_steps_run_in_order,
    a_copy_has_all_attributes,
]


@pytest.fixture
def kwargs(desc, backend):
    """An input's options, as far as the backend takes them."""
    left_out = REFUSED_ON_CPU if backend in ("cpu", "eager") else {}
    return {name: value for name, value in RUN[desc].items() if name not in left_out}


@pytest.mark.parametrize("desc", CASES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_input(check, kwargs, backend):
    check(Given(kwargs, backend))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("desc", [desc for desc in RUN if " & " not in desc])
@pytest.mark.parametrize("peer", [torch.optim.Adam, torch.optim.AdamW])
def test_input_does_the_same_as_with(peer, desc, kwargs, dtype, backend):
    """Layers are frozen for a while, a step has no gradients, and two parameters are tiny."""
    # Their plain loop is what they compare with, too. It does not take captures on a CPU.
    loop = {k: v for k, v in inputs_of(PEERS[peer])[desc].items() if k != "capturable"}
    loop |= {"foreach": False, "fused": False}
    models = [make_layers().to(dtype) for _ in range(2)]
    extra = [[torch.nn.Parameter(torch.ones(s, dtype=dtype)) for s in ((), 0)] for _ in range(2)]
    lists = [[*model.parameters(), *more] for model, more in zip(models, extra, strict=True)]
    optimizers = [
        peer(lists[0], **copy.deepcopy(loop)),
        FusedPadam(lists[1], **kwargs | AS[peer] | loop, backend=backend),
    ]
    inputs = torch.linspace(0.1, 0.6, 6, dtype=dtype).view(3, 2)
    for number in range(7):
        for model, more, optimizer in zip(models, extra, optimizers, strict=True):
            optimizer.zero_grad()
            model[2].requires_grad_(number not in (3, 4))
            if number != 2:
                model(inputs).sum().backward()
                with_fresh_gradients(more, number)
            optimizer.step()
        for theirs_, ours in zip(*lists, strict=True):
            torch.testing.assert_close(ours, theirs_, rtol=1e-5, atol=1e-6)
            states = optimizers[0].state[theirs_], optimizers[1].state[ours]
            torch.testing.assert_close(*map(dict, states[::-1]), rtol=1e-5, atol=1e-6)


def make_layers():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(2, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 1), torch.nn.Sigmoid()
    )
