"""this file is the engine: a model, a plan and a world, and the step that trains them.

    for each microbatch: forward, backward        (data.py gathers, frees and reduces)
    finish the reductions; agree on the facts     (loss, tokens, which gradients exist; the norm)
    update this rank's pieces                     (optimizer.py)
    begin to gather what the next step uses

The loss is the mean over the tokens of the *global* batch: each microbatch's mean enters with the
share of the tokens it has, whichever rank holds it, however uneven.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import begin_sum
from shardwise.comm.ledger import Key, Ledger, Tally
from shardwise.core.shape import ModelShape
from shardwise.engine import given, hint, memory, shape, state
from shardwise.engine.alike import Alike
from shardwise.engine.batch import cast, enough, filled, rows, split
from shardwise.engine.laying import lay_out
from shardwise.engine.optimizer import ShardedOptimizer
from shardwise.engine.passes import Straight
from shardwise.engine.pipelined import Pipelined
from shardwise.engine.scale import LossScale
from shardwise.engine.shard import cast_whole
from shardwise.engine.stale import Stale
from shardwise.engine.training import DTYPES, Build, Metrics, Settled, Training
from shardwise.parallel.data import Data, Unit
from shardwise.parallel.flat import Flat
from shardwise.parallel.staged import Staged
from shardwise.predict import traffic
from shardwise.predict.traffic import Line

#: So much is updated at once where updates need not wait for one another.
EARLY_BYTES = 2**21


class Engine:
    """A model laid out as a plan says, and its training step.  Made by `parallelize`."""

    def __init__(self, model: nn.Module, build: Build, training: Training) -> None:
        self.model, self.plan, self.world, self.training = model, build.plan, build.world, training
        self.ledger: Ledger = build.world.ledger
        self.dtype = DTYPES[build.plan.precision]
        cast_whole(model, self.dtype, self.world.device)
        with self.ledger.phase("start"):
            self.laid = lay_out(model, build)
        self.tensors, self.data, self.flats = self.laid.tensors, self.laid.data, self.laid.flats
        self.axes, self.facts, self.staging = self.laid.axes, self.data.facts, self.laid.staging
        self.alike = Alike(self.tensors, self.staging and self.staging.axis, self.world.device)
        self.passes = self._passes()
        self.optimizer = ShardedOptimizer(training.optimizer, self.flats)
        if isinstance(self.passes, Pipelined) and self.passes.staging.schedule.update:
            self.passes.stale = Stale(self.passes.staging, self.passes.data, self.optimizer)
        self.scale = LossScale(on=self.plan.precision == "fp16")
        self.steps = 0  # of the run
        self.made = 0  # of these, by this engine
        self.met = self.compared = False  # what ranks told each other in the last step (alike.py)
        self.idle: list[str] = []  # names that had no gradient before the checkpoint now loaded
        self.broken = False  # whether a step has begun and not ended
        self.expected = 0  # tokens of the global batch, of the step before
        self.last: dict[Key, Tally] = {}  # what the last step sent
        self.own_loss = 0.0  # of the last step, times tokens: what was made here
        self.own_finite = True  # whether the part of the gradient that is held here was

    def _passes(self) -> Straight | Pipelined:
        model, tensors, objective = self.model, self.tensors, self._objective
        if self.staging is not None and isinstance(self.data, Staged):
            return Pipelined(model, self.staging, self.data, tensors, objective)
        assert isinstance(self.data, Data)
        return Straight(model, self.data, tensors, objective, self.world.device)

    def _objective(self, model: nn.Module, part: Any) -> Tensor:
        with hint.shapes(self.tensors):
            return self.training.loss(model, cast(part, self.dtype))

    @property
    def microbatches(self) -> int:
        """How many microbatches a step has on each rank."""
        return self.plan.accumulate * self.passes.microbatches

    @property
    def data_ranks(self) -> int:
        """How many ranks share the global batch."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def data_rank(self) -> int:
        """Which share of the global batch is this rank's."""
        return self.axes[1].rank * self.axes[0].size + self.axes[0].rank

    # --- training -----------------------------------------------------------------------------

    def step(self, batch: Any) -> Metrics:
        """Train on this rank's share of the global batch: tensors in any nesting, rows first.

        A share without rows, or without tokens, takes part with weight zero.

        Raises:
            InputError: a batch that cannot be split; in an engine's first step, ranks that compute
                it together and have not the same batch, loss, or gradients of what each holds.
        """
        self.world.require_open()
        if self.staging:
            enough(batch, self.microbatches)
        before = self.ledger.copy()
        self.tensors.begin()
        if self.broken:  # the step before raised
            self.data.abandon()
            self.facts.rounds += 1  # if not on all ranks, this one is a step ahead
        self.broken = True
        parts = split(batch, self.microbatches, self.plan.cut)
        counts = [self._count(part) for part in parts]
        parts = [filled(part) for part in parts]
        self.met, self.compared = not self.made, self.alike.due
        if self.met:
            self.alike.require_batch(batch)
        if not self.expected:
            self.expected = self._total(sum(counts))
        weights = [self.scale.value * count / self.expected for count in counts]
        summed = self.passes.run(parts, counts, weights)
        self.tensors.end()
        with self.ledger.phase("update"):
            arriving = self._arrivals()
            if self.compared:
                loss = summed / max(1, sum(counts))
                arriving = self.alike.compared(arriving, loss, self.flats)
            facts = self._settle(summed, sum(counts), arriving)
        self.own_loss = summed.item()
        self.steps, self.made = self.steps + 1, self.made + 1
        self.broken = False
        self.last = self.ledger.since(before)
        sent = sum(tally.sent_bytes for tally in self.last.values())
        return Metrics(facts.loss, facts.tokens, facts.norm, facts.skipped, self.optimizer.lr, sent)

    def _count(self, part: Any) -> int:
        return self.training.tokens(part) if self.training.tokens else rows(part)

    def _total(self, mine: int) -> int:
        with self.ledger.phase("check"):
            counted = self.facts.agree(torch.tensor([float(mine)], device=self.world.device))
        return max(1, round(counted.item()))

    def _settle(self, summed: Tensor, count: int, arriving: Iterator[Unit]) -> Settled:
        """Finish the reductions, agree, update, and begin to gather for the next step.

        Gradients were divided by the number of tokens expected, that of the step before: a number
        every rank has without asking.  Where the true one differs, the update makes up for it.
        """
        own = torch.cat([summed.view(1), summed.new_tensor([count]), self.facts.got().to(summed)])
        with self.ledger.phase("check"):
            agreed = self.facts.begin_agree(own)
        first = [unit for unit in (next(arriving, None),) if unit is not None]
        with self.ledger.phase("check"):
            facts = agreed()
            facts[:1] = self._over_stages(facts[:1])  # known on the last stage
        counted = round(facts[1].item())
        total = max(1, counted)
        loss, correction = facts[0].item() / total, self.expected / total
        self.expected = counted or self.expected
        used = facts[2:]
        if self.staging:
            with self.ledger.phase("check"):
                used = self.staging.shared(self.optimizer.names, used)
        self.facts.hear(used)
        asked = self.training.clip is not None
        norm, skipped = None, False
        if asked or self.scale.on:
            norm, skipped = self._update(correction)
        else:
            self._update_early(chain(first, arriving), correction)
        self.data.units.publish()
        return Settled(loss, counted, norm if asked and not skipped else None, skipped)

    def _update_early(self, arriving: Iterable[Unit], correction: float) -> None:
        """Update units as soon as their gradients are summed, while others are on their way.

        Small ones together: an update costs as much again as what it does to so few elements.
        """
        ready: list[Flat] = []
        for unit in arriving:
            unit.show()
            ready += [flat for flat in self.flats if flat in unit.trained]
            if sum(flat.shard.nbytes for flat in ready) >= EARLY_BYTES:
                self._update_only(ready, correction)
                ready = []
        self._update_only(ready, correction)

    def _update_only(self, flats: Sequence[Flat], correction: float) -> None:
        if flats:
            self.optimizer.step(flats, correction)
        for flat in flats:
            flat.clear()

    def _arrivals(self) -> Iterator[Unit]:
        arriving = self.data.sums.arrivals()
        while True:
            with self.ledger.phase("backward"):  # sums that begin late are still backward's
                unit = next(arriving, None)
            if unit is None:
                return
            yield unit

    def _update(self, correction: float) -> tuple[float, bool]:
        """Update all units at once, where the norm of all gradients decides by how much.

        Returns the norm, and whether it has no finite value and the update was skipped (fp16).
        """
        with self.ledger.phase("backward"):
            self.data.sums.finish()
        norm = self._norm(correction)
        self.data.units.show()
        skipped = self.scale.on and not math.isfinite(norm)
        if not skipped:
            self.optimizer.step(self.flats, self._factor(norm) * correction)
        self.scale.saw(overflow=skipped)
        for flat in self.flats:
            flat.clear()
        return norm, skipped

    def _over_stages(self, x: Tensor) -> Tensor:
        """The sum of a small vector over the pipeline axis."""
        return begin_sum(x, self.staging.axis)() if self.staging else x

    def _norm(self, correction: float) -> float:
        """The norm of the global gradient, loss scale taken out."""
        with self.ledger.phase("check"):
            squared = self.optimizer.squared_norm().view(1).to(self.world.device)
            own = squared.clone()
            for axis in (self.axes[0], self.tensors.axis):
                squared = begin_sum(squared, axis)()
            squared = self._over_stages(squared)
        total = squared.item()
        self.own_finite = math.isfinite(total) or math.isfinite(own.item())
        return math.sqrt(total) * correction / self.scale.value

    def _factor(self, norm: float) -> float:
        """What gradients are multiplied by: loss scale out, clipping in (Pascanu et al., 2013)."""
        clip = self.training.clip
        shrink = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
        return shrink / self.scale.value

    @torch.no_grad()
    def evaluate(self, batch: Any) -> tuple[float, int]:
        """The mean loss over the global batch and its tokens; nothing is trained.

        Called by all ranks; the model is in eval mode for the time.
        """
        count = self._count(batch)
        found = self._made(partial(self._objective, part=filled(batch)))
        told = self.world.device, torch.float64
        loss = torch.zeros((), device=told[0], dtype=told[1]) if found is None else found.to(*told)
        own = torch.stack([loss * count, loss.new_tensor(count)])
        if not count:  # the mean over no tokens may be NaN
            own = torch.zeros_like(own)
        with self.ledger.phase("check"):
            own[:1] = self._over_stages(own[:1])
            summed, total = self.facts.agree(own).tolist()
        return summed / max(1.0, total), round(total)

    @torch.no_grad()
    def outputs(self, call: Callable[[nn.Module], Tensor], like: Tensor) -> Tensor:
        """What `call` makes of the model, in eval mode: of the shape and dtype of `like`.

        Called by all ranks, each of which gets it, also where stages of the model are elsewhere.
        """
        found = self._made(call)
        own = torch.zeros_like(like) if found is None else given.outputs(found, like)
        with self.ledger.phase("check"):
            return self._over_stages(own)

    def _made(self, call: Callable[[nn.Module], Tensor]) -> Tensor | None:
        """What `call` makes of the model in eval mode; None where another stage has it."""
        self.world.require_open()
        was_training = self.model.training
        self.model.eval()
        with self.ledger.phase("check"):
            self.facts.buffers.refresh()
        try:
            return self.passes.evaluate(call)
        finally:
            self.model.train(was_training)

    def wait(self) -> None:
        """Return when parameters that are kept whole have come (they come beside the next step)."""
        self.data.units.wait()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the steps to come. Raises InputError for what is none."""
        given.rate(lr)
        self.optimizer.set_lr(lr)

    # --- state, memory, bytes -----------------------------------------------------------------

    def boxes(self) -> list[state.Box]:
        """Everything a checkpoint holds, as boxes of whole named tensors; live, to load into.

        Before loading, call with the optimizer prepared (`engine.prepare()`), then `loaded()`.
        Called by all ranks.
        """
        self.world.require_open()
        begun, missing = self.optimizer.begun, not self.optimizer.complete
        if self.staging:
            begun, missing = self.staging.anywhere([begun, missing])
        if begun and missing:
            self.prepare()  # some parameter has never had a gradient
        return state.boxes(self)

    def prepare(self) -> None:
        """Make the optimizer's state, so that `boxes` has it before the first step."""
        self.data.units.rest()
        self.optimizer.prepare()
        self.data.units.publish()

    def loaded(self) -> None:
        """Boxes were written to from outside: bring every copy in line with them."""
        self.optimizer.idle = set(self.idle)
        self.facts.buffers.loaded()
        state.refresh(self)

    def scalars(self) -> dict[str, Any]:
        """What else a checkpoint holds: numbers, as JSON takes them.  Called by all ranks."""
        begun = self.optimizer.begun
        if self.staging:
            (begun,) = self.staging.anywhere([begun])
        idle = self.optimizer.unused(begun)
        return {
            "step": self.steps,
            "loss_scale": self.scale.value,
            "since": self.scale.good,
            "tokens": self.expected,
            "idle": self.staging.together(idle) if self.staging else idle,
        }

    def load_scalars(self, saved: dict[str, Any]) -> None:
        """Take the numbers of `scalars` back; before `loaded()`. Raises InputError for others."""
        given.scalars(saved)
        self.steps, self.idle = int(saved["step"]), list(saved.get("idle", ()))
        self.expected = int(saved.get("tokens", 0))  # so that gradients are rounded as they were
        self.scale.value, self.scale.good = float(saved["loss_scale"]), int(saved["since"])
        self.scale.value = self.scale.value if self.scale.on else 1.0

    def gradients(self) -> list[state.Box]:
        """The gradients of the last update, as it used them: summed, unscaled, clipped.

        Boxes of this rank's pieces, valid until the next step; zeros for a parameter without one.
        """
        return state.gradients(self)

    def memory(self) -> dict[str, int]:
        """Live bytes of this rank by category, read from the tensors' storages."""
        return memory.measured(self)

    def predicted_memory(self) -> dict[str, int]:
        """The same by the formula of the plan: what `memory` reads after a step."""
        return memory.predicted(self)

    def sent(self) -> dict[Key, Tally]:
        """The ledger so far, by axis, kind and phase."""
        return self.ledger.copy()

    def step_bytes(self, first: bool = False) -> dict[Line, int]:
        """What this rank's steps send by the formula of the plan; the first of a run a little more.

        Activations on the tensor axis, and what ranks compare, are those of the last step.
        """
        clips = self.training.clip is not None
        rank, plan = self.world.rank, self.plan
        more = {"norm": clips, "first": first}
        more |= {"meets": first or self.met, "compares": first or self.compared}
        states = traffic.step_bytes(plan, self.model_shape(), rank, **more)
        crossings, losses = self.tensors.stream.crossings, self.tensors.losses
        moved = traffic.activation_bytes(plan, crossings, losses)
        crossed = traffic.crossing_bytes(plan, self.passes.sent)
        every = states, moved, crossed
        return {k: sum(one.get(k, 0) for one in every) for k in {**states, **moved, **crossed}}

    def measured_bytes(self) -> dict[str, int]:
        """The bytes this rank sent in the last step, by axis and kind."""
        return traffic.by_kind({Line(*k): t.sent_bytes for k, t in self.last.items()})

    def predicted_bytes(self) -> dict[str, int]:
        """The same by the formula, for the step that was the last, or else the first."""
        return traffic.by_kind(self.step_bytes(first=self.steps <= 1))

    def model_shape(self) -> ModelShape:
        """The model as numbers, in the units of this engine."""
        return shape.model_shape(self)
