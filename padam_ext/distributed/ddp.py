"""Stepping during backward under DistributedDataParallel, by a communication hook of its own.

No `from __future__ import annotations` here: DistributedDataParallel compares a hook's annotations.
"""

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from padam_ext.distributed.plain_shards import living


class TakesBuckets(Protocol):
    """Whoever steps the parameters of a bucket."""

    def begin_bucket(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Told when all gradients of a bucket are there; which of its parameters to step."""

    def step_bucket(self, params: list[Tensor]) -> None:
        """Told when they are averaged and in `.grad`, perhaps in another thread."""


class BucketHook:
    """The communication hook of one module, which it keeps for good.

    Attributes:
        target: who steps, None for nobody: gradients are averaged only.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        """Registers it.

        Raises:
            ValueError: the module finds unused parameters.
            RuntimeError: it has a communication hook.
        """
        if ddp.find_unused_parameters:
            raise ValueError(
                "step_during_backward cannot be used with find_unused_parameters=True: which "
                "parameters no process has used is only known at the end of backward, when they "
                "have been stepped"
            )
        self.group = ddp.process_group
        self.target: TakesBuckets | None = None
        try:
            ddp.register_comm_hook(self, average_and_step)
        except RuntimeError as error:
            raise RuntimeError(
                "step_during_backward needs a communication hook of its own, but this "
                "DistributedDataParallel module has one already, such as one that compresses"
            ) from error

    def __reduce__(self) -> Any:
        """Of a copied or pickled module: one that nobody calls, since the copy has no hook."""
        return _uncalled, ()


def _uncalled() -> BucketHook:
    hook = BucketHook.__new__(BucketHook)
    hook.target = None
    return hook


_hooks: WeakKeyDictionary[DistributedDataParallel, BucketHook] = WeakKeyDictionary()


def bucket_hook_of(ddp: Any) -> BucketHook:
    """The hook of a module, made at the first call.

    Raises:
        TypeError: it is no DistributedDataParallel.
        ValueError: see BucketHook, and RuntimeError likewise, also where somebody uses it already.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"ddp must be a DistributedDataParallel module, got {type(ddp).__name__}; pass one "
            "itself where it is compiled or wrapped"
        )
    hook = _hooks.get(ddp)
    if hook is None:
        hook = _hooks[ddp] = BucketHook(ddp)
    if hook.target is not None:
        raise RuntimeError("this DistributedDataParallel module is stepped during backward already")
    return hook


def refuse_others(params: Sequence[Tensor], known: DistributedDataParallel | None) -> None:
    """Raises RuntimeError if a module other than the known one has one of the parameters.

    It averages gradients after they would have been used, and then puts them into `.grad` again,
    also where there is but one process. Nothing at a parameter tells that it has it.
    """
    mine = set(map(id, params))
    for module in living(DistributedDataParallel):
        if module is known:
            continue
        for name, param in module.module.named_parameters():
            if id(param) in mine and name not in module.parameters_to_ignore:
                raise RuntimeError(
                    "step_during_backward does not know of the DistributedDataParallel, which has "
                    f"parameter {name!r}: it averages gradients after they would have been used, "
                    "so processes would part ways. Pass it: step_during_backward(optimizer, "
                    "ddp=model)"
                )


def average_and_step(
    hook: BucketHook,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket over the processes, as without a hook, then has its parameters stepped."""
    averaging = allreduce_hook(hook.group, bucket)
    target = hook.target
    if target is None:
        return averaging
    # Views of what is being averaged.
    grads = {id(p): grad for p, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)}
    params = target.begin_bucket(bucket.parameters())

    def step(averaged: torch.futures.Future[torch.Tensor]) -> Tensor:
        for param in params:
            # It may be this process's own; DistributedDataParallel would copy into it later.
            param.grad = grads[id(param)]
        target.step_bucket(params)
        return averaged.value()

    return averaging.then(step)
