"""The engine: a model, a plan and a world, and the step that trains them.

    for each microbatch: forward, backward        (data.py gathers, frees and reduces)
    finish the reductions; sum over the ranks     (loss, tokens, which gradients exist; the norm)
    update this rank's pieces                     (optimizer.py)
    begin to gather what the next step uses

The loss is the mean over the tokens of the *global* batch.  The tokens of all ranks are summed
while the forward runs, and each microbatch's mean weighs as many as it has (norm.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.ledger import Ledger, rank_bytes
from shardwise.comm.move import begin_sum
from shardwise.comm.tiers.host_memory import doubles_on
from shardwise.comm.unchanged import kept, normal_mode
from shardwise.core.buffer_sizes import pool_bytes
from shardwise.core.errors import InputError
from shardwise.core.mesh import PIPELINE
from shardwise.core.tally import Key, Tally, by_kind, sent_bytes
from shardwise.core.tools.hook import nothing
from shardwise.core.tools.structure import plain_key
from shardwise.engine import batch as shares
from shardwise.engine import memory, step_end
from shardwise.engine.build import lay_out
from shardwise.engine.checks import validate
from shardwise.engine.checks.consistency import ConsistencyCheck
from shardwise.engine.checks.guard import Guard
from shardwise.engine.optimizer.norm import LossScale, LossWeights, Spikes, counted
from shardwise.engine.optimizer.optimizer import ShardedOptimizer
from shardwise.engine.optimizer.optimizer_state import Catalogue
from shardwise.engine.options import Build
from shardwise.engine.precision import DTYPES
from shardwise.engine.rank_zero_weights import RankZeroWeights
from shardwise.engine.state import state
from shardwise.engine.step_end import Metrics, PendingResult, StepNumbers, StepResult
from shardwise.techniques.data.apply import cast_whole
from shardwise.techniques.data.units import Unit
from shardwise.techniques.layers.exchange import plain
from shardwise.techniques.offload.disk_optimizer import open_disk
from shardwise.techniques.pipeline.passes import EngineUnits, Passes


class Engine:
    """A model sharded by a plan, and its training step.  Made by `parallelize`."""

    def __init__(self, model: nn.Module, build: Build) -> None:
        options = self.options = build.options
        self.model, self.plan, self.world, self.loss = model, build.plan, build.world, build.loss
        self.ledger: Ledger = build.world.ledger
        self.dtype, self.recompute = DTYPES[build.plan.precision], build.recompute
        self.names = [
            plain_key(name) for name, _ in model.named_parameters()
        ]  # those of all stages
        self.disk = open_disk(self.plan, options, self.world, model)
        by_unit = self.plan.states.moves().fetch is not None  # the model may not fit
        weights = RankZeroWeights.take(model, build.missing, self.world, self.dtype)
        cast_whole(model, self.dtype, self.world.device, build.fill, by_unit=by_unit)
        pool = pool_bytes(self.plan, sum(p.nbytes for p in model.parameters()), options.kernels)
        self.world.pool.reserve(pool, self.world.device)
        with self.ledger.phase("start"):
            sharded = self.sharded = lay_out(model, build, weights, self.disk)
            weights.deliver()
        state.accept_whole(model, sharded.data, sharded.flats)
        self.data, self.flats = sharded.data, sharded.flats
        self.axes, self.staging = sharded.axes, sharded.staging
        self.consensus = self.data.consensus
        self.rows = options.rows
        self.stages, same = self.world.axis(PIPELINE), self.consensus.same
        same.every, same.others = options.checks.ranks, [sharded.tensor, self.stages]
        same.batches = [*chain.from_iterable(each.same_batch() for each in sharded.applied)]
        functions = {"loss": self.loss, "tokens": options.tokens, "rows": options.rows}
        same.doubts.functions |= functions
        self.consistency = ConsistencyCheck(same, sharded.tensor)
        self.scale = LossScale(on=self.plan.precision == "fp16")
        self.guard = self._guard()
        with self.ledger.phase("start"):
            how = self.data.units, self.world.tiers, self.disk
            self.optimizer = ShardedOptimizer(options.spec, *how)
        self.optimizer.compare_on(self.consensus.same)
        if self.guard.by_norm:
            self.data.leave_device = self.optimizer.see
        units = EngineUnits(self.data, sharded.applied, self.staging)
        every = options.checks.rerun
        self.passes = Passes(model, units, self._objective, every, self.optimizer, self.guard)
        self.steps = self.steps_run = 0  # of the run, and of this engine
        self.give: Callable[[], None] = nothing  # the states of a checkpoint that is being loaded
        self.shares_compared = False  # whether data ranks have compared a batch
        self.weights: LossWeights | None = None  # of a step that has not ended, or raised
        self.unread: PendingResult | None = None  # of the last step, until it is reported
        self.last: dict[Key, Tally] = {}  # what the last step sent
        self.world.tiers.bound_device(self.plan.device_memory_bytes)

    def _guard(self) -> Guard:
        how, _, most = self.options.on_nonfinite.partition(":")
        self.spikes = Spikes(float(most) if most else None)
        by_norm = self.options.clip is not None or self.scale.on or bool(most)
        skip = how == "skip"
        for each in self.sharded.applied:
            each.skips = skip or self.scale.on
        guard = Guard(self.world, self.sharded.tensor, self.names, by_norm=by_norm, skip=skip)
        self.data.see = guard.see
        return guard

    def _objective(self, model: nn.Module, part: Any, own: Any = None) -> Tensor:
        own = part if own is None else own
        for each in reversed(self.sharded.applied):
            part = each.enter(part, model, own)
        self.data.computes_loss = self.data.in_loss = True
        try:  # a stage ends in the middle of it
            return self.loss(model, shares.widened(own, self.dtype, model))
        finally:
            self.data.in_loss = False

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a step on each rank."""
        return self.plan.accumulate * self.passes.microbatches

    @property
    def data_ranks(self) -> int:
        """The number of shares of the global batch: with `cp`, several ranks have the same one."""
        return self.plan.shares

    @property
    def data_rank(self) -> int:
        """The index of this rank's share of the global batch."""
        return self.sharded.place // self.plan.cp

    # --- training -----------------------------------------------------------------------------

    def step(self, batch: Any) -> Metrics:
        """Train on this rank's share of the global batch: nested tensors whose dim 0 counts rows.

        Tensors on another device than the world's are copied to it. A share without rows, or
        without tokens, has weight zero. If all are, the loss is 0 and nothing is updated.

        Raises:
            InputError: a batch that cannot be split; a learning rate that is not finite; in an
                engine's first step and in one of `check_every`, ranks that compute it together and
                have not the same batch, loss, or gradients of what each holds.
            NonFiniteError: on every rank, a loss or gradient that is not finite, on a GPU in the
                next step; nothing was updated.  With `on_nonfinite="skip"`, and where fp16
                overflows, only after a hundred such steps in a row.
            torch.OutOfMemoryError: on CUDA, `device_memory` allows no more memory.
        """
        self.world.require_open()
        self.world.background.report()
        validate.recording(self.data.in_loss)
        self.data.structure.require_unchanged()
        validate.as_followed(self.plan, self.model, None, self.world.rank)
        self.consensus.same.begin(self.steps + 1, *self.optimizer.compared())
        given, batch = batch, shares.on_device(batch, self.world.device, dry=self.world.dry)
        self.passes.require(batch, self.microbatches, self.rows)
        before = self.ledger.lines
        if self.data.in_step:  # the step before raised
            self.data.abandon()
            self.consensus.rounds += 1  # if not on all ranks, this one is a step ahead
        self.data.in_step = True
        parts, counts = self._microbatches(batch, given)
        apart = self.consistency.begin(self.steps_run, batch)
        try:
            parts = self._begin(batch, parts, trains=True)
            counts = [self._weight(n, part) for n, part in zip(counts, parts, strict=True)]
        except InputError:  # of a batch whose activations exceed a budget: nothing has run
            self.data.in_step = False
            raise
        self.guard.begin()
        self.data.begin_step()
        # after an error the sums of that step: other ranks may still be in it
        weights = self.weights = self.weights or self._loss_weights(counts)
        with validate.dtypes(self.dtype), validate.step(self.steps + 1):
            summed = self.passes.run(parts, counts, weights)
        del parts  # may be copies of parts of the batch
        for each in self.sharded.applied:
            each.end(trains=True)
        step_end.report(self)  # of the step before, now that the device has work to do
        with self.ledger.phase("update"):
            loss = summed / max(1, sum(counts))
            arriving = self.consistency.compare_gradients(self._arrivals(), loss, self.flats)
            result = self._settle(summed, sum(counts), arriving)
        self.consistency.end(skipped=isinstance(result, StepResult) and result.skipped)
        self.steps, self.steps_run = self.steps + 1, self.steps_run + 1
        self.data.in_step = False
        self.last = self.ledger.since(before, apart)
        sent_bytes, lr = rank_bytes(self.last), self.optimizer.options.lr
        return Metrics(result, lr, sent_bytes, clips=self.options.clip is not None)

    def _loss_weights(self, counts: Sequence[float]) -> LossWeights:
        scale = self.scale.of_each(self.data_ranks * len(counts))
        size = self.staging.schedule.update if self.staging else 0
        with self.ledger.phase("check"):
            begin, device = self.consensus.begin_agree, self.world.device
            alone = self.consensus.ranks == 1
            return LossWeights(counts, size, begin, device, scale, alone=alone)

    def _begin(self, batch: Any, parts: Sequence[Any], *, trains: bool) -> Sequence[Any]:
        for each in self.sharded.applied:
            parts = each.begin(batch, parts, trains=trains)
        return parts

    def _weight(self, count: float, part: Any) -> float:
        for each in self.sharded.applied:
            count = each.weight(count, part, self.options.tokens)
        return count

    def _microbatches(self, batch: Any, given: Any) -> tuple[list[Any], list[float]]:
        """The microbatches and their tokens; the first step raises an error of one rank on all.

        Tokens are counted in the batch as it was `given`: what is on the host needs no wait.
        """
        how = self.microbatches, self.plan.cut, self.rows
        try:
            parts = shares.split(batch, *how)
            on_host = self.options.tokens is not None and self.world.device.type == "cuda"
            counts = [self._count(x) for x in (shares.split(given, *how) if on_host else parts)]
        except InputError as error:
            self._compare_shares(batch, 0, error)
            raise
        self._compare_shares(batch, sum(counts))
        return parts, counts

    def _count(self, part: Any) -> float:
        tokens = self.options.tokens
        return shares.rows(part, self.rows) if tokens is None else tokens(part)

    def _compare_shares(self, batch: Any, mine: float, refused: InputError | None = None) -> None:
        """Compare the shares of the data ranks, and their numbers of tokens: in the first step."""
        if self.shares_compared:
            return
        few = 0 if refused else shares.few_rows(batch, self.rows, self.microbatches)
        own = [mine, refused is not None, few > 0, *shares.dtype_numbers(batch)]
        warns = self.data_ranks > 1 and not (self.world.rank or self.world.dry)
        with self.ledger.phase("check"):
            summed = self.consensus.agree_on_shares(batch, own, warns=warns)
        shares.require_counted(summed[1], refused)
        shares.require_equal_dtypes(batch, summed[3:6])
        self.consensus.same.warn_of_few(few, self.microbatches, int(summed[2]))
        self.shares_compared = True

    def _settle(
        self, summed: Tensor, count: float, arriving: Iterator[Unit]
    ) -> PendingResult | StepResult:
        reported = self.guard.reported_loss(summed).view(1)
        own = torch.cat([reported, summed.new_full((1,), count), self.consensus.summary()])
        assert self.weights is not None
        weights, self.weights = self.weights, None
        with self.ledger.phase("check"):
            agreed = self.consensus.begin_agree(own)
        first = [unit for unit in (next(arriving, None),) if unit is not None]
        with self.ledger.phase("check"):
            loss, tokens, used = agreed.wait().split([1, 1, len(own) - 2])
            own = torch.cat([loss, self.consensus.differing(used)])
            # the loss is known on the last stage
            loss, differs = self.guard.over_tensors(*self._over_stages(own).split(1))
            used = self.passes.shared(self.optimizer.names, used)
            if self.world.dry and not count:
                used[:-1] = self.consensus.expected()
        by_norm, raises = self.guard.by_norm, not self.guard.skip
        squares, differs = step_end.squares(self, differs) if by_norm else (loss * 0, differs)
        correction = weights.correction(tokens)
        squares = self.spikes.without(squares, correction)
        numbers = StepNumbers(correction, loss, tokens, used, squares, differs)
        same, arriving = self.consensus.same, chain(first, arriving)
        waits = self.scale.on or self.passes.stale is not None
        late = self.optimizer.skips_on_device and not waits
        unread = PendingResult(self.steps + 1, numbers, same, by_norm=by_norm, raises=raises)
        if not late:
            step_end.update_or_skip(self, unread, summed, arriving)
        else:
            factor = step_end.factor_without_wait(self, unread, numbers, weights.alone)
            self.optimizer.update(factor, None if by_norm else arriving)
        self.data.units.begin_unshard()
        self.unread = unread if late else None
        if unread.numbers.ready:
            step_end.report(self, summed)
        return unread.found or unread

    def _arrivals(self) -> Iterator[Unit]:
        arriving = self.data.arrivals()
        while True:
            with self.ledger.phase("backward"):  # also for reductions that begin late
                unit = next(arriving, None)
            if unit is None:
                return
            yield unit

    def _over_stages(self, x: Tensor) -> Tensor:
        return begin_sum(x, self.stages).wait()

    @normal_mode()
    @torch.no_grad()
    def evaluate(self, batch: Any) -> tuple[float, float]:
        """The mean loss over the global batch and its number of tokens, in eval mode.

        Called by all ranks; nothing is trained.
        """
        batch = shares.on_device(batch, self.world.device, dry=self.world.dry)
        self.consensus.same.require_batch(batch)
        count = self._count(batch)
        (part,) = self._begin(batch, [batch], trains=False)
        count = self._weight(count, part)
        found = self._made(lambda m: self._objective(m, part, shares.copied(part)))
        zero = torch.zeros((), dtype=torch.float64, device=self.world.device)
        loss = zero if found is None or not count else found.to(zero)  # of no tokens it may be NaN
        own = torch.stack([loss * count, zero + count])
        with self.ledger.phase("check"):
            own[:1] = self._over_stages(own[:1])
            summed, total = self.consensus.agree(own).tolist()
        return summed / (total or 1), counted(total)

    @normal_mode()
    @torch.no_grad()
    def outputs(self, call: Callable[[nn.Module], Tensor], like: Tensor) -> Tensor:
        """The result of `call(model)` in eval mode, with the shape and dtype of `like`.

        Called by all ranks; each gets the result, also ranks without the last stage.
        """
        example = "engine.outputs(lambda model: model(x), like=torch.zeros(8, 1))"
        validate.tensor("like", like, example)
        validate.function("call", call, ("model",), example)
        self._begin(None, (), trains=False)
        found = self._made(lambda model: validate.tensor("call(model)", call(model), example))
        own = torch.zeros_like(like) if found is None else validate.outputs(found, like)
        with self.ledger.phase("check"):
            return self._over_stages(own.flatten()).view_as(own)

    def _made(self, call: Callable[[nn.Module], Tensor]) -> Tensor | None:
        """The result of `call(model)` in eval mode; None if another rank has the last stage."""
        self.flush()
        with self.ledger.phase("check"):
            buffers = self.consensus.buffers.lend()
        try:
            with kept(self.world.device):
                return plain(self.passes.evaluate(call))  # whose rows are forgotten at the end
        finally:
            for each in self.sharded.applied:
                each.end(trains=False)
            for b, own in buffers:
                b.data.copy_(own)
            self.data.computes_loss = False

    gather = shares.gather

    def wait(self) -> None:
        self.data.units.wait()

    def flush(self) -> None:
        """Finish the update that `offload:optim-delayed` makes beside the next step.

        Called by all ranks; the step after it computes with the parameters of all updates. To
        evaluate and to save a checkpoint does so.
        """
        validate.outside_of_loss(self.data.in_loss)
        self.world.require_open()
        self.data.structure.require_unchanged()
        step_end.report(self)
        self.data.units.take_assigned()
        if self.optimizer.host.running:
            self.data.units.to_sharded()
            with self.ledger.phase("update"):
                self.optimizer.host.finish()
            self.data.units.begin_unshard()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next steps."""
        self.optimizer.options.set_lr(lr)

    # --- state, memory, bytes -----------------------------------------------------------------

    def boxes(self) -> list[state.Box]:
        self.flush()
        return state.boxes(self.model, self.sharded, self.optimizer)

    def loading(self, saved: Catalogue, scalars: Mapping[str, Any]) -> list[state.Box]:
        """The boxes to fill from a checkpoint with these tensors, and scalars of `scalars()`.

        Then call `load_scalars(scalars)` and `loaded()`.  Until then the optimizer is as it was.
        """
        self.flush()
        validate.scalars(scalars)
        self.data.units.to_sharded()
        at = self.model, self.sharded, self.optimizer
        boxes, self.give = state.loading(*at, saved, scalars)
        self.data.units.begin_unshard()
        return boxes

    def loaded(self) -> None:
        self.give()
        self.give = nothing
        state.refresh(self.optimizer, self.data.units)

    def scalars(self) -> dict[str, Any]:
        """What is no tensor in a checkpoint, for JSON.  Called by all ranks."""
        self.flush()
        return {
            "step": self.steps,
            "loss_scale": self.scale.value,
            "since": self.scale.good,
            "norms": self.spikes.known.tolist(),
            "optimizer": self.options.spec.kind.__name__,
            "groups": self.optimizer.options.changed(),
        } | state.values(self.model, self.sharded, self.optimizer, self.world)

    def load_scalars(self, saved: Mapping[str, Any]) -> None:
        self.steps = int(saved["step"])
        self.scale.value, self.scale.good = float(saved["loss_scale"]), int(saved["since"])
        self.scale.value = self.scale.value if self.scale.on else 1.0
        self.spikes.known = doubles_on(saved.get("norms", [0.0] * 3), self.world.device)
        self.optimizer.options.load_changed(saved.get("groups", {}))

    def gradients(self) -> list[state.Box]:
        """The gradients that the last update used: summed, unscaled, clipped.

        Boxes of this rank's pieces, valid until the next step; zeros for a parameter without one.
        """
        step_end.note_factor(self, self.unread)
        return state.gradients(self.optimizer)

    def memory(self) -> dict[str, int]:
        """Live bytes of this rank's device by category, read from the tensors' storages."""
        return memory.measured(self)

    def host_memory(self) -> dict[str, int]:
        """Live bytes in host memory by category."""
        return memory.measured(self, "host")

    def disk_memory(self) -> dict[str, int]:
        """Bytes of this rank on a disk by category."""
        return memory.measured(self, "disk")

    def sent(self) -> dict[Key, Tally]:
        """The ledger so far, by axis, kind and phase."""
        return self.ledger.lines

    def measured_bytes(self) -> dict[str, int]:
        """The bytes this rank sent in the last step, by axis and kind."""
        return by_kind(sent_bytes(self.last))
