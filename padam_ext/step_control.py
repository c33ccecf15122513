"""The control of one step in the form that each backend needs, and the norm and skip count."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from padam_ext import runtime
from padam_ext.control import Control, ControlInputs, PrepareInputs, make_control, scalar_on
from padam_ext.norm import norm_of, sums_on


class StepControl:
    """Works control out when a backend asks. The first time also sets the norm and counts a skip.

    Attributes:
        inputs: what control is worked out from.
        norm: the norm of all gradients, of one element on the first bucket's device, once a backend
            has asked.
        skipped: how many steps were skipped, int64 of one element by the device that found out.
    """

    def __init__(
        self,
        inputs: ControlInputs,
        sums_of_squares: Sequence[Tensor],
        norm_dtype: torch.dtype,
        skipped: dict[torch.device, Tensor],
    ) -> None:
        """Takes the sums of squares of each bucket, none where the norm plays no part."""
        self.inputs = inputs
        self.norm: Tensor | None = None
        self.skipped = skipped
        self._sums = sums_of_squares
        self._norm_dtype = norm_dtype
        self._reported = False
        self._control: Control | None = None
        self._on_host: Control | None = None

    def as_tensors(self) -> Control:
        """As tensors where a device has the values, by PyTorch's operations."""
        if self._control is None:
            norm = None
            if self.inputs.needs_norm:
                device = self._sums[0].device if self._sums else torch.device("cpu")
                zero = torch.zeros(1, dtype=runtime.widest_float(device), device=device)
                sums = sums_on(device, self._sums) if self._sums else zero
                norm = norm_of(sums, self.inputs.grad_scale)
            self._control = make_control(self.inputs, norm)
            if not self._reported:
                self._reported = True
                self.norm = None if norm is None else norm.to(self._norm_dtype)
                if isinstance(skip := self._control.skip, Tensor):
                    self._count_skips_on(skip.device).add_(skip.to(torch.int64))
        return self._control

    def on_host(self) -> Control:
        """As numbers, for which the host waits."""
        if self._on_host is None:
            self._on_host = self.as_tensors().on_host()
        return self._on_host

    def on_device(self, device: torch.device) -> PrepareInputs:
        """What the prepare kernel of a device works control out from."""
        grad_scale, found_inf = (
            None if value is None else _as_kernels_read(scalar_on(value, device))
            for value in self.inputs[:2]
        )
        sums = sums_on(device, self._sums) if self._sums else None
        norm = skipped = None
        if not self._reported:
            self._reported = True
            if sums is not None:
                norm = self.norm = torch.empty((), dtype=self._norm_dtype, device=device)
            if self.inputs.may_skip:
                skipped = self._count_skips_on(device)
        return PrepareInputs(sums, grad_scale, found_inf, norm, skipped)

    def _count_skips_on(self, device: torch.device) -> Tensor:
        # Each stays where it is: a CUDA graph adds to it whenever it runs.
        if device not in self.skipped:
            if runtime.capturing():  # else each replay would begin to count anew
                raise RuntimeError(
                    "a step of FusedPadam that may be skipped is being captured into a CUDA graph, "
                    f"but none has been made on {device} before: make one before the capture"
                )
            self.skipped[device] = torch.zeros((), dtype=torch.int64, device=device)
        return self.skipped[device]


def _as_kernels_read(value: Tensor) -> Tensor:
    return value if value.dtype in (torch.float32, torch.float64) else value.float()
