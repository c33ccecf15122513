"""A plan: the buckets of a step, each with its backend, kept for as long as they are true.

A kernel is given addresses, so a plan must never outlive what it was made from. Every step
compares everything that decides what memory a kernel would touch; only the gradients' addresses,
which move with every `zero_grad(set_to_none=True)`, are read afresh instead.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from padam_ext.backends import BucketStep, choose
from padam_ext.grouping import Live, OptimizerState, ParamGroups, make_buckets

_address, _stride, _numel, _is_neg, _is_conj = (
    Tensor.data_ptr,
    Tensor.stride,
    Tensor.numel,
    Tensor.is_neg,
    Tensor.is_conj,
)


class Plan:
    """The steps of all buckets for one set of live parameters, and the check that they hold."""

    def __init__(
        self, backend: str, param_groups: ParamGroups, state: OptimizerState, live: Live
    ) -> None:
        """Chooses backends and makes buckets.

        See `choose` and `make_buckets` for what they raise; nothing has changed then.
        """
        chosen = {device: choose(backend, device) for device in {p.device for p in live.params}}
        self.bucket_steps: list[BucketStep] = [
            chosen[bucket.device].make_step(bucket)
            for bucket in make_buckets(param_groups, state, live)
        ]
        self._backend = backend
        # Holding these keeps their ids from being given to other objects.
        self._params = list(live.params)
        self._all_states = list(state.values())
        self._states = [state[param] for param in live.params]
        flags = [bool(param_groups[index]["amsgrad"]) for index in live.group_indices]
        self._amsgrad_states = [s for s, flag in zip(self._states, flags, strict=True) if flag]
        self._has_complex = any(param.is_complex() for param in live.params)
        self._fingerprint = self._fingerprint_of(param_groups, state, live)

    def fits(
        self, backend: str, param_groups: ParamGroups, state: OptimizerState, live: Live
    ) -> bool:
        """Whether the buckets describe this step, too."""
        if backend != self._backend or len(live.params) != len(self._params):
            return False
        try:
            return self._fingerprint == self._fingerprint_of(param_groups, state, live)
        except (KeyError, AttributeError, TypeError, RuntimeError):
            # A state was taken away or is a number, or a tensor has become one without strides or
            # an address. Making new buckets repairs that or says what is wrong.
            return False

    def _fingerprint_of(
        self, param_groups: ParamGroups, state: OptimizerState, live: Live
    ) -> tuple[Any, ...]:
        params, grads = live.params, live.grads
        states = self._states
        return (
            [*map(id, params)],
            live.group_indices,
            [group["amsgrad"] for group in param_groups],
            [*map(id, state.values())],
            [*map(_address, params)],
            [*map(_numel, params)],
            [*map(_stride, params)],
            [*map(_stride, grads)],
            [grad.dtype for grad in grads],
            [*map(_is_neg, grads)],
            [*map(_is_conj, grads)] if self._has_complex else None,
            [s["step"].data_ptr() for s in states],
            [s["exp_avg"].data_ptr() for s in states],
            [s["exp_avg_sq"].data_ptr() for s in states],
            [s["max_exp_avg_sq"].data_ptr() for s in self._amsgrad_states],
        )
