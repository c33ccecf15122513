"""The launch table: one bucket as plain arrays, for csrc/launch_table.h.

A kernel reads addresses[slot][tensor], numels[tensor], rows[tensor] and constants[row].
Groups that differ in any option share one table: a row is a group at one step count.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from padam_ext import native
from padam_ext.constants import Control
from padam_ext.gather import Live
from padam_ext.grouping import PARAM_DTYPES, Bucket
from padam_ext.hyperparameters import Hyperparameters
from padam_ext.layout import local
from padam_ext.rows import Rows, Steps

# Order as in the enum Slot.
SLOTS = ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class LaunchTable:
    """Arrays for one bucket.

    Attributes:
        addresses: int64 [slot][tensor] in SLOTS' order, 0 where a tensor does not use a slot.
        numels: int64 [tensor], in real numbers.
        rows: see rows.py.
    """

    def __init__(self, bucket: Bucket) -> None:
        """Takes addresses of everything but gradients. The bucket keeps the tensors alive."""
        self.param_dtype = PARAM_DTYPES.index(bucket.param_dtype)
        self.grad_dtype = PARAM_DTYPES.index(bucket.grad_dtype)
        self.numels = array("q", [param.numel() for param in bucket.params])
        self.addresses = array("q")
        no_grads = [None] * len(bucket.params)
        for slot in (
            bucket.params,
            no_grads,
            bucket.exp_avgs,
            bucket.exp_avg_sqs,
            bucket.max_exp_avg_sqs,
        ):
            self.addresses.extend(0 if t is None else _address(t) for t in slot)
        self._step_addresses = array("q", [_address(step) for step in bucket.steps])
        self._comes_first = bucket.positions == list(range(len(bucket.positions)))
        self.rows = Rows(bucket.group_indices)

    def take_grads(self, bucket: Bucket, live: Live) -> list[Tensor]:
        """Takes over a step's gradients.

        Returns:
            Copies of gradients that the kernel could not have read. Like the gradients in `live`
            they must be kept until it has run.
        """
        count = len(self.numels)
        if live.grad_addresses is not None and self._comes_first:
            addresses = array("q", live.grad_addresses)[:count]
        else:
            addresses = array("q", [_address(local(live.grads[i])) for i in bucket.positions])
        copies = []
        for i in bucket.converted:
            copies.append(bucket.gradient(i, live))
            addresses[i] = _address(copies[-1])
        self.addresses[count : 2 * count] = addresses
        return copies

    def update(self, bucket: Bucket, options: Sequence[Hyperparameters], control: Control) -> None:
        """Counts one step and takes over its options.

        Args:
            bucket: the one that the table was made for.
            options: one for each param group of the optimizer.
            control: what to do with all gradients.
        """
        smallest, largest = self._add_to_steps(bucket, 1.0 - control.skip)
        steps: Steps
        if all(group.bias_correction == "none" for group in options):
            steps = 0.0  # the count plays no part: rows stay as they are
        elif bucket.counts is not None:
            steps = bucket.counts.double()
        elif smallest == largest:
            steps = smallest
        else:
            steps = [step.item() for step in bucket.steps]
        self.rows.set(options, steps, control)

    def take_back_step(self, bucket: Bucket, control: Control) -> None:
        """Undoes the counting of a step that could not be made."""
        self._add_to_steps(bucket, control.skip - 1.0)

    def _add_to_steps(self, bucket: Bucket, amount: float | Tensor) -> tuple[float, float]:
        """Adds to every counter; the smallest and the largest new value, if the host knows them."""
        if bucket.counts is not None:
            bucket.counts.add_(amount)
            return math.nan, math.nan
        if native.module is not None:
            smallest, largest = native.module.add_to_steps(self._step_addresses, amount)
            return smallest, largest
        torch._foreach_add_(bucket.steps, amount)
        counts = torch.stack(bucket.steps)
        return counts.min().item(), counts.max().item()


def _address(tensor: Tensor) -> int:
    """An address as int64, which those of some devices exceed: the same bits, then negative."""
    address = tensor.data_ptr()
    return address - 2**64 if address >= 2**63 else address
