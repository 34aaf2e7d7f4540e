"""The memory and the time of the plans of a search: in closed form, and predicted.

    kernels     those of one row of a rank with all stages, times rows, over stages; the ramps of
                the schedule's bubble; recorded for each size of tp and cp, on few of equal blocks
    exchanged   bytes within layers, of the same record; and those of the row of the states table,
                2 N for ddp to zero2 and 3 N for zero3 in each microbatch (arXiv 1910.02054), of
                which what is longer than the kernels is exposed
    stored      by the states table, of equal parts of the parameters; and what autograd keeps

A prediction records the model's own pass, and takes its memory from dry runs (observe/).

    blocks        b0    b1    b2    b3 + head       seconds 1 1 1 5
    even          b0    b1  | b2    b3 + head       slowest stage 6
    stages:3,1    b0    b1    b2  | b3 + head       slowest stage 5

The planner of DAPPLE (arXiv 2007.01045) divides layers by their measured time.  Here the seconds of
a block are predicted, those of a stage of the same plan with a stage for each block.  First an
exact partition makes the slowest stage as fast as possible (core/layouts/uneven.py).  Then blocks
move from one stage to another while that makes the schedule shorter, by its clock: of several
stages a rank, the slowest one does not decide alone.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise, permutations
from typing import Final, NamedTuple, Protocol

from shardwise.core.errors import InputError
from shardwise.core.layouts.uneven import balanced
from shardwise.core.mesh import PIPELINE, TENSOR
from shardwise.core.model_spec import Blocks, Operation
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import schedule_of
from shardwise.core.plan.words import size_text
from shardwise.core.schedule.clock import ActionCosts, clock
from shardwise.core.schedule.library import allowed, entry
from shardwise.prediction.cluster import Cluster
from shardwise.prediction.prediction import Prediction
from shardwise.prediction.search.result import Candidate, RankedPlan, RefusedPlan
from shardwise.prediction.time.staged import hop_s, stage_kernels
from shardwise.prediction.time.step_time import Network, RankWork, precision

# --- uneven stages --------------------------------------------------------------------------------

#: Blocks move between stages if there are at most so many: every two are tried.
MOST_TRIED: Final = 16
#: A move makes the schedule shorter by this part at least, more than rounding.
LEAST: Final = 1e-6

Counts = tuple[int, ...]


class CutModel(Protocol):
    """Predictions of a model that is cut into stages."""

    def of(self, plan: Plan, rows: int, rank: int = 0, depth: int | None = None) -> Prediction:
        """That of a rank, with microbatches of `rows` rows, of a copy with `depth` blocks.
        Raises InputError if it cannot run.
        """
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
#: The bytes of a parameter, and of its gradient, in bf16.
SHORT_BYTES: Final = 2
#: The depths of the copies of a deep model whose costs continue along a line.
DEPTHS: Final = (2, 3)
#: Under zero3: units are gathered ahead, so the first blocks take other memory than later ones.
GATHERED: Final = (4, 5)
#: A budget of activations is found in so many predictions.
BUDGETS: Final = 4


class PredictedModel(CutModel, Protocol):
    """Predictions of one model under many plans; `blocks`: the list of its equal blocks, if any."""

    blocks: Blocks | None

    def one_row(self, plan: Plan, depth: int | None) -> Prediction:
        """That of one row on one data rank, without a pipeline, on the axes within layers of
        `plan`, recomputed like it; of a copy with `depth` blocks.
        """
        ...


class RowCosts(NamedTuple):
    """The costs of one row of the batch on a rank that has all stages.

    kernels_s   of kernels, and blocks_s of those in equal blocks
    moves_s     of moves within layers
    kept_bytes  by autograd
    numel       the trained parameters of the model, of all ranks
    states      that the optimizer has for each
    """

    kernels_s: float
    blocks_s: float
    moves_s: float
    kept_bytes: float
    numel: float
    states: float


class PlanCosts:
    """The memory and the time of plans. What many plans have in common is computed once."""

    def __init__(self, model: PredictedModel, cluster: Cluster) -> None:
        self.model, self.cluster = model, cluster
        self.rows = dict[object, RowCosts | InputError]()
        self.known = dict[Candidate, RankedPlan | RefusedPlan]()

    def estimate_s(self, candidate: Candidate) -> float:
        """The time of a step in closed form: kernels and the ramps of equal stages, bytes within
        layers, and what is longer than the kernels of the bytes of the row of the states table.
        """
        plan, rows = candidate
        stages, ramps = plan.mesh.size_of(PIPELINE), 1.0
        if plan.pipeline is not None:
            name, size = allowed(plan.pipeline, stages)
            ramps = entry(name).span(size) / size.work
        one, blocks = self._row(plan), self.model.blocks
        mean_s = (one.kernels_s + one.moves_s) / stages
        most = -(-blocks.number // stages) / blocks.number if blocks else 0.0
        passes_s = max(mean_s, most * (one.blocks_s + one.moves_s)) * ramps
        passes_s *= rows * plan.microbatches
        return passes_s + self._between_s(plan, passes_s)

    def _between_s(self, plan: Plan, passes_s: float) -> float:
        """The seconds of the states: exchanged beyond the kernels, and updated."""
        one, axis = self._row(plan), plan.inner_data_axis
        parts = plan.mesh.size_of(PIPELINE) * plan.mesh.size_of(TENSOR) * plan.ep
        n = plan.mesh.size_of(axis)
        own_bytes = SHORT_BYTES * one.numel / parts * (n - 1) / n
        rate, runs = Network(self.cluster, plan, 0).rate(axis, "all_gather"), plan.accumulate
        gathers, sums = {"zero3": (2 * runs, runs), "zero2": (1, runs)}.get(plan.row, (1, 1))
        moves_s = own_bytes * (gathers + sums) / rate if n > 1 else 0.0
        after_s = 0.0 if plan.row == "zero3" or n == 1 else own_bytes / rate
        states = one.numel / parts * 4 * (1 + one.states)
        updates_s = 2 * states / (1 if plan.row == "ddp" else n) / self.cluster.bytes_per_s
        return max(after_s, moves_s - self.cluster.device.overlap * passes_s) + updates_s

    def ranked(self, candidate: Candidate) -> RankedPlan | RefusedPlan:
        """The predicted memory and time of a plan, or why it cannot run."""
        if candidate not in self.known:
            self.known[candidate] = self._ranked(candidate)
        return self.known[candidate]

    def _ranked(self, candidate: Candidate) -> RankedPlan | RefusedPlan:
        try:
            times, depths = self._depths(candidate.plan)
            few, *more = [self._predicted(candidate, depth) for depth in depths]
        except InputError as error:
            return RefusedPlan(candidate.plan, str(error), candidate.rows)
        found = _continued(few, more[0], times) if more else few
        over = self.over(found.peak_bytes)
        return too_large(candidate, over) if over > 0 else found

    def _predicted(self, candidate: Candidate, depth: int | None) -> RankedPlan:
        """The memory and the time of a copy with `depth` blocks. Raises InputError."""
        plan, rows = candidate
        peak_bytes = max(found.device_peak for found in self._of_stages(candidate, depth))
        found, sent = self.model.of(plan, rows, depth=depth), Counter[str]()
        for line, sent_bytes in found.sent().items():
            sent[line.axis] += sent_bytes
        return RankedPlan(plan, rows, found.step_time(self.cluster), peak_bytes, dict(sent))

    def _depths(self, plan: Plan) -> tuple[int, list[int | None]]:
        """How many blocks two copies have that are predicted in place of a deep model with equal
        stages, and how often their difference is added to the larger copy; 0, [None]: no copies.
        """
        blocks, schedule = self.model.blocks, schedule_of(plan)
        stages = 1 if schedule is None else len(schedule.home)
        equal = not plan.recompute_budget_bytes and not plan.layers and plan.stages is None
        if blocks is None or not equal or blocks.number % stages:
            return 0, [None]
        depths = GATHERED if plan.row == "zero3" else DEPTHS
        if blocks.number < sum(depths) * stages:  # the model itself takes no longer
            return 0, [None]
        return blocks.number // stages - depths[1], [n * stages for n in depths]

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
        """The plan with the largest budget of activations that fits on its ranks: the memory that
        is free with the last one is added to it, or what is too much taken from it.
        """
        plan, rows = candidate
        best, room = candidate, self.cluster.device.memory_bytes
        budget = max(found.activations for found in self._of_stages(candidate))
        budget += room - self.peak_bytes(candidate)
        for _ in range(BUDGETS):
            own = Candidate(replace(plan, recompute=size_text(budget)), rows)
            free = room - self.peak_bytes(own)
            best = own if free >= 0 else best
            budget += free
        return best

    def with_whole_blocks(self, candidate: Candidate) -> Candidate:
        """The plan whose first blocks keep their parameters whole, as many as fit."""
        plan, rows = candidate
        blocks = self.model.blocks
        if blocks is None:
            return candidate

        def whole(number: int) -> Plan:
            names = f"{blocks.name}.0" + f"-{number - 1}" * (number > 1)
            return Plan.parse(f"{plan} | {names}: zero2")

        peak, one = (self.model.of(each, rows).device_peak for each in (plan, whole(1)))
        number = -self.over(peak) // max(1, one - peak)
        return Candidate(whole(min(number, blocks.number)), rows) if number > 0 else candidate

    def fits(self, candidate: Candidate) -> bool:
        """Whether a plan can run on devices of the cluster."""
        return isinstance(self.ranked(candidate), RankedPlan)

    def peak_bytes(self, candidate: Candidate) -> int:
        return max(found.device_peak for found in self._of_stages(candidate))

    def _of_stages(self, candidate: Candidate, depth: int | None = None) -> list[Prediction]:
        """Of equal stages the first, which keeps most microbatches, and the last, with the loss."""
        plan, rows = candidate
        line = plan.mesh.line(PIPELINE, 0)
        ranks = line if plan.stages is not None else [*dict.fromkeys((line[0], line[-1]))]
        return [self.model.of(plan, rows, rank, depth) for rank in ranks]

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
        parts = stages * plan.mesh.size_of(TENSOR) * plan.ep
        states = 4 * (1 + one.states)
        n = plan.size / (stages * plan.mesh.size_of(TENSOR))
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
        key = plan.mesh.size_of(TENSOR), plan.cp, plan.recompute
        if key not in self.rows:
            try:
                self.rows[key] = self._one_row(plan)
            except InputError as error:
                self.rows[key] = error
        found = self.rows[key]
        if isinstance(found, InputError):
            raise found
        return found

    def _one_row(self, plan: Plan) -> RowCosts:
        blocks = self.model.blocks
        if blocks is None:
            return self._costs(self.model.one_row(plan, None))
        few, more = (self._costs(self.model.one_row(plan, depth)) for depth in DEPTHS)
        times = blocks.number - DEPTHS[1]
        return RowCosts(*(b + times * (b - a) for a, b in zip(few, more, strict=True)))

    def _costs(self, found: Prediction) -> RowCosts:
        """The costs of a recorded row, without weights, launches and latencies that rows share."""
        fast = {name: getattr(self.cluster, name) for name in ("inside", "between")}
        fast = {name: link.model_copy(update={"latency_s": 0.0}) for name, link in fast.items()}
        work = RankWork(found, self.cluster.model_copy(update=fast))
        every, blocks = work.operations, self.model.blocks
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


def _continued(few: RankedPlan, more: RankedPlan, times: int) -> RankedPlan:
    """The numbers of a deep model along the line through those of two copies with fewer blocks."""

    def at(a: float, b: float) -> float:
        return max(0.0, b + times * (b - a))

    def each(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
        return {axis: at(a.get(axis, 0), b.get(axis, 0)) for axis in {**a, **b}}

    first, last = few.time, more.time
    time = replace(
        last,
        compute_s=at(first.compute_s, last.compute_s),
        exposed_s=each(first.exposed_s, last.exposed_s),
        bubble_s=at(first.bubble_s, last.bubble_s),
        update_s=at(first.update_s, last.update_s),
        flops=at(first.flops, last.flops),
    )
    sent = {axis: int(n) for axis, n in each(few.sent_bytes, more.sent_bytes).items()}
    return RankedPlan(more.plan, more.rows, time, int(at(few.peak_bytes, more.peak_bytes)), sent)


def too_large(candidate: Candidate, over: int) -> RefusedPlan:
    reason = f"it does not fit: at least {over:,} bytes more than a device has"
    return RefusedPlan(candidate.plan, reason, candidate.rows, over)
