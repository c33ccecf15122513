"""The output rule of the paper's theory: one iterate, drawn in proportion to the learning rates."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class IterateSampler:
    """Keeps one iterate out of all, drawn as Algorithm 1 of the paper draws its output.

    The iterate after each step is drawn with a probability proportional to the learning rate of
    that step. The paper's bounds are about the gradient at this iterate. The number of steps need
    not be known: after each step the new iterate replaces the kept one with probability
    lr / (sum of all lr so far), which gives every iterate its share at any time. This needs one
    copy of the parameters, which is updated less and less often.

    Watches the optimizer by a step hook, from when the sampler is made. The learning rate is that
    of the first param group; if it is a tensor on a GPU, the host waits for it.

    Args:
        optimizer: any torch.optim.Optimizer.
        generator: source of the draws, on the CPU; None for torch's default one.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = FusedPadam(model.parameters())
        >>> sampler = IterateSampler(optimizer)
        >>> for _ in range(3):
        ...     model(torch.randn(8, 4)).square().mean().backward()
        ...     optimizer.step()
        >>> with sampler.applied():
        ...     prediction = model(torch.randn(8, 4))  # with the drawn parameters
    """

    def __init__(self, optimizer: Optimizer, *, generator: torch.Generator | None = None) -> None:
        self._optimizer = optimizer
        self._generator = generator
        self._total = 0.0
        self._drawn_step = 0
        self._num_steps = 0
        self._num_skipped = int(getattr(optimizer, "skipped_steps", 0))
        self._copies: list[Tensor] = []
        # Weak, so that the optimizer does not keep the sampler alive, and there is no cycle.
        observe = weakref.WeakMethod(self._observe)
        self._hook = optimizer.register_step_post_hook(
            lambda *_: None if (method := observe()) is None else method()
        )

    @property
    def drawn_step(self) -> int:
        """Number of the step, from 1, that made the drawn iterate; 0 if there is none."""
        return self._drawn_step

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Sets the parameters to the drawn iterate, and back to the latest values at the end.

        Raises:
            RuntimeError: nothing has been drawn, or parameters were added since.
        """
        params = self._params()
        if len(params) != len(self._copies):
            raise RuntimeError(
                f"the drawn iterate has {len(self._copies)} parameters, the optimizer "
                f"{len(params)}: make at least one step with lr > 0 first"
            )
        with torch.no_grad():
            latest = [param.clone() for param in params]
            torch._foreach_copy_(params, self._copies)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(params, latest)

    def close(self) -> None:
        """Stops watching the optimizer. The drawn iterate stays."""
        self._hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on; the generator's state is not in it."""
        return {
            "total_lr": self._total,
            "drawn_step": self._drawn_step,
            "num_steps": self._num_steps,
            "iterate": self._copies,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a state_dict, copying its tensors.

        Raises:
            ValueError: its tensors do not fit the parameters. Nothing has been loaded then.
        """
        saved, params = state_dict["iterate"], self._params()
        if saved and [t.shape for t in saved] != [p.shape for p in params]:
            raise ValueError(
                f"the file has an iterate of shapes {[tuple(t.shape) for t in saved]}, the "
                f"parameters have {[tuple(p.shape) for p in params]}"
            )
        self._total = state_dict["total_lr"]
        self._drawn_step = state_dict["drawn_step"]
        self._num_steps = state_dict["num_steps"]
        self._copies = [
            torch.empty_like(param).copy_(tensor)
            for tensor, param in zip(saved, params, strict=False)
        ]

    def _params(self) -> list[Tensor]:
        return [p.detach() for group in self._optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def _observe(self) -> None:
        skipped = int(getattr(self._optimizer, "skipped_steps", 0))
        if skipped > self._num_skipped:  # nothing has moved
            self._num_skipped = skipped
            return
        self._num_skipped = skipped  # less, if the optimizer has begun to count anew
        lr = float(self._optimizer.param_groups[0]["lr"])
        self._num_steps += 1
        self._total += lr
        draw = float(torch.rand((), generator=self._generator, dtype=torch.float64, device="cpu"))
        if draw * self._total >= lr:
            return
        self._drawn_step = self._num_steps
        params = self._params()
        if len(params) != len(self._copies):
            self._copies = [param.clone() for param in params]
        else:
            torch._foreach_copy_(self._copies, params)
