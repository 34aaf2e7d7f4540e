"""A check that refuses optimizers that need whole tensors when parameters are sharded.

A shard of a matrix has two dims too (flat_parameter.py).  An optimizer such as Muon would treat it
as a matrix and compute a wrong update, without any error.

    torch's and ours      known by name
    any other class       tried on small parameters (optimizer_probe.py)
"""

import warnings
from collections.abc import Sequence

from torch.optim import Optimizer

from shardwise.core.errors import bad
from shardwise.core.plan.plan import Plan
from shardwise.engine.optimizer.optimizer_groups import Options
from shardwise.engine.optimizer.optimizer_probe import OptimizerProbe, maker

#: torch.optim classes that update each element independently, so that they work on shards.
ELEMENTWISE = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax"),
    *("ASGD", "Rprop"),
)
#: Classes that need the full tensor, and are supported if each rank updates full parameters.
BY_TENSOR = ("Adafactor",)


def needs_whole_tensors(kind: type) -> bool:
    """Whether a class of torch.optim, or a class derived from it, is not elementwise."""
    return _torch_class(kind) not in ("", *ELEMENTWISE)


def updates_by_tensor(kind: type) -> bool:
    """Whether it is not elementwise, but supported if each rank updates full parameters."""
    return _torch_class(kind) in BY_TENSOR


def _torch_class(kind: type) -> str:
    """The name of the class in torch.optim that it is or derives from; "" for others."""
    bases = (c for c in kind.__mro__ if c.__module__.startswith("torch.optim"))
    return next((c.__name__ for c in bases if c is not Optimizer), "")


def is_known(kind: type) -> bool:
    """Whether it is a class of torch or of this package that updates each element alone."""
    ours = kind.__module__.startswith("shardwise.")
    return ours or (kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE)


def require_shardable(kind: type[Optimizer], groups: Sequence[Options], plan: Plan) -> None:
    """Raise InputError for an optimizer that does not work as `plan` shards its parameters.

    One that is not known is tried, with the options of each of its groups (optimizer_probe.py).
    """
    if is_known(kind):
        return
    probes: list[OptimizerProbe] = [] if updates_by_tensor(kind) else _probes(kind, groups)
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
        _warn_unprobed(kind)
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


def works_on_pieces(kind: type[Optimizer], groups: Sequence[Options]) -> bool:
    """Whether it works on pieces of parameters.  Warns of one that cannot be tried."""
    if is_known(kind):
        return True
    if needs_whole_tensors(kind):
        return False
    probes = _probes(kind, groups)
    if not all(probe.ran for probe in probes):
        _warn_unprobed(kind)
    return all(probe.works_on_parts() for probe in probes if probe.ran)


def _probes(kind: type[Optimizer], groups: Sequence[Options]) -> list[OptimizerProbe]:
    """A probe for each of the groups' options that differ in more than the rate."""
    distinct = {repr(sorted((k, v) for k, v in g.items() if k != "lr")): g for g in groups}
    return [OptimizerProbe(maker(kind, group)) for group in distinct.values()]


def _warn_unprobed(kind: type[Optimizer]) -> None:
    warnings.warn(
        f"{kind.__name__} could not be tried on a small parameter. On shards it trains right only "
        "if its update of each element depends on that element's values alone.",
        stacklevel=4,
    )
