"""Loading checkpoints of other optimizers by torch.distributed.checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.planner import LoadPlan

from padam_ext.options import DEFAULTS
from padam_ext.slots import STATE_SLOTS


class AdamLoadPlanner(DefaultLoadPlanner):
    """Loads states of FusedPadam from checkpoints of torch.optim.Adam, AdamW and older versions.

    torch.distributed.checkpoint insists on each key that the loading optimizer has. With this
    planner it still does, but for options of param groups, which then keep their present values,
    and for `max_exp_avg_sq`, which starts as the checkpoint's `exp_avg_sq`.

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
        """
        items = super().create_local_plan().items  # leaves out what is missing
        metadata = self.metadata
        assert metadata is not None  # or the call before has raised
        for key, value in self.state_dict.items():
            if key in metadata.state_dict_metadata or _is_option(key):
                continue
            source = _starts_as(key)
            if source not in metadata.state_dict_metadata:
                raise RuntimeError(f"Missing key in checkpoint state_dict: {key}.")
            items += [
                replace(item, dest_index=replace(item.dest_index, fqn=key))
                for item in create_default_local_load_plan({source: value}, metadata).items
            ]
        return LoadPlan(items)


def _is_option(key: str) -> bool:
    *path, name = key.split(".")
    return "param_groups" in path and name in DEFAULTS


def _starts_as(key: str) -> str:
    """The key of the state from which a missing one is copied; "" where there is none."""
    path, _, name = key.rpartition(".")
    for slot in STATE_SLOTS:
        if slot.name == name and slot.starts_as is not None:
            return f"{path}.{slot.starts_as}"
    return ""
