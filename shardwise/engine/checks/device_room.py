"""Whether a step fits `device_memory`, `offload:auto`, and the error when memory runs out.

A plan is refused before it starts if the predicted peak of a step exceeds the bound. A suggested
bound has room for MOST times the prediction, for other batches and kernels.

    try:
        engine.step(batch)
    except RuntimeError as error:
        raise explained(error, "in a step", engine.plan, world.rank) if ran_out(error) else error

`offload:auto` is the least offload with which a step is predicted to fit `device_memory` (on CUDA
also the device's own memory), on every stage of a pipeline: nothing, `optim`, `param`. States on a
disk are not among them: they take as much of the device as those in host memory.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

import torch

from shardwise.core.errors import RunError, bad
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import problems
from shardwise.core.plan.words import size_text
from shardwise.prediction.prediction import Prediction

Predict = Callable[[Plan], Prediction]
#: A suggested bound is a multiple of this, or of its 1024th for small models.
_STEP_BYTES = 2**20
MOST: Final = 1.2


def peak_bytes(found: Prediction) -> int:
    """The predicted peak of a step on the device of the rank that stores most."""
    return max(found.on(rank).device_peak for rank in _stages(found))


def bound_bytes(peak: int) -> int:
    """A bound that a step with this predicted peak meets: rounded up, with room."""
    wanted = MOST * peak
    unit = _STEP_BYTES if wanted >= 16 * _STEP_BYTES else _STEP_BYTES // 1024
    return -(-int(wanted + 1) // unit) * unit


def require_room(plan: Plan, predict: Predict) -> None:
    """Raise InputError if a step of `plan` needs more than its `device_memory`, by prediction.
    `predict` gives the prediction of a plan for the model and the batch of the run.
    """
    bound = plan.device_memory_bytes
    if bound is None or (peak := peak_bytes(predict(plan))) <= bound:
        return
    raise bad(
        f"device_memory:{size_text(bound)} in the plan '{plan}', whose step stores {peak:,} bytes "
        "on the device of a rank by prediction",
        "a bound above that, an offload, recomputation, more ranks or a smaller batch",
        f"'{replace(plan, device_memory_bytes=bound_bytes(peak))}'",
    )


def _stages(found: Prediction) -> Iterable[int]:
    if found.plan.pipeline is None:
        return [found.rank]
    return {found.plan.coordinate(r).get("pp", 0): r for r in range(found.plan.size)}.values()


# --- the error when memory runs out ---------------------------------------------------------------


def ran_out(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    first = next(iter(str(error).splitlines()), "").lower()
    return isinstance(error, RuntimeError) and "alloc" in first and "memory" in first


def explained(error: BaseException, doing: str, plan: Plan, rank: int) -> RunError:
    """The error to raise in place of `error`, which a rank met `doing` something."""
    said = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
    return RunError(
        f"Rank {rank} ran out of memory {doing} under '{plan}' ({said}). A smaller model or batch, "
        "or a plan that shards over more ranks, recomputes or offloads, may fit: --dry-run "
        "predicts the memory of a rank."
    )


# --- `offload:auto` -------------------------------------------------------------------------------

AUTO = "auto"


def with_offload(
    plan: Plan, predict: Callable[[Plan], Prediction], device: torch.device | None = None
) -> Plan:
    """`plan` with the offload chosen for `offload:auto`; any other plan is returned unchanged.
    `predict` gives the prediction of a plan for the model and the batch of the run, on any rank.
    Raises InputError without a bound on the memory, or if nothing fits (with the least that does).
    """
    if plan.offload != AUTO:
        return plan
    bound, peaks = _bound(plan, device), list[int]()
    for candidate in (replace(plan, offload=choice) for choice in (None, "optim", "param")):
        if not problems(candidate):
            found = predict(candidate)
            peaks.append(peak_bytes(found))
            if peaks[-1] <= bound:
                return found.plan
    least = min(peaks)
    raise bad(
        f"'offload:auto' in the plan '{plan}', for whose step the least that a rank can store on "
        f"its device is {least:,} bytes",
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
