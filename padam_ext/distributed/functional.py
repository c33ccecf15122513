"""FusedPadam in the form of torch.distributed.optim's functional optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from padam_ext.optimizer import FusedPadam


class FunctionalPadam:
    """Steps with gradients that are passed, and takes parameters as they come.

    For code that steps parameters one by one, and asks torch.distributed for this form::

        from torch.distributed.optim.utils import as_functional_optim, register_functional_optim

        register_functional_optim(FusedPadam, FunctionalPadam)
        optimizer = as_functional_optim(FusedPadam, lr=0.1)
        optimizer.step_param(param, grad)

    Attributes:
        param_group: its one param group.
        state: as FusedPadam's.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *args: Any,
        _allow_empty_param_list: bool = False,
        **options: Any,
    ) -> None:
        """Takes FusedPadam's arguments.

        Raises:
            ValueError: no parameters, without `_allow_empty_param_list`; and see FusedPadam.
        """
        params = list(params)
        if not params and not _allow_empty_param_list:
            raise ValueError("optimizer got an empty parameter list")
        self._optimizer = FusedPadam([{"params": params}], *args, **options)

    @property
    def param_group(self) -> dict[str, Any]:
        """The options, and under "params" the parameters."""
        return self._optimizer.param_groups[0]

    @property
    def state(self) -> dict[Tensor, Any]:
        """By parameter; see FusedPadam."""
        return self._optimizer.state

    def step_param(self, param: Tensor, grad: Tensor | None) -> None:
        """Steps one parameter, whether seen before or not; `.grad` is left as it is.

        Args:
            param: of any shape.
            grad: of its shape; None for no step.
        """
        if not self._optimizer._has_param(param):
            self.param_group["params"].append(param)
        self._step([param], [grad])

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Steps all parameters in their order.

        Args:
            gradients: one for each; None for those to leave out.

        Raises:
            ValueError: more or fewer gradients than parameters.
        """
        params = self.param_group["params"]
        if len(params) != len(gradients):
            raise ValueError(
                f"step needs a gradient or None for each of {len(params)} parameters, got "
                f"{len(gradients)}"
            )
        self._step(params, gradients)

    def _step(self, params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        before = [param.grad for param in params]
        try:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            self._optimizer.step_params(params)
        finally:
            for param, grad in zip(params, before, strict=True):
                param.grad = grad
