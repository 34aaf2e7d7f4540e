"""Parity: one rank's comparison of its shards with the same model trained in plain PyTorch.

Every rank trains the model twice on the same global batches: under the plan on its share of the
rows, and in plain PyTorch on all of them (oracle.py). docs/explanation/proof.md lists what it
compares. Gradients are those that an update used; under an asynchronous schedule, the last update.

Updates are delayed from the first step, made as late as they may be, and in several parts.
Gradients are clipped to between a quarter and a half of the first norm, but not in the step with an
idle rank. After loading there is no bound, so that each unit is updated as soon as its gradients
arrive.
"""

import math
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.comm.move import all_gather_object
from shardwise.comm.world import World
from shardwise.core.plan.plan import BUCKET_BYTES, Plan
from shardwise.engine.engine import Engine
from shardwise.engine.options import EngineOptions
from shardwise.engine.parallelize import build_engine
from shardwise.models.registry import find
from shardwise.models.trainable import Trainable
from shardwise.observe.dry_engine import ALONE
from shardwise.observe.dry_twin import DryTwin
from shardwise.observe.meter import Live
from shardwise.observe.work import kernels_of
from shardwise.verify.comparison import compare, drawn, uses_of
from shardwise.verify.finding import Finding
from shardwise.verify.inputs import Options, without_dropout
from shardwise.verify.memory_proof import EVALUATED_STEP, attributes, over_steps
from shardwise.verify.oracles import textbook
from shardwise.verify.oracles.batches import ROWS, SEED, Division, Loads, Routed, ragged
from shardwise.verify.oracles.oracle import Microbatches, Oracle
from shardwise.verify.oracles.oracles import (
    LOSS_SCALE,
    Oracles,
    is_asynchronous,
    oracles_of,
    spec_of,
)

#: Ranks in threads share torch's global generator, which a model may use in __init__ and forward.
BUILDING: Final = ALONE
#: The seeds between one proof's batches and another's; odd seeds have shorter rows.
OTHER_SEEDS: Final = 1000


def prove(
    world: World, plan: Plan, model: str | Trainable, steps: int, options: Options | None = None
) -> Finding:
    """Train `model` under `plan` and in one process, and compare. All ranks must call it."""
    promises, plan = textbook.first_delayed(plan), with_early_delays(plan)
    with BUILDING:
        trainable = ragged(without_dropout(find(model)), plan)
    if options is not None and options.batches:
        make_batch, shift = trainable.make_batch, OTHER_SEEDS * options.batches
        trainable = replace(trainable, make_batch=lambda rows, seed: make_batch(rows, seed + shift))
    return _prove(world, plan, trainable, steps, options).with_promises(promises)


def with_early_delays(plan: Plan) -> Plan:
    """The plan whose updates are delayed from the first step on, if they are delayed at all."""
    offload = plan.offloaded
    if offload is None or offload.undelayed is None or offload.undelayed < 2:
        return plan
    return replace(plan, offload=str(replace(offload, undelayed=0)))


def _prove(
    world: World, plan: Plan, trainable: Trainable, steps: int, options: Options | None
) -> Finding:
    options = replace(options or Options(), kernels=kernels_of(world.device))
    with BUILDING:
        oracles = alone_of(trainable, plan, world.device)
        clip = None if is_asynchronous(plan) else clip_of(oracles, trainable, world.device)
        oracles = with_noise(oracles, trainable, plan, world.device)
    clip = all_gather_object(clip, world)[0]  # a rank's own loss may differ
    dry = partial(dry_twin, trainable, plan, world.rank, options=options)

    def again() -> tuple[Engine, DryTwin]:
        return engine_of(trainable, plan, world, None, options), dry()

    ours = engine_of(trainable, plan, world, clip, options)
    found = compare(ours, oracles, dry(clip), trainable.batch, steps, again)
    live = Live()
    engine = engine_of(trainable, plan, world, clip, options, live)

    def batch(step: int) -> Any:
        return equal_share(trainable, engine, step)

    own = attributes(oracles.exact.model).keys()
    with BUILDING:
        routed = Routed(alone_of(trainable, plan, world.device).nearest, plan, clip)

    def loads(step: int) -> Sequence[Loads]:
        if step == EVALUATED_STEP + 1:
            routed.finish()  # as the evaluation does
        return routed.step(equal_batch(trainable, engine, step), SEED + step)

    uses = uses_of(oracles.exact, trainable.batch)
    over = over_steps(engine, live, batch, dry(clip), own, loads, uses)
    return replace(  # the bytes shown are those that differ
        found,
        costs=replace(over.costs if found.costs.hold else found.costs, peaks=over.costs.peaks),
        memory_measured=found.memory_measured | over.read,
        memory_predicted=found.memory_predicted | over.theory,
        strays=over.strays,
    )


def equal_batch(trainable: Trainable, engine: Engine, step: int) -> Any:
    rows = ROWS * engine.data_ranks * engine.microbatches
    return trainable.batch(rows, SEED + step, engine.world.device)


def equal_share(trainable: Trainable, engine: Engine, step: int) -> Any:
    whole = equal_batch(trainable, engine, step)
    return Division.of(engine).share(whole, engine.data_rank)


def dry_twin(
    trainable: Trainable,
    plan: Plan,
    rank: int,
    clip: float | None = None,
    options: Options | None = None,
) -> DryTwin:
    """The dry run of a proof's engine, of an unchanged plain model."""
    with BUILDING:
        model = trainable.plain()
    chosen = build_options(trainable, plan, options or Options(), model)
    return DryTwin(model, plan, replace(chosen, clip=clip), rank)


def engine_of(
    trainable: Trainable,
    plan: Plan,
    world: World,
    clip: float | None = None,
    options: Options | None = None,
    live: Live | None = None,
) -> Engine:
    """The engine of a proof; `live` tracks its memory."""
    options = options or Options()
    with BUILDING:
        model = trainable.build()
    with live.of(model) if live else nullcontext():
        chosen = build_options(trainable, plan, options, model)
        folder = tempfile.gettempdir()
        chosen = replace(chosen, tokens=trainable.tokens, clip=clip, offload_folder=folder)
        engine = build_engine(model, plan, world, chosen)
    engine.load_scalars(engine.scalars() | {"loss_scale": LOSS_SCALE})
    engine.consistency.before_first = None  # the proof compares with the plain model itself
    if live is None:  # updates in several parts, and later than in the run that measures memory
        half = sum(flat.shard.nbytes for flat in engine.flats if flat.trained) // 2 + 1
        engine.optimizer.early_bytes, engine.optimizer.host.late = half, True
    return engine


def build_options(
    trainable: Trainable, plan: Plan, options: Options, model: nn.Module | None = None
) -> EngineOptions:
    """The options of a proof's engine and predictions, for `model`."""
    return EngineOptions(
        optimizer=spec_of(plan, trainable.plain() if model is None else model),
        loss=trainable.loss,
        tokens=trainable.tokens,
        units=options.units,
        least_unit_bytes=0 if plan.bucket_bytes == BUCKET_BYTES else None,
        table=options.table,
        kernels=options.kernels,
    )


def alone_of(trainable: Trainable, plan: Plan, device: torch.device) -> Oracles:
    of = spec_of(plan, trainable.plain()), trainable.loss, trainable.tokens
    return oracles_of(lambda: trainable.build(device), plan, *of)


def with_noise(oracles: Oracles, trainable: Trainable, plan: Plan, device: torch.device) -> Oracles:
    """The oracles that measure rounding, if anything is computed in 32 bits or fewer. In fp32 a
    second oracle begins with other last bits of the weights. In 16 bits one process rounds the
    gradients of each rank's microbatch, as the run does, if the loss is their mean.
    """
    exact, alone = oracles.exact, oracles.alone
    if alone is not None:
        if isinstance(exact, Oracle) and isinstance(alone, Oracle):
            alone.microbatches = _rounded_each(oracles, exact, trainable, device)
        return oracles
    if exact.dtype is torch.float64 and not exact.task.narrow:
        return oracles

    def made() -> nn.Module:
        model, generator = trainable.make(), torch.Generator().manual_seed(SEED)
        for p in (p for p in model.parameters() if p.is_floating_point()):
            signs = torch.randint(2, p.shape, generator=generator).to(p) * 2 - 1
            p.data = p.data * (1 + signs * torch.finfo(torch.float32).eps)
        return model

    other = alone_of(replace(trainable, make=made), plan, device)
    return replace(oracles, perturbed=other.exact)


def _rounded_each(
    oracles: Oracles, exact: Oracle, trainable: Trainable, device: torch.device
) -> Microbatches:
    """Microbatches in 16 bits: each rank's, if their exact gradients sum to the batch's."""
    whole = exact.microbatches
    if whole.each != "batch" or whole.data_ranks * whole.number == 1:
        return whole
    shares, found = replace(whole, each="share"), list[Tensor]()
    batch = trainable.batch(ROWS * whole.data_ranks * whole.number, SEED, device)
    for exact.microbatches in (whole, shares):
        gradients = drawn(0, lambda: exact.trial(batch)).values()
        found.append(torch.cat([g.to_dense().flatten() for g in gradients if g is not None]))
    exact.microbatches = whole
    one, other = found
    same = one.shape == other.shape and (one - other).norm() <= oracles.unit * one.norm()
    return shares if same else whole


def clip_of(oracles: Oracles, trainable: Trainable, device: torch.device) -> float | None:
    """A power of two: a quarter to half of the first gradients' norm; None if it is zero."""
    assert isinstance(oracles.exact, Oracle)
    exact, batch = oracles.exact, trainable.batch(ROWS, SEED, device)
    found = drawn(0, lambda: exact.trial(batch))  # the same numbers on every rank
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in found.values() if g is not None))
    return 2.0 ** (math.frexp(norm)[1] - 2) if norm > 0 and math.isfinite(norm) else None
