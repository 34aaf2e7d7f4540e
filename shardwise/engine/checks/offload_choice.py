"""`offload:auto`: the least offload with which a step is predicted to fit the device's memory.

    nothing    optim=x for one unit, two, ...    optim    param

The first that fits `device_memory` (on CUDA also the device's own memory) is taken; it must fit on
every stage of a pipeline. A prediction has no temporary memory of kernels: leave room for it.
States on a disk are not among them: they take as much of the device as those in host memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from shardwise.core.errors import bad
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import problems
from shardwise.core.plan.word_values import size_text
from shardwise.engine.checks.device_room import bound_bytes, peak_bytes
from shardwise.prediction.prediction import Prediction

AUTO = "auto"


def with_offload(
    plan: Plan, predict: Callable[[Plan], Prediction], device: torch.device | None = None
) -> Plan:
    """`plan` with the offload chosen for `offload:auto`; any other plan is returned unchanged.

    `predict` gives the prediction of a plan for the model and the batch of the run, on any rank.

    Raises InputError if there is no bound on the memory, or if nothing fits (with the least bound
    that does).
    """
    if plan.offload != AUTO:
        return plan
    bound = _bound(plan, device)
    least = 0
    for found in _candidates(plan, predict):
        peak = peak_bytes(found)
        if peak <= bound:
            return found.plan
        least = min(least or peak, peak)
    raise bad(
        f"'offload:auto' in the plan '{plan}', for whose step the least that a rank can store on "
        f"its device is {least:,} bytes, temporary memory of kernels apart",
        f"a bound of {least:,} bytes or more, more ranks, recompute:full, a smaller batch, or "
        "zero3, which can offload parameters too",
        f"device_memory:{size_text(bound_bytes(least))}",
    )


def require_chosen(plan: Plan) -> None:
    """Raise InputError for a plan whose offload has not been chosen yet."""
    if plan.offload == AUTO:
        raise bad(
            f"the plan '{plan}' where the model's batch is not known",
            "a plan with the offload that offload:auto stands for",
            f'the plan that `shardwise predict "{plan}"` prints',
        )


def _bound(plan: Plan, device: torch.device | None) -> int:
    found = [] if plan.device_memory_bytes is None else [plan.device_memory_bytes]
    if device is not None and device.type == "cuda":
        found.append(torch.cuda.get_device_properties(device).total_memory)
    if not found:
        allowed = "device_memory:SIZE beside offload:auto where there is no GPU"
        given = f"'offload:auto' in the plan '{plan}' without a bound on the device's memory"
        raise bad(given, allowed, f"'{plan} device_memory:8GiB'")
    return min(found)


def _candidates(plan: Plan, predict: Callable[[Plan], Prediction]) -> Iterator[Prediction]:
    """Predictions from the least offload to the most."""
    none = predict(replace(plan, offload=None))
    yield none
    numels = [sum(p.numel for p in unit.params if p.trainable) for unit in none.model.units]
    for first in reversed(range(len(numels))):
        share = sum(numels[first:]) / max(1, sum(numels))
        if numels[first]:
            text = "optim" if share == 1 else f"optim={_rounded(share)!r}"
            changed = replace(none.plan, offload=text)
            yield none.on(none.rank, changed)
    whole = replace(plan, offload="param")
    if not problems(whole):
        yield predict(whole)


def _rounded(share: float) -> float:
    """The share in three digits, not above it: so the units are the same, or one fewer."""
    return max(0.001, int(share * 1000) / 1000)
