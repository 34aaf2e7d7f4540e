"""The memory and the time of the plans of a search, lower bounds of both, and uneven stages.

    blocks        b0    b1    b2    b3 + head       seconds 1 1 1 5
    even          b0    b1  | b2    b3 + head       slowest stage 6
    stages:3,1    b0    b1    b2  | b3 + head       slowest stage 5

The planner of DAPPLE (arXiv 2007.01045) divides layers by their measured time.  Here the seconds of
a block are predicted, those of a stage of the same plan with a stage for each block.  First an
exact partition makes the slowest stage as fast as possible (core/layouts/uneven.py).  Then blocks
move from one stage to another while that makes the schedule shorter, by its clock: of several
stages a rank, the slowest one does not decide alone.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise, permutations
from typing import Final, NamedTuple, Protocol

from shardwise.core.errors import InputError
from shardwise.core.layouts.uneven import balanced
from shardwise.core.mesh import PIPELINE
from shardwise.core.model_spec import Blocks, Operation
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import problems, schedule_of
from shardwise.core.plan.words import size_text
from shardwise.core.schedule.clock import ActionCosts, clock
from shardwise.core.schedule.library import allowed, entry
from shardwise.prediction.cluster import Cluster
from shardwise.prediction.prediction import Prediction
from shardwise.prediction.search.result import Candidate, RankedPlan, RefusedPlan
from shardwise.prediction.time.staged import StageSeconds, hop_s, least_makespan_s, stage_kernels
from shardwise.prediction.time.step_time import RankWork, precision, update_s

# --- uneven stages --------------------------------------------------------------------------------

#: Blocks move between stages if there are at most so many: every two are tried.
MOST_TRIED: Final = 16
#: A move makes the schedule shorter by this part at least, more than rounding.
LEAST: Final = 1e-6

Counts = tuple[int, ...]


class CutModel(Protocol):
    """Predictions of a model that is cut into stages."""

    def of(self, plan: Plan, rows: int, rank: int = 0) -> Prediction:
        """That of a rank, with microbatches of `rows` rows. Raises InputError if it cannot run."""
        ...

    def pieces(self, stages: int) -> int:
        """The number of blocks that so many stages divide; of layers if there are fewer blocks."""
        ...


def with_uneven_stages(candidate: Candidate, model: CutModel, cluster: Cluster) -> Candidate:
    """The pipeline plan with the blocks of each stage that its time asks for.
    Raises InputError for a model whose blocks cannot be stages.
    """
    plan, rows = candidate
    schedule = schedule_of(plan)
    assert schedule is not None
    pieces, stages = model.pieces(len(schedule.home)), len(schedule.home)
    axes = tuple((axis, pieces if axis == PIPELINE else size) for axis, size in plan.axes)
    finest = replace(plan, axes=axes, schedule="1f1b:1", stages=None, row="ddp", offload=None)
    of_block = stage_kernels(RankWork(model.of(finest, rows), cluster)).seconds
    hop = hop_s(RankWork(model.of(plan, rows), cluster))

    def makespan_s(counts: Counts) -> float:
        places = list(pairwise(accumulate(counts, initial=0)))
        found = {op: tuple(sum(own[a:b]) for a, b in places) for op, own in of_block.items()}
        return clock(schedule, ActionCosts(**found, hop=hop)).makespan

    weights = [forward + back for forward, back in zip(of_block["F"], of_block["B"], strict=True)]
    counts = tuple(b - a for a, b in pairwise((0, *balanced(weights, stages), pieces)))
    if stages <= MOST_TRIED:
        counts = _moved(counts, makespan_s)
    return candidate._replace(plan=replace(plan, stages=counts))


def _moved(counts: Counts, cost: Callable[[Counts], float]) -> Counts:
    least = cost(counts)
    while near := {other: cost(other) for other in _moves(counts)}:
        other = min(near, key=near.__getitem__)
        if near[other] >= least * (1 - LEAST):
            break
        counts, least = other, near[other]
    return counts


def _moves(counts: Counts) -> Iterator[Counts]:
    """The counts with one block less in a stage of several, and one more in another stage."""
    for giver, taker in permutations(range(len(counts)), 2):
        if counts[giver] > 1:
            changed = {giver: counts[giver] - 1, taker: counts[taker] + 1}
            yield tuple(changed.get(stage, count) for stage, count in enumerate(counts))


#: The least part of the bytes of kernels beside products that grows with the rows (norms' weights
#: do not).
SHARED: Final = 0.98
#: The first stage, which has the embedding, may have so many layers for one of the mean stage.
FIRST_STAGE: Final = 0.5
#: With so many microbatches for each stage, a schedule keeps as many of them as with more.
MICROBATCHES: Final = 4
#: The bits of a budget of activations.
BUDGET_BITS: Final = 8
#: A bound is this part of a sum whose terms are the prediction's, in another order.
ROUNDING: Final = 1 - 1e-9


class Recordings(CutModel, Protocol):
    """Predictions of one model under many plans; `blocks`: the list of its equal blocks, if any."""

    blocks: Blocks | None

    def one_stage(self, plan: Plan) -> Prediction:
        """That of one row on one data rank, without a pipeline, recomputed like `plan`."""
        ...


class RowCosts(NamedTuple):
    """The least costs of one row of the batch on a rank that has all stages.

    kernels_s   of kernels, and blocks_s of those in equal blocks
    moves_s     of moves within layers
    kept_bytes  by autograd
    numel       the trained parameters of the model, of all ranks
    states      that the optimizer has for each
    """

    kernels_s: float
    blocks_s: float
    moves_s: float
    kept_bytes: int
    numel: int
    states: int


class PlanCosts:
    """The memory and the time of plans. What many plans have in common is computed once."""

    def __init__(self, recordings: Recordings, cluster: Cluster) -> None:
        self.recordings, self.cluster = recordings, cluster
        self.rows = dict[object, RowCosts | InputError]()
        self.stored = dict[object, tuple[int, int]]()
        self.kept = dict[object, int]()
        self.between = dict[object, float]()
        self.passes = dict[object, float | StageSeconds]()

    def bound_s(self, candidate: Candidate) -> float:
        """The least time of a step: its kernels, the ramps of a pipeline, and bytes within layers.
        The ramps are those of equal stages, by the schedule's closed form, if no gradients are
        postponed. Some rank has at least the mean number of equal blocks, rounded up.
        """
        plan, rows = candidate
        stages, ramps = plan.mesh.size_of(PIPELINE), 1.0
        if plan.pipeline is not None:
            name, size = allowed(plan.pipeline, stages)
            ramps = 1.0 if name.startswith("zb") else entry(name).span(size) / size.work
        one = self._row(plan)
        moves_s = one.moves_s * (1.0 if stages == 1 else FIRST_STAGE)
        mean_s, blocks = (one.kernels_s * ramps + moves_s) / stages, self.recordings.blocks
        most = -(-blocks.number // stages) / blocks.number if blocks else 0.0
        return max(mean_s, most * one.blocks_s) * rows * plan.microbatches

    def step_bound_s(self, candidate: Candidate) -> float:
        """A larger bound: the step without waits for moves that overlap, of the slowest rank."""
        plan, rows = candidate
        stages = plan.pipeline and allowed(plan.pipeline, plan.mesh.size_of(PIPELINE))[1].v
        cut = stages, plan.stages
        key = plan.axes, plan.context, plan.sp, cut, plan.recompute, plan.tile, rows
        found = self.recordings.of(plan, rows)
        if key not in self.passes:
            work = RankWork(found, self.cluster)
            if plan.pipeline is None:
                inline = (sum(axes.values()) for axes in work.inline.values())
                self.passes[key] = work.compute_s + sum(inline)
            else:
                self.passes[key] = stage_kernels(work).seconds
        own = self.passes[key]
        if isinstance(own, Mapping):
            passes_s = least_makespan_s(found, own)
        else:
            passes_s = own * plan.microbatches
        key = plan.axes, plan.context, plan.sp, plan.row, plan.offload, cut
        if key not in self.between:
            after_s = sum(RankWork(found, self.cluster).after().values())
            self.between[key] = after_s + update_s(found, self.cluster)
        return ROUNDING * (passes_s + self.between[key])

    def ranked(self, candidate: Candidate) -> RankedPlan | RefusedPlan:
        """The memory and the time of a plan, or why it cannot run."""
        plan, rows = candidate
        try:
            peak_bytes = self.peak_bytes(candidate)
            if self.over(peak_bytes) > 0:
                return too_large(candidate, self.over(peak_bytes))
            time = self.recordings.of(plan, rows).step_time(self.cluster)
        except InputError as error:
            return RefusedPlan(plan, str(error), rows)
        return RankedPlan(plan, rows, time, peak_bytes, {})

    def faster(
        self, than: RankedPlan, changed: Callable[[Candidate], Candidate]
    ) -> RankedPlan | None:
        """The changed plan, if it fits and takes less time."""
        with suppress(InputError):
            found = self.ranked(changed(Candidate(than.plan, than.rows)))
            if isinstance(found, RankedPlan) and found.seconds < than.seconds:
                return found
        return None

    def with_budget(self, candidate: Candidate) -> Candidate:
        """The plan with the largest budget of activations that fits on its ranks."""
        plan, rows = candidate
        whole = candidate._replace(plan=replace(plan, recompute=None))
        most = max(found.activations for found in self._of_stages(whole))
        step = 2 ** max(0, most.bit_length() - BUDGET_BITS)

        def of_budget(steps: int) -> Candidate:
            return Candidate(replace(plan, recompute=size_text(steps * step)), rows)

        counts = range(1, most // step + 1)
        fit = bisect_left(counts, 1, key=lambda n: self.over(self.peak_bytes(of_budget(n))) > 0)
        return of_budget(max(1, fit))

    def with_whole_blocks(self, candidate: Candidate) -> Candidate:
        """The plan whose first blocks keep their parameters whole, as many as fit."""
        plan, rows = candidate
        blocks = self.recordings.blocks
        if blocks is None:
            return candidate

        def whole(number: int) -> Plan:
            names = f"{blocks.name}.0" + f"-{number - 1}" * (number > 1)
            return Plan.parse(f"{plan} | {names}: zero2")

        peak, one = (self.recordings.of(each, rows).device_peak for each in (plan, whole(1)))
        number = -self.over(peak) // max(1, one - peak)
        return Candidate(whole(min(number, blocks.number)), rows) if number > 0 else candidate

    def sent_bytes(self, ranked: RankedPlan) -> dict[str, int]:
        sent = Counter[str]()
        for line, sent_bytes in self.recordings.of(ranked.plan, ranked.rows).sent().items():
            sent[line.axis] += sent_bytes
        return dict(sent)

    def fits(self, candidate: Candidate) -> bool:
        """Whether a plan can run on devices of the cluster."""
        try:
            if problems(candidate.plan) or self.over(self.least_bytes(candidate)) > 0:
                return False
            return self.over_bytes(candidate) <= 0 and self.over(self.peak_bytes(candidate)) <= 0
        except InputError:
            return False

    def over_bytes(self, candidate: Candidate) -> int:
        """By how much a part of the peak exceeds a device's memory; negative if it does not.
        The part is what is stored between steps and what autograd keeps; of one microbatch without
        gradients, which backward makes.  The latter does not depend on the row of the states table,
        and the former not on microbatches and recomputation.
        """
        plan, rows = candidate
        over, line = 0, plan.mesh.line(PIPELINE, 0)
        for few in dict.fromkeys((1, rows)):  # a row of its own first, whose pass is recorded
            for rank in sorted({line[0], line[-1]}):
                kept = self._kept(Candidate(plan, few), rank) * (SHARED * rows if few < rows else 1)
                stored, gradients = self._stored(candidate, rank)
                freed = gradients if plan.microbatches == 1 else 0
                over = self.over(stored + max(0, int(kept) - freed))
                if over > 0:
                    return over
        return over

    def peak_bytes(self, candidate: Candidate) -> int:
        return max(found.device_peak for found in self._of_stages(candidate))

    def _of_stages(self, candidate: Candidate) -> list[Prediction]:
        plan, rows = candidate
        return [self.recordings.of(plan, rows, rank) for rank in plan.mesh.line(PIPELINE, 0)]

    def over(self, peak_bytes: int) -> int:
        return peak_bytes - self.cluster.device.memory_bytes

    def least_bytes(self, candidate: Candidate) -> int:
        """A lower bound of the peak memory, in closed form: stored states and kept activations.

        stored     by the states table, of equal parts of the parameters
        kept       stages r of p keep min(m, p - r) microbatches under 1f1b: if no rank keeps
                   more than K, all stages of one microbatch keep at most K times the sum of
                   the inverses
        """
        plan, rows = candidate
        one, stages = self._row(plan), plan.mesh.size_of(PIPELINE)
        parts = stages * plan.mesh.size_of("tp") * plan.ep
        states = 4 * (1 + one.states)
        n = plan.size / (stages * plan.mesh.size_of("tp"))
        by_row = {"ddp": 4 + states, "zero1": 4 + states / n, "zero2": 2 + (2 + states) / n}
        stored = one.numel / parts * by_row.get(plan.row, (4 + states) / n)
        ranks: Iterable[int] = range(1, stages + 1)
        if (plan.pipeline or "").startswith("interleaved"):
            ranks = [1] * stages
        kept = SHARED * rows * one.kept_bytes
        kept /= sum(1 / min(alive, plan.microbatches) for alive in ranks)
        if plan.offload:
            return int(kept)
        if plan.microbatches == 1:  # backward makes the gradients, and frees what is kept
            kept -= one.numel / parts * 2 / (n if plan.row in ("zero2", "zero3") else 1)
        return int(max(stored, kept) if stages > 1 else stored + max(0, kept))

    def _row(self, plan: Plan) -> RowCosts:
        key = plan.mesh.size_of("tp"), plan.cp, plan.recompute
        if key not in self.rows:
            try:
                self.rows[key] = self._least(self.recordings.one_stage(plan))
            except InputError as error:
                self.rows[key] = error
        found = self.rows[key]
        if isinstance(found, InputError):
            raise found
        return found

    def _least(self, found: Prediction) -> RowCosts:
        """The costs of a recorded row, without weights, launches and latencies that rows share."""
        fast = {name: getattr(self.cluster, name) for name in ("inside", "between")}
        fast = {name: link.model_copy(update={"latency_s": 0.0}) for name, link in fast.items()}
        work = RankWork(found, self.cluster.model_copy(update=fast))
        every, blocks = work.operations, self.recordings.blocks
        inside = [x for x in every if blocks and x.module.startswith(f"{blocks.name}.")]
        kernels_s, blocks_s = self._growing_s(every), self._growing_s(inside)
        moves_s = sum(sum(axes.values()) for axes in work.inline.values())
        numel = sum(p.numel for p in found.spec.shape.params if p.trainable)
        return RowCosts(
            kernels_s, blocks_s, moves_s, found.activations, numel, found.optimizer.states
        )

    def _growing_s(self, operations: Sequence[Operation]) -> float:
        products = [each for each in operations if each.done_flops]
        computing_s = sum(x.done_flops / self.cluster.flops_per_s(precision(x)) for x in products)
        moved_bytes = sum(each.moved_bytes for each in operations if not each.done_flops)
        return computing_s + SHARED * moved_bytes / self.cluster.bytes_per_s

    def _stored(self, candidate: Candidate, rank: int) -> tuple[int, int]:
        plan = candidate.plan
        chunks = plan.pipeline and allowed(plan.pipeline, plan.mesh.size_of(PIPELINE))[1].v
        key = plan.axes, plan.context, plan.row, plan.offload, chunks, plan.stages, rank
        if key not in self.stored:
            memory = self.recordings.of(plan, 1, rank).memory
            self.stored[key] = sum(memory.values()), memory["gradients"]
        return self.stored[key]

    def _kept(self, candidate: Candidate, rank: int) -> int:
        plan, rows = candidate
        if plan.pipeline is not None:  # more microbatches keep as much
            _, size = allowed(plan.pipeline, plan.mesh.size_of(PIPELINE))
            enough = min(size.m, MICROBATCHES * size.p)
            plan = replace(plan, schedule=plan.pipeline.replace(f":{size.m}", f":{enough}", 1))
        key = replace(plan, row="ddp", offload=None, accumulate=1), rows, rank
        if key not in self.kept:
            self.kept[key] = self.recordings.of(plan, rows, rank).activations
        return self.kept[key]


def too_large(candidate: Candidate, over: int) -> RefusedPlan:
    reason = f"it does not fit: at least {over:,} bytes more than a device has"
    return RefusedPlan(candidate.plan, reason, candidate.rows, over)
