"""Whether a step fits `device_memory` by prediction.

A step stores LEAST to MOST times its prediction (prediction/peak_memory.py).  So a plan is refused
before it starts if LEAST times the prediction exceeds the bound. A suggested bound has room for
MOST times the prediction.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from shardwise.core.errors import bad
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.word_values import size_text
from shardwise.prediction.peak_memory import LEAST, MOST, device_peak_bytes
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
    raise bad(
        f"device_memory:{size_text(bound)} in the plan '{plan}', whose step stores {peak:,} bytes "
        "on the device of a rank by prediction, temporary memory of kernels apart",
        "a bound above that, an offload, recomputation, more ranks or a smaller batch",
        f"'{replace(plan, device_memory_bytes=bound_bytes(peak))}'",
    )


def _stages(found: Prediction) -> Iterable[int]:
    """A rank of each pipeline stage, which differ in what they store."""
    if found.plan.pipeline is None:
        return [found.rank]
    return {found.plan.coordinate(r).get("pp", 0): r for r in range(found.plan.size)}.values()
