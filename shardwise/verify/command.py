"""`verify`: proves a plan on a model, on the ranks that were started or on new ones.

A plan without a precision runs in fp64. docs/explanation/proof.md lists what must hold.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shardwise.comm.move import all_gather_object
from shardwise.comm.start.launch import require_ranks, spawn
from shardwise.comm.start.rendezvous import environment
from shardwise.comm.world import alone, init
from shardwise.core.errors import InputError, RankError, RunError, bad
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import require
from shardwise.core.tools.arguments import integer, short_repr
from shardwise.derive.table import table_or_derived
from shardwise.engine.batch import split
from shardwise.engine.checks.device_room import require_chosen, require_room
from shardwise.engine.predict import predict_rank
from shardwise.models import user
from shardwise.models.registry import find
from shardwise.models.trainable import Loss, Trainable
from shardwise.models.user import place_of
from shardwise.prediction.prediction import Prediction
from shardwise.techniques.expert.apply import experts_in
from shardwise.verify import parity
from shardwise.verify.finding import Finding
from shardwise.verify.inputs import Options, batch_norm_note, dropout_note, without_dropout
from shardwise.verify.oracles.batches import ROWS, ROWS_16, SEED
from shardwise.verify.report import Report, may_be_chance, over_batches, report

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
    require(plan)
    require_chosen(plan)
    plan = plan.completed(start.size if start else None)
    _require_small(plan)
    if not started:
        require_ranks(plan.size, device or "cpu")
    # a wrong name or model raises here, before any rank starts
    made, options = smoke_test(model, plan, options)
    note = batch_norm_note(made, plan)
    require_room(plan, partial(_predicted, model, options))
    world = init(device) if started else None
    require(plan, None if world is None else world.size)

    def proved(batches: int) -> list[Finding]:
        own = replace(options, batches=batches)
        if world is not None:
            return all_gather_object(parity.prove(world, plan, model, steps, own), world)
        return _on_new_ranks((plan, model, steps, own, device or "cpu"), note, fork=fork)

    findings, name = proved(0), model if isinstance(model, str) else model.name
    found = report(plan, name, findings)
    if may_be_chance(found, findings):
        findings = over_batches([findings, *map(proved, range(1, BATCHES))])
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
    found = parity.prove(world, plan, model, steps, options)
    world.barrier()
    return found


# --- a model that is defined in Python ------------------------------------------------------------


def model_of(
    build: Callable[[], Any] | str,
    batch: Any,
    loss: Loss | None,
    tokens: Callable[[Any], float] | None,
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
            "a function that builds the model; or a name, as in shardwise verify --model",
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
            "tensors with an entry in dim 0 for each row; or a function of (rows, seed)",
            "batch={'inputs': x, 'targets': y}, or batch=make_batch",
        )
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(own, generator=generator) for _ in range(-(-count // own))]
    order = torch.cat(orders)[:count]
    return pytree.tree_map_only(Tensor, lambda x: x[order.to(x.device)] if x.dim() else x, batch)


# --- the smoke test -------------------------------------------------------------------------------

TENSORS = 4  # of the size of a parameter, on one process: it, its gradient, two states of AdamW


def smoke_test(
    model: str | Trainable, plan: Plan, options: Options | None = None
) -> tuple[nn.Module, Options]:
    """Train `model` for a step, and build a dry engine; returns it, and the options to prove."""
    found, options = _trained(model, plan), with_table(model, plan, options or Options())
    trainable = without_dropout(find(model))
    dry = parity.dry_twin(trainable, plan, 0, options=options)
    dry.within(trainable.batch(ROWS, SEED), lambda _: None)  # raises InputError, as a rank does
    return found, options


def with_table(model: str | Trainable, plan: Plan, options: Options) -> Options:
    """The options with a derived table, if the plan needs one and there is none."""
    own = find(model)
    batch = partial(own.batch, ROWS, SEED)
    return replace(options, table=table_or_derived(options.table, plan, own.plain, batch, own.loss))


def _trained(model: str | Trainable, plan: Plan) -> nn.Module:
    trainable = find(model)
    trainable.require_memory(TENSORS * (8 if plan.precision == "fp64" else 4))
    _require_seeded(trainable)
    if plan.precision in ("bf16", "fp16") and experts_in(trainable.plain()):
        raise bad(
            f"a proof in {plan.precision} of a mixture of experts: rounding changes the routing",
            "fp64 or fp32 for models with experts",
            f"'{replace(plan, precision='fp64')}'",
        )
    name = trainable.name
    if isinstance(model, str) and model.partition(":")[0] == "gpt":  # ours; a step may take long
        return trainable.build()
    plain, precision = Plan(precision=plan.precision), plan.precision
    try:
        engine = parity.engine_of(trainable, plain, alone())
        engine.step(trainable.batch(ROWS, SEED))
        if precision in ("bf16", "fp16"):
            precision = "fp64, with which 16 bits are compared,"
            device = engine.world.device
            parity.clip_of(parity.alone_of(trainable, plain, device), trainable, device)
    except InputError:
        raise
    except Exception as error:
        raise bad(
            f'the model "{name}", whose step in {precision} on one process gives '
            f"{type(error).__name__}: {' '.join(str(error).split())} ({place_of(error, name)})",
            "a model that trains on its own batches, in the precision of the plan",
            'experts_implementation="eager" for a mixture of transformers, or fp32 in the plan',
        ) from error
    return engine.model


def _require_seeded(trainable: Trainable) -> None:
    """Raise InputError for batches that differ between two calls, since each rank makes its own."""
    one, other = (pytree.tree_leaves(trainable.batch(ROWS, SEED)) for _ in range(2))
    pairs = [(a, b) for a, b in zip(one, other, strict=False) if isinstance(a, Tensor)]
    same = (torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
    if len(one) != len(other) or not all(same):
        raise bad(
            f'make_batch of the model "{trainable.name}", which ignores its seed',
            "batches that depend only on rows and seed, because each rank makes its own",
            "torch.randn(rows, ..., generator=torch.Generator().manual_seed(seed))",
        )


def _predicted(model: str | Trainable, options: Options, plan: Plan) -> Prediction:
    """Of the steps of a proof, for the largest batch of the first rank."""
    trainable = without_dropout(find(model))
    fewest = ROWS_16 if plan.precision in ("bf16", "fp16") else ROWS
    rows = plan.microbatches * max(ROWS, fewest // plan.microbatches)
    plain = trainable.plain()
    chosen = parity.build_options(trainable, plan, options, plain)
    return predict_rank(plain, plan, trainable.batch(rows, SEED), chosen, ranks=plan.size)


# --- why a proof fails ----------------------------------------------------------------------------

# Each property of a model, its loss or its batches that no plan reproduces is tried in one process
# without a plan, and the first that is true is named.

#: The rows of the batches that are tried, and the relative difference of equal losses.
TRIED, CLOSE = 4, 1e-5


def cause(trainable: Trainable, findings: Sequence[Finding]) -> str:
    """The property of the model that no plan reproduces; "" if none is found."""
    with parity.BUILDING, torch.random.fork_rng(devices=[]):
        trial = Trial(without_dropout(trainable))
        tried = (drawn(trial), carried(trial), summed(trial))
    return next((text for text in (*tried, of_a_rank(findings)) if text), "")


def of_a_rank(findings: Sequence[Finding]) -> str:
    """Whether ranks compute different losses of one batch in one process."""
    losses = [one.alone[0] for one in findings if one.alone]
    if all(_close(loss, losses[0]) for loss in losses):
        return ""
    other = next(x for x in losses if not _close(x, losses[0]))
    return (
        f"The loss of one batch in one process is {losses[0]:.6g} on rank 0, and on another rank "
        f"{other:.6g}. All ranks must compute the same function of their rows."
    )


class Trial:
    """The model in one process in fp64, in training mode, from the same buffers in each call."""

    def __init__(self, trainable: Trainable) -> None:
        oracle = parity.alone_of(trainable, Plan(precision="fp64"), torch.device("cpu")).exact
        self.model, self.task, self.dtype = oracle.model, oracle.task, oracle.dtype
        self.batches = [trainable.batch(TRIED, SEED + 2 * k) for k in range(2)]
        self.start = {name: b.clone() for name, b in self.model.named_buffers()}

    @torch.no_grad()
    def loss(self, batch: Any, seed: int = 0, *, kept: bool = False) -> float:
        """The loss of a batch; the pass begins with the first buffers, unless `kept`."""
        for name, b in () if kept else self.model.named_buffers():
            b.copy_(self.start[name])
        torch.manual_seed(seed)
        return float(self.task.loss_of(self.model, batch, self.dtype))


def drawn(trial: Trial) -> str:
    """Whether a pass draws random numbers, and in which function."""
    batch = trial.batches[0]
    first, other, again = (trial.loss(batch, seed) for seed in (1, 2, 1))
    if first != again:
        return (
            f"The loss of one batch is {first:.6g} and then {again:.6g}, with the same seed of "
            "torch: the model or the loss keeps a state, or has a generator of its own."
        )
    if first == other:
        return ""
    with FirstDraw() as draw:
        trial.loss(batch, 1)
    return (
        f"The forward pass draws random numbers ({draw.name or 'of torch'}), and each rank draws "
        "its own. The proof sets nn.Dropout to 0, and rates that are attributes of modules with "
        "`drop` in their name: switch the others off."
    )


class FirstDraw(TorchFunctionMode):
    """`name`: the first function that changes the state of torch's generator."""

    name = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.get_rng_state()
        out = func(*args, **(kwargs or {}))
        if not self.name and not torch.equal(before, torch.get_rng_state()):
            self.name = getattr(func, "__name__", str(func))
        return out


def carried(trial: Trial) -> str:
    """A buffer that a pass changes and later passes read."""
    one, other = trial.batches
    plain = trial.loss(other)
    trial.loss(one)
    changed = [n for n, b in trial.model.named_buffers() if not torch.equal(b, trial.start[n])]
    if not changed or trial.loss(other, kept=True) == plain:
        return ""
    return (
        f"A training pass changes the buffer {changed[0]}, and the loss depends on it: it differs "
        "on ranks with other rows or more microbatches than one process. Compute it from what all "
        "ranks have, or sum it over the data ranks (torch.distributed.all_reduce) in the forward."
    )


def summed(trial: Trial) -> str:
    """Whether the loss is no mean over the tokens."""
    tokens: Callable[[Any], float] = trial.task.tokens
    batch = trial.batches[0]
    halves = split(batch, 2, "halves")
    whole, parts = trial.loss(batch), [trial.loss(half) for half in halves]
    mean = sum(tokens(x) * part for x, part in zip(halves, parts, strict=True)) / tokens(batch)
    if _close(whole, mean) or not math.isfinite(whole):
        return ""
    if _close(whole, sum(parts)):
        return (
            f"The loss is a sum over the rows: it is {whole:.6g} for {TRIED} rows, and "
            f'{parts[0]:.6g} and {parts[1]:.6g} for their halves. Use their mean: reduction="mean".'
        )
    return (
        f"The loss is no mean over the rows: it is {whole:.6g} for {TRIED} rows, and the mean of "
        f"their halves is {mean:.6g}. If rows count by their tokens, pass tokens=. A loss that "
        "compares rows (contrastive, a norm over the batch) differs if a plan divides the batch."
    )


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=CLOSE, abs_tol=1e-12)
