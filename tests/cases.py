"""The shared table of cases: every backend runs all of them against the oracle."""

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

DEFAULTS: dict[str, Any] = {
    "lr": 0.1,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "partial": 0.125,
    "amsgrad": True,
    "bias_correction": "none",
    "decoupled_weight_decay": False,
    "maximize": False,
    "state_dtype": "float32",
    "param_rounding": "nearest",
    "master": None,
    "seed": 0,
    "second_moment": "mean",
}

PARTIALS = (0.0, 1 / 16, 1 / 8, 0.2, 1 / 4, 0.4, 1 / 2)


@dataclass(frozen=True)
class Case:
    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def all_options(self) -> dict[str, Any]:
        return DEFAULTS | self.options


def _cases() -> list[Case]:
    cases = [
        Case(f"p={p:g} {correction}", {"partial": p, "bias_correction": correction,
                                       "weight_decay": 5e-2})
        for p in PARTIALS
        for correction in ("none", "authors", "adam")
    ]  # fmt: skip
    decoupled = {"weight_decay": 0.1, "decoupled_weight_decay": True}
    cases += [
        Case("no decay"),
        Case("decoupled", decoupled),
        Case("decoupled p=0.4", decoupled | {"partial": 0.4}),
        Case("no amsgrad", {"amsgrad": False, "weight_decay": 5e-2}),
        Case("no amsgrad p=0.2 adam", {"amsgrad": False, "partial": 0.2, "weight_decay": 5e-2,
                                       "bias_correction": "adam"}),
        Case("maximize", {"maximize": True, "weight_decay": 5e-2}),
        Case("maximize decoupled p=1/4", decoupled | {"maximize": True, "partial": 0.25}),
        Case("eps=0", {"eps": 0.0, "weight_decay": 5e-2}),
        Case("large eps p=0.2", {"eps": 1e-2, "partial": 0.2, "weight_decay": 5e-2}),
        Case("large eps p=1/2", {"eps": 1e-2, "partial": 0.5, "weight_decay": 5e-2}),
        Case("no momentum", {"betas": (0.0, 0.99), "weight_decay": 5e-2}),
        Case("no averaging", {"betas": (0.9, 0.0), "partial": 0.25, "weight_decay": 5e-2}),
        Case("odd betas", {"betas": (0.77, 0.9123), "partial": 0.3, "weight_decay": 1e-2}),
        Case("small lr", {"lr": 3e-4, "partial": 0.5, "weight_decay": 5e-2}),
        *(
            Case(f"{moment} p={p:g}", {"second_moment": moment, "amsgrad": False, "partial": p,
                                       "weight_decay": 5e-2})
            for moment in ("sum", "max", "yogi")
            for p in (1 / 8, 0.3, 1 / 2)
        ),
        Case("lr=0", {"lr": 0.0, "weight_decay": 5e-2}),
    ]  # fmt: skip
    return cases


CASES = _cases()
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def ids(values):
    return [getattr(v, "name", str(v).removeprefix("torch.")).replace(" ", "-") for v in values]


# In `make test` the half types take turns: they differ only in how parameters and gradients are
# read and written. Each meets every p and every correction there. The other cases are slow.
HALF_TYPES = (torch.bfloat16, torch.float16)
each_case_and_dtype = pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(
            case,
            dtype,
            id="-".join(ids((case, dtype))),
            marks=[pytest.mark.slow] if dtype == HALF_TYPES[number % 2 - 1] else [],
        )
        for number, case in enumerate(CASES)
        for dtype in DTYPES
    ],
)
each_partial = pytest.mark.parametrize("partial", PARTIALS, ids=ids(PARTIALS))
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=ids(DTYPES))


# Ways to store, and a dtype of parameters for which each is.
STORAGES = [
    (torch.float32, {"state_dtype": "packed32"}),
    (torch.bfloat16, {"state_dtype": "packed32"}),
    (torch.float16, {"state_dtype": "packed32"}),
    (torch.bfloat16, {"state_dtype": "packed32", "param_rounding": "stochastic", "seed": 5}),
    (torch.bfloat16, {"state_dtype": "packed32", "master": "split"}),
    (torch.bfloat16, {"param_rounding": "stochastic"}),
    (torch.bfloat16, {"master": "split"}),
]


def describe_storage(storage):
    dtype, options = storage
    return "-".join([*ids([dtype]), *(str(option) for option in options.values())])


# Interpretation takes its time: three of them show every codec there.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The kernels' PTX is executed on the CPU: `make test-ptx`.
EXECUTED = os.environ.get("EXECUTE_PTX") == "1"
SLOWLY = INTERPRETED or EXECUTED
# A kernel for GPUs on the CPU, for tests that ask for no other.
if EXECUTED:
    ON_CPU = ["triton-sm_90", pytest.param("cuda-90", marks=pytest.mark.nvcc)]
else:
    ON_CPU = ["triton" if INTERPRETED else "cuda-on-host"]
SOME_STORAGES = [STORAGES[i] for i in (0, 3, 6)] if INTERPRETED else STORAGES
each_storage = pytest.mark.parametrize("storage", SOME_STORAGES, ids=describe_storage)
# In `make test` they take turns: two for each case; one in the interpreter.
each_case_and_storage = pytest.mark.parametrize(
    ("case", "storage"),
    [
        pytest.param(
            case,
            storage,
            id=f"{ids([case])[0]}-{describe_storage(storage)}",
            marks=[] if (2 * number + place) % len(STORAGES) < 2 else [pytest.mark.slow],
        )
        for number, case in enumerate(CASES)
        for place, storage in enumerate(STORAGES)
        if not INTERPRETED or (number + place) % len(STORAGES) == 0
        # Words hold no momentum beside a v that forgets at once, and no sums: errors.
        if "state_dtype" not in storage[1]
        or not (case.name == "no averaging" or "second_moment" in case.options)
    ],
)
