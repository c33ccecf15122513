"""The launch table: one bucket as plain arrays, for csrc/launch_table.h.

A kernel reads addresses[slot][tensor], numels[tensor], rows[tensor] and constants[row].
Groups that differ in any option share one table: a row is a group at one step count.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from padam_ext import native
from padam_ext.constants import GENERAL, make_constants
from padam_ext.gather import Live
from padam_ext.grouping import PARAM_DTYPES, Bucket
from padam_ext.hyperparameters import Hyperparameters
from padam_ext.layout import local

# Order as in the enum Slot.
SLOTS = ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class LaunchTable:
    """Arrays for one bucket.

    Attributes:
        addresses: int64 [slot][tensor] in SLOTS' order, 0 where a tensor does not use a slot.
        numels: int64 [tensor], in real numbers.
        rows: int64 [tensor], index of the tensor's row.
        constants: float64 [row][field], see constants.py.
        root: the one of constants.py's ROOTS that all rows share, else the general one.
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
        self.constants = array("d")
        self.root = GENERAL
        self._comes_first = bucket.positions == list(range(len(bucket.positions)))
        self._group_indices = bucket.group_indices
        self._groups = list(dict.fromkeys(bucket.group_indices))
        self._rows_by_group = array("q", map(self._groups.index, bucket.group_indices))
        self.rows = self._rows_by_group
        self._rows_made_from: object = None

    def update(
        self, bucket: Bucket, live: Live, options: Sequence[Hyperparameters]
    ) -> list[Tensor]:
        """Counts one step and takes over its gradients and options.

        Args:
            bucket: the one that the table was made for.
            live: this step's gradients.
            options: one for each param group of the optimizer.

        Returns:
            Copies of gradients that the kernel could not have read. Like the gradients in `live`
            they must be kept until it has run.
        """
        copies = self._set_grads(bucket, live)
        smallest, largest = self._add_to_steps(bucket, 1.0)
        if all(group.bias_correction == "none" for group in options):
            self._set_rows(options, 0.0)  # the count plays no part: rows stay as they are
        elif smallest == largest:
            self._set_rows(options, smallest)
        else:
            self._set_rows(options, [step.item() for step in bucket.steps])
        return copies

    def _set_grads(self, bucket: Bucket, live: Live) -> list[Tensor]:
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

    def take_back_step(self, bucket: Bucket) -> None:
        """Undoes the counting of a step that could not be made."""
        self._add_to_steps(bucket, -1.0)

    def _add_to_steps(self, bucket: Bucket, amount: float) -> tuple[float, float]:
        """Adds to every counter; the smallest and the largest new value."""
        if native.module is not None:
            smallest, largest = native.module.add_to_steps(self._step_addresses, amount)
            return smallest, largest
        torch._foreach_add_(bucket.steps, amount)
        counts = torch.stack(bucket.steps)
        return counts.min().item(), counts.max().item()

    def _set_rows(self, options: Sequence[Hyperparameters], steps: Sequence[float] | float) -> None:
        """Makes one row for every group and step count, of each tensor or of all, that occurs."""
        if self._rows_made_from == (options, steps):
            return
        if isinstance(steps, float):
            occurring = [(group, steps) for group in self._groups]
            self.rows = self._rows_by_group
        else:
            each = list(zip(self._group_indices, steps, strict=True))
            occurring = list(dict.fromkeys(each))
            row_of = {key: row for row, key in enumerate(occurring)}
            self.rows = array("q", [row_of[key] for key in each])
        constants = [make_constants(options[group], step) for group, step in occurring]
        self.constants = array("d", chain.from_iterable(constants))
        roots = {int(row.root) for row in constants}
        self.root = roots.pop() if len(roots) == 1 else GENERAL
        self._rows_made_from = (list(options), steps)


def _address(tensor: Tensor) -> int:
    """An address as int64, which those of some devices exceed: the same bits, then negative."""
    address = tensor.data_ptr()
    return address - 2**64 if address >= 2**63 else address
