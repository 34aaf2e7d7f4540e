"""The units of a pipeline rank: their stages, and when the reduction of their gradients begins.

    F B I W s     hooks gather and free the units that stage s uses, one by one (unit_hooks.py)
    W s           the weight gradients that I deferred are computed and added
    REDUCE s      all microbatches are done: the reduction of the stage's gradients begins

A parameter that several stages use is in one unit.  On a rank that has all of these stages, its
reduction begins with the last REDUCE of them.  A parameter that several ranks hold is reduced after
all others, in the order of the names, so that all its holders take the same order.
"""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from shardwise.techniques.data.units import Unit

#: Postponed products: a weight, and the factors of left^T right (weight_gradient.py).
PutOff = list[tuple[nn.Parameter, Tensor, Tensor]]


class StagedUnits:
    """The units of the stages that this rank owns.

    units    by stage, the units that the stage uses
    last     the units whose gradients are reduced last, in this order
    inside   modules that only layers call: their hooks see every use of their parameters
    """

    def __init__(
        self,
        units: Mapping[int, Sequence[Unit]],
        last: Sequence[Unit],
        inside: Collection[nn.Module],
    ) -> None:
        self.units, self.last, self.inside = dict(units), list(last), inside
        self.waiting: PutOff = []

    def later(self) -> PutOff:
        """The weight-gradient products deferred since the last call."""
        waiting, self.waiting = self.waiting, []
        return waiting
