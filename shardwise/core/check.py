"""The judge of whether a plan can run here: every problem at once, each with its remedy."""

from dataclasses import replace

from shardwise.core.errors import Problem, refusal
from shardwise.core.plan import Plan

__all__ = ["Problem", "problems", "require"]

_LATER_AXES = {
    "pp": "pipelines",
    "cp": "context parallelism",
    "ep": "expert parallelism",
    "tp": "tensor parallelism",
}
_ALLOWED_AXES = "dpN, or dp_replicateN with dp_shardN"


def problems(plan: Plan, world_size: int | None = None) -> list[Problem]:
    """All that keeps `plan` from running, on `world_size` ranks where that is known.

    A plan that can run gives the empty list. Every remedy that is a plan can run itself.
    """
    return [*_not_yet(plan), *_data_axes(plan), *_world(plan, world_size)]


def require(plan: Plan, world_size: int | None = None) -> None:
    """Return if `plan` can run; else raise one InputError that lists every problem."""
    found = problems(plan, world_size)
    if found:
        raise refusal(f"the plan '{plan}'", found)


def _not_yet(plan: Plan) -> list[Problem]:
    """What the words can say and this version cannot do."""
    remedy = str(_runnable(plan))
    found = [
        _later(f"{name}{size}", what, _ALLOWED_AXES, remedy)
        for name, what in _LATER_AXES.items()
        if (size := plan.mesh.size_of(name)) > 1
    ]
    words = {
        "sp": ("sequence parallelism", plan.sp),
        plan.schedule: ("pipeline schedules", plan.schedule is not None),
        f"recompute:{plan.recompute}": ("recomputation", plan.recompute is not None),
        f"offload:{plan.offload}": ("offload", plan.offload is not None),
        "buffers:SIZE": ("a bound on buffers", plan.buffers_bytes is not None),
    }
    allowed = "the data-parallel words: axes, row, precision, accumulate, bucket"
    return found + [
        _later(str(word), what, allowed, remedy) for word, (what, said) in words.items() if said
    ]


def _later(word: str, what: str, allowed: str, remedy: str) -> Problem:
    given = f"'{word}', but {what} are not in this version"
    if not what.endswith("s") or what.startswith("a "):
        given = f"'{word}', but {what} is not in this version"
    return Problem(given, allowed, f"'{remedy}'")


def _data_axes(plan: Plan) -> list[Problem]:
    """Axes for data that do not go together, or not with the row."""
    sizes = dict(plan.axes)
    given = " ".join(f"{name}{size}" for name, size in plan.axes if name.startswith("dp"))
    remedy = f"'{_runnable(plan)}'"
    hybrid = [name for name in ("dp_replicate", "dp_shard") if name in sizes]
    if "dp" in sizes and hybrid:
        allowed = "either dpN, or dp_replicateN and dp_shardN, whose product is the same"
        return [Problem(f"'{given}', which splits the data in two ways", allowed, remedy)]
    if hybrid and plan.row == "ddp":
        allowed = "dp_shardN together with zero1, zero2 or zero3; ddp shards nothing"
        return [Problem(f"'{given}' under the row ddp", allowed, remedy)]
    if hybrid == ["dp_replicate"]:
        allowed = "dp_replicateN together with dp_shardN, which says what is sharded over what"
        return [Problem(f"'{given}' without dp_shard under {plan.row}", allowed, remedy)]
    return []


def _world(plan: Plan, world_size: int | None) -> list[Problem]:
    """Ranks that were started and ranks that the plan needs."""
    if world_size is None or world_size == plan.size:
        return []
    if world_size < 1:
        given = f"a world of {world_size} ranks"
        return [Problem(given, "one rank or more", f"--nproc {plan.size}")]
    needs = f"{plan.size} processes" if plan.size > 1 else "1 process"
    runs = "1 runs" if world_size == 1 else f"{world_size} run"
    product = "*".join(f"{name}{size}" for name, size in plan.axes) or "no axis, so one rank"
    given = f"the plan '{plan}', which needs {needs} ({product}), where {runs}"
    allowed = "as many processes as the product of the plan's axes"
    instead = f"'{_fit(plan, world_size)}', or start {needs} for this one"
    return [Problem(given, allowed, instead)]


def _runnable(plan: Plan) -> Plan:
    """The nearest plan that this version runs: the same data ranks and row, without the rest."""
    sizes = {name: size for name, size in plan.axes if name.startswith("dp")}
    whole = plan.row != "ddp" and "dp_shard" in sizes and "dp" not in sizes
    axes = tuple(sizes.items()) if whole else (("dp", plan.data_size),)
    if not sizes:
        axes = ()
    return Plan(
        axes=axes,
        row=plan.row,
        precision=plan.precision,
        accumulate=plan.accumulate,
        bucket_bytes=plan.bucket_bytes,
    )


def _fit(plan: Plan, world_size: int) -> Plan:
    """The nearest plan that this version runs on `world_size` ranks."""
    near = _runnable(plan)
    shard = near.mesh.size_of("dp_shard")
    if world_size == 1:
        return replace(near, axes=())
    if near.mesh.size_of("dp_replicate") > 1 and world_size % shard == 0 and world_size > shard:
        return replace(near, axes=(("dp_replicate", world_size // shard), ("dp_shard", shard)))
    return replace(near, axes=(("dp", world_size),))
