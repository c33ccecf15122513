"""The launch table: one bucket as plain arrays, for csrc/launch_table.h.

A kernel reads addresses[slot][tensor], numels[tensor], rows[tensor] and constants[row].
Groups that differ in any option share one table: a row is a group at one step count.
"""

from __future__ import annotations

from array import array

from padam_ext.buckets import Bound, Bucket
from padam_ext.rows import Rows


class LaunchTable:
    """Arrays for one bucket.

    Attributes:
        signature: dtypes by slot, and of the arithmetic.
        addresses: int64 [slot][tensor] in SLOTS' order, 0 where a tensor does not use a slot.
        numels: int64 [tensor], in real numbers.
        salts: int64 [tensor], see random_bits.py.
        rows: see rows.py.
    """

    def __init__(self, bucket: Bucket) -> None:
        """Takes addresses of everything but gradients and what is staged."""
        self.signature = bucket.signature
        self.numels = array("q", [record.numel for record in bucket.records])
        self.salts = array("q", [record.salt for record in bucket.records])
        self.addresses = array("q")
        for column in bucket.columns():
            self.addresses.extend(column)
        self.rows = Rows(bucket.group_indices)

    def bind(self, bound: Bound) -> None:
        """Takes over a step's gradients, and the copies of what is staged."""
        count = len(self.numels)
        self.addresses[count : 2 * count] = bound.grad_addresses()
        for slot, index, address in bound.staged_addresses():
            self.addresses[slot * count + index] = address
