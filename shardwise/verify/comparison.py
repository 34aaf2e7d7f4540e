"""The comparison of a run with its oracles: of its steps and its states.

In order: step 1, an evaluation, steps 2 to n, states; a checkpoint loaded into a new engine, a step
of it, states; in fp16 a step that overflows, one more, states; elsewhere one whose gradients are
not finite. If the update of step 1 is delayed, the evaluation is after step 2; if any is, the new
engine has one pending when it loads.
"""

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.comm.move import all_gather_object
from shardwise.comm.world import World
from shardwise.core.errors import InputError, NonFiniteError, bad
from shardwise.core.tally import Key
from shardwise.engine import memory
from shardwise.engine.batch import copied as own_tensors
from shardwise.engine.checks import validate
from shardwise.engine.engine import Engine
from shardwise.engine.state.box import Box
from shardwise.observe.dry_twin import DryTwin, sent_bytes
from shardwise.techniques.expert.apply import layers_of
from shardwise.verify.difference import (
    EngineStep,
    OracleStep,
    Wholes,
    compared,
    expected_outputs,
    oracle_state,
    ratio,
    returned,
    scalar,
    step_errors,
    tensor_errors,
)
from shardwise.verify.finding import NEVER, BoxPlace, Costs, Errors, Finding, Parts, renamed
from shardwise.verify.oracles import textbook
from shardwise.verify.oracles.async_oracle import AsyncOracle
from shardwise.verify.oracles.batches import IDLE_STEP, ROWS, SEED, Choices, Division, rows_of_step
from shardwise.verify.oracles.oracle import Oracle, in_eval_mode
from shardwise.verify.oracles.oracles import LOSS_SCALE, Oracles, factor_of
from shardwise.verify.oracles.rounding import moment_errors, moments, published

#: A loss scale at which every gradient in fp16 overflows, and the loss in fp32 does not.
OVERFLOW: Final = 2.0**100
#: The factor by which a bound on the gradient's norm is raised.
LOOSE: Final = 2.0**10
#: The value of every weight before a load.
FORGOTTEN: Final = 0.5


@dataclass
class Comparison:
    """The comparison of a run with its oracles so far."""

    oracles: Oracles
    dry: DryTwin
    batch: Callable[[int, int, torch.device], Any]
    errors: list[Errors | Parts]
    pieces: list[tuple[str, frozenset[BoxPlace]]]
    costs: Costs = field(default_factory=Costs)
    alone: list[float] = field(default_factory=list[float])  # the losses of the first oracle

    def __post_init__(self) -> None:
        nearest = self.oracles.nearest.model  # in the precision of the run
        self.choices = Choices(nearest)
        self.first = {name: b.clone() for name, b in nearest.named_buffers()}
        self.uses = uses_of(self.oracles.exact, self.batch)
        self.choices.evaluated.clear()

    def apart(self) -> "Comparison":
        twin = copy(self)
        twin.errors = []
        return twin

    def step(self, engine: Engine, step: int, *, loaded: bool = False) -> None:
        """Train run and oracles on a new batch."""
        whole, own, division = self.shared(engine, step)
        if not loaded:
            self.rate(engine, factor_of(step))
        idle, theory = division.idle, self.dry.step(engine, own, division.counts(whole))
        with bounded(engine, step) as clip, validate.sharded(engine.plan, lambda: None):
            metrics = drawn(step, lambda: engine.step(own))
        expected = [
            drawn(step, lambda o=o: OracleStep.of(o, whole, clip, idle)) for o in self.oracles.all
        ]
        self.alone.append(expected[0].loss)
        mine = EngineStep.last(engine, metrics)
        self.errors += step_errors(step + 1, mine, expected, self.oracles.unit)
        loads = self.choices.loads(whole, engine.plan, division)
        self.costs = self.costs.after(engine, theory, self.uses, loads, self.dry.note)
        if metrics.skipped:
            self.errors.append(Errors("gradients", ("none: the update was skipped",), (NEVER,)))
        else:
            self.tensors(mine.gradients, [one.gradients for one in expected])

    def rate(self, engine: Engine, factor: float) -> None:
        """Multiply the specified rates of run and oracles by `factor`."""
        engine.set_lr(engine.optimizer.torch.defaults["lr"] * factor)
        for oracle in self.oracles.all:
            oracle.weights.rate(factor)

    def overflow(self, engine: Engine, step: int) -> None:
        """Check in fp16 that a step whose gradient overflows is skipped and changes no weight. It
        halves the scale. The next step doubles it, and all is as in one process.
        """
        before = self.states(engine, copied=True)
        kept = (engine.scale.value, engine.scale.good) == (LOSS_SCALE, engine.steps)
        engine.scale.value = OVERFLOW
        whole, own, _ = self.shared(engine, 0)
        skipped = drawn(step, lambda: engine.step(own)).skipped
        same = skipped and all(map(torch.equal, before, self.states(engine)))
        for oracle in self.oracles.all:
            assert isinstance(oracle, Oracle)
            drawn(step, lambda o=oracle: o.skip(whole))
        self.choices.seen.clear()
        halved = (engine.scale.value, engine.scale.good) == (OVERFLOW / 2, 0)
        engine.scale.value, engine.scale.good = LOSS_SCALE, engine.scale.patience - 1
        following = self.apart()
        following.step(engine, step)
        following.state(engine)
        self.costs = following.costs
        doubled = (engine.scale.value, engine.scale.good) == (2 * LOSS_SCALE, 0)
        facts = {"the scale before it": kept, "the skipped update": same}
        facts |= {"the scale after it": halved, "the scale after good updates": doubled}
        self.errors.append(Errors.of_facts("overflow", facts))
        self.errors += [renamed(found, "after overflow") for found in following.errors]

    def shared(self, engine: Engine, step: int) -> tuple[Any, Any, Division]:
        """The global batch of a step, this rank's share, and how it is divided."""
        division = Division.of(engine, step)
        rows = rows_of_step(engine.plan, division, step)
        whole = self.batch(rows, SEED + step, engine.world.device)
        return whole, own_tensors(division.share(whole, engine.data_rank)), division

    def tensors(self, boxes: Sequence[Box], of_oracles: Sequence[Wholes]) -> None:
        unit, start = self.oracles.unit, self.oracles.start
        for errors, pieces in tensor_errors(boxes, of_oracles, unit, start):
            self.errors.append(errors)
            self.pieces.append((errors.kind, pieces))

    def state(self, engine: Engine) -> None:
        self.tensors(engine.boxes(), [oracle_state(oracle) for oracle in self.oracles.all])
        self.buffers(engine)
        if self.oracles.unit:
            self.errors.append(published(engine))

    def buffers(self, engine: Engine) -> None:
        """Compare buffers that never change, and those of layers of experts, which count the tokens
        of all ranks. Others may depend on how the batch is divided: only if it is not.
        """
        found: dict[str, float] = {}
        short, undivided = self.oracles.unit > 0, engine.data_ranks * engine.microbatches == 1
        layers = tuple(f"{name}." for name in layers_of(self.oracles.nearest.model))
        wanted = dict(self.oracles.nearest.model.named_buffers())
        for box in (box for box in engine.boxes() if box.name.startswith("buffer/")):
            name = box.name.partition("/")[2]
            constant = torch.equal(wanted[name], self.first[name])
            counted = not short and not box.replica and (undivided or name.startswith(layers))
            if (constant or counted) and box.tensor.numel() and not box.tensor.is_meta:
                own, expected = box.tensor.double(), wanted[name].double()
                apart = torch.where(own == expected, 0.0, own - expected).abs().max()
                error = ratio(float(apart), float(expected.abs().max()))
                found[name] = NEVER if short and error else error
        self.errors.append(Errors("buffers", tuple(found), tuple(found.values())))

    def agrees(
        self, name: str, engine: Engine, step: int, shared: tuple[Any, Any, Division]
    ) -> dict[Key, int]:
        """Compare loss and tokens of a batch in eval mode; returns what the dry run sends."""
        whole, own, division = shared
        theory = self.dry.evaluate(own, replace(division, microbatches=1).counts(whole))
        found = drawn(step, lambda: engine.evaluate(own))
        self.choices.evaluated.clear()

        def evaluated(oracle: Any) -> float:
            """The mean of what its passes compute."""
            task, dtype = oracle.task, oracle.dtype
            return sum(
                float(oracle.evaluate(lambda m, own=own: task.loss_of(m, own, dtype)))
                * (task.tokens(own) / task.tokens(whole))
                for own in oracle.of_ranks(whole, division.idle)
            )

        losses = [drawn(step, lambda o=o: evaluated(o)) for o in self.oracles.all]
        tokens = [float(self.oracles.exact.task.tokens(whole))] * len(losses)
        for what, number, wanted in zip(("loss", "tokens"), found, (losses, tokens), strict=True):
            unit = self.oracles.unit
            self.errors.append(scalar("evaluation", what + name, float(number), wanted, unit))
        return theory

    def reload(self, saved: Engine, engine: Engine, step: int) -> None:
        """Load a checkpoint of `saved` into `engine`, and compare a step of it."""
        self._delay(engine, step)
        engine.scale.value *= 2.0  # the loaded one is another
        try:
            reload_engine(saved, engine)
        except InputError:  # on all ranks: what is saved differs between them
            self.errors.append(Errors.of_facts("after loading", {"equal on all ranks": False}))
            return
        saved.consensus.buffers.refresh()  # a checkpoint has those of the first data rank
        self.loaded(saved, engine)
        for oracle in self.oracles.all:
            if isinstance(oracle, Oracle):  # to save has finished a delayed update
                oracle.finish()
        after = self.apart()
        exact = self.oracles.unit == 0 or not isinstance(self.oracles.exact, Oracle)
        before = {} if exact else moments(engine)
        after.step(engine, step, loaded=True)
        update = [] if exact else [moment_errors(engine, before)]
        after.state(engine)
        self.errors += [renamed(errors, "after loading") for errors in after.errors]
        self.errors += update
        self.costs = after.costs

    def _delay(self, engine: Engine, step: int) -> None:
        """Leave a delayed update pending, if the plan delays any: a load must drop it."""
        offload = engine.plan.offloaded
        if offload is None or offload.undelayed is None:
            return
        _, own, _ = self.shared(engine, 0)
        for _ in range(offload.undelayed + 1):
            drawn(step, lambda: engine.step(own))

    def not_finite(self, engine: Engine, step: int) -> None:
        """Check that gradients that are not finite raise and change nothing; it ends the engine."""
        if not any(bool(grad.any()) for grad in self.oracles.exact.weights.used.values()):
            return  # as on all ranks
        before, refused = self.states(engine, copied=True), False
        _, own, _ = self.shared(engine, 0)
        engine.scale.value = math.inf
        try:
            drawn(step, lambda: engine.step(own))
        except NonFiniteError:
            refused = True
        same = refused and all(map(torch.equal, before, self.states(engine)))
        self.errors.append(Errors.of_facts("not finite", {"the step that is not finite": same}))

    def states(self, engine: Engine, *, copied: bool = False) -> list[Tensor]:
        """Weights and optimizer states. No buffers, since a layer may count its passes in one."""
        of = {f"model/{name}" for name in engine.names}
        boxes = [b for b in engine.boxes() if b.name in of or b.name.startswith("optim/")]
        return [box.tensor.clone() if copied else box.tensor for box in boxes]

    def loaded(self, saved: Engine, engine: Engine) -> None:
        """Check that buffers, extra states and the engine's numbers equal the saved ones."""
        begins = ("buffer/", "extra/")
        before, after = (
            {box.name: box.tensor for box in one.boxes() if box.name.startswith(begins)}
            for one in (saved, engine)
        )
        same = before.keys() == after.keys() and all(
            torch.equal(x, after[name]) for name, x in before.items()
        )
        numbers = saved.scalars() == engine.scalars()
        facts = {"buffers": same, "numbers": numbers}
        self.errors.append(Errors.of_facts("after loading", facts))

    def evaluation(self, engine: Engine, step: int) -> None:
        """Compare the loss and the outputs of another batch in eval mode."""
        pending = bool(engine.optimizer.host.running)  # its bytes are those of an update
        late = isinstance(self.oracles.exact, Oracle) and self.oracles.exact.pending
        self.errors.append(Errors.of_facts("evaluation", {"a pending update": pending == late}))
        shared = self.shared(engine, IDLE_STEP)
        if pending or shared[2].idle:
            name = ", with an update pending" if pending else ", first"
            self.agrees(name, engine, step, shared)
        engine.wait()
        whole, _, division = shared = self.shared(engine, step)
        before = engine.ledger.lines
        theory = self.agrees("", engine, step, shared)
        sent = sent_bytes(engine.ledger.since(before))
        at_once = replace(division, microbatches=1)
        loads = self.choices.loads(whole, engine.plan, at_once, trained=False)
        self.costs = self.costs.after(engine, theory, self.uses, loads, evaluated=sent)
        few = self.batch(ROWS, SEED + step, engine.world.device)
        ranks = engine.data_ranks, engine.data_rank
        nearest = self.oracles.nearest
        like = torch.zeros_like(expected_outputs(nearest, few, *ranks))
        found = engine.outputs(lambda m: returned(nearest, m, few), like)
        wanted = [expected_outputs(oracle, few, *ranks) for oracle in self.oracles.all]
        outputs, box = (
            [{"outputs": values} for values in wanted],
            Box.full("outputs/outputs", found),
        )
        self.errors.append(compared("outputs", [box], outputs, self.oracles.unit))


def uses_of(
    oracle: Oracle | AsyncOracle, batch: Callable[[int, int, torch.device], Any]
) -> textbook.Uses:
    """How a pass of the oracle's model uses its weights."""
    few = batch(ROWS, SEED, next(oracle.model.parameters()).device)
    with textbook.Uses(oracle.model) as uses:
        in_eval_mode(oracle.model, lambda m: oracle.task.loss_of(m, few, oracle.dtype))
    return uses


def compare(
    ours: Engine,
    oracles: Oracles,
    dry: DryTwin,
    batch: Callable[[int, int, torch.device], Any],
    steps: int,
    fresh: Callable[[], tuple[Engine, DryTwin]] | None = None,
) -> Finding:
    """Train the engine and its oracles on `batch(rows, seed, device)`, and compare. `dry` is the
    dry run of `ours`. `fresh()`: another engine and its dry run, to load a checkpoint.
    """
    so_far = Comparison(oracles, dry, batch, [], [])
    looks = so_far.apart()  # shown after the states
    offload = ours.plan.offloaded
    # an evaluation finishes the first delayed update: a step comes before it
    look = min(steps - 1, int(offload is not None and offload.undelayed == 0))
    for step in range(steps):
        before = ours.ledger.lines
        so_far.step(ours, step)
        if ours.ledger.since(before) != ours.last:  # something else was sent
            so_far.costs = replace(so_far.costs, hold=False)
        if step == look:  # so that later steps follow each other
            looks.costs = so_far.costs
            looks.evaluation(ours, steps)
            so_far.costs = looks.costs
    so_far.state(ours)
    so_far.errors += looks.errors
    held = memory.resting(ours), dry.memory()
    finding = Finding(ours.world.rank, (), so_far.costs, *held)
    finding = finding.with_promises(textbook.broken(ours))
    again = ours
    if fresh is not None:
        again, so_far.dry = fresh()
        so_far.reload(ours, again, steps + 1)
    if ours.scale.on:
        so_far.overflow(again, steps + 2)
    else:
        so_far.not_finite(again, steps + 2)
    return replace(
        finding,
        errors=tuple(so_far.errors),
        costs=so_far.costs,
        pieces=tuple(so_far.pieces),
        whole=whole_of(oracles.exact),
        narrow=bool(oracles.exact.task.narrow) and oracles.unit == 0,
        alone=tuple(so_far.alone),
    )


def whole_of(oracle: Oracle | AsyncOracle) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The names and shapes of all tensors that the ranks together must compare."""
    gradients = {f"grad/{name}": x for name, x in oracle.weights.masters.items()}
    every = {**oracle_state(oracle), **gradients}
    return tuple((name, tuple(x.shape)) for name, x in every.items())


@contextmanager
def bounded(engine: Engine, step: int) -> Iterator[float | None]:
    """The bound on the gradient's norm in a step; in one of every four it is above the norm."""
    clip, options = engine.options.clip, engine.options
    if clip is not None and step % 4 == IDLE_STEP:
        clip *= LOOSE
    engine.options = replace(options, clip=clip)
    yield clip
    engine.options = options


def drawn(step: int, act: Callable[[], Any]) -> Any:
    """Seed torch's generator by the step and call `act`, so that both runs draw alike."""
    torch.manual_seed(SEED + step)
    return act()


# --- a checkpoint ---------------------------------------------------------------------------------


def reload_engine(saved: Engine, fresh: Engine) -> Engine:
    """Save `saved` to a temporary folder; load it into `fresh`, whose weights were changed."""
    from shardwise.checkpoint import engines  # takes long to import

    _forget(fresh)
    world = saved.world
    folder = _shared_folder(world)
    try:
        engines.save(saved, folder)
        engines.load(fresh, folder)
        world.barrier()
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return fresh


def _shared_folder(world: World) -> Path:
    """A temporary folder that all ranks see: the host's own, or one in the current folder."""
    for place in (None, Path.cwd()):
        own = tempfile.mkdtemp(prefix="shardwise-verify-", dir=place) if world.rank == 0 else ""
        folder = Path(all_gather_object(own, world)[0])
        if all(all_gather_object(folder.is_dir(), world)):
            return folder
        world.barrier()
        if world.rank == 0:
            folder.rmdir()
    raise bad(
        "a proof on several hosts, which see neither each other's temporary folder nor one here",
        "a folder that all hosts share, for a checkpoint of the model",
        "export TMPDIR=/a/shared/folder on rank 0, or the command in a shared folder",
    )


@torch.no_grad()
def _forget(engine: Engine) -> None:
    for flat in engine.flats:
        for weights in (flat.full, flat.shard):
            if weights.untyped_storage().nbytes():
                weights.fill_(FORGOTTEN)
