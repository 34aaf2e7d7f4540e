"""this file is what a user may ask of the engine, checked before anything is changed."""

import sys
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.comm.world import World
from shardwise.core.errors import bad
from shardwise.core.plan import Plan
from shardwise.core.plan_check import require
from shardwise.engine import compiled, consistency, stage_module, validate, weight_stashing
from shardwise.engine.engine import Engine
from shardwise.engine.optimizer_spec import AdamW, Recipe
from shardwise.engine.shard import default_fill, layable
from shardwise.engine.tensor_parallel import fitting
from shardwise.engine.training import Build, Loss, Training
from shardwise.engine.unwrap import no_pipe


def parallelize(
    model: nn.Module,
    plan: Plan | str,
    world: World,
    optimizer: Recipe | None = None,
    loss: Loss | None = None,
    **options: Any,
) -> Engine:
    """Lay `model` out as `plan` says, in place, and return the engine that trains it.

    Options: `tokens`, `clip`, `on_nonfinite`, `check_every` (see Training); `units` (see
    parallel/data/wrap_policy.py), of which neighbours smaller than `least_unit_bytes` (None: 2 MiB)
    are one; `fill(name, tensor)` for the weights of a model on the meta device; `seed` where it has
    no fill; `prefetch`, the units gathered ahead; `table`, the styles of tensor parallelism
    (docs/tensor-tables.md); `stages`, the names of the modules that begin the stages of a pipeline
    but the first, and
    `beside={"norm": "head"}`, modules that are not called where they are defined (docs/stages.md).

    Raises:
        InputError: the plan cannot work, with every problem and its remedy; what is given is of
            the wrong kind, or not the same on all ranks; an unknown option. The model is as it
            was then.
    """
    validate.model(model, "sw.parallelize")
    validate.stepped_after(model, "sw.parallelize of a model")
    validate.world(world)
    plan = plan_of(plan)
    require(plan, world.size)
    plan = _completed(plan, world)
    compiled.require_plain(model, plan, loss)
    options = settled_options(options)
    recipe = recipe_of(optimizer)
    objective = validate.loss(own_loss if loss is None else loss)
    tokens = None if options["tokens"] is None else validate.tokens(options["tokens"])
    fill = options["fill"]
    fill = default_fill(model, options["seed"]) if fill is None else validate.fill(fill)
    validate.trained(model)
    mixed = plan.precision in ("bf16", "fp16")
    validate.unchanging(model, plan.data_size * (1 + mixed))
    no_pipe(model)
    layable(model, options["units"])
    table = fitting(model, plan, options["table"])
    beside = validate.names(options["beside"])
    begin = stage_module.fitting(model, plan, options["stages"], beside)
    on_nonfinite = options["on_nonfinite"]
    clip = weight_stashing.require(model, plan, begin, options["clip"], beside, on_nonfinite)
    if world.rank == 0:
        recipe.warn_unmatched([n for n, _ in model.named_parameters(remove_duplicate=False)])
    training = Training(recipe, objective, tokens, clip, on_nonfinite, options["check_every"])
    consistency.given(world, _told(model, plan, table, recipe, options))
    world = world.on(plan.mesh)
    asked = options["units"], fill, options["prefetch"], table
    build = Build(plan, world, *asked, begin, beside, options["least_unit_bytes"])
    return Engine(model, build, training)


#: The options, and what each is where it is not given.
USUAL: dict[str, Any] = {
    "tokens": None,
    "clip": None,
    "units": "auto",
    "least_unit_bytes": None,
    "fill": None,
    "seed": 0,
    "prefetch": 1,
    "table": None,
    "stages": None,
    "beside": None,
    "on_nonfinite": "raise",
    "check_every": consistency.EVERY,
}

#: Those that have to be alike on all ranks; so has the seed, where weights are made of it.
ALIKE = (
    *("clip", "units", "least_unit_bytes", "prefetch", "stages", "beside"),
    *("on_nonfinite", "check_every"),
)


def _told(
    model: nn.Module, plan: Plan, table: Any, recipe: Recipe, options: dict[str, Any]
) -> dict[str, object]:
    """What has to be the same on all ranks, by name."""
    told: dict[str, object] = {
        "the plan": str(plan),
        "the model": consistency.described(model),
        "the table": table,
        "the optimizer": recipe,
    } | {f"the option {name}": options[name] for name in ALIKE}
    if any(p.is_meta for p in model.parameters()):
        told["the option seed"] = options["seed"]
    return told


def plan_of(plan: Any) -> Plan:
    """The plan, read if it is a text. Raises InputError for what is neither."""
    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str):
        raise bad(
            f"the plan {validate.shown(plan)}", "a text of plan words, or a Plan", '"dp2 zero3"'
        )
    return Plan.parse(plan)


def _completed(plan: Plan, world: World) -> Plan:
    """The plan with the data ranks that this world leaves over, printed once where it has any."""
    completed = plan.completed(world.size)
    if completed != plan and world.rank == 0:
        print(
            f"shardwise: the plan '{plan}' on {world.size} ranks is '{completed}'", file=sys.stderr
        )
    return completed


def settled_options(options: dict[str, Any]) -> dict[str, Any]:
    """Every option, with the usual value of those not given. Raises InputError for wrong ones."""
    unknown = sorted(options.keys() - USUAL.keys())
    if unknown:
        close = get_close_matches(unknown[0], USUAL, n=1, cutoff=0.5)
        instead = f"{close[0]}=..." if close else "clip=1.0"
        named = ", ".join(unknown)
        raise bad(f"parallelize with the option {named}", ", ".join(sorted(USUAL)), instead)
    validate.positive("clip", options.get("clip"))
    if options.get("on_nonfinite", "raise") not in ("raise", "skip"):
        what = f"on_nonfinite={validate.shown(options['on_nonfinite'])}"
        raise bad(what, "'raise' or 'skip'", 'on_nonfinite="skip"')
    validate.whole("seed", options.get("seed", 0), 0, 0)
    validate.whole("prefetch", options.get("prefetch", 1), 0, 1)
    validate.whole("check_every", options.get("check_every", 1), 0, 1)
    if options.get("least_unit_bytes") is not None:
        validate.whole("least_unit_bytes", options["least_unit_bytes"], 0, 2**21)
    return USUAL | options


def recipe_of(optimizer: Any) -> Recipe:
    """The optimizer as a recipe: torch's own come too late or too early."""
    if optimizer is None:
        return AdamW(lr=3e-4)
    if isinstance(optimizer, Recipe):
        return optimizer
    instead = "optimizer=sw.AdamW(lr=3e-4)"
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        instead = f"optimizer=sw.Optim(torch.optim.{optimizer.__name__}, lr=3e-4)"
    elif isinstance(optimizer, Optimizer):
        options = f"torch.optim.{type(optimizer).__name__}, lr={optimizer.defaults.get('lr')}"
        instead = f"optimizer=sw.Optim({options}), without the model's parameters"
    shown = (
        type(optimizer).__name__ if isinstance(optimizer, Optimizer) else validate.shown(optimizer)
    )
    allowed = "sw.AdamW, sw.Adam, sw.SGD or sw.Optim with options; parameters are found by the plan"
    raise bad(f"optimizer={shown}", allowed, instead)


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a model that returns it: a scalar, or an output with `.loss` (transformers)."""
    out = model(**batch) if isinstance(batch, dict) else model(batch)
    found = out if isinstance(out, Tensor) else getattr(out, "loss", None)
    if found is None:
        raise bad(
            f"a model ({type(model).__name__}) that returns a {type(out).__name__} without a loss, "
            "and no loss= to make one",
            "a model that returns its loss (transformers: with labels in the batch), or a loss",
            validate.LOSS,
        )
    return found
