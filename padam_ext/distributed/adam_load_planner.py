"""Loading checkpoints of other optimizers by torch.distributed.checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from padam_ext.checkpoint import check_second_moment
from padam_ext.options import DEFAULTS
from padam_ext.slots import MOMENTS, SLOTS, STATE_SLOTS


class AdamLoadPlanner(DefaultLoadPlanner):
    """Loads states of FusedPadam from checkpoints of torch.optim.Adam, AdamW and older versions.

    torch.distributed.checkpoint insists on each key that the loading optimizer has. With this
    planner it still does, but for options of param groups, `param_low` and `salt`, which then keep
    their present values, and for `max_exp_avg_sq`, which starts as the checkpoint's `exp_avg_sq`.

    Example::

        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder, planner=AdamLoadPlanner())
        set_state_dict(model, optimizer, model_state_dict=model_state,
                       optim_state_dict=optimizer_state)
    """

    def __init__(self, **options: Any) -> None:
        """Takes DefaultLoadPlanner's options but `allow_partial_load`."""
        super().__init__(**options, allow_partial_load=True)

    def create_local_plan(self) -> LoadPlan:
        """What to read.

        Raises:
            RuntimeError: anything else is missing.
            ValueError: second moments of the checkpoint are not what the option says.
        """
        items = super().create_local_plan().items  # leaves out what is missing
        metadata = self.metadata
        assert metadata is not None  # or the call before has raised
        for key, value in self.state_dict.items():
            if key in metadata.state_dict_metadata:
                continue
            if _may_be_missing(key):
                if key.endswith(".second_moment"):
                    check_second_moment(value)
                continue
            source = _starts_as(key)
            if source not in metadata.state_dict_metadata:
                raise RuntimeError(
                    f"Missing key in checkpoint state_dict: {key}.{_advice(key, metadata)}"
                )
            items += [
                replace(item, dest_index=replace(item.dest_index, fqn=key))
                for item in create_default_local_load_plan({source: value}, metadata).items
            ]
        return LoadPlan(items)


def _may_be_missing(key: str) -> bool:
    """An option, or what a state begins with itself."""
    *path, name = key.split(".")
    return name in DEFAULTS if "param_groups" in path else name in ("param_low", "salt")


def _advice(key: str, metadata: Metadata) -> str:
    """What to do where the checkpoint holds the moments in another way."""
    path, _, name = key.rpartition(".")
    ways = [names[0] for names in MOMENTS if name not in names]
    there = [way for way in ways if f"{path}.{way}" in metadata.state_dict_metadata]
    if name not in SLOTS or not there:
        return ""
    return (
        f" It has {there[0]!r}: load it with the state_dtype and amsgrad that wrote it, then set "
        'param_groups[i]["state_dtype"]; the next step converts the states.'
    )


def _starts_as(key: str) -> str:
    """The key of the state from which a missing one is copied; "" where there is none."""
    path, _, name = key.rpartition(".")
    for slot in STATE_SLOTS:
        if slot.name == name and slot.starts_as is not None:
            return f"{path}.{slot.starts_as}"
    return ""
