"""The predictions of one model under many plans, from few recorded passes.

They are `sw.predict`'s, except that a tensor between two stages is taken to have as many elements
as its microbatch has rows, times those of one row. Deep models of copies are recorded with few of
their equal blocks (repeated.py).
"""

from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwise.core.errors import InputError
from shardwise.core.mesh import PIPELINE, TENSOR
from shardwise.core.model_spec import ModelPass, ModelShape, ModelSpec, StageSpec
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import schedule_of
from shardwise.derive.repeated import NotLinearError, equal_blocks, repeated, shortened
from shardwise.derive.table import table_or_derived
from shardwise.engine.model_structure import SharedParts
from shardwise.engine.options import EngineOptions
from shardwise.engine.predict import Predictor, notes_of
from shardwise.engine.spec_of_model import (
    MicrobatchCuts,
    StagedLayout,
    plain_copy,
    recomputed_kinds,
    stage_cuts,
    stage_places,
    structure,
)
from shardwise.observe.meta_pass import UNKNOWN
from shardwise.prediction.prediction import Prediction
from shardwise.prediction.rank_shape import parts_on, shape_on

#: The plan whose precision and options all predictions share.
PLAIN: Final = Plan(precision="bf16")


class RecordedPass(NamedTuple):
    """A prediction of one microbatch, its pass, and that of the plain model, for tensor ranks."""

    prediction: Prediction
    run: ModelPass
    plain: ModelPass


class RecordedModel:
    """The recorded passes of a model, and the predictions that are made of them."""

    def __init__(self, model: nn.Module, batch: Any, options: EngineOptions) -> None:
        self.model, self.batch, self.options = model, batch, options
        self.plain = plain_copy(model, PLAIN)
        self.blocks, self.known = equal_blocks(model), SharedParts()
        self.short = dict[int, nn.Module]()
        self.linear = dict[Plan, bool]()
        self.passes = dict[object, RecordedPass | InputError]()
        self.structures = dict[object, ModelSpec | InputError]()
        self.cuts = dict[object, MicrobatchCuts | InputError]()
        self.shapes = dict[object, ModelShape | InputError]()
        self.tables = dict[object, Any]()
        self.kinds = dict[object, dict[str, str] | InputError]()

    def of(self, plan: Plan, rows: int, rank: int = 0) -> Prediction:
        """The prediction of a rank, with microbatches of `rows` rows. Raises InputError."""
        structure, one = self._structure(plan), self.recorded(plan, rows)
        runs = plan.microbatches
        tensors = structure.tensors and replace(structure.tensors, runs=(one.plain,) * runs)
        spec = replace(
            structure,
            run=one.run,
            tensors=tensors,
            stages=structure.stages and _with_rows(structure.stages, rows, runs),
            expert_moves=(one.plain.moves,) * runs,
            row_gathers=(one.run.rows,) * runs,
            recomputed={},
        )
        if plan.recompute:
            kinds = dict.fromkeys(structure.recomputed, plan.recompute)
            chosen = id(structure), id(one), plan
            kinds = _once(self.kinds, chosen, lambda: recomputed_kinds(spec, plan, kinds))
            spec = replace(spec, recomputed=kinds)
        schedule = plan.schedule if plan.row == "zero3" and spec.stages else None
        stages = spec.stages and (plan.stages or spec.stages.number)
        key = plan.axes, plan.context, plan.sp, plan.row, plan.offload, plan.layers
        key = *key, stages, schedule, rank
        own = id(structure), plan.row, plan.offload

        def made() -> ModelShape:
            parts = self.known(own, lambda: parts_on(spec, plan, rank).shape)
            return shape_on(spec, plan, rank, parts=parts)

        shape = _once(self.shapes, key, made)
        notes = notes_of(one.run.note, plan)
        return replace(one.prediction, plan=plan, rank=rank, spec=spec, model=shape, notes=notes)

    def pieces(self, stages: int) -> int:
        """Blocks, or else layers, that so many stages divide. Raises InputError for fewer."""
        return len(stage_places(self.plain, self.options, self.known, stages))

    def one_stage(self, plan: Plan) -> Prediction:
        alone = replace(self._alone(plan), recompute=plan.recompute)
        return self.of(alone, 1)

    def recorded(self, plan: Plan, rows: int) -> RecordedPass:
        alone = self._alone(plan)
        return _once(self.passes, (alone, rows), lambda: self._recorded(alone, rows))

    def _alone(self, plan: Plan) -> Plan:
        axes = ("dp", 1), (TENSOR, plan.mesh.size_of(TENSOR))
        return replace(PLAIN, axes=axes, context=plan.context, sp=plan.sp)

    def _recorded(self, plan: Plan, rows: int) -> RecordedPass:
        """The pass of the model, if possible from passes of copies with fewer blocks."""
        blocks, known, is_linear = self.blocks, list[Prediction](), self.linear.get(plan)

        def record(depth: int) -> list[ModelPass]:
            assert blocks is not None
            if depth not in self.short:
                self.short[depth] = shortened(self.model, blocks, depth)
            known.append(self._predictor(plan, depth).of(self._rows(rows)))
            return _passes(known[-1])

        if blocks is not None and is_linear is not False:
            self.linear[plan] = False
            with suppress(NotLinearError, InputError, *UNKNOWN):
                found = repeated(record, blocks, checked=is_linear is True)
                self.linear[plan] = True
                return RecordedPass(known[0], found[0], found[-1])
        prediction = self._predictor(plan, None).of(self._rows(rows))
        found = _passes(prediction)
        return RecordedPass(prediction, found[0], found[-1])

    def _structure(self, plan: Plan) -> ModelSpec:
        schedule, shards = schedule_of(plan), plan.row == "zero3"
        stages = 0 if schedule is None else len(schedule.home)
        axes = [("dp", plan.ep), ("ep", plan.ep), (TENSOR, plan.mesh.size_of(TENSOR))]
        axes = [(PIPELINE, stages)] * (stages > 1) + [a for a in axes if a[1] > 1 or a[0] == "dp"]
        alone = replace(
            Plan(tuple(axes), plan.context, plan.sp, precision="bf16", recompute="full"),
            row="zero3" if shards else "ddp",
            schedule="1f1b:1" if stages > 1 else None,
            stages=plan.stages if stages > 1 else None,
            layers=plan.layers,
        )

        def made() -> ModelSpec:
            """The spec, computed."""
            options = replace(self.options, table=self._table(alone, None))

            def staged(layout: StagedLayout) -> Any:
                bundles, *outside = self._cuts(alone, options, layout)
                return (bundles,), *outside

            known = SharedParts() if plan.layers else self.known
            return structure(self.plain, alone, options, staged, known).spec

        return _once(self.structures, alone, made)

    def _cuts(self, plan: Plan, options: EngineOptions, layout: StagedLayout) -> MicrobatchCuts:
        """What crosses the stages, from the trace in which every stage is as short as possible."""
        places = stage_places(self.plain, options, self.known)
        finest = layout._replace(begin=places[1:])
        axes = plan.mesh.size_of(TENSOR), plan.context, plan.sp

        def traced(layout: StagedLayout) -> MicrobatchCuts:
            def trace() -> MicrobatchCuts:
                return stage_cuts(self.plain, plan, self._rows(1), options, layout)

            return _once(self.cuts, (axes, layout.begin), trace)

        if set(layout.begin) <= set(finest.begin):
            with suppress(InputError):
                bundles, outside, written = traced(finest)
                begins = [finest.begin.index(name) + 1 for name in layout.begin]
                ends = pairwise([0, *begins, len(places)])
                every = (frozenset[str]().union(*outside[a:b]) for a, b in ends)
                at = tuple((bisect_right(begins, stage), size) for stage, size in written)
                return tuple(bundles[begin - 1] for begin in begins), tuple(every), at
        return traced(layout)

    def _predictor(self, plan: Plan, depth: int | None) -> Predictor:
        model = self.model if depth is None else self.short[depth]
        return Predictor(model, plan, replace(self.options, table=self._table(plan, depth)))

    def _table(self, plan: Plan, depth: int | None) -> Any:
        key = plan.mesh.size_of(TENSOR), depth
        if key not in self.tables:
            model = self.model if depth is None else self.short[depth]
            given = self.options.table, plan
            rows, loss = (lambda: self._rows(1)), self.options.objective
            self.tables[key] = table_or_derived(*given, lambda: model, rows, loss)
        return self.tables[key]

    def _rows(self, rows: int) -> Any:
        return tree_map_only(Tensor, lambda x: x[:1].repeat(rows, *[1] * (x.dim() - 1)), self.batch)


def _passes(found: Prediction) -> list[ModelPass]:
    tensors = found.spec.tensors
    return [found.spec.run, *(tensors.runs[:1] if tensors else ())]


def _once(known: dict[object, Any], key: object, make: Callable[[], Any]) -> Any:
    """The value of a key, made at the first call; or the same error again."""
    if key not in known:
        try:
            known[key] = make()
        except InputError as error:
            known[key] = error
    if isinstance(known[key], InputError):
        raise known[key]
    return known[key]


def _with_rows(stages: StageSpec, rows: int, runs: int) -> StageSpec:
    (bundles, *_) = stages.bundles
    wide = tuple(tuple(x._replace(numel=x.numel * rows) for x in each) for each in bundles)
    return replace(stages, bundles=(wide,) * runs)
