"""States that fit no parameter, in files or put by hand: an error, and nothing has changed."""

import copy
import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from checking import step_and_check
from padam_ext import FusedPadam
from test_conventions import backward, equal, make_model, train

BROKEN = {
    "another shape": (lambda s, g: s[0].update(exp_avg=torch.ones(2)), ValueError, r"shape \(2,\)"),
    "half a state": (lambda s, g: s[0].pop("exp_avg_sq"), ValueError, "needs exp_avg and"),
    "not a tensor": (lambda s, g: s[0].update(exp_avg_sq=3), TypeError, "must be a tensor, got 3"),
    "sparse": (lambda s, g: s[0].update(exp_avg=s[0]["exp_avg"].to_sparse()), TypeError, "dense"),
    "no data": (lambda s, g: s[0].update(exp_avg=s[0]["exp_avg"].to("meta")), TypeError, "meta"),
    "many steps": (lambda s, g: s[0].update(step=torch.ones(3)), ValueError, "one number"),
    "a wrapper": (
        lambda s, g: s[0].update(exp_avg=FakeTensorMode().from_tensor(s[0]["exp_avg"])),
        TypeError, "must be a dense tensor with data, got a FakeTensor",
    ),
    "no dict": (lambda s, g: s.update({0: 3}), TypeError, "parameter 0 must be a dict, got 3"),
    "no step": (lambda s, g: s[0].update(step=None), TypeError, "must be a number, got None"),
    "a bad option": (lambda s, g: g[0].update(eps=-1.0), ValueError, "eps must be .* got -1.0"),
    "no params": (lambda s, g: g[0].pop("params"), KeyError, "params"),  # as torch.optim
    "too few groups": (lambda s, g: g.clear(), ValueError, "number of parameter groups"),
    "too few params": (lambda s, g: g[0]["params"].pop(), ValueError, "size of optimizer's group"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_does_not_fit_is_refused_and_changes_nothing(name, backend):
    breaks, error, message = BROKEN[name]
    model = make_model()
    optimizer = FusedPadam(model.parameters(), backend=backend)
    train(model, optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())
    broken = copy.deepcopy(before)
    breaks(broken["state"], broken["param_groups"])
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(broken)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, state in after["state"].items():
        assert equal(state.values(), before["state"][key].values())
    backward(model)
    step_and_check(optimizer)


BAD_STEPS = [
    (-1, ValueError, "whole number in .* got -1"),
    (-1.0, ValueError, "got -1.0"),
    (2.5, ValueError, "got 2.5"),
    (math.nan, ValueError, "got nan"),
    (math.inf, ValueError, "got inf"),
    (10**5000, ValueError, "got about 2"),
    (np.float32(-2), ValueError, "got .*-2.0"),
    (torch.tensor(-1), ValueError, "got -1"),
    (torch.tensor([math.nan]), ValueError, "got nan"),
    (torch.tensor(0.5, dtype=torch.float64), ValueError, "got 0.5"),
    (torch.tensor(1 + 0j), TypeError, r"must be a number, got \(1\+0j\)"),
    ("3", TypeError, "must be a number, got '3'"),
    (None, TypeError, "must be a number, got None"),
]


@pytest.mark.parametrize(("step", "error", "message"), BAD_STEPS, ids=[m for _, _, m in BAD_STEPS])
@pytest.mark.parametrize("bias_correction", ["none", "adam"])
def test_a_step_that_counts_nothing(step, error, message, bias_correction, backend):
    model = make_model()
    optimizer = FusedPadam(model.parameters(), bias_correction=bias_correction, backend=backend)
    train(model, optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    params = [p.detach().clone() for p in model.parameters()]

    broken = copy.deepcopy(optimizer.state_dict())
    broken["state"][2]["step"] = step
    with pytest.raises(error, match=f"state 'step' of parameter 2 .*{message}"):
        optimizer.load_state_dict(broken)
    backward(model)
    good = optimizer.state[model[2].weight]["step"]
    optimizer.state[model[2].weight]["step"] = step
    with pytest.raises(error, match=f"state 'step' of parameter 2 of param group 0 .*{message}"):
        optimizer.step()

    optimizer.state[model[2].weight]["step"] = good
    assert equal(params, model.parameters())
    for key, state in optimizer.state_dict()["state"].items():
        assert equal(state.values(), before[key].values())


@pytest.mark.parametrize(
    "step",
    [
        3, 3.0, np.int64(3), np.float16(3), torch.tensor(3, dtype=torch.uint8), torch.tensor([[3]]),
        torch.tensor(3, dtype=torch.bfloat16),
    ],
    ids=repr,
)  # fmt: skip
def test_a_whole_number_of_any_type_is_a_step(step, backend):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedPadam([param], bias_correction="adam", backend=backend)
    optimizer.state[param] = {"step": copy.deepcopy(step)}  # is counted in place
    param.grad = torch.ones(3)
    step_and_check(optimizer)
    assert optimizer.state[param]["step"] == 4
