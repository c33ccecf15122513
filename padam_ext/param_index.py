"""Where each parameter stands among the param groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from padam_ext.gather import Selection


class ParamIndex:
    """Finds a parameter's group in the same time however many there are; keeps nothing alive."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[int, int]] = {}  # by id: group, position

    def select(self, params: Sequence[Tensor], param_groups: Sequence[dict[str, Any]]) -> Selection:
        """Some parameters by the index of their group.

        Raises:
            ValueError: a parameter is in no group, or given twice.
        """
        by_group: dict[int, list[Tensor]] = {}
        seen: set[int] = set()
        for param in params:
            if id(param) in seen:
                raise ValueError(f"a parameter of shape {tuple(param.shape)} is given twice")
            seen.add(id(param))
            by_group.setdefault(self._group_of(param, param_groups), []).append(param)
        return list(by_group.items())

    def _group_of(self, param: Tensor, param_groups: Sequence[dict[str, Any]]) -> int:
        if not self._is_at_known_place(param, param_groups):
            self._places = {
                id(one): (group_index, position)
                for group_index, group in enumerate(param_groups)
                for position, one in enumerate(group["params"])
            }
            if not self._is_at_known_place(param, param_groups):
                raise ValueError(
                    f"a tensor of shape {tuple(param.shape)} is in no param group of this optimizer"
                )
        return self._places[id(param)][0]

    def _is_at_known_place(self, param: Tensor, param_groups: Sequence[dict[str, Any]]) -> bool:
        group_index, position = self._places.get(id(param), (len(param_groups), 0))
        if group_index >= len(param_groups):
            return False
        params = param_groups[group_index]["params"]
        return position < len(params) and params[position] is param
