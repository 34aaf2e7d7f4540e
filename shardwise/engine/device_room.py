"""Whether a step fits `device_memory` by prediction, and the least bound that some offload meets.

A step stores LEAST to MOST times its prediction (prediction/peak.py).  So a plan is refused before
it starts if LEAST times the prediction exceeds the bound. A suggested bound has room for MOST times
the prediction.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from shardwise.core.errors import bad
from shardwise.core.plan import Plan
from shardwise.core.plan_check import problems
from shardwise.core.plan_parser import size_text
from shardwise.prediction.peak import LEAST, MOST, device_peak_bytes
from shardwise.prediction.prediction import Prediction

Predict = Callable[[Plan], Prediction]
#: A suggested bound is a multiple of this, or of its 1024th for small models.
_STEP_BYTES = 2**20


def peak_bytes(found: Prediction) -> int:
    """The predicted peak of a step on the device of the rank that stores most."""
    return max(device_peak_bytes(found.on(rank)) for rank in _stages(found))


def bound_bytes(peak: int) -> int:
    """A bound that a step with this predicted peak meets: rounded up, with room for temporaries."""
    wanted = MOST * peak
    unit = _STEP_BYTES if wanted >= 16 * _STEP_BYTES else _STEP_BYTES // 1024
    return -(-int(wanted + 1) // unit) * unit


def require_room(plan: Plan, predict: Predict) -> None:
    """Raise InputError if a step of `plan` needs more than its `device_memory`, by prediction.

    `predict` gives the prediction of a plan for the model and the batch of the run.
    """
    bound = plan.device_memory_bytes
    if bound is None or LEAST * (peak := peak_bytes(predict(plan))) <= bound:
        return
    found, least = least_peak(plan, predict)
    own = replace(plan, device_memory_bytes=bound_bytes(peak))
    near = replace(found, device_memory_bytes=bound_bytes(least))
    instead = f"'{own}'" if near == own else f"'{near}', or '{own}'"
    raise bad(
        f"device_memory:{size_text(bound)} in the plan '{plan}', whose step stores {peak:,} bytes "
        "on the device of a rank by prediction, temporary memory of kernels apart",
        f"a bound above that, or an offload: the least bound that can be met with this model and "
        f"batch is {bound_bytes(least):,} bytes, under '{replace(near, device_memory_bytes=None)}'",
        instead,
    )


def least_peak(plan: Plan, predict: Predict) -> tuple[Plan, int]:
    """The plan with the smallest predicted peak among `plan` and its offloads; and that peak.

    zero1 and zero2 cannot offload parameters, so that zero3 is tried for them.
    """
    peaks = {each: peak_bytes(predict(each)) for each in _offloads(plan)}
    best = min(peaks, key=lambda each: peaks[each])
    return best, peaks[best]


def _offloads(plan: Plan) -> Iterator[Plan]:
    plain = replace(plan, device_memory_bytes=None)
    yield plain if plain.offload != "auto" else replace(plain, offload=None)
    rows = [plan.row, "zero3"] if plan.row in ("zero1", "zero2") else [plan.row]
    for row in rows:
        for what in ("optim", "param"):
            changed = replace(plain, row=row, offload=what)
            if not problems(changed):
                yield changed


def _stages(found: Prediction) -> Iterable[int]:
    """A rank of each pipeline stage, which differ in what they store."""
    if found.plan.pipeline is None:
        return [found.rank]
    return {found.plan.coordinate(r).get("pp", 0): r for r in range(found.plan.size)}.values()
