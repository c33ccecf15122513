"""What PyTorch's test/test_optim.py checks of numbers, for each input of optimizer_info.py."""

import copy

import pytest
import torch

from optimizer_info import (
    AS,
    CASES,
    INFO,
    INPUTS,
    PEERS,
    REFUSED,
    REFUSED_ON_CPU,
    Problem,
    assert_equal,
    given_to,
    inputs_of,
    reason,
    with_fresh_gradients,
)
from padam_ext import FusedPadam


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


CHECKS = [
    goes_the_right_way,
    a_tensor_as_learning_rate_is_that_number,
    groups_are_like_optimizers_of_their_own,
    complex_numbers_are_pairs_of_real_ones,
    dtypes_beside_each_other_do_not_matter,
]


@pytest.mark.parametrize("desc", CASES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_input(check, desc, backend):
    check(given_to(backend, desc))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("desc", [case for case in CASES if " & " not in case.values[0]])
@pytest.mark.parametrize("peer", [torch.optim.Adam, torch.optim.AdamW])
def test_input_does_the_same_as_with(peer, desc, dtype, backend):
    """Layers are frozen for a while, a step has no gradients, and two parameters are tiny."""
    # Their plain loop is what they compare with, too. It does not take captures on a CPU.
    loop = {k: v for k, v in inputs_of(PEERS[peer])[desc].items() if k != "capturable"}
    loop |= {"foreach": False, "fused": False}
    models = [make_layers().to(dtype) for _ in range(2)]
    extra = [[torch.nn.Parameter(torch.ones(s, dtype=dtype)) for s in ((), 0)] for _ in range(2)]
    lists = [[*model.parameters(), *more] for model, more in zip(models, extra, strict=True)]
    optimizers = [
        peer(lists[0], **copy.deepcopy(loop)),
        FusedPadam(lists[1], **given_to(backend, desc).kwargs | AS[peer] | loop, backend=backend),
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
