"""A plan: the buckets of a step, each with its backend, kept while they are valid.

A kernel is given addresses, so what was prepared must never outlive what it was made from. There is
one record for each parameter, shared by all plans. Each step reads again what decides which memory
a kernel would touch, and makes new records where a reading differs. So every plan notices a
replaced tensor, and records of other parameters are kept.

States are read only once the user may hold them: until then only steps change them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from padam_ext import runtime
from padam_ext.backends import Backend
from padam_ext.backends.device import DeviceStep
from padam_ext.backends.step import BucketStep
from padam_ext.buckets import Bucket, ParamRecord, make_buckets, make_record
from padam_ext.checks import Name, ParamGroups, check_grad, check_param, params_of
from padam_ext.distributed.reduction import Reduction
from padam_ext.gather import Reading, Selection, StepInputs, best_gatherer
from padam_ext.precision import check_precision, follow_replacement, warn_of_stalling
from padam_ext.slots import STATE_SLOTS, Storage
from padam_ext.state import OptimizerState, check_state, fit_state
from padam_ext.step_counts import StepCounts, place_counters

# The key of the plan for all parameters. A plan for some of them has the id of the first.
ALL_PARAMS = "all"
# Plans that are kept under one key, for runs in which now some and now other parameters have a
# gradient: layers that are skipped, experts, two losses in turn.
MOST_PLANS = 4

Choose = Callable[[torch.device], Backend]


class Needs(NamedTuple):
    """What a step asks of its plan.

    Attributes:
        backend: name of the backend, as the user gave it.
        count_on_device: a device may decide whether to skip the step.
        capturable: the step may go into a CUDA graph.
        reduction: over which processes the norm adds up, where there are others.
        compare_states: somebody may have replaced states.
    """

    backend: str = "auto"
    count_on_device: bool = False
    capturable: bool = False
    reduction: Reduction | None = None
    compare_states: bool = False


class Plan(NamedTuple):
    """The steps of all buckets for one set of parameters, and what they were made from."""

    steps: list[BucketStep]
    needs: Needs
    storages: dict[int, Storage]
    reading: Reading | None
    state_reading: Reading | None
    generation: int


class Planner:
    """What one optimizer has prepared: a record for each parameter, and plans."""

    def __init__(self) -> None:
        self._gatherer = best_gatherer()
        self._records: dict[int, ParamRecord] = {}  # by the parameter's id
        self._plans: dict[object, list[Plan]] = {}  # the last used first
        self._captured: list[object] = []
        # Counts replacements of anything whose address an earlier plan may have.
        self._generation = 0

    def forget(self) -> None:
        """Drops everything prepared, for example because states were replaced.

        What is in a CUDA graph is kept.
        """
        self._records.clear()
        self._plans.clear()

    def keep_captured(self, *used: object) -> None:
        """Keeps things as long as the optimizer: a CUDA graph uses them whenever it runs.

        That is also after a state_dict was loaded, which makes other states.
        """
        self._captured.append(used)

    def gather(self, selection: Selection, state: OptimizerState) -> StepInputs:
        """Gathers those of the selected parameters that have a gradient."""
        return self._gatherer.gather(selection, state)

    def plan(
        self,
        inputs: StepInputs,
        param_groups: ParamGroups,
        choose: Choose,
        needs: Needs,
        *,
        keep_as: object = None,
    ) -> list[BucketStep]:
        """How to step what was gathered.

        Args:
            inputs: what was gathered.
            param_groups: the optimizer's.
            choose: the backend for tensors of a device.
            needs: see there.
            keep_as: a name under which to keep the plan for the next step; None to keep none.

        See `choose`, `check_param`, `check_grad` and `check_state` for what it raises; nothing has
        changed then.
        """
        states = None
        if needs.compare_states and inputs.reading is not None:
            states = self._gatherer.read_states(inputs.state, inputs.params)
        groups = array("q", inputs.group_indices)
        storages = {index: Storage.of(param_groups[index]) for index in set(groups)}
        kept = self._plans.get(keep_as, [])
        for place, plan in enumerate(kept):
            if _still_holds(plan, self._generation, inputs, needs, storages, states):
                if place > 0:
                    kept.insert(0, kept.pop(place))
                if runtime.capturing():
                    used = [dict(inputs.state[param]) for param in inputs.params]
                    self.keep_captured(plan.steps, used)
                return plan.steps
        if runtime.capturing():
            raise RuntimeError(
                "a step of FusedPadam is being captured into a CUDA graph, but it is the first "
                "for these parameters, states and gradients: make one before the capture, with "
                "gradients for the same parameters"
            )
        chosen = {device: choose(device) for device in {p.device for p in inputs.params}}
        _check_capturable(chosen, needs)
        records, changed = self._update_records(
            inputs, groups, param_groups, storages, needs, states
        )
        steps, have_moved = [], False
        copies = None
        if needs.reduction is not None:
            copies = [
                needs.reduction.copies(param, group)
                for param, group in zip(inputs.params, groups, strict=True)
            ]
        for bucket in make_buckets(records, groups, copies):
            step, moved = _make_step(bucket, inputs, chosen[bucket.device], needs)
            steps.append(step)
            have_moved |= moved
        if have_moved and len(changed) < len(records):
            self._generation += 1
        if have_moved or changed:
            everything = have_moved or needs.compare_states
            states = self._read_records(
                inputs, records, range(len(records)) if everything else changed
            )
        if keep_as is not None:
            plan = Plan(
                steps, needs, storages, inputs.reading,
                states if needs.compare_states else None, self._generation,
            )  # fmt: skip
            still_good = [other for other in kept if other.generation == self._generation]
            self._plans[keep_as] = [plan, *still_good[: MOST_PLANS - 1]]
            self._prune(param_groups)
        return steps

    def _update_records(
        self,
        inputs: StepInputs,
        groups: Sequence[int],
        param_groups: ParamGroups,
        storages: dict[int, Storage],
        needs: Needs,
        states: Reading | None,
    ) -> tuple[list[ParamRecord], list[int]]:
        """The record of each parameter, and the positions of those that had to be made."""
        count = len(inputs.params)
        pieces = _pieces(inputs.reading, count)
        state_pieces = _pieces(states, count)
        found = [self._records.get(id(param)) for param in inputs.params]
        changed = []
        for position, (record, group) in enumerate(zip(found, groups, strict=True)):
            if record is None or not (
                record.reading == pieces[position] is not None
                and record.storage == storages[group]
                and (states is None or record.state_reading == state_pieces[position] is not None)
            ):
                changed.append(position)
        plain = _plain(inputs, changed)
        for position in changed:
            param = inputs.params[position]
            name = Name(param_groups, param)
            if position not in plain:
                check_param(param, name)
                check_grad(param, inputs.grads[position], name)
            check_precision(param, param_groups[groups[position]], name)
            check_state(inputs.state.get(param, {}), param, name, waits=False)
        # Only a first salt depends on the place; to look for all places takes as long as a step.
        lacks_salt = any(
            storages[groups[i]].draws and "salt" not in inputs.state.get(inputs.params[i], {})
            for i in changed
        )
        place_of = _places(param_groups) if lacks_salt else {}
        for position in changed:
            param, group_options = inputs.params[position], param_groups[groups[position]]
            warn_of_stalling(param, group_options)
            old = self._records.pop(id(param), None)
            self._generation += old is not None
            state = inputs.state[param]
            owns_state = (
                not needs.compare_states
                or not any(slot.name in state for slot in STATE_SLOTS)
                or (old is not None and old.owns_state
                    and old.state_reading == state_pieces[position])
            )  # fmt: skip
            is_plain = position in plain
            is_new = not state
            fit_state(
                state, param, group_options, place_of.get(id(param), position),
                may_replace=owns_state, keep_counter=needs.compare_states,
                plain=is_plain,
            )  # fmt: skip
            record = make_record(
                param, inputs.grads[position], state, storages[groups[position]],
                owns_state=owns_state, plain=is_plain and is_new,
            )  # fmt: skip
            if old is not None:
                follow_replacement(state, old.place, record.place)
            record.reading = pieces[position]
            if record.reading is not None:
                self._records[id(param)] = record
            found[position] = record
        return [record for record in found if record is not None], changed

    def _read_records(
        self, inputs: StepInputs, records: list[ParamRecord], positions: Sequence[int]
    ) -> Reading:
        """Reads the states of some parameters into their records."""
        params = [inputs.params[position] for position in positions]
        reading = self._gatherer.read_states(inputs.state, params)
        for position, piece in zip(positions, reading.pieces(), strict=True):
            records[position].state_reading = piece
        return reading

    def _prune(self, param_groups: ParamGroups) -> None:
        """Drops the records of parameters that have left the optimizer, now and then."""
        if len(self._records) <= sum(len(group["params"]) for group in param_groups):
            return
        there = {id(param) for group in param_groups for param in group["params"]}
        self._records = {key: r for key, r in self._records.items() if key in there}
        self._plans = {k: p for k, p in self._plans.items() if k in there or k == ALL_PARAMS}


def _still_holds(
    plan: Plan,
    generation: int,
    inputs: StepInputs,
    needs: Needs,
    storages: dict[int, Storage],
    states: Reading | None,
) -> bool:
    """Whether a plan describes this step, too."""
    return (
        plan.generation == generation
        and plan.needs._replace(compare_states=needs.compare_states) == needs
        and plan.storages == storages
        and plan.reading is not None
        and inputs.reading is not None
        and plan.reading.same(inputs.reading)
        and (states is None or (plan.state_reading is not None and plan.state_reading.same(states)))
    )


def _places(param_groups: ParamGroups) -> dict[int, int]:
    """By id, where each parameter stands among all."""
    return {id(param): place for place, param in enumerate(params_of(param_groups))}


def _plain(inputs: StepInputs, positions: Sequence[int]) -> set[int]:
    """Those of some positions whose parameter and gradient are plain, see gather.py's Reading."""
    if inputs.reading is None:
        return set()
    plain = inputs.reading.plain()
    return {
        i for i in positions
        if plain[i] and not inputs.params[i].is_neg() and not inputs.grads[i].is_neg()
    }  # fmt: skip


def _pieces(reading: Reading | None, count: int) -> list[Any]:
    return [None] * count if reading is None else reading.pieces()


def _check_capturable(chosen: dict[torch.device, Backend], needs: Needs) -> None:
    for device, taken_by in chosen.items():
        if needs.capturable and not taken_by.counts_on_device:
            raise RuntimeError(
                f"capturable=True needs a kernel for GPUs, but tensors on {device} are stepped "
                f"by {taken_by.name!r}: leave it out"
            )


def _make_step(
    bucket: Bucket, inputs: StepInputs, taken_by: Backend, needs: Needs
) -> tuple[BucketStep, bool]:
    """The step of a bucket, and whether step counters have moved for it."""
    elsewhere = any(at.type != "cpu" for at in {r.counter_device for r in bucket.records})
    # Counters that are on the device stay there.
    on_device = taken_by.counts_on_device and (
        needs.count_on_device or needs.capturable or elsewhere
    )
    moved = place_counters(bucket, inputs, on_device=on_device)
    step = taken_by.make_step(bucket, StepCounts(bucket, on_device=on_device))
    if needs.capturable and isinstance(step, DeviceStep):
        step.prepare_capture()
    return step, moved


def all_params(param_groups: ParamGroups) -> Selection:
    """Everything that an optimizer has."""
    return [(index, group["params"]) for index, group in enumerate(param_groups)]
