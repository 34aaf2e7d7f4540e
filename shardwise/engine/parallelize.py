"""this file is what a user may ask of the engine, checked before anything is changed."""

from typing import Any

from torch import Tensor, nn

from shardwise.comm.world import World
from shardwise.core.check import require
from shardwise.core.errors import bad
from shardwise.core.plan import Plan
from shardwise.engine.engine import Build, Engine, Loss, Training
from shardwise.engine.optimizer import AdamW, Recipe
from shardwise.engine.shard import default_fill


def parallelize(
    model: nn.Module,
    plan: Plan | str,
    world: World,
    optimizer: Recipe | None = None,
    loss: Loss | None = None,
    **options: Any,
) -> Engine:
    """Lay `model` out as `plan` says, in place, and return the engine that trains it.

    Options: `tokens`, `clip` (see Training); `units` (see parallel/units.py); `fill(name, tensor)`
    for the weights of a model on the meta device; `seed` where it has no fill; `prefetch`, the
    units gathered ahead.

    Raises:
        InputError: the plan cannot work, with every problem and its remedy; an unknown option.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    require(plan, world.size)
    known = {"tokens", "clip", "units", "fill", "seed", "prefetch"}
    if options.keys() - known:
        unknown = ", ".join(sorted(options.keys() - known))
        raise bad(f"parallelize with the option {unknown}", ", ".join(sorted(known)), "clip=1.0")
    if isinstance(loss, nn.Module):
        raise bad(
            f"loss={type(loss).__name__}(), a module",
            "a function of model and batch that returns the mean loss of the batch",
            "loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1])",
        )
    training = Training(
        optimizer or AdamW(lr=3e-4), loss or _own_loss, options.get("tokens"), options.get("clip")
    )
    world = world.on(plan.mesh)
    fill = options.get("fill") or default_fill(model, options.get("seed", 0))
    build = Build(plan, world, options.get("units", "auto"), fill, options.get("prefetch", 1))
    return Engine(model, build, training)


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a model that returns it: a scalar, or an output with `.loss` (transformers)."""
    out = model(**batch) if isinstance(batch, dict) else model(batch)
    return out if isinstance(out, Tensor) else out.loss
