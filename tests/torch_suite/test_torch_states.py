"""What PyTorch's test/test_optim.py checks of states, hooks and copies, for each input."""

import copy
import io
import itertools

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from optimizer_info import (
    CASES,
    INFO,
    assert_equal,
    given_to,
    with_fresh_gradients,
    without_names,
)


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


# They have the states of others, so `make test` leaves them to `make test-all-cases`.
LIKE_OTHERS = (
    "non-default lr",
    "nonzero weight_decay",
    "maximize",
    "capturable, amsgrad",
    "Tensor lr with capturable and amsgrad",
    "Tensor lr, Tensor betas, with capturable and amsgrad",
)
STATE_CASES = [
    pytest.param(*case.values, marks=pytest.mark.slow) if case.values[0] in LIKE_OTHERS else case
    for case in CASES
]


@pytest.mark.parametrize("desc", STATE_CASES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_input(check, desc, backend):
    check(given_to(backend, desc))
