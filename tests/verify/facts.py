"""Facts that a proof does not state, because they are of the engine alone: for the catalogue.

late evaluation     right after a delayed update, evaluation and outputs are those of its weights
rerun               a step in which ranks repeat each other's microbatches changes no bit
late writer         `async_save` saves the moment of its call, however late its thread writes
moments             at each event a step holds the bytes of its dry run, and an evaluation fewer
assigned weights    what is assigned to p.data is the weight, and its master in 32 bits
blocks of stages    each stage has as many blocks as `stages:` says
masks               dropout that is computed again draws what it has drawn
"""

import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import shardwise as sw
from shardwise.checkpoint.pending import PendingCheckpoint
from shardwise.comm.world import World, alone
from shardwise.core.model_spec import SMALL_BYTES
from shardwise.core.plan.plan import Plan
from shardwise.core.zero import GATHERED, KEPT, PREDICTED, TEMPORARY, Event
from shardwise.engine.engine import Engine
from shardwise.observe.dry_engine import dry_step
from shardwise.observe.dry_twin import ALONE
from shardwise.observe.measured_timeline import dry_events, measuring
from shardwise.prediction.prediction import DryStep
from shardwise.verify import parity
from shardwise.verify.inputs import Options
from shardwise.verify.oracles.batches import ragged
from shardwise.verify.oracles.oracles import is_asynchronous
from tests.engine.cases import Case, build, rows_task
from tests.engine.pipelines import ADAMW, Dropping, chain, with_dropout
from tests.pool import run_threads
from tests.verify import micro


def engine_of(world: World, model: str, plan: Plan, **options: Any) -> tuple[Engine, Any]:
    """An engine of a model of micro.py, and this rank's batch."""
    trainable = ragged(micro.find(model), plan)
    of: dict[str, Any] = {"loss": trainable.loss, "tokens": trainable.tokens, "least_unit_bytes": 0}
    made = trainable.build()
    engine = sw.parallelize(made, plan, world, optimizer=sw.AdamW(lr=0.01), **of, **options)
    return engine, parity.equal_share(trainable, engine, 0)


def states(engine: Engine) -> dict[str, Tensor]:
    return {box.name: box.tensor.detach().clone() for box in engine.boxes()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[n]) for n, x in one.items())


def late_evaluation(world: World, model: str, plan: Plan) -> bool:
    """The loss of an evaluation before and after the update was finished."""
    engine, batch = engine_of(world, model, plan)
    for _ in range(2):
        engine.step(batch)
    assert engine.updates.running
    early = engine.evaluate(batch)
    engine.flush()
    return early == engine.evaluate(batch)


def rerun(world: World, model: str, plan: Plan) -> bool:
    """Losses and states with a rerun in every step, and without."""
    found = list[tuple[list[float], dict[str, Tensor]]]()
    for every in ("0", "0 rerun:1"):
        engine, batch = engine_of(world, model, plan, check_every=every if " " in every else 0)
        found.append(([engine.step(batch).loss for _ in range(3)], states(engine)))
    return found[0][0] == found[1][0] and equal(found[0][1], found[1][1])


def late_writer(world: World, model: str, plan: Plan) -> bool:
    """A checkpoint whose thread begins to write after the next step."""
    assert world.size == 1
    engine, batch = engine_of(alone(), model, plan)
    engine.step(batch)
    saved, stepped, run = states(engine), threading.Event(), PendingCheckpoint._run

    def late(pending: PendingCheckpoint, *args: Any) -> None:
        stepped.wait()
        run(pending, *args)

    with tempfile.TemporaryDirectory() as folder:
        with patch.object(PendingCheckpoint, "_run", late):
            handle = sw.async_save(engine, folder)
        engine.step(batch)
        stepped.set()
        handle.result()
        sw.load(engine, folder)
    return equal(states(engine), saved)


def assigned_weights(world: World, model: str, plan: Plan) -> bool:
    """Weights after a step of rate 0 that follows an assignment, as far as 16 bits tell."""
    engine, batch = engine_of(world, model, plan)
    engine.step(batch)
    for p in engine.model.parameters():
        p.data = torch.full_like(p, 0.25)
    engine.set_lr(0.0)
    engine.step(batch)
    of = {f"model/{name}" for name in engine.names}
    found = [x for name, x in states(engine).items() if name in of]
    return all(bool((x.to(engine.dtype) == 0.25).all()) for x in found)


def blocks_of_stages(world: World, model: str, plan: Plan) -> bool:
    """The numbers of the blocks of this rank, which has one stage."""
    engine, _ = engine_of(world, model, plan)
    counts = plan.stages or ()
    first = sum(counts[: world.rank])
    names = [name.split(".") for flat in engine.flats for name in flat.names]
    found = {int(parts[1]) for parts in names if parts[0] == "blocks"}
    return found == {*range(first, first + counts[world.rank])}


def masks(world: World, model: str, plan: Plan) -> bool:
    """The losses of blocks with dropout, under the plan and without it."""
    task, found = rows_task(chain(Dropping, with_dropout)), list[list[float]]()
    for text in ("fp64", str(plan)):
        torch.manual_seed(0)
        engine = build(world, task, Case(text, **ADAMW))
        found.append([engine.step(task.batch(step)).loss for step in range(3)])
    return found[0] == found[1]


#: Events at which messages of the update may be under way, which hold copies of weights.
UPDATE = ("update", "end")
#: The peaks and the events of a dry run by model, plan and rank. A dry run has each fault of
#: its engine, so those beside a mutation were made before it.
FORETOLD: dict[tuple[str, str, int], tuple[DryStep, Sequence[Event]]] = {}


def moments(world: World, model: str, plan: Plan) -> bool:
    """A third step has the bytes of its dry run at each event; an evaluation keeps nothing."""
    trainable = ragged(micro.find(model), plan)
    options = parity.build_options(trainable, plan, Options())
    clip = None if is_asynchronous(plan) else 1.0  # with a norm, all sums end before the update
    engine = parity.engine_of(trainable, plan, world, clip)
    batch = parity.equal_share(trainable, engine, 0)
    engine.step(batch)
    engine.flush()
    with measuring(engine, batch, peaks=False) as evaluation:
        engine.evaluate(batch)
    engine.step(batch)
    with measuring(engine, batch, peaks=False) as seen:
        engine.step(batch)
    engine.wait()
    place = model, str(plan), world.rank
    if place not in FORETOLD:
        of = trainable.plain(), plan, batch, replace(options, clip=clip), world.rank
        with ALONE:
            FORETOLD[place] = dry_step(*of), dry_events(*of)
    found, events = FORETOLD[place]
    host = engine.recompute.host
    good = len(seen.events) == len(events) and all(map(as_foreseen, seen.events, events))
    good &= (0 if host is None else host.most_fetched_bytes) <= found.fetched
    good &= all(
        n <= (0 if event.kind in UPDATE else found.host_activations)
        for event, n in zip(seen.events, seen.on_host, strict=True)
    )
    good &= all(evaluated(event, events) for event in evaluation.events)
    world.barrier()  # ranks in threads read each other's tensors until here
    return good


def as_foreseen(event: Event, foreseen: Event) -> bool:
    """Each category is equal, kept activations but for flags; beside them is no more. Messages of
    the update may be.
    """
    read, theory = event.by_category, foreseen.by_category
    same = all(abs(read[c] - theory[c]) <= SMALL_BYTES * (c == KEPT) for c in PREDICTED)
    more = read[TEMPORARY] > theory[TEMPORARY] + SMALL_BYTES
    return same and (not more or event.kind in UPDATE)


def evaluated(event: Event, events: Sequence[Event]) -> bool:
    """An evaluation keeps nothing, and gathers for a unit what the forward pass of a step does."""
    passes = [e for e in events if e.kind == "forward" and e.unit == event.unit]
    most = max((e.by_category[GATHERED] for e in passes), default=event.by_category[GATHERED])
    return event.by_category[KEPT] <= SMALL_BYTES and event.by_category[GATHERED] <= most


Fact = Callable[[World, str, Plan], bool]
FACTS: dict[str, Fact] = {
    "moments": moments,
    "late evaluation": late_evaluation,
    "rerun": rerun,
    "late writer": late_writer,
    "assigned weights": assigned_weights,
    "blocks of stages": blocks_of_stages,
    "masks": masks,
}


def holds(fact: str, model: str, plan: Plan) -> bool:
    return all(run_threads(plan.size, FACTS[fact], model, plan))
