"""Parity: one rank's comparison of its shards with the same model trained in plain PyTorch.

Every rank trains the model twice on the same global batches: under the plan on its share of the
rows, and in plain PyTorch on all of them (oracle.py). It compares its own shards:

    loss           of every step; in one of them the last data rank has no rows
    gradients      of every step, as the update used them; of the last update if the schedule is
                   asynchronous
    weights        after the last step; in 16 bits their change
    optimizer      its state after the last step
    evaluation     the loss of one more batch in eval mode
    outputs        what the model returns for a few rows, gathered
    after loading  the first four again, after a step of a new engine that loaded a checkpoint of
                   this one, the rates included
    overflow       in fp16, of a step whose gradients overflow: it changes nothing but the scale;
                   and the first four after one more step
    recomputation  a step of a plan that recomputes, with dropout, beside one without (masks.py)

The optimizer is that of recipe.py, whose rates change in every step. A delayed update is made as
late as it may be. Gradients are clipped to between a quarter and a half of the first norm; after
loading, the bound is so large that nothing is clipped.
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.comm.ledger import Key, Tally
from shardwise.comm.world import World
from shardwise.core.expert_moves import Loads
from shardwise.core.independent import plan_of_expert, ranks_by_expert
from shardwise.core.plan import BUCKET_BYTES, Plan
from shardwise.engine.box import Box
from shardwise.engine.engine import Engine
from shardwise.engine.live import Live
from shardwise.engine.parallelize import parallelize
from shardwise.engine.prediction import Predictor
from shardwise.models.registry import find
from shardwise.models.trainable import Trainable
from shardwise.parallel.redistribute.exchange import Counts
from shardwise.prediction.memory import by_tier
from shardwise.prediction.prediction import Prediction
from shardwise.verify.async_oracle import AsyncOracle
from shardwise.verify.batches import ROWS, SEED, Division, rows_of_step
from shardwise.verify.costs import Costs, Theory
from shardwise.verify.difference import Expected, compared, scalar
from shardwise.verify.finding import NEVER, Errors, Finding, Parts, Piece, renamed
from shardwise.verify.independent import share_of_expert, with_bytes_between
from shardwise.verify.limits import without_dropout
from shardwise.verify.loads import Choices, Routed
from shardwise.verify.masks import compare_masks, recomputes
from shardwise.verify.memory import attributes, over_steps
from shardwise.verify.options import Options
from shardwise.verify.oracle import Oracle
from shardwise.verify.oracles import LOSS_SCALE, Oracles, is_asynchronous, oracles_of
from shardwise.verify.outputs import expected_outputs, returned
from shardwise.verify.recipe import factor_of, spec_of
from shardwise.verify.reloading import reload_engine

#: A loss scale at which every gradient in fp16 overflows, and the loss in fp32 does not.
OVERFLOW: Final = 2.0**100
#: Ranks in threads share torch's global generator, which a model may use in __init__ and forward.
BUILDING: Final = Lock()


def prove(
    world: World, plan: Plan, model: str, steps: int, options: Options | None = None
) -> Finding:
    """Train `model` under `plan` and in one process, and compare. All ranks must call it."""
    if plan.experts:
        own = world.split(ranks_by_expert(plan))
        trainable = share_of_expert(_found(model), plan, own)
        return with_bytes_between(
            _prove(own, plan_of_expert(plan), trainable, steps, options), world
        )
    return _prove(world, plan, _found(model), steps, options)


def _found(model: str) -> Trainable:
    with BUILDING:
        return without_dropout(find(model))


def _prove(
    world: World, plan: Plan, trainable: Trainable, steps: int, options: Options | None
) -> Finding:
    options = options or Options()
    with BUILDING:
        oracles = alone_of(trainable, plan, world.device)
        clip = None if is_asynchronous(plan) else clip_of(oracles, trainable, world.device)
    theory = theory_of(trainable, plan, world.rank, clip, options)

    def fresh(clip: float | None) -> Engine:
        return engine_of(trainable, plan, world, clip, options)

    again = None if clip is None else clip * 2.0**10
    found = compare(fresh(clip), oracles, theory, trainable.batch, steps, lambda: fresh(again))
    if recomputes(plan, world):

        def make(trainable: Trainable, plan: Plan) -> Engine:
            return engine_of(trainable, plan, world, None, options)

        same = compare_masks(trainable, plan, options.units, make, equal_share)
        found = replace(found, errors=(*found.errors, same))
    live = Live()
    engine = engine_of(trainable, plan, world, clip, options, live)

    def batch(step: int) -> Any:
        return equal_share(trainable, engine, step)

    own = attributes(oracles.exact.model).keys()
    with BUILDING:
        routed = Routed(alone_of(trainable, plan, world.device).all[-1], plan, clip)

    def loads(step: int) -> Sequence[Loads]:
        return routed.step(equal_batch(trainable, engine, step), SEED + step)

    return found.with_costs(over_steps(engine, live, batch, theory, own, loads))


def equal_batch(trainable: Trainable, engine: Engine, step: int) -> Any:
    """A global batch in which all data ranks have as many rows."""
    rows = ROWS * engine.data_ranks * engine.microbatches
    return trainable.batch(rows, SEED + step, engine.world.device)


def equal_share(trainable: Trainable, engine: Engine, step: int) -> Any:
    """This rank's rows of it."""
    whole = equal_batch(trainable, engine, step)
    return Division.of(engine).share(whole, engine.data_rank)


def theory_of(
    trainable: Trainable,
    plan: Plan,
    rank: int,
    clip: float | None = None,
    options: Options | None = None,
) -> Theory:
    """The prediction for each batch of a proof, from an unchanged plain model."""
    with BUILDING:
        model = trainable.plain()
    chosen = build_options(trainable, plan, options or Options(), model)
    predictor = Predictor(model, plan, rank=rank, ranks=plan.size, clip=clip, **chosen)

    def of(batch: Any, rows: Sequence[Counts] | None = None, *, whole: bool = False) -> Prediction:
        with BUILDING:  # a pass on the meta device restores the global generator
            return predictor.of(batch, rows, whole=whole)

    return of


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
        engine = parallelize(
            model,
            plan,
            world,
            tokens=trainable.tokens,
            clip=clip,
            offload_folder=tempfile.gettempdir(),
            **build_options(trainable, plan, options, model),
        )
    engine.load_scalars(engine.scalars() | {"loss_scale": LOSS_SCALE})
    engine.consistency.before_first = None  # the proof compares with the plain model itself
    engine.updates.next_step.late = live is None  # another time than in the run of ten steps
    return engine


def build_options(
    trainable: Trainable, plan: Plan, options: Options, model: nn.Module | None = None
) -> dict[str, Any]:
    """The options that a proof passes to parallelize, and to the predictor, for `model`."""
    model = trainable.plain() if model is None else model
    return {
        "optimizer": spec_of(plan, model),
        "loss": trainable.loss,
        "units": options.units,
        "least_unit_bytes": 0 if plan.bucket_bytes == BUCKET_BYTES else None,
        "table": options.table,
    }


def alone_of(trainable: Trainable, plan: Plan, device: torch.device) -> Oracles:
    """The oracles: the same training in one process."""
    of = spec_of(plan, trainable.plain()), trainable.loss, trainable.tokens
    return oracles_of(lambda: trainable.build(device), plan, *of)


def clip_of(oracles: Oracles, trainable: Trainable, device: torch.device) -> float | None:
    """A power of two, such that the norm of the first gradients is two to four times as large.

    None if all gradients are zero.
    """
    assert isinstance(oracles.exact, Oracle)
    exact, batch = oracles.exact, trainable.batch(ROWS, SEED, device)
    found = _drawn(0, lambda: exact.trial(batch))  # the same numbers on every rank
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in found.values() if g is not None))
    return 2.0 ** (math.frexp(norm)[1] - 2) if norm > 0 and math.isfinite(norm) else None


@dataclass
class Comparison:
    """The comparison of a run with its oracles so far."""

    oracles: Oracles
    theory: Theory
    batch: Callable[[int, int, torch.device], Any]
    errors: list[Errors | Parts]
    pieces: list[tuple[str, frozenset[Piece]]]
    costs: Costs = field(default_factory=Costs)
    sent: dict[Key, Tally] = field(default_factory=dict)  # in the steps so far

    def __post_init__(self) -> None:
        self.choices = Choices(self.oracles.all[-1].model)  # in the precision of the run

    def step(self, engine: Engine, step: int, *, loaded: bool = False, skipped: int = 0) -> None:
        """Train run and oracles on a new batch, with new rates unless the engine has `loaded` them.

        `skipped`: so many steps of the engine before were skipped.
        """
        whole, own, division = self.shared(engine, step)
        if not loaded:
            self.rate(engine, factor_of(step))
        clip, idle = engine.training.clip, division.idle
        mine = _drawn(step, lambda: engine.step(own))
        losses = [_drawn(step, lambda o=o: o.step(whole, clip, idle)) for o in self.oracles.all]
        self.number("loss", f"loss of step {step + 1}", mine.loss, losses)
        loads = self.choices.loads(whole, engine.plan, division)
        theory = self.theory(own, division.counts(whole))
        told = {"loaded": loaded, "skipped": skipped, "loads": loads}
        self.costs = self.costs.after(engine, theory, **told)
        for key, tally in engine.last.items():
            self.sent[key] = self.sent.get(key, Tally()) + tally
        if mine.skipped:
            self.errors.append(Errors("gradients", ("none: the update was skipped",), (NEVER,)))
        else:
            self.tensors("gradients", engine.gradients(), lambda o: o.weights.used)

    def rate(self, engine: Engine, factor: float) -> None:
        """Set the rates of run and oracles to so many times those of the specification."""
        engine.set_lr(engine.optimizer.torch.defaults["lr"] * factor)
        for oracle in self.oracles.all:
            oracle.weights.rate(factor)

    def overflow(self, engine: Engine, step: int) -> None:
        """Check in fp16 that a step whose gradient overflows is skipped and changes no weight.

        It halves the scale. After one more step, from which the scale doubles, all is as in one
        process.
        """
        of = {f"model/{name}" for name in engine.names}

        def states() -> list[Tensor]:
            """Weights and the optimizer's; a layer may count its passes in a buffer."""
            boxes = engine.boxes()
            return [b.tensor for b in boxes if b.name in of or b.name.startswith("optim/")]

        before = [x.clone() for x in states()]
        engine.scale.value = OVERFLOW
        whole, own, _ = self.shared(engine, 0)
        skipped = _drawn(step, lambda: engine.step(own)).skipped
        same = skipped and all(map(torch.equal, before, states()))
        for oracle in self.oracles.all:
            assert isinstance(oracle, Oracle)
            _drawn(step, lambda o=oracle: o.skip(whole))
        self.choices.seen.clear()
        halved = (engine.scale.value, engine.scale.good) == (OVERFLOW / 2, 0)
        engine.scale.value, engine.scale.good = LOSS_SCALE, engine.scale.patience - 1
        following = replace(self, errors=[])
        following.step(engine, step, skipped=1)
        following.state(engine)
        self.costs = following.costs
        doubled = (engine.scale.value, engine.scale.good) == (2 * LOSS_SCALE, 0)
        names = "the skipped update", "the scale after it", "the scale after good updates"
        errors = (0.0 if holds else NEVER for holds in (same, halved, doubled))
        self.errors.append(Errors("overflow", names, tuple(errors)))
        self.errors += [renamed(found, "after overflow") for found in following.errors]

    def shared(self, engine: Engine, step: int) -> tuple[Any, Any, Division]:
        """The global batch of a step, this rank's share, and how it is divided."""
        division = Division.of(engine, step)
        whole = self.rows_for(engine, step, division)
        return whole, division.share(whole, engine.data_rank), division

    def rows_for(self, engine: Engine, step: int, division: Division) -> Any:
        """A global batch for a step."""
        rows = rows_of_step(engine.plan, division, step)
        return self.batch(rows, SEED + step, engine.world.device)

    def number(self, kind: str, name: str, found: float, of_oracles: list[float]) -> None:
        """Compare one number."""
        alone = of_oracles[1] if len(of_oracles) > 1 else None
        self.errors.append(scalar(kind, name, found, of_oracles[0], alone, self.oracles.unit))

    def tensors(self, kind: str, boxes: list[Box], of: Callable[[Any], Any]) -> None:
        """Compare boxes with the tensors `of(oracle)` of each oracle."""
        exact, *more = [of(oracle) for oracle in self.oracles.all]
        start = self.oracles.start if kind == "weights" else None
        expected = Expected(exact, more[0] if more else None, start)
        self.errors.append(compared(kind, boxes, expected, self.oracles.unit))
        if kind != "outputs":
            self.pieces.append((kind, Piece.of(boxes)))

    def state(self, engine: Engine) -> None:
        """Compare weights and the optimizer's state."""
        boxes = engine.boxes()
        weights = [box for box in boxes if box.name.startswith("model/")]
        self.tensors("weights", weights, lambda o: o.weights.values())
        moments = [box for box in boxes if box.name.startswith("optim/")]
        # a parameter without any gradient has zeros
        none = {box.name.partition("/")[2]: torch.zeros(box.shape) for box in moments}
        self.tensors("optimizer", moments, lambda o: none | o.weights.state())

    def agrees(self, kind: str, name: str, loss: float, step: int, whole: Any) -> None:
        """Compare the loss of a global batch in eval mode."""
        self.choices.evaluated.clear()

        def evaluated(oracle: Any) -> float:
            task = oracle.task
            return float(oracle.evaluate(lambda m: task.loss_of(m, whole, oracle.dtype)))

        losses = [_drawn(step, lambda o=o: evaluated(o)) for o in self.oracles.all]
        self.number(kind, name, loss, losses)

    def loaded(self, saved: Engine, engine: Engine) -> None:
        """Check that the modules' own tensors are those that were saved."""
        before, after = (
            {
                box.name: box.tensor
                for box in one.boxes()
                if box.name.startswith(("buffer/", "extra/"))
            }
            for one in (saved, engine)
        )
        same = before.keys() == after.keys() and all(
            torch.equal(x, after[name]) for name, x in before.items()
        )
        self.errors.append(Errors("after loading", ("buffers",), (0.0 if same else NEVER,)))

    def evaluation(self, engine: Engine, step: int) -> None:
        """Compare the loss and the outputs of another batch in eval mode."""
        whole, own, division = self.shared(engine, step)
        if engine.updates.next_step.pending:  # whose bytes are those of an update
            pending, _ = _drawn(step, lambda: engine.evaluate(own))
            self.agrees("evaluation", "loss, with an update pending", pending, step, whole)
        engine.wait()
        before = engine.ledger.copy()
        loss, _ = _drawn(step, lambda: engine.evaluate(own))
        sent = engine.ledger.since(before)

        self.agrees("evaluation", "loss", loss, step, whole)
        at_once = replace(division, microbatches=1)
        loads = self.choices.loads(whole, engine.plan, at_once, trained=False)
        theory = self.theory(own, at_once.counts(whole), whole=True)
        self.costs = self.costs.of_evaluation(sent, theory, loads)
        few = self.batch(ROWS, SEED + step, engine.world.device)
        ranks = engine.data_ranks, engine.data_rank
        wanted = [expected_outputs(oracle, few, *ranks) for oracle in self.oracles.all]
        nearest = self.oracles.all[-1]
        found = engine.outputs(lambda m: returned(nearest, m, few), torch.zeros_like(wanted[-1]))
        shape = tuple(found.shape)
        box = Box("outputs/outputs", shape, (0,) * found.dim(), shape, found)
        values = dict(zip(map(id, self.oracles.all), wanted, strict=True))
        self.tensors("outputs", [box], lambda o: {"outputs": values[id(o)]})


def compare(
    ours: Engine,
    oracles: Oracles,
    theory: Theory,
    batch: Callable[[int, int, torch.device], Any],
    steps: int,
    fresh: Callable[[], Engine] | None = None,
) -> Finding:
    """Train the engine and its oracles on `batch(rows, seed, device)`, and compare.

    `theory(batch)` is the prediction for this rank's share of a batch. `fresh()` makes another
    engine of the same plan, to load a checkpoint of this one.
    """
    so_far, before = Comparison(oracles, theory, batch, [], []), ours.ledger.copy()
    for step in range(steps):
        so_far.step(ours, step)
    if ours.ledger.since(before) != so_far.sent:  # bytes were sent between steps
        so_far.costs = replace(so_far.costs, hold=False)
    so_far.evaluation(ours, steps)  # before anything else finishes a delayed update
    so_far.state(ours)
    prediction = theory(so_far.shared(ours, steps - 1)[1])
    held = by_tier(ours.memory(), ours.host_memory(), ours.disk_memory())
    finding = Finding(ours.world.rank, (), so_far.costs, held, prediction.memory_by_tier)
    again = ours
    if fresh is not None:
        again = reload_engine(ours, fresh())
        so_far.loaded(ours, again)
        after = replace(so_far, errors=[])
        after.step(again, steps + 1, loaded=True)
        after.state(again)
        so_far.errors += [renamed(found, "after loading") for found in after.errors]
        so_far.costs = after.costs
    if ours.scale.on:
        so_far.overflow(again, steps + 2)
    return replace(
        finding,
        errors=tuple(so_far.errors),
        costs=so_far.costs,
        pieces=tuple(so_far.pieces),
        whole=whole_of(oracles.exact),
    )


def whole_of(oracle: Oracle | AsyncOracle) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The names and shapes of all tensors that the ranks together must compare."""
    every = {
        "model": oracle.weights.values(),
        "grad": oracle.weights.masters,
        "optim": oracle.weights.state(),
    }
    return tuple(
        (f"{kind}/{name}", tuple(t.shape))
        for kind, found in every.items()
        for name, t in found.items()
    )


def _drawn(step: int, act: Callable[[], Any]) -> Any:
    """Call `act` with torch's generator seeded by the step, so that both runs draw the same."""
    torch.manual_seed(SEED + step)
    return act()
