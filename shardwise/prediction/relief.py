"""The plan word that makes a part of a rank's peak smaller.

    parameters    that rest on the device, and those that are gathered
    gradients, optimizer, buffers
    activations   all that the engine does not own: what autograd keeps, temporary tensors, messages

A word is proposed only if the plan with it can run. The rows of the states table come first, which
cost bytes between ranks; then recomputation, which costs operations; then host memory, which costs
copies; then ranks.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import problems
from shardwise.core.zero import ACTIVATIONS

#: The first row of the states table that shards a part.
_ROWS: Final = {"optimizer": "zero1", "gradients": "zero2", "parameters": "zero3"}
_ORDER: Final = ("ddp", "zero1", "zero2", "zero3")
#: Values of other words, each a field of the plan.
_VALUES: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "parameters": (("offload", "param"),),
    "gradients": (("offload", "optim"),),
    "optimizer": (("offload", "optim"),),
    ACTIVATIONS: (("recompute", "full"),),
}


def relieved(plan: Plan, part: str) -> Plan | None:
    """`plan` with one word more or another one, under which `part` takes less; None without one."""
    return next((each for each in _candidates(plan, part) if not problems(each)), None)


def added_words(plan: Plan, other: Plan) -> str:
    own = str(plan).split()
    return " ".join(word for word in str(other).split() if word not in own)


def _candidates(plan: Plan, part: str) -> Iterator[Plan]:
    row, axes = _ROWS.get(part), dict(plan.axes)
    if part == "gradients" and plan.microbatches == 1:
        row = None  # most of them are made when most activations are gone
    if row is not None and plan.row in _ORDER and plan.data_size > 1:
        if _ORDER.index(plan.row) < _ORDER.index(row):
            yield replace(plan, row=row)
        elif (axis := plan.shard_axis) in axes:
            yield replace(plan, axes=tuple((axes | {axis: 2 * axes[axis]}).items()))
    stays = part == "gradients" and plan.microbatches > 1  # until the last microbatch
    for field, value in () if stays else _VALUES.get(part, ()):
        if getattr(plan, field) is None:
            changes: dict[str, Any] = {field: value}
            yield replace(plan, **changes)
    if part != "buffers":
        tensor = axes | {"tp": 2 * axes.get("tp", 1)}
        yield replace(plan, axes=tuple(tensor.items()), sp=plan.sp or part == ACTIVATIONS)
