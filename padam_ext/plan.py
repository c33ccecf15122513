"""A plan: the buckets of a step, each with its backend, kept for as long as they are true.

A kernel is given addresses, so a plan must never outlive what it was made from. Every step
compares what decides which memory a kernel would touch. The gradients' addresses, which move with
every `zero_grad(set_to_none=True)`, are not compared but read afresh. States are compared from the
moment on that somebody may hold them: until then only kernels can have changed them.
"""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import Tensor

from padam_ext.backends import BucketStep, choose
from padam_ext.device_step import DeviceStep
from padam_ext.device_table import capturing
from padam_ext.gather import Gatherer, Live, best_gatherer
from padam_ext.grouping import OptimizerState, ParamGroups, make_buckets
from padam_ext.state import MOMENTS


class Planner:
    """Has a plan for each step of one selection of an optimizer's parameters."""

    def __init__(self) -> None:
        self._gatherer = best_gatherer()
        self._plan: Plan | None = None

    def forget(self) -> None:
        """Makes the next plan anew, as for states that were replaced."""
        self._plan = None

    def plan(
        self,
        backend: str,
        param_groups: ParamGroups,
        state: OptimizerState,
        param_lists: list[list[Tensor]],
        *,
        compare_states: bool,
        count_on_device: bool,
        capturable: bool,
    ) -> tuple[Live, list[BucketStep]]:
        """What is alive of the parameters, given as one list per param group, and how to step it.

        With `count_on_device` a device may decide whether to skip the step; with `capturable` it
        may go into a CUDA graph.

        See `Plan` for what it raises; nothing has changed then.
        """
        live = self._gatherer.gather(param_lists)
        count_on_device |= capturable
        if self._plan is None or not self._plan.fits(
            backend, param_groups, state, live,
            compare_states=compare_states, count_on_device=count_on_device, capturable=capturable,
        ):  # fmt: skip
            if capturing():
                raise RuntimeError(
                    "a step of FusedPadam is being captured into a CUDA graph, but it is the first "
                    "for these parameters, states and gradients: make one before the capture, with "
                    "gradients for the same parameters"
                )
            self._plan = Plan(
                backend, self._gatherer, param_groups, state, live,
                count_on_device=count_on_device, capturable=capturable,
            )  # fmt: skip
        return live, self._plan.bucket_steps


class Plan:
    """The steps of all buckets for one set of live parameters, and the check that they hold."""

    def __init__(
        self,
        backend: str,
        gatherer: Gatherer,
        param_groups: ParamGroups,
        state: OptimizerState,
        live: Live,
        *,
        count_on_device: bool,
        capturable: bool,
    ) -> None:
        """Chooses backends and makes buckets.

        See `choose` and `make_buckets` for what they raise; nothing has changed then.
        """
        chosen = {device: choose(backend, device) for device in {p.device for p in live.params}}
        for device, taken_by in chosen.items():
            if capturable and not taken_by.counts_on_device:
                raise RuntimeError(
                    f"capturable=True needs a kernel for GPUs, but tensors on {device} are stepped "
                    f"by {taken_by.name!r}: leave it out"
                )
        self.bucket_steps: list[BucketStep] = []
        for bucket in make_buckets(param_groups, state, live):
            states = [state[live.params[position]] for position in bucket.positions]
            taken_by = chosen[bucket.device]
            elsewhere = any(step.device.type != "cpu" for step in bucket.steps)
            if taken_by.counts_on_device and (count_on_device or elsewhere):
                bucket.count_on_device(states)
            elif elsewhere:
                bucket.count_on_host(states)
            step = taken_by.make_step(bucket)
            if capturable and isinstance(step, DeviceStep):
                step.prepare_capture()
            self.bucket_steps.append(step)
        self._counts_on_device = count_on_device
        self._capturable = capturable
        self._backend = backend
        self._gatherer = gatherer
        self._live = live._replace(grads=[])  # a plan must not keep gradients alive
        self._all_states = list(state.values())
        self._states = [state[param] for param in live.params]
        flags = [param_groups[index]["amsgrad"] for index in live.group_indices]
        self._amsgrad_flags = [group["amsgrad"] for group in param_groups]
        self._amsgrad_states = [s for s, flag in zip(self._states, flags, strict=True) if flag]
        self._state_reading = self._read_states()

    def fits(
        self,
        backend: str,
        param_groups: ParamGroups,
        state: OptimizerState,
        live: Live,
        *,
        compare_states: bool,
        count_on_device: bool,
        capturable: bool,
    ) -> bool:
        """Whether the buckets describe this step, too."""
        then = self._live
        return (
            backend == self._backend
            and (self._counts_on_device or not count_on_device)
            and self._capturable == capturable
            and _same_objects(live.params, then.params)
            and live.group_indices == then.group_indices
            and self._amsgrad_flags == [group["amsgrad"] for group in param_groups]
            and live.param_reading is not None
            and live.param_reading == then.param_reading
            and live.grad_layouts == then.grad_layouts
            and live.null_grads == then.null_grads
            and not (compare_states and self._states_have_changed(state))
        )

    def _states_have_changed(self, state: OptimizerState) -> bool:
        return (
            len(state) != len(self._all_states)
            or not all(map(is_, state.values(), self._all_states))
            or self._state_reading != self._read_states()
        )

    def _read_states(self) -> tuple[Any, Any] | None:
        try:
            return (
                self._gatherer.state_addresses(self._states, ("step", *MOMENTS[:2])),
                self._gatherer.state_addresses(self._amsgrad_states, MOMENTS[2:]),
            )
        except (KeyError, AttributeError, TypeError, RuntimeError):
            # A state was taken away, or is a number, or has no address: make buckets anew.
            return None


def _same_objects(these: list[Any], those: list[Any]) -> bool:
    return these is those or (len(these) == len(those) and all(map(is_, these, those)))
