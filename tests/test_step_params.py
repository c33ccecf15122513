"""Steps of some parameters only."""

import tracemalloc

import pytest
import torch

from checking import Watched
from padam_ext import FusedPadam

pytestmark = pytest.mark.gpu_variants


def test_a_parameter_given_twice_is_refused(backend):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedPadam([param], backend=backend)
    param.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"shape \(3,\) is given twice"):
        optimizer.step_params([param, param])
    assert not optimizer.state
    assert param.tolist() == [1, 1, 1]


def test_one_parameter_and_no_other_is_stepped(backend):
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = FusedPadam([{"params": params[:1]}, {"params": params[1:], "lr": 0.5}],
                           backend=backend)  # fmt: skip
    for param in params:
        param.grad = torch.ones(3)
    for _ in range(3):
        watched = Watched(optimizer, params[2])
        optimizer.step_param(params[2])
        watched.check(optimizer)
    assert set(optimizer.state) == {params[2]}
    assert params[0].tolist() == params[1].tolist() == [1, 1, 1]
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [1, 1, 4]


def test_groups_that_change_are_seen(backend):
    first, second, third = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = FusedPadam([first, second], lr=0.0, backend=backend)
    for param in (first, second, third):
        param.grad = torch.ones(3)
    optimizer.step_param(second)
    optimizer.add_param_group({"params": [third], "lr": 0.5})
    optimizer.step_param(third)
    assert third[0] < 1
    optimizer.param_groups[0]["params"] = [first]
    optimizer.param_groups[1]["params"].insert(0, second)
    optimizer.step_param(second)
    assert second[0] < 1
    optimizer.param_groups[1]["params"].remove(second)
    with pytest.raises(ValueError, match=r"a tensor of shape \(3,\) is in no param group"):
        optimizer.step_param(second)


def test_loading_reaches_the_plans_of_single_parameters(backend):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedPadam([param], backend=backend)
    param.grad = torch.ones(3)
    optimizer.step_param(param)
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = torch.full((3,), 5.0)
    optimizer.load_state_dict(saved)
    optimizer.step_param(param)
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], torch.full((3,), 4.6))


def test_no_gradient_no_step(backend):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedPadam([param], backend=backend)
    optimizer.step_param(param)
    assert not optimizer.state


@pytest.mark.parametrize("num_groups", [1, 1500])
def test_memory_for_stepping_parameters_alone_is_linear_and_small(num_groups):
    """Beside what steps of all together need: under 1 KB of Python's memory for each parameter."""
    count = 1500
    held = []
    for one_by_one in (False, True):
        params = [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]
        groups = [{"params": params[i::num_groups]} for i in range(num_groups)]
        optimizer = FusedPadam(groups)
        for param in params:
            param.grad = torch.ones(2)
        tracemalloc.start()
        for _ in range(2):
            optimizer.state  # noqa: B018 -- whoever has had it may replace tensors
            if one_by_one:
                for param in params:
                    optimizer.step_param(param)
            else:
                optimizer.step()
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert held[1] - held[0] < 1024 * count


@pytest.mark.parametrize(
    ("what", "error"),
    [
        (lambda param: param, "expected a list of parameters, got one tensor"),
        (lambda param: [[param]], r"expected parameters, got \[Parameter"),
        (lambda param: [None], "expected parameters, got None"),
        (lambda param: "weight", "expected parameters, got 'w'"),
    ],
)
def test_what_is_no_list_of_parameters_is_refused(what, error):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedPadam([param])
    param.grad = torch.ones(3)
    with pytest.raises(TypeError, match=error):
        optimizer.step_params(what(param))
    assert not optimizer.state
