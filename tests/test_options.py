"""Options are declared once; the constructor, the operator and the documents agree."""

import inspect
import re
from pathlib import Path

import torch

import padam_ext  # noqa: F401 - it defines the operator
from cases import DEFAULTS as DEFAULTS_OF_CASES
from padam_ext import FusedPadam
from padam_ext.optimizer_options import IGNORED_DEFAULTS, OPTIMIZER_DEFAULTS
from padam_ext.options import DEFAULTS, OPTIONS, Hyperparameters

ROOT = Path(__file__).parents[1]


def test_the_constructor():
    parameters = inspect.signature(FusedPadam).parameters
    defaults = {name: p.default for name, p in parameters.items() if name != "params"}
    assert defaults == DEFAULTS | OPTIMIZER_DEFAULTS | IGNORED_DEFAULTS
    assert list(defaults) == [*DEFAULTS, *OPTIMIZER_DEFAULTS, *IGNORED_DEFAULTS]
    assert DEFAULTS == DEFAULTS_OF_CASES


def test_plain_values_of_the_defaults_are_the_defaults():
    for option in OPTIONS:
        assert option.plain(option.name, option.default) == option.default


def test_hyperparameters():
    fields = [name for name in Hyperparameters._fields if not name.startswith("beta")]
    assert fields == [name for name in DEFAULTS if name != "betas"]
    assert Hyperparameters.from_group(DEFAULTS).beta2 == DEFAULTS["betas"][1]


def test_the_operator():
    arguments = {a.name: a for a in torch.ops.padam_ext.step.default._schema.arguments}
    for name, default in DEFAULTS.items():
        if name == "amsgrad":  # is whether there are running maxima
            assert "max_exp_avg_sqs" in arguments
        elif name in ("state_dtype", "param_rounding", "master", "seed"):
            assert name not in arguments  # it has float32 states, and rounds to the nearest
        elif name == "betas":
            assert {"beta1", "beta2"} <= set(arguments)
        elif arguments[name].has_default_value():
            assert arguments[name].default_value == default
        else:
            assert isinstance(default, float), name


def test_the_documented_table():
    text = (ROOT / "docs" / "options.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|([^|]*)\|", text, re.M))
    assert rows.pop("params").strip() == ""
    documented = {name: eval(value.strip("` ")) for name, value in rows.items()}
    assert documented == DEFAULTS | OPTIMIZER_DEFAULTS | IGNORED_DEFAULTS
    assert list(documented) == [*DEFAULTS, *OPTIMIZER_DEFAULTS, *IGNORED_DEFAULTS]


def test_the_docstring_names_every_option():
    text = inspect.getdoc(FusedPadam)
    for name in DEFAULTS | OPTIMIZER_DEFAULTS | IGNORED_DEFAULTS:
        assert f"\n    {name}: " in text, name
