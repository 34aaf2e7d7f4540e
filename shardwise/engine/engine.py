"""this file is the engine: a model, a plan and a world, and the step that trains them.

    for each microbatch: forward, backward        (data.py gathers, frees and reduces)
    finish the reductions; agree on the facts     (loss, tokens, which gradients exist; the norm)
    update this rank's pieces                     (optimizer.py)
    begin to gather what the next step uses

The loss is the mean over the tokens of the *global* batch: each microbatch's mean enters with the
share of the tokens it has, whichever rank holds it, however uneven.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.ledger import Key, Ledger, Tally
from shardwise.comm.world import World
from shardwise.core.plan import Plan
from shardwise.core.shape import ModelShape
from shardwise.core.states import ROWS
from shardwise.core.table import Table
from shardwise.engine import memory, shape, state, tensor
from shardwise.engine.batch import cast, filled, rows, split
from shardwise.engine.optimizer import ShardedOptimizer
from shardwise.engine.recipe import Recipe
from shardwise.engine.scale import LossScale
from shardwise.engine.shard import Sharding, materialise, shard, units_of
from shardwise.parallel.data import Pace, Unit
from shardwise.parallel.flat import Fill
from shardwise.parallel.units import Rule
from shardwise.predict import traffic
from shardwise.predict.traffic import Line

Loss = Callable[[nn.Module, Any], Tensor]
Count = Callable[[Any], int]

DTYPES = {
    None: None,
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class Metrics:
    """What one step was: the mean loss over the global batch's tokens, their number, the norm of
    the gradient before clipping (None where nobody asked), whether fp16 overflowed and the update
    was skipped, the learning rate, and the bytes this rank sent.
    """

    loss: float
    tokens: int
    grad_norm: float | None
    skipped: bool
    lr: float
    bytes: int


@dataclass(frozen=True)
class Training:
    """How an engine trains: `loss(model, batch)` is the mean over the batch's own tokens,
    `tokens(batch)` their number (None: the rows of the batch); gradients are clipped to norm
    `clip` (None: not).
    """

    optimizer: Recipe
    loss: Loss
    tokens: Count | None = None
    clip: float | None = None


@dataclass(frozen=True)
class Build:
    """What the user asked for: the plan, the world it lies on, units, initial weights, prefetch."""

    plan: Plan
    world: World
    units: Rule
    fill: Fill
    prefetch: int
    table: Table | None


class Engine:
    """A model laid out as a plan says, and its training step.  Made by `parallelize`."""

    def __init__(self, model: nn.Module, build: Build, training: Training) -> None:
        self.model, self.plan, self.world, self.training = model, build.plan, build.world, training
        self.ledger: Ledger = build.world.ledger
        self.dtype = DTYPES[build.plan.precision]
        self._cast()
        world, plan = build.world, build.plan
        how = Sharding(
            row=ROWS[plan.row],
            shard=world.axis(plan.shard_axis or "none"),
            replicate=world.axis(plan.replicate_axis or "none"),
            units=build.units,
            bucket_bytes=plan.bucket_bytes,
            fill=build.fill,
            device=world.device,
        )
        pace = Pace(ahead=build.prefetch, by_hand=False)
        specs = units_of(model, how, world.axis(tensor.AXIS).size)
        with self.ledger.phase("start"):
            self.tensors = tensor.lay_out(model, world, plan.sp, build.table)
            self.data, self.flats = shard(model, how, pace, specs, self.tensors)
        self.axes = how.axes
        self.optimizer = ShardedOptimizer(training.optimizer, self.flats)
        self.scale = LossScale(on=plan.precision == "fp16")
        self.steps = 0
        self.idle: list[str] = []  # names that had no gradient before the checkpoint now loaded
        self.broken = False  # whether a step has begun and not ended
        self.expected = 0  # tokens of the global batch, of the step before
        self.last: dict[Key, Tally] = {}  # what the last step sent

    def _cast(self) -> None:
        """The plan's precision, the plan's device; parameters on meta stay there."""
        materialise(self.model, self.world.device)
        for p in self.model.parameters():
            if p.is_floating_point() and self.dtype is not None:
                p.data = p.data.to(self.dtype)
            if not p.is_meta:
                p.data = p.data.to(self.world.device)
        for b in self.model.buffers():
            b.data = b.data.to(self.world.device)
            if self.dtype is torch.float64 and b.is_floating_point():
                b.data = b.data.double()

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
        """
        before = self.ledger.copy()
        self.tensors.begin()
        if self.broken:  # the step before raised
            self.data.abandon()
        self.broken = True
        parts = split(batch, self.plan.accumulate)
        counts = [self._count(part) for part in parts]
        parts = [filled(part) for part in parts]
        if not self.expected:
            self.expected = self._total(sum(counts))
        summed = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for k, (part, count) in enumerate(zip(parts, counts, strict=True)):
            self.data.sums.sync, self.data.mute = k == len(parts) - 1, count == 0
            with self.tensors.draws.during(self.world.device):
                loss = self.training.loss(self.model, cast(part, self.dtype))
                (loss * (self.scale.value * count / self.expected)).backward()
            if count:  # the mean over no tokens may be NaN
                summed += loss.detach() * count
        self.tensors.end()
        with self.ledger.phase("update"):
            facts = self._settle(summed, sum(counts))
        self.steps += 1
        self.broken = False
        self.last = self.ledger.since(before)
        sent = sum(tally.sent_bytes for tally in self.last.values())
        return Metrics(facts.loss, facts.tokens, facts.norm, facts.skipped, self.optimizer.lr, sent)

    def _count(self, part: Any) -> int:
        return self.training.tokens(part) if self.training.tokens else rows(part)

    def _total(self, mine: int) -> int:
        with self.ledger.phase("check"):
            counted = self.data.agree(torch.tensor([float(mine)], device=self.world.device))
        return max(1, round(counted.item()))

    def _settle(self, summed: Tensor, count: int) -> "_Facts":
        """Finish the reductions, agree, update, and begin to gather for the next step.

        Gradients were divided by the number of tokens expected, that of the step before: a number
        every rank has without asking.  Where the true one differs, the update makes up for it.
        """
        own = torch.cat([summed.view(1), summed.new_tensor([count]), self.data.got().to(summed)])
        with self.ledger.phase("check"):
            agreed = self.data.begin_agree(own)
        arriving = self._arrivals()
        first = [unit for unit in (next(arriving, None),) if unit is not None]
        with self.ledger.phase("check"):
            facts = agreed()
        counted = round(facts[1].item())
        total = max(1, counted)
        loss, correction = facts[0].item() / total, self.expected / total
        self.expected = counted or self.expected
        self.data.hear(facts[2:])
        asked = self.training.clip is not None
        norm, skipped = None, False
        if asked or self.scale.on:
            norm, skipped = self._update(correction)
        else:
            self._update_early(chain(first, arriving), correction)
        self.data.publish()
        return _Facts(loss, counted, norm if asked and not skipped else None, skipped)

    def _update_early(self, arriving: Iterable[Unit], correction: float) -> None:
        """Update each unit as soon as its gradients are summed, while others are on their way."""
        for unit in arriving:
            unit.show()
            trained = [flat for flat in self.flats if flat in unit.trained]
            self.optimizer.step(trained, correction)
            for flat in trained:
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
        self.data.show()
        skipped = self.scale.on and not math.isfinite(norm)
        if not skipped:
            self.optimizer.step(self.flats, self._factor(norm) * correction)
        self.scale.saw(overflow=skipped)
        for flat in self.flats:
            flat.clear()
        return norm, skipped

    def _norm(self, correction: float) -> float:
        """The norm of the global gradient, loss scale taken out."""
        with self.ledger.phase("check"):
            squared = self.optimizer.squared_norm().view(1)
            for axis in (self.axes[0], self.tensors.axis):
                squared = self.data.agree_on(squared, axis)
        return math.sqrt(squared.item()) * correction / self.scale.value

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
        was_training = self.model.training
        self.model.eval()
        count = self._count(batch)
        with self.ledger.phase("check"):
            self.data.buffers.refresh()
        try:
            loss = self.training.loss(self.model, cast(filled(batch), self.dtype)).double()
        finally:
            self.model.train(was_training)
        own = torch.stack(
            [loss * count if count else torch.zeros_like(loss), loss.new_tensor(count)]
        )
        with self.ledger.phase("check"):
            summed, total = self.data.agree(own).tolist()
        return summed / max(1.0, total), round(total)

    def wait(self) -> None:
        """Return when parameters that are kept whole have come (they come beside the next step)."""
        self.data.wait()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the steps to come."""
        self.optimizer.set_lr(lr)

    # --- state, memory, bytes -----------------------------------------------------------------

    def boxes(self) -> list[state.Box]:
        """Everything a checkpoint holds, as boxes of whole named tensors; live, to load into.

        Before loading, call with the optimizer prepared (`engine.prepare()`), then `loaded()`.
        Called by all ranks.
        """
        if not self.optimizer.complete:
            self.prepare()  # some parameter has never had a gradient
        return state.boxes(self)

    def prepare(self) -> None:
        """Make the optimizer's state, so that `boxes` has it before the first step."""
        self.data.rest()
        self.optimizer.prepare()
        self.data.publish()

    def loaded(self) -> None:
        """Boxes were written to from outside: bring every copy in line with them."""
        self.optimizer.idle = set(self.idle)
        self.data.buffers.loaded()
        state.refresh(self)

    def scalars(self) -> dict[str, Any]:
        """What else a checkpoint holds: numbers, as JSON takes them."""
        return {
            "step": self.steps,
            "loss_scale": self.scale.value,
            "since": self.scale.good,
            "tokens": self.expected,
            "idle": self.optimizer.unused(),
        }

    def load_scalars(self, saved: dict[str, Any]) -> None:
        """Take the numbers of `scalars` back; before `loaded()`."""
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
        """What this rank's steps send by the formula of the plan; the first one a little more.

        Activations on the tensor axis are those of the last step, by their shapes.
        """
        clips = self.training.clip is not None
        rank, plan = self.world.rank, self.plan
        states = traffic.step_bytes(plan, self.model_shape(), rank, norm=clips, first=first)
        size = 8 if self.dtype is torch.float64 else 4  # a loss is summed in fp32 at least
        stream, losses = self.tensors.stream, self.tensors.logits
        moved = traffic.activation_bytes(plan, stream.crossings, losses, size)
        return {k: states.get(k, 0) + moved.get(k, 0) for k in {**states, **moved}}

    def measured_bytes(self) -> dict[str, int]:
        """The bytes this rank sent in the last step, by axis and kind."""
        return traffic.by_kind({Line(*k): t.sent_bytes for k, t in self.last.items()})

    def predicted_bytes(self) -> dict[str, int]:
        """The same by the formula, for the step that was the last, or else the first."""
        return traffic.by_kind(self.step_bytes(first=self.steps <= 1))

    def model_shape(self) -> ModelShape:
        """The model as numbers, in the units of this engine."""
        return shape.model_shape(self)


@dataclass(frozen=True)
class _Facts:
    loss: float
    tokens: int
    norm: float | None
    skipped: bool
