"""Bad input: an error that names the value, before anything has changed."""

import copy
import math
import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from padam_ext import FusedPadam


def parameter():
    return torch.nn.Parameter(torch.ones(3))


HUGE = 10**5000  # beyond floats, and beyond what Python prints

BAD_OPTIONS = [
    ({"lr": -0.1}, ValueError, r"lr must be in \[0, inf\), got -0.1"),
    ({"lr": math.nan}, ValueError, "lr must be .* got nan"),
    ({"lr": math.inf}, ValueError, "lr must be .* got inf"),
    ({"lr": "0.1"}, TypeError, "lr must be a number, got '0.1' of type str"),
    ({"lr": True}, TypeError, "lr must be a number, got True"),
    ({"lr": [0.1]}, TypeError, "lr must be a number, got \\[0.1\\]"),
    ({"partial": {}}, TypeError, "partial must be a number, got {}"),
    ({"lr": None}, TypeError, "lr must be a number, got None"),
    ({"lr": torch.tensor(-1.0)}, ValueError, "lr must be .* got -1.0"),
    ({"lr": torch.ones(2)}, ValueError, r"tensor lr must have 1 element, got shape \(2,\)"),
    ({"lr": torch.tensor(0.1, device="meta")}, TypeError, "tensor lr .* read, got .*device='meta'"),
    ({"lr": torch.tensor(0.1j)}, TypeError, "lr must be a number, got 0.1.*j"),
    ({"lr": 10**400}, ValueError, r"lr must be in \[0, inf\), got 1000"),
    ({"lr": -(10**400)}, ValueError, r"lr must be in \[0, inf\), got -1000"),
    ({"lr": HUGE}, ValueError, r"lr must be in \[0, inf\), got about 2\*\*16609"),
    ({"eps": HUGE}, ValueError, "eps must be .* got about"),
    ({"weight_decay": HUGE}, ValueError, "weight_decay must be .* got about"),
    ({"partial": HUGE}, ValueError, "partial must be .* got about"),
    ({"betas": (0.9, HUGE)}, ValueError, r"betas\[1\] must be in \[0, 1\), got about"),
    ({"eps": torch.ones(2)}, ValueError, r"eps must have 1 element, got shape \(2,\)"),
    ({"eps": torch.tensor(-1.0)}, ValueError, "eps must be .* got -1.0"),
    ({"betas": (0.9,)}, ValueError, r"betas must be a pair .* got \(0.9,\)"),
    ({"betas": 0.9}, ValueError, "betas must be a pair .* got 0.9"),
    ({"betas": {0.9, 0.99}}, ValueError, "betas must be a pair"),
    ({"betas": (1.0, 0.9)}, ValueError, r"betas\[0\] must be in \[0, 1\), got 1.0"),
    ({"betas": (0.9, -0.1)}, ValueError, r"betas\[1\] must be in \[0, 1\), got -0.1"),
    ({"betas": (0.9, math.nan)}, ValueError, r"betas\[1\] must be .* got nan"),
    ({"betas": ("0.9", 0.9)}, TypeError, r"betas\[0\] must be a number, got '0.9'"),
    ({"eps": -1e-8}, ValueError, r"eps must be in \[0, inf\), got -1e-08"),
    ({"eps": math.nan}, ValueError, "eps must be .* got nan"),
    ({"eps": "1e-8"}, TypeError, "eps must be a number"),
    ({"weight_decay": -1}, ValueError, r"weight_decay must be in \[0, inf\), got -1"),
    ({"weight_decay": math.inf}, ValueError, "weight_decay must be .* got inf"),
    ({"partial": -1}, ValueError, r"partial must be in \[0, 0.5\], got -1"),
    ({"partial": 0.50001}, ValueError, r"partial must be in \[0, 0.5\], got 0.50001"),
    ({"partial": math.nan}, ValueError, "partial must be .* got nan"),
    ({"partial": 0.1j}, TypeError, "partial must be a number"),
    ({"bias_correction": "yes"}, ValueError, "bias_correction must be one of .* got 'yes'"),
    ({"bias_correction": np.ones(2)}, ValueError, "bias_correction must be one of .* got array"),
    ({"bias_correction": True}, ValueError, "bias_correction must be one of .* got True"),
    ({"betas": np.array([0.9, 1.0])}, ValueError, r"betas\[1\] must be in \[0, 1\), got .*1.0"),
    ({"betas": np.ones(3)}, ValueError, "betas must be a pair .* got array"),
    ({"betas": "ab"}, (TypeError, ValueError), r"betas.* must be .* got 'a"),
    ({"amsgrad": 2}, TypeError, "amsgrad must be True or False, got 2"),
    ({"amsgrad": np.int64(-1)}, TypeError, "amsgrad must be True or False, got .*-1"),
    ({"maximize": "no"}, TypeError, "maximize must be True or False, got 'no'"),
    ({"second_moment": "min"}, ValueError, "second_moment must be one of .* got 'min'"),
    (
        {"second_moment": "sum"},
        ValueError,
        "'sum' needs amsgrad=False, got True, which is for .*'mean' only",
    ),
    (
        {"second_moment": "max", "amsgrad": False, "bias_correction": "adam"},
        ValueError,
        "'max' needs bias_correction='none', got 'adam'",
    ),
    (
        {"second_moment": "yogi", "amsgrad": False, "state_dtype": "packed32"},
        ValueError,
        "'yogi' needs state_dtype='float32', got 'packed32'",
    ),
    ({"decoupled_weight_decay": None}, TypeError, "decoupled_weight_decay must be .* got None"),
]
each_bad_option = pytest.mark.parametrize(
    ("option", "error", "message"), BAD_OPTIONS, ids=[m for _, _, m in BAD_OPTIONS]
)


@each_bad_option
def test_the_constructor_refuses(option, error, message):
    with pytest.raises(error, match=message):
        FusedPadam([parameter()], **option)
    with pytest.raises(error, match=message):
        FusedPadam([{"params": [parameter()], **option}])


@each_bad_option
def test_add_param_group_refuses_and_adds_nothing(option, error, message):
    optimizer = FusedPadam([parameter()])
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": [parameter()], **option})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "option",
    [{"max_grad_norm": 1.0}, {"skip_nonfinite": True}, {"capturable": True}, {"backend": "eager"}],
    ids=str,
)
def test_an_option_of_the_optimizer_set_in_a_param_group_later(option):
    param = parameter()
    optimizer = FusedPadam([param])
    param.grad = torch.ones_like(param)
    optimizer.param_groups[0].update(option)
    with pytest.raises(ValueError, match="is for the whole optimizer"):
        optimizer.step()
    assert not optimizer.state


# The range of lr is looked at where a user hands it over, not at what schedulers make of it.
LATER = [bad for bad in BAD_OPTIONS if not re.match(r"lr must be (in|\.\*)", bad[2])]


@pytest.mark.parametrize(("option", "error", "message"), LATER, ids=[m for _, _, m in LATER])
def test_a_step_refuses_before_anything_changes(option, error, message, backend):
    params = [parameter(), parameter()]
    optimizer = FusedPadam([{"params": [p]} for p in params], backend=backend)
    for param in params:
        param.grad = torch.ones(3)
    optimizer.step()
    before = copy.deepcopy((params, dict(optimizer.state)))
    optimizer.param_groups[1].update(option)
    with pytest.raises(error, match=message):
        optimizer.step()
    assert torch.equal(params[0], before[0][0])
    assert optimizer.state[params[0]]["step"] == 1


@pytest.mark.parametrize(
    "option",
    [
        {"lr": 0}, {"lr": np.float32(0.1)}, {"lr": torch.tensor(0.1)}, {"lr": torch.tensor([0.1])},
        {"betas": [0, 0]}, {"eps": 0}, {"partial": 0}, {"partial": 0.5}, {"weight_decay": 1},
    ],
    ids=str,
)  # fmt: skip
def test_the_ends_of_the_ranges_are_allowed(option, backend):
    param = parameter()
    optimizer = FusedPadam([param], **option, backend=backend)
    param.grad = torch.ones(3)
    optimizer.step()
    assert param.isfinite().all()


class ListConfig(Sequence):
    """As OmegaConf's: neither a list nor a tuple."""

    def __init__(self, *values):
        self._values = values

    def __getitem__(self, index):
        return self._values[index]

    def __len__(self):
        return len(self._values)

    def __repr__(self):
        return f"ListConfig{self._values}"


PAIR = (0.75, 0.5)  # exact in float32
# What is given, and the plain option that it means and that is kept.
OTHER_TYPES = [
    ({"betas": ListConfig(*PAIR)}, {"betas": PAIR}),
    ({"betas": list(PAIR)}, {"betas": PAIR}),
    ({"betas": np.array(PAIR)}, {"betas": PAIR}),
    ({"betas": np.array(PAIR, dtype=np.float32)}, {"betas": PAIR}),
    ({"betas": torch.tensor(PAIR)}, {"betas": PAIR}),
    ({"betas": tuple(torch.tensor(PAIR))}, {"betas": PAIR}),
    ({"betas": (np.float32(0.75), np.float64(0.5))}, {"betas": PAIR}),
    ({"betas": (0, 0)}, {"betas": (0.0, 0.0)}),
    ({"eps": torch.tensor(0.25)}, {"eps": 0.25}),
    ({"eps": torch.tensor([0.25], dtype=torch.float64)}, {"eps": 0.25}),
    ({"eps": np.float32(0.25)}, {"eps": 0.25}),
    ({"partial": np.float64(0.25)}, {"partial": 0.25}),
    ({"lr": np.float64(0.5)}, {"lr": 0.5}),
    ({"lr": np.float32(0.5)}, {"lr": 0.5}),
    ({"lr": np.int64(1)}, {"lr": 1.0}),
    ({"weight_decay": np.float64(0.5)}, {"weight_decay": 0.5}),
    ({"amsgrad": np.bool_(False)}, {"amsgrad": False}),
    ({"amsgrad": 0}, {"amsgrad": False}),
    ({"maximize": 1}, {"maximize": True}),
    ({"maximize": np.bool_(True)}, {"maximize": True}),
    ({"decoupled_weight_decay": 1, "weight_decay": 0.5},
     {"decoupled_weight_decay": True, "weight_decay": 0.5}),
]  # fmt: skip
PLAIN = {"betas": tuple, "amsgrad": bool, "maximize": bool, "decoupled_weight_decay": bool}
each_other_type = pytest.mark.parametrize(
    ("given", "plain"), OTHER_TYPES, ids=[str(given) for given, _ in OTHER_TYPES]
)


def is_plain(name, value):
    items = value if isinstance(value, tuple) else ()
    return type(value) is PLAIN.get(name, float) and all(type(item) is float for item in items)


@each_other_type
@pytest.mark.parametrize("place", ["constructor", "group", "added group"])
def test_options_of_other_types_are_kept_as_plain_numbers(place, given, plain, tmp_path):
    param = parameter()
    if place == "constructor":
        optimizer = FusedPadam([param], **given)
    elif place == "group":
        optimizer = FusedPadam([{"params": [param], **given}])
    else:
        optimizer = FusedPadam([parameter()])
        optimizer.add_param_group({"params": [param], **given})
    group = optimizer.param_groups[-1]
    for name, value in plain.items():
        assert group[name] == value
        assert is_plain(name, group[name])
    torch.save(optimizer.state_dict(), tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", weights_only=True)
    assert loaded["param_groups"][-1] == optimizer.state_dict()["param_groups"][-1]


@each_other_type
@pytest.mark.parametrize("later", [False, True])
def test_options_of_other_types_mean_what_plain_ones_mean(later, given, plain, backend):
    made = []
    for options in (given, plain):
        param = parameter()
        optimizer = FusedPadam([param], **({} if later else options), backend=backend)
        if later:
            optimizer.param_groups[0].update(options)
        for factor in (1, -2):
            param.grad = torch.tensor([1.0, 2.0, 0.0]) * factor
            optimizer.step()
        made.append(param)
    assert torch.equal(*made)


def test_a_rate_that_is_a_tensor_stays_one():
    lr = torch.tensor(0.1)
    optimizer = FusedPadam([parameter()], lr=lr)
    assert optimizer.param_groups[0]["lr"] is lr


def test_a_numpy_rate_that_was_set_later_is_saved_as_a_plain_one(tmp_path):
    optimizer = FusedPadam([parameter()])
    optimizer.param_groups[0]["lr"] = np.float64(0.05)
    torch.save(optimizer.state_dict(), tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", weights_only=True)
    assert loaded["param_groups"][0]["lr"] == 0.05
    assert type(loaded["param_groups"][0]["lr"]) is float


def test_an_unknown_backend():
    with pytest.raises(ValueError, match=r"backend must be one of \('auto', .* got 'gpu'"):
        FusedPadam([parameter()], backend="gpu")


@pytest.mark.parametrize("name", ["typo", "", None, 1])
def test_an_unknown_backend_that_is_set_later(name):
    optimizer = FusedPadam([parameter()], backend="eager")
    with pytest.raises(ValueError, match=r"backend must be one of \('auto', .* got " + repr(name)):
        optimizer.backend = name
    assert optimizer.backend == "eager"


@pytest.mark.parametrize("value", [np.ones(2), None, 1], ids=["array", "None", "int"])
def test_a_backend_of_another_type(value):
    with pytest.raises(ValueError, match="backend must be one of"):
        FusedPadam([parameter()], backend=value)


def test_a_backend_for_one_param_group():
    message = "param group has backend='eager', but .* whole optimizer, which has 'auto'"
    group = {"params": [parameter()], "backend": "eager"}
    with pytest.raises(ValueError, match=message):
        FusedPadam([group])
    optimizer = FusedPadam([parameter()])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    # Wrappers of optimizers copy all arguments into their groups: the same again is no error.
    FusedPadam([group], backend="eager")


def test_a_param_group_keeps_keys_that_are_no_options():
    group = {"params": [parameter()], "name": "head", "initial_lr": 0.2}
    optimizer = FusedPadam([group])
    assert optimizer.param_groups[0]["name"] == "head"
    assert optimizer.param_groups[0]["initial_lr"] == 0.2


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="momentum"):
        FusedPadam([parameter()], momentum=0.9)


def test_duplicate_parameters():
    param = parameter()
    with pytest.raises(ValueError, match="parameter 1 appears more than once"):
        FusedPadam([param, param])
    with pytest.raises(ValueError, match="parameter 'b' appears more than once"):
        FusedPadam([("a", param), ("b", param)])
    with pytest.raises(ValueError, match="more than one parameter group"):
        FusedPadam([{"params": [param]}, {"params": param}])


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ([], ValueError, "empty parameter list"),
        ([torch.ones(2, requires_grad=True) * 2], ValueError, "non-leaf"),
        ([1.0], TypeError, "Tensors"),
        (torch.ones(2), TypeError, "iterable"),
        ([{"params": {parameter()}}], TypeError, "ordered"),
    ],
    ids=["empty", "non-leaf", "not a tensor", "a tensor", "a set"],
)
def test_lists_that_torch_refuses(params, error, message):
    with pytest.raises(error, match=message):
        FusedPadam(params)
