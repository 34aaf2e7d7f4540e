"""`verify`: proves a plan on a model, on the ranks that were started or on new ones.

A plan without a precision runs in fp64. docs/explanation/proof.md lists what must hold.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.comm.move import all_gather_object
from shardwise.comm.start.launch import require_ranks, spawn
from shardwise.comm.start.rendezvous import environment
from shardwise.comm.world import init
from shardwise.core.errors import RankError, RunError, bad
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import require
from shardwise.core.tools.arguments import choice, integer, short_repr
from shardwise.engine.checks.device_room import require_chosen
from shardwise.models import user
from shardwise.models.registry import find
from shardwise.models.trainable import Loss, Trainable
from shardwise.verify.causes import cause
from shardwise.verify.finding import Finding, pooled
from shardwise.verify.inputs import Options, batch_norm_note, dropout_note
from shardwise.verify.parity import prove
from shardwise.verify.report import Report, may_be_chance, report
from shardwise.verify.smoke_test import require_bound, smoke_test

MOST_STEPS = 1000
MOST_MICROBATCHES = 512  # of two rows each
BATCHES = 4  # of a proof in 16 bits whose first one may differ by chance


def verify(
    plan: Plan | str,
    model: str | Trainable = "gpt",
    steps: int = 3,
    options: Options | None = None,
    *,
    device: str | None = None,
    fork: bool = False,
) -> Report:
    """Prove `plan` on `model`, on the ranks that torchrun or Slurm started or else on new ones.

    A plan that names no data axis is completed for the ranks that were started, else for the fewest
    on which each of its words has an effect: `zero3` is proved as `dp2 zero3`, `tp2` as `tp2`.

    Called by all ranks of a world. `options` are units and table, as parallelize takes them. New
    ranks run on the `device` "cpu" (the default) or "cuda", a GPU for each; `fork` forks them.
    Raises InputError for a plan that cannot run, an unknown model, steps below 1 or above
    MOST_STEPS, fewer GPUs than ranks; RankError if a rank fails.
    """
    plan = plan if isinstance(plan, Plan) else Plan.parse(plan)
    plan = replace(plan, precision=plan.precision or "fp64")
    integer("steps", steps, 1, 3, MOST_STEPS)
    start = environment()
    started = start is not None
    choice("--device", device or "cpu", ("cpu", "cuda"))
    require(plan)
    require_chosen(plan)
    plan = plan.completed(start.size if start else None)
    _require_small(plan)
    if not started:
        require_ranks(plan.size, device or "cpu")
    # a wrong name or model raises here, before any rank starts
    made, options = smoke_test(model, plan, options)
    note = batch_norm_note(made, plan)
    require_bound(model, plan, options)
    world = init(device) if started else None
    require(plan, None if world is None else world.size)

    def proved(batches: int) -> list[Finding]:
        own = replace(options, batches=batches)
        if world is not None:
            return all_gather_object(prove(world, plan, model, steps, own), world)
        return _on_new_ranks((plan, model, steps, own, device or "cpu"), note, fork=fork)

    findings, name = proved(0), model if isinstance(model, str) else model.name
    found = report(plan, name, findings)
    if may_be_chance(found, findings):
        every = [findings, *map(proved, range(1, BATCHES))]
        findings = [pooled(of_rank) for of_rank in zip(*every, strict=True)]
        found = report(plan, name, findings)
    changed = " ".join(said for said in (dropout_note(made), found.changed) if said)
    why = note or ("" if found.holds else cause(find(model), findings))
    return replace(found, note=why, changed=changed)


def _require_small(plan: Plan) -> None:
    """Raise InputError if the plan's global batch is too large for one process."""
    most = MOST_MICROBATCHES // plan.shares
    if plan.microbatches > max(1, most):
        raise bad(
            f"{plan.microbatches} microbatches a rank in a proof of the plan '{plan}'",
            f"at most {MOST_MICROBATCHES} microbatches in all, which one process computes at once",
            "a plan with fewer microbatches, which proves the same",
        )


#: Of a rank: the plan, the model, the number of steps, the options, the device.
Args = tuple[Plan, str | Trainable, int, Options, str]


def _on_new_ranks(args: Args, note: str, *, fork: bool) -> list[Finding]:
    plan, *_, device = args
    try:
        return spawn(_on_rank, plan.size, args, device, fork=fork)
    except RankError as error:
        if not note:
            raise
        # for example, batch norm refuses a rank with a single row
        why = error.text.splitlines()[-1]
        raise RunError(f"{note} Rank {error.rank} could not continue: {why}") from None


def _on_rank(
    plan: Plan, model: str | Trainable, steps: int, options: Options, device: str
) -> Finding:
    world = init(device)
    found = prove(world, plan, model, steps, options)
    world.barrier()
    return found


# --- a model that is defined in Python ------------------------------------------------------------


def model_of(
    build: Callable[[], Any] | str,
    batch: Any,
    loss: Loss | None,
    tokens: Callable[[Any], int] | None,
) -> Trainable | str:
    """The model that sw.verify was given. Raises InputError for arguments that give none."""
    made = batch if batch is None or callable(batch) else partial(_rows_of, batch)
    if isinstance(build, str):
        if batch is None and loss is None and tokens is None:
            return build
        found = find(build)
        changes = {"make_batch": made, "loss": loss, "tokens": tokens}
        return replace(found, **{name: x for name, x in changes.items() if x is not None})
    if isinstance(build, nn.Module) or not callable(build):
        raise bad(
            f"a {type(build).__name__} ({short_repr(build)}) as the model of sw.verify",
            "a function without arguments that returns the model, because the model is built "
            "several times; or a name, as in shardwise verify --model",
            "def build(): return Net(), then sw.verify(build, ...)",
        )
    name = getattr(build, "__qualname__", type(build).__name__)
    return replace(user.of_function(name, build, loss=loss, make_batch=made), tokens=tokens)


def _rows_of(batch: Any, count: int, seed: int) -> Any:
    """`count` rows of an example batch in a random order; each row as often as the others."""
    lengths = {len(x) for x in pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.dim()}
    own = lengths.pop() if len(lengths) == 1 else 0
    if own == 0:
        raise bad(
            "batch=, an example batch whose tensors have no rows, or different numbers of rows",
            "tensors with one entry in dim 0 for each row; or a function of (rows, seed) that "
            "makes a batch",
            "batch={'inputs': x, 'targets': y}, or batch=make_batch",
        )
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(own, generator=generator) for _ in range(-(-count // own))]
    order = torch.cat(orders)[:count]
    return pytree.tree_map_only(Tensor, lambda x: x[order.to(x.device)] if x.dim() else x, batch)
