"""Facts that a proof does not state, because they are of the engine alone: for the catalogue.

late evaluation     right after a delayed update, evaluation and outputs are those of its weights
rerun               a step in which ranks repeat each other's microbatches changes no bit
late writer         `async_save` saves the moment of its call, however late its thread writes
assigned weights    what is assigned to p.data is the weight, and its master in 32 bits
blocks of stages    each stage has as many blocks as `stages:` says
masks               dropout that is computed again draws what it has drawn
"""

import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import shardwise as sw
from shardwise.checkpoint.pending import PendingCheckpoint
from shardwise.comm.world import World, alone
from shardwise.core.model_spec import SMALL_BYTES
from shardwise.core.plan.plan import Plan
from shardwise.core.zero import GATHERED, KEPT, PREDICTED, TEMPORARY, Event
from shardwise.engine.engine import Engine
from shardwise.engine.options import own_loss
from shardwise.observe.measured_timeline import StepMeter, measuring
from shardwise.prediction.peak_memory import device_peak_bytes, gathered_most_bytes
from shardwise.prediction.prediction import Prediction
from shardwise.verify import parity
from shardwise.verify.oracles.batches import ragged
from shardwise.verify.oracles.oracles import is_asynchronous
from shardwise.verify.proof_options import Options
from tests.engine.cases import Case, build, rows_task
from tests.engine.pipelines import ADAMW, Dropped, Dropping, chain
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
    """Copies of the weights and of the optimizer's state."""
    return {box.name: box.tensor.detach().clone() for box in engine.boxes()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two states are equal to the last bit."""
    return one.keys() == other.keys() and all(torch.equal(x, other[n]) for n, x in one.items())


def late_evaluation(world: World, model: str, plan: Plan) -> bool:
    """The loss of an evaluation before and after the update was finished."""
    engine, batch = engine_of(world, model, plan)
    for _ in range(2):
        engine.step(batch)
    assert engine.updates.updater.pending
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
    """Weights after a step of rate 0 that follows an assignment."""
    engine, batch = engine_of(world, model, plan)
    engine.step(batch)
    for p in engine.model.parameters():
        p.data = torch.full_like(p, 0.25)
    engine.set_lr(0.0)
    engine.step(batch)
    of = {f"model/{name}" for name in engine.names}
    return all(bool((x == 0.25).all()) for name, x in states(engine).items() if name in of)


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
    task, found = rows_task(chain(Dropping, Dropped)), list[list[float]]()
    for text in ("fp64", str(plan)):
        torch.manual_seed(0)
        engine = build(world, task, Case(text, **ADAMW))
        found.append([engine.step(task.batch(step)).loss for step in range(3)])
    return found[0] == found[1]


Fact = Callable[[World, str, Plan], bool]
FACTS: dict[str, Fact] = {
    "moments": lambda *of: not wrong_moments(*of),
    "late evaluation": late_evaluation,
    "rerun": rerun,
    "late writer": late_writer,
    "assigned weights": assigned_weights,
    "blocks of stages": blocks_of_stages,
    "masks": masks,
}


def holds(fact: str, model: str, plan: Plan) -> bool:
    """Whether a fact holds on all ranks."""
    return all(run_threads(plan.size, FACTS[fact], model, plan))


# The memory of one step and of an evaluation at their moments: measured, and predicted.
#
# Between two steps no activation, no gathered weight and no gradient in flight is alive: a copy
# that is kept from the forward to the backward pass is seen within a step only. Each event of
# a dry run (observe/dry_engine.py) is compared:
#
#   equal                 each category at each event, `kept` within 1 KiB; without a pipeline
#                         `temporary` is at most the dry run's, on a tensor axis at each loss
#   bounds without it     all but `temporary` is at most the predicted peak
#                         (prediction/peak_memory.py), and what is gathered at most three units
#   on the host           activations are at most the predicted ones, and those fetched at once too
#   tile:N                logits of a cross-entropy have V/N columns at once
#   an evaluation         nothing is kept, and no more is gathered than in a step's forward pass
#   at the update         of activations none is left; there may be a copy of all gradients, and
#                         messages of weights

#: Events at which messages of the update may be under way, which hold copies of weights.
UPDATE = ("update", "end")
#: The events of a dry run by model, plan and rank. A dry run has each fault of its engine, so those
#: beside a mutation were made before it.
FORETOLD: dict[tuple[str, str, int], Sequence[Event]] = {}
#: Fewer bytes are not looked for: flags, sums, the padding of gradients.
SLACK_BYTES = SMALL_BYTES


@dataclass
class Moments:
    """Bytes of a step that are not as predicted by name, read and predicted."""

    read: dict[str, int] = field(default_factory=dict[str, int])
    theory: dict[str, int] = field(default_factory=dict[str, int])

    def equal(self, name: str, read: int, theory: int, slack: int = 0) -> None:
        """Compare two numbers, and show them if they differ by more than `slack`."""
        if abs(read - theory) > slack:
            self.read[name], self.theory[name] = read, theory

    def at_most(self, name: str, read: int, most: int) -> None:
        """Compare a number with its bound."""
        if read > most + SLACK_BYTES:
            self.read[name], self.theory[name] = read, most


def wrong_moments(world: World, model: str, plan: Plan) -> dict[str, tuple[int, int]]:
    """The moments of a rank's third step and of an evaluation that are wrong: read, and theory."""
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
    found, plain = parity.theory_of(trainable, plan, world.rank, clip)(batch), trainable.plain()
    place = model, str(plan), world.rank
    if place not in FORETOLD:
        FORETOLD[place] = parity.foreseen_events(found, plain, batch, options)
    events = FORETOLD[place]
    logits = logits_most_bytes(plan, plain, batch, options.loss or own_loss)
    moments = Foreseen(found, events, logits).compare(seen, evaluation)
    world.barrier()  # ranks in threads read each other's tensors until here
    return {name: (read, moments.theory[name]) for name, read in moments.read.items()}


@dataclass(frozen=True)
class Foreseen:
    """What is predicted of a step."""

    found: Prediction
    events: Sequence[Event]
    logits: Mapping[int, int]  # the most bytes, by classes

    def compare(self, seen: StepMeter, evaluation: StepMeter) -> Moments:
        """The measured events beside the predicted ones; those of an evaluation at the end."""
        moments = Moments()
        if self.events:
            self._events(moments, seen.events)
        if self.found.plan.pipeline is None:
            self._bounded(moments, seen.events)
        for event in (event for event in seen.events if event.kind in UPDATE):
            most = self._copies_bytes
            moments.at_most(f"{TEMPORARY} at {event}", _sum(event, (KEPT, TEMPORARY)), most)
        host = seen.engine.recompute.host
        fetched = 0 if host is None else host.most_fetched_bytes
        moments.at_most("fetched from the host at once", fetched, self.found.fetched)
        for event, on_host in zip(seen.events, seen.on_host, strict=True):
            most = 0 if event.kind in UPDATE else self.found.host_activations
            moments.at_most(f"activations on the host at {event}", on_host, most)
        for layer, features in tiled_layers(seen.engine.model, seen.events).items():
            if features in self.logits:
                grown, most = grown_bytes(seen.events, layer), self.logits[features]
                moments.at_most(f"logits of {layer} at once", grown, most)
        self._evaluated(moments, evaluation.events)
        return moments

    def _evaluated(self, moments: Moments, events: Sequence[Event]) -> None:
        """Each event of an evaluation: it keeps nothing, and gathers what the forward pass does."""
        gathered: dict[str, int] = {}
        for event in self.events:
            if event.kind == "forward":
                most = max(gathered.get(event.unit, 0), event.by_category[GATHERED])
                gathered[event.unit] = most
        for event in events:
            name = f"of an evaluation at {event}"
            moments.at_most(f"kept {name}", event.by_category[KEPT], 0)
            if event.unit in gathered:
                read = event.by_category[GATHERED]
                moments.at_most(f"gathered {name}", read, gathered[event.unit])

    @property
    def _copies_bytes(self) -> int:
        """A copy of all gradients and a message of all weights, which may be in 32 bits."""
        tiers = self.found.memory, self.found.host_memory
        wide = 2 if self.found.plan.precision in ("bf16", "fp16") else 1
        return wide * sum(one["parameters"] + one["gradients"] for one in tiers)

    def _events(self, moments: Moments, events: Sequence[Event]) -> None:
        """Each event of the dry run."""
        moments.equal("moments of a step", len(events), len(self.events))
        for event, foreseen in zip(events, self.events, strict=False):
            for name in PREDICTED:
                read, theory = event.by_category[name], foreseen.by_category[name]
                slack = SLACK_BYTES if name == KEPT else 0
                moments.equal(f"{name} at {event}", read, theory, slack)
            if self.found.plan.pipeline is None and not self._lets(event):
                read, most = event.by_category[TEMPORARY], foreseen.by_category[TEMPORARY]
                moments.at_most(f"{TEMPORARY} at {event}", read, most)

    def _lets(self, event: Event) -> bool:
        """Whether the temporary bytes of an event are not bounded.

        On a tensor axis messages may be under way at all events but the loss.
        """
        gathers = event.kind != "loss" and self.found.plan.mesh.size_of("tp") > 1
        return event.kind in UPDATE or gathers

    def _bounded(self, moments: Moments, events: Sequence[Event]) -> None:
        """Each event, by what is computed without the engine."""
        most = device_peak_bytes(self.found)
        for event in events:
            moments.at_most(f"all but temporary at {event}", _sum(event, PREDICTED), most)
        self._gathered(moments, events)

    def _gathered(self, moments: Moments, events: Sequence[Event]) -> None:
        """Each event, if a recomputation gathers no units of its own."""
        units = [name for unit in self.found.spec.modules for name in unit.modules]
        if any(unit.startswith(f"{name}.") for name in self.found.recomputed for unit in units):
            return
        gathered = gathered_most_bytes(self.found)
        for event in events:
            most = gathered.get(event.unit, gathered[""])
            if (read := event.by_category[GATHERED]) > most:
                moments.equal(f"gathered at {event}", read, most)


def _sum(event: Event, names: Iterable[str]) -> int:
    return sum(event.by_category[name] for name in names)


# --- what `tile:N` promises of a cross-entropy over V classes: V/N columns of logits at once ------
#
#     event     forward tile 0    forward tile 1    ...    loss
#     alive     -                 sums of tile 0           sums of all tiles
#
# (Memory-centric tiling: ZeRO-Infinity, arXiv 2104.07857, section 5.1.3.) A layer in tiles gives
# logits if the plain model calls a cross-entropy over as many classes as it has output features.

#: Numbers of each position that a loss keeps beside the logits: of each tile, and in all.
OF_EACH_TILE, IN_ALL = 3, 16
#: Their bytes: sums have at least 32 bits.
BYTES: Final = {"fp64": 8}
LEAST_BYTES: Final = 4


class _LossCalls(TorchFunctionMode):
    """The positions of each cross-entropy that is called, by its number of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: dict[int, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "cross_entropy":
            logits = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
            classes = logits.shape[-1]
            self.positions[classes] = logits.numel() // max(1, classes)
        return func(*args, **kwargs)


def logits_most_bytes(
    plan: Plan, model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor]
) -> Mapping[int, int]:
    """The most bytes of logits in a microbatch of `batch`, by the number of classes; {} untiled."""
    if plan.tiled is None:
        return {}
    here = next(model.parameters()).device
    with _LossCalls() as seen, torch.no_grad():
        loss(model, pytree.tree_map_only(Tensor, lambda x: x.to(here), batch))
    number, size = plan.tiled.number, BYTES.get(plan.precision or "", LEAST_BYTES)
    return {
        classes: positions // plan.microbatches * columns * size
        for classes, positions in seen.positions.items()
        for columns in [-(-classes // number) + OF_EACH_TILE * number + IN_ALL]
    }


def tiled_layers(model: nn.Module, events: Sequence[Event]) -> dict[str, int]:
    """The output features of the layers whose tiles are units of their own, by name."""
    found: dict[str, int] = {}
    for name in {event.unit.rpartition(".tiles.")[0] for event in events}:
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Linear):
            found[name] = layer.out_features
    return found


def grown_bytes(events: Sequence[Event], layer: str) -> int:
    """By how much activations grow from the first tile of `layer` to the loss, at most."""
    alive: dict[int, list[int]] = defaultdict(list)
    for event in events:
        first = event.kind == "forward" and event.unit.startswith(f"{layer}.tiles.")
        if first or (event.kind == "loss" and alive[event.microbatch]):
            now = event.by_category[KEPT] + event.by_category[TEMPORARY]
            alive[event.microbatch].append(now)
    return max((max(found) - found[0] for found in alive.values() if found), default=0)
