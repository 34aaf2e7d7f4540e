"""`sw.parallelize`: checks all arguments, then builds the engine."""

import sys
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.comm.world import World
from shardwise.core.arguments import MOST_SEED, choice, integer, positive, short_repr
from shardwise.core.errors import bad
from shardwise.core.independent import plan_of_expert, ranks_by_expert
from shardwise.core.plan import Plan
from shardwise.core.plan_check import require
from shardwise.core.suggest import suggest
from shardwise.engine import (
    compiled,
    consistency,
    first_step,
    recompute_budget,
    stage_module,
    validate,
    weight_stashing,
)
from shardwise.engine.default_fill import default_fill
from shardwise.engine.elementwise import require_shardable
from shardwise.engine.engine import Engine
from shardwise.engine.offload_choice import require_chosen
from shardwise.engine.optimizer_spec import AdamW, OptimizerSpec, written
from shardwise.engine.rank_zero_weights import missing_weights
from shardwise.engine.shard import layable
from shardwise.engine.tensor_parallel import layer_tables, table_for
from shardwise.engine.training import Build, Loss, Training
from shardwise.engine.unwrap import no_pipe
from shardwise.kernels.choice import CHOICES
from shardwise.parallel.data.inference import normal_mode


@normal_mode()
def parallelize(
    model: nn.Module,
    plan: Plan | str,
    world: World,
    optimizer: OptimizerSpec | None = None,
    loss: Loss | None = None,
    **options: Any,
) -> Engine:
    """Shard `model` in place according to `plan`, and return the engine that trains it.

    With `experts:independent` it is the engine of one expert, number `engine.world.expert`.

    Options; those of a technique that the plan does not use are checked and have no effect:
        tokens, clip, on_nonfinite, check_every: see Training; rows: see Build.
        units: the wrap policy (parallel/data/wrap_policy.py).
        least_unit_bytes: smaller units are merged with their neighbours; None means 2 MiB.
        fill, seed: fill(name, tensor) writes weights on the meta device, else they follow `seed`.
        prefetch: the number of units gathered ahead of their use.
        table: the styles of tensor parallelism (docs/tensor-tables.md).
        stages: the names of the modules that begin each stage except the first.
        offload_folder: the folder of states that rest on a disk (docs/offload.md).
        kernels: "auto", or "torch" for torch's own functions and autograd alone.
        beside: {"norm": "head"} for modules not called where they are defined (docs/stages.md).

    Raises:
        InputError: the plan or an argument cannot work or differs between ranks; nothing changed.
    """
    validate.model(model, "sw.parallelize")
    validate.no_backward_optimizer(model, "sw.parallelize of a model")
    validate.world(world)
    plan, world = _of_this_rank(plan_of(plan), world)
    compiled.require_plain(model, plan, loss)
    options = settled_options(options)
    spec = spec_of(optimizer)
    require_shardable(spec.kind, spec.by_group, plan)
    objective = validate.loss(own_loss if loss is None else loss)
    tokens, rows = validate.tokens(options["tokens"]), validate.rows(options["rows"])
    own_fill = validate.fill(options["fill"], options["seed"])
    fill = own_fill or default_fill(model, options["seed"])
    validate.trainable(model)
    validate.no_max_norm(model, plan.data_size * (1 + (plan.precision in ("bf16", "fp16"))))
    no_pipe(model)
    layable(model, options["units"], plan)
    table = table_for(model, plan, options["table"])
    layers = layer_tables(model, plan, options["table"])
    beside = validate.beside(options["beside"])
    begin = stage_module.stage_starts(model, plan, options["stages"], beside)
    recomputed = recompute_budget.recomputation(model, plan, world.rank, objective, options, begin)
    on_nonfinite, every = options["on_nonfinite"], options["check_every"]
    clip = weight_stashing.require(model, plan, begin, options["clip"], beside, on_nonfinite)
    if world.rank == 0:
        spec.warn_unmatched([n for n, _ in model.named_parameters(remove_duplicate=False)])
    how = Training(spec, objective, tokens, clip, on_nonfinite, every, options["offload_folder"])
    consistency.require_same(world, _shared(model, plan, table, spec, options))
    missing = missing_weights(model, world)
    validate.fill_used(options, model, missing)
    world = world.on(plan.mesh)
    asked = options["units"], fill, options["prefetch"], table, begin, beside
    more = options["least_unit_bytes"], recomputed, options["kernels"], layers, rows, missing
    return first_step.engine_of(model, Build(plan, world, *asked, *more), how)


#: The options and their defaults.
DEFAULTS: dict[str, Any] = {
    "tokens": None,
    "rows": None,
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
    "check_every": consistency.CHECK_EVERY,
    "kernels": "auto",
    "offload_folder": None,
}

#: Options that must be equal on all ranks.
SHARED = (
    *("clip", "units", "least_unit_bytes", "prefetch", "stages", "beside"),
    *("on_nonfinite", "check_every", "kernels", "seed"),
)


def _shared(
    model: nn.Module, plan: Plan, table: Any, spec: OptimizerSpec, options: dict[str, Any]
) -> dict[str, object]:
    """The arguments that must be the same on all ranks, by name."""
    shared: dict[str, object] = {
        "the plan": str(plan),
        "the model": consistency.model_signature(model),
        "the table": table,
        "the optimizer": spec,
    }
    return shared | {f"the option {name}": options[name] for name in SHARED}


def plan_of(plan: Any) -> Plan:
    """Parse a plan if it is a text.  Raises InputError for other types."""
    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str):
        raise bad(
            f"the plan {short_repr(plan)}",
            "a text of plan words, or a Plan",
            '"dp2 zero3"',
        )
    return Plan.parse(plan)


def _of_this_rank(plan: Plan, world: World) -> tuple[Plan, World]:
    """The plan, checked and completed, and the world; those of this rank's independent expert."""
    require(plan, world.size)
    plan = _completed(plan, world)
    if not plan.experts:
        return plan, world
    return plan_of_expert(plan), world.split(ranks_by_expert(plan))


def _completed(plan: Plan, world: World) -> Plan:
    """The plan with its open data axis filled in; rank 0 prints the result if it changed."""
    require_chosen(plan)
    completed = plan.completed(world.size)
    if completed != plan and world.rank == 0:
        print(
            f"shardwise: the plan '{plan}' on {world.size} ranks is '{completed}'", file=sys.stderr
        )
    return completed


def settled_options(options: dict[str, Any]) -> dict[str, Any]:
    """Check the options and add defaults.  Raises InputError for a wrong name or value."""
    unknown = sorted(options.keys() - DEFAULTS.keys())
    if unknown:
        close = suggest(unknown[0], DEFAULTS, 0.5)
        instead = f"{close}=..." if close else "clip=1.0"
        named = ", ".join(unknown)
        raise bad(f"parallelize with the option {named}", ", ".join(sorted(DEFAULTS)), instead)
    positive("clip", options.get("clip"))
    choice("on_nonfinite", options.get("on_nonfinite", "raise"), ("raise", "skip"))
    choice("kernels", options.get("kernels", "auto"), CHOICES)
    integer("seed", options.get("seed", 0), 0, 0, MOST_SEED)
    integer("prefetch", options.get("prefetch", 1), 0, 1)
    integer("check_every", options.get("check_every", 1), 0, 1)
    if options.get("least_unit_bytes") is not None:
        integer("least_unit_bytes", options["least_unit_bytes"], 0, 2**21)
    return DEFAULTS | options


def spec_of(optimizer: Any) -> OptimizerSpec:
    """Check the optimizer.  An instance of torch's is refused: it has the unsharded parameters."""
    if optimizer is None:
        return AdamW(lr=3e-4)
    if isinstance(optimizer, OptimizerSpec):
        return optimizer
    instead = "optimizer=sw.AdamW(lr=3e-4)"
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        instead = f"optimizer=sw.Optim({written(optimizer)}, lr=3e-4)"
    elif isinstance(optimizer, Optimizer):
        options = f"{written(type(optimizer))}, lr={optimizer.defaults.get('lr')}"
        instead = f"optimizer=sw.Optim({options}), without the model's parameters"
    shown = type(optimizer).__name__ if isinstance(optimizer, Optimizer) else short_repr(optimizer)
    allowed = "sw.AdamW, sw.Adam, sw.SGD, sw.Lion or sw.Optim with options, without parameters"
    raise bad(f"optimizer={shown}", allowed, instead)


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The default loss: the model's own output, a scalar or an object with `.loss`."""
    out = model(**batch) if isinstance(batch, dict) else model(batch)
    found = out if isinstance(out, Tensor) else getattr(out, "loss", None)
    if found is None:
        raise bad(
            f"a model ({type(model).__name__}) that returns a {type(out).__name__} without a loss, "
            "and no loss= argument",
            "a model that returns its loss (transformers: with labels in the batch), or loss=",
            validate.LOSS,
        )
    return found
