"""The check that this version can run a plan: all problems at once, each with a remedy."""

from dataclasses import replace

from shardwise.core.errors import InputError, Problem, refusal
from shardwise.core.layer_plan_check import layer_problems
from shardwise.core.plan import Plan
from shardwise.core.plan_parser import (
    PARTITIONED_WORDS,
    later,
    recompute_budget,
    runnable_forms,
    size_text,
)
from shardwise.core.pool_size import PIECE_BYTES, smallest_pool_bytes
from shardwise.core.schedule.library import LIBRARY, Size, allowed
from shardwise.core.zero import row_of

__all__ = ["Problem", "problems", "require"]


def problems(plan: Plan, world_size: int | None = None) -> list[Problem]:
    """All problems of `plan`, on `world_size` ranks if given; empty if it can run."""
    own = [*_not_yet(plan), *_pipeline(plan), *_tensor(plan), *_tiers(plan)]
    own += _data_axes(plan)
    own += _experts(plan.completed(world_size))
    own += _buffers(plan.completed(world_size) if world_size else plan)
    own += _arenas(plan)
    own += _tiles(plan)
    whole = _world(plan, world_size)
    layers = [] if own or whole else layer_problems(plan.completed(world_size), problems)
    return [*own, *whole, *layers]


def require(plan: Plan, world_size: int | None = None) -> None:
    """Raise one InputError that lists every problem of `plan`, if it has any."""
    found = problems(plan, world_size)
    if found:
        raise refusal(f"the plan '{plan}'", found)


def _not_yet(plan: Plan) -> list[Problem]:
    """A problem for each word that this version cannot run; an axis of one rank does nothing."""
    nothing = {f"{name}1" for name, _ in plan.axes}
    return [
        Problem(
            f"'{word}', but {later(word)} not in this version",
            f"the plan words {' '.join(runnable_forms())}",
            f"the plan without {word}",
        )
        for word in str(plan).split()
        if later(word) and word not in nothing
    ]


def _pipeline(plan: Plan) -> list[Problem]:
    """Problems of the schedule: sizes that it forbids, and words that do not go with it."""
    return _forbidden(plan) or (_stale(plan) if _is_stale(plan) else [])


def _forbidden(plan: Plan) -> list[Problem]:
    if plan.pipeline is None:
        return []
    try:
        allowed(plan.pipeline, plan.mesh.size_of("pp"))
    except InputError as error:
        return list(error.problems)
    return []


def _is_stale(plan: Plan) -> bool:
    """Whether the schedule is asynchronous: it updates stages during the step."""
    name = (plan.pipeline or "").partition(":")[0]
    return name in LIBRARY and LIBRARY[name].updates(Size(1, 1)) > 0


def _stale(plan: Plan) -> list[Problem]:
    """Words that do not go with an asynchronous schedule."""
    found: list[Problem] = []
    schedule = f"{plan.pipeline}, which updates by itself"
    if plan.precision == "fp16":
        given = f"fp16 with {schedule}: an overflow would have to skip the update of all stages"
        allowed = "bf16, fp32 or fp64, which have no loss scale"
        found.append(Problem(given, allowed, f"'{replace(plan, precision='bf16')}'"))
    if plan.accumulate > 1:
        given = f"accumulate:{plan.accumulate} with {schedule}"
        instead = f"'{replace(plan, accumulate=1)}'"
        found.append(Problem(given, "more microbatches in the schedule", instead))
    if row_of(plan.row).param.kind == "S":
        given = f"{plan.row} with {schedule} and keeps full versions of the weights"
        allowed = "ddp, zero1 or zero2, or a schedule that updates at the end"
        found.append(Problem(given, allowed, f"'{replace(plan, row='zero2')}'"))
    if plan.offload is not None:
        given = f"offload:{plan.offload} with {schedule} during the pass"
        allowed = "no offload, or a schedule that updates at the end"
        found.append(Problem(given, allowed, f"'{replace(plan, offload=None)}'"))
    return found


def _tensor(plan: Plan) -> list[Problem]:
    """`sp` and `recompute:partitioned` without tensor parallelism."""
    if plan.mesh.size_of("tp") > 1:
        return []
    if plan.recompute in PARTITIONED_WORDS:
        word = f"recompute:{plan.recompute}"
        given = f"'{word}' without tensor parallelism, whose ranks would share inputs"
        allowed = f"{word} together with tpN of two ranks or more"
        instead = f"'{replace(plan, recompute='full')}', or tp2 beside it"
        return [Problem(given, allowed, instead)]
    if not plan.sp:
        return []
    allowed = "sp together with tpN of two ranks or more, on which the sequence is split"
    given = "'sp' without tensor parallelism, which has no effect"
    return [Problem(given, allowed, "the plan without sp, or tp2 beside it")]


def _bounded(plan: Plan) -> bool:
    """Whether a budget of the device's activations is given for blocks that keep none there."""
    return plan.activations is not None and recompute_budget(plan.recompute) > 0


def _tiers(plan: Plan) -> list[Problem]:
    """A budget of activations that do not rest on the device; parameters that cannot leave it."""
    if not _bounded(plan):
        return _rests(plan)
    given = f"'recompute:{plan.recompute}', a budget of device memory, with 'activations:host'"
    allowed = "a budget alone; or activations:host with recompute:full, selective, everyN or names"
    return [Problem(given, allowed, f"'{replace(plan, activations=None)}'")]


def _rests(plan: Plan) -> list[Problem]:
    """Parameters in host memory under a row whose update makes only a block of them."""
    if plan.offloaded is None or plan.offloaded.param_tier == "device" or _updates_whole(plan):
        return []
    given = f"'offload:{plan.offload}' with {plan.row}, which keeps all parameters on every rank "
    given += "and updates a block on each: the blocks would be gathered in host memory"
    allowed = "zero3, which keeps a block of them; ddp, which updates all; or offload:optim"
    return [Problem(given, allowed, f"'{replace(plan, row='zero3')}'")]


def _updates_whole(plan: Plan) -> bool:
    """Whether a rank updates what it keeps of the parameters."""
    row = row_of(plan.row)
    return row.param == row.optim


def _arenas(plan: Plan) -> list[Problem]:
    """Arenas without a tensor to put in them, or of sizes that the plan does not fix."""
    why = _no_arenas(plan)
    if not why:
        return []
    allowed = "arenas with recompute:full, selective, partitioned, everyN or names; or with zero2 "
    allowed += "or zero3 and no pipeline"
    return [Problem(f"'arenas' with {why}", allowed, f"'{replace(plan, arenas=False)}'")]


def _no_arenas(plan: Plan) -> str:
    """Why `plan` cannot have arenas; "" if it can, or has none."""
    if not plan.arenas:
        return ""
    if _bounded(replace(plan, activations="host")):
        return f"recompute:{plan.recompute}, which chooses for each batch what is kept"
    if plan.activations is not None or plan.recompute == "partitioned-host":
        return "activations in host memory"
    if plan.recompute is None and (plan.pipeline or row_of(plan.row).grad.kind != "S"):
        return f"{plan.row} and no recomputation, where no tensor has a place in them"
    return ""


def _tiles(plan: Plan) -> list[Problem]:
    """Tiles that would not be freed, or with words that do not go with them."""
    why = _no_tiles(plan)
    if not why:
        return []
    allowed = "tile with zero3, or with offload:param, which free a tile after its use; with "
    allowed += "accumulate, recompute, clipping and any precision"
    near = replace(plan, row="zero3") if why.startswith(plan.row) else replace(plan, tile=None)
    return [Problem(f"'tile:{plan.tile}' with {why}", allowed, f"'{near}'")]


def _no_tiles(plan: Plan) -> str:
    """Why `plan` cannot have tiles; "" if it can, or has none."""
    if plan.tile is None:
        return ""
    if plan.pipeline is not None:
        return f"{plan.pipeline}, whose stages gather whole layers"
    if plan.mesh.size_of("tp") > 1:
        return "tensor parallelism, whose ranks already hold a part of each layer"
    if plan.arenas or plan.activations_on_host or recompute_budget(plan.recompute):
        return "arenas, activations in host memory or a budget of activations"
    kept = plan.offloaded is None or plan.offloaded.param_tier == "device"
    if kept and row_of(plan.row).param.kind != "S":
        return f"{plan.row}, under which the device keeps whole parameters"
    return ""


def _buffers(plan: Plan) -> list[Problem]:
    """A pool of communication buffers in which the ranks cannot sum the smallest piece."""
    least = smallest_pool_bytes(plan)
    if plan.buffers_bytes is None or plan.buffers_bytes >= least or plan.size == 1:
        return []
    ranks = max(size for _, size in plan.axes)
    given = f"'buffers:{size_text(plan.buffers_bytes)}' with {ranks} ranks on an axis"
    allowed = f"{least} bytes or more, in which {ranks} ranks can sum pieces of {PIECE_BYTES} bytes"
    return [Problem(given, allowed, f"buffers:{size_text(least)}")]


def _data_axes(plan: Plan) -> list[Problem]:
    """Data axes that contradict each other or the row."""
    sizes = dict(plan.axes)
    given = " ".join(f"{name}{size}" for name, size in plan.axes if name.startswith("dp"))
    remedy = f"dp{plan.data_size} in place of {given}"
    hybrid = [name for name in ("dp_replicate", "dp_shard") if name in sizes]
    if "dp" in sizes and hybrid:
        allowed = "either dpN, or dp_replicateN and dp_shardN, whose product is the same"
        return [Problem(f"'{given}', which splits the data in two ways", allowed, remedy)]
    if hybrid and not row_of(plan.row).sharded:
        allowed = f"dp_shardN together with zero1, zero2 or zero3; {plan.row} shards nothing"
        return [Problem(f"'{given}' under the row {plan.row}", allowed, remedy)]
    if hybrid == ["dp_replicate"]:
        allowed = "dp_replicateN together with dp_shardN, which says what is sharded over what"
        return [Problem(f"'{given}' without dp_shard under {plan.row}", allowed, remedy)]
    return []


def _experts(plan: Plan) -> list[Problem]:
    """`ep` that does not divide the data ranks."""
    axis, ranks = plan.inner_data_axis, plan.mesh.size_of(plan.inner_data_axis)
    if ranks % plan.ep == 0:
        return []
    degrees = [n for n in range(1, min(ranks, 64) + 1) if ranks % n == 0]
    listed = ", ".join(f"ep{n}" for n in degrees)
    allowed = (
        f"a divisor of the {ranks} ranks of {axis}, over which experts are distributed: {listed}"
    )
    return [
        Problem(
            f"'ep{plan.ep}' with {axis}{ranks}",
            allowed,
            f"ep{max(n for n in degrees if n <= plan.ep)}",
        )
    ]


def _world(plan: Plan, world_size: int | None) -> list[Problem]:
    """A world whose size is not the plan's."""
    if world_size is None or plan.completed(world_size).size == world_size:
        return []
    needs = f"{plan.size} processes" if plan.size > 1 else "1 process"
    runs = "1 runs" if world_size == 1 else f"{world_size} run"
    product = "*".join(f"{name}{size}" for name, size in plan.mesh.axes) or "no axis, so one rank"
    more = " or a multiple" * plan.open
    given = f"the plan '{plan}', which needs {needs}{more} ({product}), where {runs}"
    allowed = "as many processes as the product of the plan's axes"
    if plan.open:
        allowed = "a multiple of the product of the plan's axes; the ranks left over are data ranks"
    instead = f"start {needs}"
    if not plan.open:
        instead += ", or leave the data axis out, which then takes the ranks left over"
    return [Problem(given, allowed, instead)]
