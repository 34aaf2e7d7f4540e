"""The error when memory runs out in a step: what the rank stores, and plan words that would help.

    try:
        engine.step(batch)
    except RuntimeError as error:
        raise explained(error, engine, predictor) if ran_out(error) else error

The error lists the bytes of the rank's tensors at that moment. For each word, `sw.predict` predicts
what the changed plan stores between steps, and the activations that autograd keeps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from shardwise.core.errors import InputError, bad
from shardwise.core.plan import Plan
from shardwise.core.plan_check import problems
from shardwise.core.zero import ROWS
from shardwise.engine.device_room import bound_bytes, least_peak, peak_bytes
from shardwise.engine.engine import Engine
from shardwise.prediction.prediction import Prediction

Predictor = Callable[[Plan], Prediction]
KEPT = "activations"
#: From the least to the most; those on a disk relieve the host, and no more of the device.
OFFLOADS = (None, "optim", "param", "optim@disk", "param@disk")
CATEGORIES = ("parameters", "gathered", "gradients", "optimizer", "buffers", KEPT)


@dataclass(frozen=True)
class Remedy:
    """A changed plan, and what a rank stores under it: between steps, and kept activations."""

    plan: Plan
    stored_bytes: int


def ran_out(error: BaseException) -> bool:
    """Whether an error of torch says that memory ran out, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    first = next(iter(str(error).splitlines()), "").lower()
    return isinstance(error, RuntimeError) and "alloc" in first and "memory" in first


def explained(error: BaseException, engine: Engine, predict: Predictor) -> InputError:
    """The error to raise in place of `error`: a paragraph, and two tables.

    `predict` gives the prediction of a plan for the same model, batch and options.
    """
    plan, rank = engine.plan, engine.world.rank
    now, found = stored(engine), predict(plan)
    host = not isinstance(error, torch.OutOfMemoryError)  # which is a device's
    helpful = remedies(plan, predict, host=host)
    said = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
    every = found.memory | {KEPT: found.activations}
    most = max(every, key=lambda category: every[category])
    problem = bad(
        f"a step of the plan '{plan}' for which rank {rank} has too little memory on "
        f"{engine.world.device} ({said}); most of what it stores is {most}",
        "a plan, a model or a batch for which there is room" + _least(plan, predict),
        f"--plan '{helpful[0].plan}'" if helpful else "a smaller model or batch",
    )
    held = [(category, now.get(category), every.get(category)) for category in CATEGORIES]
    tables = [*_table((f"rank {rank} stores, bytes", "now", "predicted"), held)]
    if helpful:
        before = _total(found, host)
        rows = [(str(r.plan), r.stored_bytes, before - r.stored_bytes) for r in helpful]
        tables += ["", *_table(("plans that store less, bytes", "predicted", "saves"), rows)]
    return InputError("\n".join([str(problem), "", *tables]))


def stored(engine: Engine) -> dict[str, int]:
    """What this rank stores now, in the middle of a step; activations only if they are known."""
    found = engine.memory()
    gathered = sum(f.full.untyped_storage().nbytes() for f in engine.flats if f.reshards)
    found |= {"parameters": found["parameters"] - gathered, "gathered": gathered}
    device = engine.world.device
    if device.type == "cuda":
        found[KEPT] = max(0, torch.cuda.memory_allocated(device) - sum(found.values()))
    return found


def _least(plan: Plan, predict: Predictor) -> str:
    """The least bounds on device memory that a step meets, for a plan that has such a bound."""
    if plan.device_memory_bytes is None:
        return ""
    (near, least), own = least_peak(plan, predict), peak_bytes(predict(plan))
    return (
        f"; with this model and batch device_memory can be {bound_bytes(own):,} bytes or more, "
        f"and under '{near}' {bound_bytes(least):,}"
    )


def remedies(plan: Plan, predict: Predictor, *, host: bool = False) -> Sequence[Remedy]:
    """Plans that differ in one word and store less, the smallest first.

    `host`: it is the host that has too little memory, so what is stored there counts too.
    """
    before, found = _total(predict(plan), host), list[Remedy]()
    for changed in _changes(plan, host):
        if problems(changed):
            continue
        try:
            after = _total(predict(changed), host)
        except InputError:  # a batch of too few rows, for example
            continue
        if after < before:
            found.append(Remedy(changed, after))
    return sorted(found, key=lambda remedy: remedy.stored_bytes)


def _changes(plan: Plan, host: bool) -> Iterator[Plan]:
    names = list(ROWS)
    if plan.row in names and plan.data_size > 1:
        yield from (replace(plan, row=row) for row in names[names.index(plan.row) + 1 :])
    if plan.recompute is None:
        yield replace(plan, recompute="full")
    if not plan.activations_on_host:
        yield replace(plan, activations="host")
    yield from (replace(plan, offload=what) for what in _offloads(plan.offload, host))
    yield replace(plan, accumulate=2 * plan.accumulate)
    if plan.precision in (None, "fp32", "fp64"):
        yield replace(plan, precision="bf16")
    shard = plan.shard_axis
    if shard is not None:
        axes = tuple((name, 2 * size if name == shard else size) for name, size in plan.axes)
        yield replace(plan, axes=axes)


def _offloads(now: str | None, host: bool) -> Iterator[str]:
    """Further offloads: to a disk only if the host is short of memory, or states are there now."""
    to_disk = host or "disk" in (now or "")
    if now is not None and now.startswith(("optim=", "optim,")):  # the states of some units
        now = None
    if now not in OFFLOADS:
        return
    for what in OFFLOADS[OFFLOADS.index(now) + 1 :]:
        if what is not None and (to_disk or not what.endswith("@disk")):
            yield what


def _total(found: Prediction, host: bool) -> int:
    on_host = sum(found.host_memory.values()) + found.host_activations
    return sum(found.memory.values()) + found.activations + found.fetched + host * on_host


def _table(
    head: tuple[str, str, str], rows: Sequence[tuple[str, int | None, int | None]]
) -> Iterator[str]:
    """Lines of three columns, numbers to the right."""
    shown = [head] + [(name, *("-" if n is None else f"{n:,}" for n in of)) for name, *of in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(3)]
    for name, *numbers in shown:
        right = (n.rjust(w) for n, w in zip(numbers, widths[1:], strict=True))
        yield "  ".join([name.ljust(widths[0]), *right])
