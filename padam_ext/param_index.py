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
            TypeError: something is no tensor.
        """
        by_group: dict[int, list[Tensor]] = {}
        seen: set[int] = set()
        if isinstance(params, Tensor):
            raise TypeError("expected a list of parameters, got one tensor: pass [param]")
        for param in params:
            if not isinstance(param, Tensor):
                raise TypeError(f"expected parameters, got {param!r} among them")
            if id(param) in seen:
                raise ValueError(f"a parameter of shape {tuple(param.shape)} is given twice")
            seen.add(id(param))
            if not self.has(param, param_groups):
                raise ValueError(
                    f"a tensor of shape {tuple(param.shape)} is in no param group of this optimizer"
                )
            by_group.setdefault(self._places[id(param)][0], []).append(param)
        return list(by_group.items())

    def has(self, param: Tensor, param_groups: Sequence[dict[str, Any]]) -> bool:
        """Whether a parameter is in a group."""
        if self._is_at_known_place(param, param_groups):
            return True
        self._places = {
            id(one): (group_index, position)
            for group_index, group in enumerate(param_groups)
            for position, one in enumerate(group["params"])
        }
        return self._is_at_known_place(param, param_groups)

    def _is_at_known_place(self, param: Tensor, param_groups: Sequence[dict[str, Any]]) -> bool:
        group_index, position = self._places.get(id(param), (len(param_groups), 0))
        if group_index >= len(param_groups):
            return False
        params = param_groups[group_index]["params"]
        return position < len(params) and params[position] is param
