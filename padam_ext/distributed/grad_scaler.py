"""GradScaler over several processes: what one has found, the scaler of each must know."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer


def calling_scaler(optimizer: Optimizer) -> Any:
    """The GradScaler whose `step` makes this step of an optimizer; None where none does.

    It passes only the numbers to optimizers that unscale gradients themselves, not itself.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is GradScaler.step.__code__:
            scaler, its_optimizer = (frame.f_locals[name] for name in ("self", "optimizer"))
            return scaler if its_optimizer is optimizer else None
        frame = frame.f_back
    return None


def check_sees_all(scaler: Any) -> None:
    """Raises RuntimeError if a scaler that unscales looks at this process's gradients alone.

    It then leaves out steps that other processes make, which would wait for this one.
    """
    if scaler is not None and not hasattr(scaler, "process_group"):
        raise RuntimeError(
            "with norm_group and unscale_grads=False, GradScaler does not see infinities of other "
            "processes: use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, or leave "
            "out unscale_grads=False"
        )


def tell_scaler(scaler: Any, optimizer: Optimizer, found_inf: Tensor) -> None:
    """Has a scaler's `update` see what all processes found, so that their scales stay the same.

    Args:
        scaler: a GradScaler.
        optimizer: what it steps.
        found_inf: not 0 if any process found an infinity or NaN.
    """
    found = (found_inf != 0).float()
    per_device = scaler._found_inf_per_device(optimizer)
    for here in per_device.values():
        # Waits for a copy to the CPU: `update` reads it next.
        here.copy_(found.reshape(here.shape), non_blocking=here.device.type != "cpu")
    # A process without gradients has looked at nothing; `update` takes that for a mistake.
    per_device.setdefault(found.device, found)
