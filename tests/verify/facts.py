"""Facts that a proof does not state, because they are of the engine alone: for the catalogue.

moments   at each event a step holds the bytes of its dry run, and an evaluation fewer
masks     dropout that is computed again draws what it has drawn
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from shardwise.comm.world import World
from shardwise.core.plan.plan import Plan
from shardwise.core.zero import GATHERED, KEPT, PREDICTED, TEMPORARY, Event
from shardwise.observe.dry_engine import ALONE, dry_step
from shardwise.observe.measured_timeline import dry_events, measuring
from shardwise.prediction.prediction import DryStep
from shardwise.techniques.recompute.host_activations import SMALL_BYTES
from shardwise.verify import parity
from shardwise.verify.inputs import Options
from shardwise.verify.oracles.batches import ragged
from shardwise.verify.oracles.oracles import is_asynchronous
from tests.engine.cases import Case, build, rows_task
from tests.engine.pipelines import Dropping, chain, with_dropout
from tests.engine.tensors import ADAMW
from tests.pool import run_threads
from tests.verify import micro


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


FACTS: dict[str, Callable[[World, str, Plan], bool]] = {"moments": moments, "masks": masks}


def holds(fact: str, model: str, plan: Plan) -> bool:
    return all(run_threads(plan.size, FACTS[fact], model, plan))
