"""Whether an engine's optimizer works as the plan shards its parameters."""

from collections.abc import Sequence

from torch.optim import Optimizer

from shardwise.core.errors import bad
from shardwise.core.plan.plan import Plan
from shardwise.engine.optimizer.elementwise import (
    is_known,
    probes_of,
    updates_by_tensor,
    warn_unprobed,
)
from shardwise.engine.optimizer.optimizer_groups import Options
from shardwise.engine.optimizer.optimizer_probe import OptimizerProbe


def require_shardable(kind: type[Optimizer], groups: Sequence[Options], plan: Plan) -> None:
    """Raise InputError for an optimizer that does not work as `plan` shards its parameters.

    One that is not known is tried, with the options of each of its groups (optimizer_probe.py).
    """
    if is_known(kind):
        return
    probes: list[OptimizerProbe] = [] if updates_by_tensor(kind) else probes_of(kind, groups)
    if any(probe.ran and not probe.works_in_turns() for probe in probes):
        raise bad(
            f"{kind.__name__} in an engine, which updates unit by unit: {kind.__name__} combines "
            "its parameters, or counts its steps over all of them",
            "an optimizer whose update of a parameter depends on that parameter alone",
            "sw.AdamW(lr=3e-4), or sw.DDP(module) in a loop of your own",
        )
    split = _split_axes(plan)
    if not split or (probes and all(probe.ran and probe.works_on_parts() for probe in probes)):
        return
    if not all(probe.ran for probe in probes):
        warn_unprobed(kind)
        return
    whole = "with ddp, pp, dp_replicate, accumulate and recompute, in every precision"
    raise bad(
        f"{kind.__name__} under the plan '{plan}', whose ranks of the axis {' and '.join(split)} "
        f"update parts of a parameter; {kind.__name__} computes from whole tensors, such as means "
        "of rows, norms or matrix products",
        f"{kind.__name__} where each rank updates whole parameters: {whole}",
        f"sw.Lion(lr=1e-4) with '{plan}', or {kind.__name__} with 'dp{plan.size}'",
    )


def _split_axes(plan: Plan) -> list[str]:
    """The axes whose ranks hold parts of parameters."""
    sizes: dict[str, int] = {}
    for layers in plan.of_all_layers:
        for axis in filter(None, ("tp", layers.shard_axis)):
            sizes[axis] = max(sizes.get(axis, 1), layers.mesh.size_of(axis))
    return [axis for axis, size in sizes.items() if size > 1]
