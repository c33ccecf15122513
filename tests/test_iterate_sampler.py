"""The iterate that the paper's theory is about: drawn in proportion to the learning rates."""

import pytest
import torch

from padam_ext import FusedPadam, IterateSampler


def make(lr=0.1, seed=0, sizes=(3, 2)):
    params = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    optimizer = FusedPadam(params, lr=lr)
    sampler = IterateSampler(optimizer, generator=torch.Generator().manual_seed(seed))
    return params, optimizer, sampler


def run(params, optimizer, rates):
    """Steps behind which every parameter holds the number of the step."""
    for number, lr in enumerate(rates, start=1):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()  # without gradients, so that what stands there can be chosen:
        with torch.no_grad():
            for param in params:
                param.fill_(number)


def test_each_iterate_is_drawn_in_proportion_to_its_learning_rate():
    rates, draws = [0.1, 0.4, 0.0, 0.3, 0.2], 4000
    counts = [0] * (len(rates) + 1)
    params, optimizer, _ = make()
    generator = torch.Generator().manual_seed(0)
    for _ in range(draws):
        sampler = IterateSampler(optimizer, generator=generator)
        run(params, optimizer, rates)
        sampler.close()
        counts[sampler.drawn_step] += 1
    assert counts[0] == counts[3] == 0
    for count, rate in zip(counts[1:], rates, strict=True):
        # Five standard deviations of a binomial count.
        assert abs(count - draws * rate) <= 5 * (draws * rate * (1 - rate)) ** 0.5


def test_the_iterate_is_the_one_behind_its_step():
    """The paper draws x_t, t >= 2, with the learning rate of step t - 1, which led to it."""
    for seed in range(20):
        params, optimizer, sampler = make(seed=seed)
        iterates = {}
        for number in range(1, 6):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
            iterates[number] = [param.detach().clone() for param in params]
        latest = [param.detach().clone() for param in params]
        with sampler.applied():
            for param, drawn in zip(params, iterates[sampler.drawn_step], strict=True):
                assert torch.equal(param, drawn)
        for param, last in zip(params, latest, strict=True):
            assert torch.equal(param, last)


def test_parameters_come_back_behind_an_error():
    params, optimizer, sampler = make()
    run(params, optimizer, [0.1, 0.1])
    with pytest.raises(KeyError), sampler.applied():
        raise KeyError
    assert params[0].tolist() == [2, 2, 2]


def test_nothing_to_apply():
    params, optimizer, sampler = make(lr=0.0)
    run(params, optimizer, [0.0])
    assert sampler.drawn_step == 0
    with pytest.raises(RuntimeError, match=r"has 0 parameters, the optimizer 2: make at least one"):
        sampler.applied().__enter__()


def test_parameters_added_later_are_in_the_next_draw():
    params, optimizer, sampler = make()
    run(params, optimizer, [1e-9])
    params.append(torch.nn.Parameter(torch.zeros(4)))
    optimizer.add_param_group({"params": params[-1:]})
    with pytest.raises(RuntimeError, match="has 2 parameters, the optimizer 3"):
        sampler.applied().__enter__()
    run(params, optimizer, [1e9])
    with sampler.applied():
        assert len(params[-1]) == 4


def test_going_on_from_a_state_dict(tmp_path):
    rates = [0.1, 0.2, 0.3, 0.2, 0.1]
    for seed in range(10):
        params, optimizer, sampler = make(seed=seed)
        run(params, optimizer, rates)
        again, other, first = make(seed=seed)
        run(again, other, rates[:2])
        torch.save(first.state_dict(), tmp_path / "sampler.pt")
        first.close()
        second = IterateSampler(other, generator=first._generator)
        second.load_state_dict(torch.load(tmp_path / "sampler.pt"))
        run(again, other, rates[2:])
        assert second.drawn_step == sampler.drawn_step
        assert second.state_dict()["total_lr"] == sampler.state_dict()["total_lr"]


def test_a_state_dict_of_other_parameters_is_refused():
    params, optimizer, sampler = make()
    run(params, optimizer, [0.1])
    _, _, other = make(sizes=(5,))
    with pytest.raises(
        ValueError, match=r"shapes \[\(3,\), \(2,\)\], the parameters have \[\(5,\)\]"
    ):
        other.load_state_dict(sampler.state_dict())
    assert other.drawn_step == 0


def test_any_optimizer():
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=torch.tensor(0.5))
    sampler = IterateSampler(optimizer)
    param.grad = torch.ones(2)
    optimizer.step()
    assert sampler.drawn_step == 1


def test_a_step_that_was_skipped_is_no_candidate():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedPadam([param], skip_nonfinite=True)
    sampler = IterateSampler(optimizer, generator=torch.Generator().manual_seed(0))
    for value in (1.0, float("nan"), float("nan"), 1.0):
        param.grad = torch.full((3,), value)
        optimizer.step()
    assert sampler.state_dict()["num_steps"] == 2
    assert sampler.state_dict()["total_lr"] == pytest.approx(0.2)
