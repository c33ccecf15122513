"""The paper's seven optimizers with its hyperparameters; from torch.optim and pytorch-optimizer.

From the section "Experiments" of Chen et al., IJCAI 2020. The weight decay that is not AdamW's,
5e-4 for images and 1.2e-6 for the LSTMs, stands in comments of the paper's LaTeX source only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from padam_ext import FusedPadam

NAMES = {
    "sgd": "SGD-Momentum",
    "adam": "Adam",
    "amsgrad": "Amsgrad",
    "adamw": "AdamW",
    "yogi": "Yogi",
    "adabound": "AdaBound",
    "padam": "Padam",
}

_L2 = {"weight_decay": 5e-4}
_CIFAR: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9, **_L2},
    "adam": {"lr": 0.001, "betas": (0.9, 0.99), **_L2},
    "amsgrad": {"lr": 0.001, "betas": (0.9, 0.99), **_L2},
    "adamw": {"lr": 0.001, "betas": (0.9, 0.999), "normalized_weight_decay": 0.025},
    "yogi": {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-3, **_L2},
    "adabound": {"lr": 0.001, "betas": (0.9, 0.999), "final_lr": 0.1, **_L2},
    "padam": {"lr": 0.1, "betas": (0.9, 0.999), "partial": 1 / 8, **_L2},
}
_SMALL = {"weight_decay": 1.2e-6}
_LSTM2: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 1.0, "momentum": 0.9, **_SMALL},
    "adam": {"lr": 0.001, "betas": (0.9, 0.999), **_SMALL},
    "amsgrad": {"lr": 0.001, "betas": (0.9, 0.999), **_SMALL},
    "adamw": {"lr": 0.001, "betas": (0.9, 0.999), "normalized_weight_decay": 4e-4},
    "yogi": {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-3, **_SMALL},
    "adabound": {"lr": 0.001, "betas": (0.9, 0.999), "final_lr": 10.0, **_SMALL},
    "padam": {"lr": 0.01, "betas": (0.9, 0.999), "partial": 0.4, **_SMALL},
}
HYPERPARAMETERS = {
    "cifar": _CIFAR,
    "imagenet": _CIFAR | {"adamw": _CIFAR["adamw"] | {"normalized_weight_decay": 0.05}},
    "lstm2": _LSTM2,
    "lstm3": _LSTM2
    | {
        "sgd": _LSTM2["sgd"] | {"lr": 10.0},
        "yogi": _LSTM2["yogi"] | {"lr": 0.1},
        "adabound": _LSTM2["adabound"] | {"final_lr": 100.0},
        "padam": _LSTM2["padam"] | {"lr": 1.0, "partial": 0.2},
    },
}


def require_installed(names: Iterable[str]) -> None:
    """Raises if a package of these optimizers is missing, which costs no import.

    Raises:
        ModuleNotFoundError: Yogi and AdaBound without pytorch-optimizer.
    """
    if {"yogi", "adabound"} & set(names) and find_spec("pytorch_optimizer") is None:
        raise ModuleNotFoundError("Yogi and AdaBound need pytorch-optimizer")


def make_optimizer(
    name: str, options: dict[str, Any], params: Iterable[Tensor], steps: int
) -> Optimizer:
    """One of NAMES.

    Args:
        name: a key of NAMES.
        options: from HYPERPARAMETERS, or like those.
        params: what it steps.
        steps: of the whole run, which AdamW's normalized weight decay depends on.

    Raises:
        ModuleNotFoundError: Yogi and AdaBound without pytorch-optimizer.
    """
    options = dict(options)
    if name == "sgd":
        return torch.optim.SGD(params, **options)
    if name == "adam":
        return torch.optim.Adam(params, **options)
    if name == "amsgrad":
        return torch.optim.Adam(params, amsgrad=True, **options)
    if name == "adamw":
        normalized = options.pop("normalized_weight_decay")
        decay = weight_decay(normalized, options["lr"], steps)
        return torch.optim.AdamW(params, weight_decay=decay, **options)
    if name == "padam":
        return FusedPadam(params, **options)
    import pytorch_optimizer

    adaptive = {"yogi": pytorch_optimizer.Yogi, "adabound": pytorch_optimizer.AdaBound}[name]
    return adaptive(params, weight_decouple=False, **options)


def weight_decay(normalized: float, lr: float, steps: int) -> float:
    """What torch.optim.AdamW is told for a normalized weight decay.

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", appendix B.1: each step takes
    away the share `normalized * sqrt(b / (B * T))`, for b of B examples in each of the steps of T
    epochs, which is one by the root of the number of steps. torch.optim.AdamW takes away
    `lr * weight_decay`.
    """
    return normalized / math.sqrt(steps) / lr
