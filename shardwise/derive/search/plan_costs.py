"""The memory and the time of the plans of a search: in closed form, and predicted.

    kernels     those of one row of a rank with all stages, times rows, over stages; the ramps of
                the schedule's bubble; recorded for each size of tp and cp, on few of equal blocks
    exchanged   bytes within layers, of the same record; and those of the row of the states table,
                2 N for ddp to zero2 and 3 N for zero3 in each microbatch (arXiv 1910.02054), of
                which what is longer than the kernels is exposed
    stored      by the states table, of equal parts of the parameters; and what autograd keeps

A prediction records the model's own pass, and takes its memory from dry runs (observe/).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from shardwise.core.errors import InputError
from shardwise.core.layouts.uneven import Counts
from shardwise.core.mesh import PIPELINE, TENSOR
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.words import size_text
from shardwise.core.schedule.library import allowed, entry
from shardwise.core.zero import ROWS, bytes_per_parameter
from shardwise.derive.search.result import Candidate, RankedPlan, RefusedPlan
from shardwise.prediction.cluster import Cluster
from shardwise.prediction.prediction import Operation, Prediction
from shardwise.prediction.time.network import Network, precision
from shardwise.prediction.time.step_time import StepTime

if TYPE_CHECKING:
    from shardwise.derive.plan_search import SearchedModel

#: The least part of the bytes of kernels beside products that grows with the rows (norms' weights
#: do not).
SHARED: Final = 0.98
#: The bytes of a parameter, and of its gradient, in bf16.
SHORT_BYTES: Final = 2
#: The blocks of the smallest stage in copies of a deep model, whose costs continue along a line.
DEPTHS: Final = (2, 3)
#: Under zero3: units are gathered ahead, so the first blocks take other memory than later ones.
GATHERED: Final = (4, 5)
#: A rank whose bound of the memory is at least this part of the largest one may store most.
NEAR: Final = 0.9
#: A budget of activations is found in so many predictions.
BUDGETS: Final = 2


class RowCosts(NamedTuple):
    """The costs of one row of the batch on a rank that has all stages.

    kernels_s   of kernels
    moves_s     of moves within layers
    kept_bytes  by autograd
    numel       the trained parameters of the model, of all ranks
    """

    kernels_s: float
    moves_s: float
    kept_bytes: float
    numel: float


def _weighted(*parts: tuple[float, RowCosts]) -> RowCosts:
    every = [[weight * cost for cost in costs] for weight, costs in parts]
    return RowCosts(*map(sum, zip(*every, strict=True)))


class ModelCosts(NamedTuple):
    """The costs of a model and of its equal blocks; the optimizer states of a parameter."""

    whole: RowCosts
    blocks: RowCosts
    states: int


class Copy(NamedTuple):
    """A plan for a copy of the model with `depth` blocks, and its weight in a sum over copies."""

    weight: float
    plan: Plan
    depth: int | None = None


class PlanCosts:
    """The memory and the time of plans. What many plans have in common is computed once."""

    def __init__(self, model: "SearchedModel", cluster: Cluster) -> None:
        self.model, self.cluster, self.room = model, cluster, cluster.device.memory_bytes
        self.found, self.ratios = dict[object, Any](), list[float]()

    def estimate_s(self, candidate: Candidate) -> float:
        """The time of a step in closed form, with the ramps of equal stages and exposed bytes."""
        plan, rows = candidate
        stages, ramps = plan.mesh.size_of(PIPELINE), 1.0
        if plan.pipeline is not None:
            name, size = allowed(plan.pipeline, stages)
            ramps = entry(name).span(size) / size.work
        (one, inside, _), blocks = self._row(plan), self.model.blocks
        mean_s = (one.kernels_s + one.moves_s) / stages
        most = -(-blocks.number // stages) / blocks.number if blocks else 0.0
        passes_s = max(mean_s, most * (inside.kernels_s + inside.moves_s)) * ramps
        passes_s *= rows * plan.microbatches / plan.cp
        return passes_s + self._between_s(plan, passes_s)

    def _between_s(self, plan: Plan, passes_s: float) -> float:
        """The seconds of the states: exchanged beyond the kernels, and updated."""
        (one, _, states), axis = self._row(plan), plan.inner_data_axis
        parts = plan.mesh.size_of(PIPELINE) * plan.mesh.size_of(TENSOR) * plan.ep
        n = plan.mesh.size_of(axis)
        own_bytes = SHORT_BYTES * one.numel / parts * (n - 1) / n
        rate, runs = Network(self.cluster, plan, 0).rate(axis, "all_gather"), plan.accumulate
        runs = plan.microbatches if plan.row == "zero3" else runs
        gathers, sums = {"zero3": (2 * runs, runs), "zero2": (1, runs)}.get(plan.row, (1, 1))
        moves_s = own_bytes * (gathers + sums) / rate if n > 1 else 0.0
        after_s = 0.0 if plan.row == "zero3" or n == 1 else own_bytes / rate
        updated = one.numel / parts * 4 * (1 + states) / (1 if plan.row == "ddp" else n)
        updates_s = 2 * updated / self.cluster.bytes_per_s
        return max(after_s, moves_s - self.cluster.device.overlap * passes_s) + updates_s

    def ranked(
        self, candidate: Candidate, copies: list[Copy] | None = None
    ) -> RankedPlan | RefusedPlan:
        """The predicted memory and time of a plan, or why it cannot run; a sum over copies."""
        try:
            if copies is not None:
                return self._ranked(candidate, copies)
            return self._once(candidate, lambda: self._ranked(candidate, self._copies(candidate)))
        except InputError as error:
            return RefusedPlan(candidate.plan, str(error), candidate.rows)

    def _ranked(self, candidate: Candidate, copies: list[Copy]) -> RankedPlan | RefusedPlan:
        (plan, rows), peak_bytes, kept_bytes = candidate, 0.0, 0.0
        for place in self._places(candidate):
            found = [
                self.model.of(each.plan, rows, each.plan.mesh.line(PIPELINE, 0)[place], each.depth)
                for each in copies
            ]
            peak_bytes = max(peak_bytes, _sum(copies, [each.device_peak for each in found]))
            kept_bytes = max(kept_bytes, _sum(copies, [each.activations for each in found]))
            self.ratios.append(peak_bytes / max(1, self.least_bytes(candidate)))
            if (over := int(peak_bytes) - self.room) > 0:
                return too_large(candidate, over)
        firsts = [self.model.of(each.plan, rows, depth=each.depth) for each in copies]
        time, sent = self._time(copies, firsts), self._sent(copies, firsts)
        return RankedPlan(plan, rows, time, int(peak_bytes), sent, int(kept_bytes))

    def _time(self, copies: list[Copy], found: list[Prediction]) -> StepTime:
        times = [each.step_time(self.cluster) for each in found]
        names = ("compute_s", "bubble_s", "update_s", "flops")
        sums = {name: _sum(copies, [getattr(each, name) for each in times]) for name in names}
        exposed_s = _sums(copies, [each.exposed_s for each in times])
        return replace(times[-1], exposed_s=exposed_s, **sums)

    def _sent(self, copies: list[Copy], found: list[Prediction]) -> dict[str, int]:
        sent = [Counter[str]() for _ in found]
        for own, each in zip(sent, found, strict=True):
            for line, sent_bytes in each.sent().items():
                own[line.axis] += sent_bytes
        return {axis: round(n) for axis, n in _sums(copies, sent).items()}

    def _copies(self, candidate: Candidate) -> list[Copy]:
        """What is predicted in place of a deep model: numbers are linear in its blocks."""
        plan, blocks = candidate.plan, self.model.blocks
        counts = self._counts(plan)
        if blocks is None or plan.layers or sum(counts) != blocks.number:
            return [Copy(1.0, plan)]
        if plan.recompute_budget_bytes:
            return self._copies_of_budget(candidate, blocks.number)
        few, more = GATHERED if plan.row == "zero3" else DEPTHS
        least = min(counts)
        if len(counts) * (2 * least - few - more) < blocks.number:
            return [Copy(1.0, plan)]
        found = list[Copy]()
        for depth, weight in _line(few, more, least).items():
            own = tuple(n - least + depth for n in counts)
            changed = replace(plan, stages=own if plan.pipeline else None)
            found.append(Copy(weight, changed, sum(own)))
        return found

    def _copies_of_budget(self, candidate: Candidate, number: int) -> list[Copy]:
        """Copies that recompute all blocks in one of two ways, weighted by the blocks of each."""
        (plan, rows), budget = candidate, candidate.plan.recompute_budget_bytes
        if plan.pipeline is not None:
            return [Copy(1.0, plan)]
        before, more = list[Copy](), 0.0
        for kind in (None, "selective", "full"):
            copies = self._copies(Candidate(replace(plan, recompute=kind), rows))
            found = [self.model.of(each.plan, rows, depth=each.depth) for each in copies]
            kept = _sum(copies, [each.activations for each in found])
            if kept <= budget or kind == "full":
                part = (budget - kept) // ((more - kept) / number) / number if before else 0.0
                return [*_times(1 - part, copies), *_times(part, before)]
            before, more = copies, kept
        raise AssertionError("full recomputation is the last")

    def _counts(self, plan: Plan) -> Counts:
        if plan.pipeline is None:
            return (self.model.blocks.number if self.model.blocks else 0,)
        size = allowed(plan.pipeline, plan.mesh.size_of(PIPELINE))[1]
        stages = size.p * size.v
        return plan.stages or self._once(stages, lambda: self.model.counts(stages))

    def _places(self, candidate: Candidate) -> list[int]:
        """The pipeline ranks that may store most, the likeliest first, then the ends."""
        found = self._by_place(candidate)
        most = max(found, key=found.__getitem__)
        if len({*found.values()}) == 1:
            return [*found]
        ends = [rank for rank in (min(found), max(found)) if rank != most]
        return [most, *(rank for rank in ends if found[rank] >= NEAR * found[most])]

    def with_budget(self, candidate: Candidate) -> Candidate:
        """The plan with the largest budget of activations that fits, by a few predictions."""
        plan, rows = candidate
        best, last = candidate, self.ranked(candidate)
        assert isinstance(last, RankedPlan)
        budget = last.kept_bytes + self.room - last.peak_bytes
        for _ in range(BUDGETS):
            own = Candidate(replace(plan, recompute=size_text(budget)), rows)
            found = self.ranked(own)
            if isinstance(found, RankedPlan):
                best, budget = own, budget + self.room - found.peak_bytes
            else:
                budget -= found.over_bytes
        return best

    def least_bytes(self, candidate: Candidate) -> int:
        """A lower bound of the peak memory, in closed form."""
        return int(max(self._by_place(candidate).values()))

    def _by_place(self, candidate: Candidate) -> dict[int, float]:
        """That of each pipeline rank that may store most: stored states and kept activations.

        stored     by the states table, of its parameters
        kept       of a_r microbatches (schedule/library.py); where blocks differ: if no rank keeps
                   more than K, all stages of one microbatch keep at most K times the sum of 1 / a_r
        """
        plan, rows = candidate
        (one, inside, states), ranks = self._row(plan), plan.mesh.size_of(PIPELINE)
        row_kept = SHARED * rows / plan.cp
        if plan.pipeline is None:
            return {0: self._stored(plan, one.numel, states, row_kept * one.kept_bytes)}
        name, size = allowed(plan.pipeline, ranks)
        alive, counts = [n / size.v for n in entry(name).tapes(size)], self._counts(plan)
        ends, blocks = {0, ranks - 1}, self.model.blocks
        if blocks is None or sum(counts) != blocks.number:
            kept = row_kept * one.kept_bytes / sum(1 / each for each in alive)
            least = max(kept, self._stored(plan, one.numel / ranks, states, 0.0))
            return dict.fromkeys(range(ranks) if plan.stages else ends, least)
        found = dict[int, float]()
        for rank in range(ranks):
            part = sum(counts[rank::ranks]) / blocks.number
            numel = part * inside.numel + (one.numel - inside.numel) / 2 * (rank in ends)
            kept = part * alive[rank] * inside.kept_bytes
            kept += (one.kept_bytes - inside.kept_bytes) * (rank == ranks - 1)
            found[rank] = self._stored(plan, numel, states, row_kept * kept)
        return found

    def _stored(self, plan: Plan, numel: float, states: int, kept: float) -> float:
        """The bytes of `numel` parameters by the states table, and those that autograd keeps."""
        numel /= plan.mesh.size_of(TENSOR) * plan.ep
        n = plan.size // (plan.mesh.size_of(PIPELINE) * plan.mesh.size_of(TENSOR))
        if plan.microbatches == 1 and not plan.offload:
            # backward makes the gradients, and frees what is kept
            kept = max(0.0, kept - numel * 2 / (n if plan.row in ("zero2", "zero3") else 1))
        if plan.offload == "param":
            return kept
        sums, wide = (0, 0) if plan.offload else (SHORT_BYTES, 4 * (1 + states))
        stored = bytes_per_parameter(ROWS[plan.row], n, SHORT_BYTES, sums, wide)
        if plan.pipeline is not None and plan.row in ("zero2", "zero3"):
            stored += sums  # gradients of a stage are summed at its end
        return numel * stored + kept

    def _row(self, plan: Plan) -> ModelCosts:
        if plan.recompute_budget_bytes:
            plan = replace(plan, recompute=None)
        key = plan.mesh.size_of(TENSOR), plan.cp, plan.recompute
        return self._once(key, lambda: self._one_row(plan))

    def _once(self, key: object, make: Callable[[], Any]) -> Any:
        """What `make` returns, or the InputError that it raises, found once for a key."""
        if key not in self.found:
            try:
                self.found[key] = make()
            except InputError as error:
                self.found[key] = error
        if isinstance(self.found[key], InputError):
            raise self.found[key]
        return self.found[key]

    def _one_row(self, plan: Plan) -> ModelCosts:
        """The costs of the model, on the line through those of copies."""
        (few, more), blocks = DEPTHS, self.model.blocks
        state = self.model.options.spec.first_state(0, (2, 3), torch.float32).values()
        states = sum(isinstance(x, Tensor) and x.shape == (2, 3) for x in state)
        first = self._costs(self.model.one_row(plan, few if blocks else None))
        if blocks is None:
            return ModelCosts(first, _weighted((0.0, first)), states)
        if plan.recompute:
            plain = self._row(replace(plan, recompute=None))
            inside = _weighted((1.0, first), (-1.0, plain.whole), (1.0, plain.blocks))
            block = _weighted((1 / few, inside))
        else:
            second = self._costs(self.model.one_row(plan, more))
            block = _weighted((1 / (more - few), second), (-1 / (more - few), first))
        whole = _weighted((1.0, first), (blocks.number - few, block))
        return ModelCosts(whole, _weighted((blocks.number, block)), states)

    def _costs(self, found: Prediction) -> RowCosts:
        """The costs of a recorded row, without weights, launches and latencies that rows share."""
        fast = {name: getattr(self.cluster, name) for name in ("inside", "between")}
        fast = {name: link.model_copy(update={"latency_s": 0.0}) for name, link in fast.items()}
        network = Network(self.cluster.model_copy(update=fast), found.plan, found.rank)
        step = found.dry_step
        sent = {key: n for key, n in step.sent.items() if key.phase in ("forward", "backward")}
        moves_s = sum(network.seconds(sent).values())
        operations = [each for each in step.issued if isinstance(each, Operation)]
        numel = sum(step.trained) * found.plan.mesh.size_of(TENSOR)
        return RowCosts(self._growing_s(operations), moves_s, found.activations, numel)

    def _growing_s(self, operations: Sequence[Operation]) -> float:
        products = [each for each in operations if each.done_flops]
        computing_s = sum(x.done_flops / self.cluster.flops_per_s(precision(x)) for x in products)
        moved_bytes = sum(each.moved_bytes for each in operations if not each.done_flops)
        return computing_s + SHARED * moved_bytes / self.cluster.bytes_per_s


def _times(part: float, copies: Iterable[Copy]) -> list[Copy]:
    return [each._replace(weight=part * each.weight) for each in copies]


def _line(a: int, b: int, at: int) -> dict[int, float]:
    """The weights of the values at a and b of a linear function, whose sum is that at `at`."""
    return {a: (b - at) / (b - a), b: (at - a) / (b - a)}


def _sum(copies: Iterable[Copy], values: Iterable[float]) -> float:
    return max(0.0, sum(each.weight * x for each, x in zip(copies, values, strict=True)))


def _sums(copies: Iterable[Copy], values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    every = dict.fromkeys(axis for each in values for axis in each)
    return {axis: _sum(copies, [each.get(axis, 0) for each in values]) for axis in every}


def too_large(candidate: Candidate, over: int) -> RefusedPlan:
    reason = f"it does not fit: at least {over:,} bytes more than a device has"
    return RefusedPlan(candidate.plan, reason, candidate.rows, over)
