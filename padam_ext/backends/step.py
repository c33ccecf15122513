"""The interface between the driver and a backend's step of one bucket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from padam_ext.buckets import Bound, Bucket
from padam_ext.control import ControlInputs
from padam_ext.options import Hyperparameters
from padam_ext.step_control import StepControl
from padam_ext.step_counts import StepCounts

# Of each param group that occurs.
Options = Mapping[int, Hyperparameters]


class BucketStep(ABC):
    """Steps one bucket, by methods that are called in this order.

    `bind` is called for all buckets before `begin` is called for any, and so on.
    """

    def __init__(self, bucket: Bucket, counts: StepCounts) -> None:
        """Takes the bucket and the step counters of its tensors."""
        self.bucket = bucket
        self._counts = counts

    def bind(self, bound: Bound) -> None:  # noqa: B027 - a backend may have nothing to do
        """Takes over the addresses of this step; raises where it cannot be made."""

    def begin(  # noqa: B027 - likewise
        self, bound: Bound, options: Options, inputs: ControlInputs
    ) -> None:
        """Does what has to be done before the norm is summed up."""

    @abstractmethod
    def sum_of_squares(self, bound: Bound) -> Tensor:
        """Sums that add up to the sum of all gradients' squares: float64 [k] on the device."""

    @abstractmethod
    def step(self, bound: Bound, options: Options, control: StepControl) -> None:
        """Steps every tensor, with the options of each param group that occurs.

        If it raises, step counts are as before.
        """

    def cancel(self, bound: Bound) -> None:  # noqa: B027 - likewise
        """Takes back what `begin` did, in place of `step`."""
