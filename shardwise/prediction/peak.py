"""The most bytes that a step stores on a rank's device, but for temporary memory of kernels.

    between steps        parameters, gradients, optimizer, buffers (memory.py)
    kept                 activations that autograd keeps, and those fetched from the host
    gathered             three units: in use, ahead of it, and the one before
    gradients on the way four units: two that are summed over ranks, two that are copied or filled

The parts are added up, although not all are largest at the same moment.
"""

from collections import Counter
from typing import Final

from shardwise.prediction.group import Group, each_backward, groups
from shardwise.prediction.prediction import Prediction

GATHERED_UNITS: Final = 3
GRADIENT_UNITS: Final = 4


def device_peak_bytes(found: Prediction) -> int:
    """The bytes that `found.rank` stores on its device in a step, at most, temporaries apart."""
    gathered, gradients = Counter[str](), Counter[str]()
    for group in groups(found.plan, found.model):
        stored_bytes = group.flat.padded * group.element_bytes
        gathered[group.unit.name] += stored_bytes * group.reshards
        gradients[group.unit.name] += stored_bytes * _on_the_way(group)
    return (
        sum(found.memory.values())
        + found.activations
        + found.fetched
        + sum(count for _, count in gathered.most_common(GATHERED_UNITS))
        + sum(count for _, count in gradients.most_common(GRADIENT_UNITS))
    )


def _on_the_way(group: Group) -> bool:
    """Whether its gradient is on the device only for a part of the backward pass."""
    return each_backward(group) or (group.trained and group.row.optim_tier != "device")
