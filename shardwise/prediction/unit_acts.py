"""The acts on a rank's units in a step: from the recorded calls of the plain model.

    recorded     embed ( ) blocks.0 ( ) blocks.1 ( )     the loss     and back, in reverse
    events       call, returned of each unit                          reached, complete of each
    acts         gather, wait, free, reduce              counted

The machine that hooks ask in a run decides them here too (core/unit_order.py). A gather of a unit
that is gathered sends nothing. (FSDP, arXiv 2304.11277, section 3.)
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from shardwise.core.mesh import PIPELINE
from shardwise.core.model_spec import Call, ModelShape, ModelSpec, StageSpec, UnitModules, Value
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import schedule_of
from shardwise.core.reduce_order import Act, UnitState
from shardwise.core.schedule.schedule import COMPUTE_OPS, Action
from shardwise.core.unit_order import CallPlace, UnitOrder
from shardwise.prediction.flat_groups import Group, groups

GATHERS: Final = ("gather", "wait", "use")
FREES: Final = ("free", "free_early", "close")


class Returned(NamedTuple):
    """A call in a forward pass that backward goes through: of `unit`, which returned at `place`.
    Without a place it is the first call of the unit in the pass, at its begin.
    """

    unit: int
    place: CallPlace | None


class UnitActs:
    """What the acts of `order` gather.

    gathered   the units that are gathered
    opened     those that stay so until the pass ends: read outside of the calls that gather them
    acted      called with each act
    used       called with each unit that computes, once in each pass
    """

    def __init__(self, order: UnitOrder) -> None:
        self.order, self.units, self.phase = order, order.units, "forward"
        self.gathered, self.opened = set[int](), set[int]()
        self.acted: Callable[[Act], None] = lambda _: None
        self.used: Callable[[int], None] = lambda _: None
        self.again = set[int]()  # units that a reentrant checkpoint computes again in backward

    def do(self, acts: Iterable[Act]) -> None:
        """Do acts on units."""
        for act in acts:
            kind, unit = act
            if kind in GATHERS and self.units[unit].reshards and unit not in self.gathered:
                self.gathered.add(unit)
            elif kind in FREES:
                self.opened -= {unit} if kind == "close" else set()
                self.gathered -= {unit} - self.opened
            self.acted(act)

    def forward(
        self,
        modules: Sequence[UnitModules],
        calls: Iterable[Call],
        values: Sequence[Value],
        reads: Iterable[tuple[int, int]] = (),
    ) -> list[Returned]:
        """Feed the calls of a forward pass; returns what its backward pass goes through.
        `reads`: the number of calls before the use of a unit's parameters.
        """
        numbers = {name: n for n, unit in enumerate(modules) for name in unit.modules}
        calls, found, begun, silent = [*calls], list[Returned](), set[int](), set[int]()
        again = {call.module for call in calls if call.recomputed}
        uses = deque(sorted(reads))
        for number, call in enumerate(calls):
            self.read(uses, number)
            unit = None if call.recomputed else numbers.get(call.module)
            if unit is None:
                continue
            if call.begins:
                under_no_grad = not call.recorded  # frozen, or a checkpoint
                (silent.add if under_no_grad else silent.discard)(unit)
                self.again |= {unit} if under_no_grad and call.module in again else set()
                first = unit not in begun
                found += [Returned(unit, None)] * first
                begun.add(unit)
                self.do(self.order.call(unit) if self.units[unit].reshards else ())
                if first:
                    self.used(unit)
            elif self.units[unit].reshards:
                graded = any(values[value].trained for value in call.values)
                found += [Returned(unit, self.order.place)] if graded else []
                ends = call.module == modules[unit].modules[-1]
                taped = unit not in silent
                self.do(self.order.returned(unit, ends=ends, recorded=taped, graded=graded))
            elif any(values[value].trained for value in call.values):
                found.append(Returned(unit, CallPlace([], 0)))
        self.read(uses, len(calls))
        return found

    def read(self, uses: deque[tuple[int, int]], number: int) -> None:
        """Gather units whose parameters are used after so many calls, if they are not."""
        while uses and uses[0][0] <= number:
            _, unit = uses.popleft()
            if self.units[unit].reshards and unit not in self.gathered:
                self.opened.add(unit)
                self.do([Act("wait", unit)])

    def backward(self, passed: Sequence[Returned]) -> None:
        """Feed the backward pass of such a forward pass."""
        last = {unit: index for index, (unit, _) in enumerate(passed)}
        for index, (unit, place) in reversed([*enumerate(passed)]):
            if place is None:
                self.do([Act("wait", unit)] if unit in self.again else ())
                if last[unit] == index:  # no gradient at its output: at those of its parameters
                    self.used(unit)
                if self.units[unit].missing:
                    self.do(self.order.complete(unit))
                continue
            self.do(self.order.reached(unit, place) if self.units[unit].reshards else ())
            if last[unit] == index:
                self.used(unit)

    def microbatch(self, spec: ModelSpec, *, sync: bool = True) -> None:
        """Feed the passes of a microbatch without a schedule; `sync`: it is the last of a step."""
        self.phase = "forward"
        self.order.begin_forward(recorded=True)
        run = spec.run
        passed = self.forward(spec.modules, run.calls, run.values, reads_of(spec))
        self.phase = "backward"
        self.do(self.order.begin_backward(sync=sync))
        self.backward(passed)
        self.do(self.order.end_backward())


class StageActs:
    """The `acts` on the units of a pipeline rank, under the schedule of the plan.
    Units that a stage reads outside of its layers (a root unit, tied parameters) stay gathered
    while the rank is in the stage.  `spec` has this rank's part of each parameter, of all stages.
    """

    def __init__(
        self,
        plan: Plan,
        spec: ModelSpec,
        rank: int,
        ahead: int = 0,
        own: Sequence[Sequence[Group]] = (),
    ) -> None:
        schedule, stages, units = schedule_of(plan), spec.stages, spec.shape.units
        assert schedule is not None and stages is not None
        place = plan.mesh.coordinate(rank).get(PIPELINE, 0)
        self.spec, self.own = spec, schedule.stages(place)
        self.actions = [*schedule.actions(place)]
        outside = frozenset[str]().union(*(stages.outside[stage] for stage in self.own))
        around = {
            n
            for n, (unit, own) in enumerate(zip(units, spec.modules, strict=True))
            if any(p.name in outside for p in unit.params)
            or any(not stages.of(module) for module in own.modules)
        }
        at = [{stage for p in u.params for stage in stages.params[p.name]} for u in units]
        of_stage = {stage: [n for n, own in enumerate(at) if stage in own] for stage in self.own}
        self.calls = {stage: tuple(_calls(spec.run.calls, stages, stage)) for stage in self.own}
        self.graded = {stage: stage > 0 and stages.graded[stage - 1] for stage in self.own}
        states = states_of(by_unit(plan, spec.shape), spec.modules, around)
        self.of_stage = of_stage
        further, offload = sums_of(plan, own, rank)
        self.order = UnitOrder(
            states, ahead, len(units), further=further, offload=offload, stages=of_stage
        )
        self.acts = UnitActs(self.order)

    def run(self) -> Iterator[Action]:
        """A run of the schedule; yields after each action."""
        passed = dict[tuple[int, int], list[Returned]]()
        self.order.begin_run()
        for action in self.actions:
            op, stage, microbatch = action
            if op not in COMPUTE_OPS:
                yield action
                continue
            self.acts.phase = "forward" if op == "F" else "backward"
            self.acts.do(self.order.enter(stage, op, graded=self.graded[stage]))
            if op == "F":
                of = self.spec.modules, self.calls[stage], self.spec.run.values
                passed[stage, microbatch] = self.acts.forward(*of)
            else:
                self.acts.backward(passed[stage, microbatch])
            self.acts.do(self.order.leave(recorded=True))
            yield action
        self.acts.do(self.order.abandon())


def _calls(calls: Iterable[Call], stages: StageSpec, stage: int) -> Iterator[Call]:
    """The calls that run in `stage`.
    The call of a layer that several stages hold runs in the earliest of them that has not ended.  A
    module that is a layer, and a part of another, is a part while the other runs.
    """
    reached, inside = 0, ""
    for call in calls:
        if call.begins and not call.recomputed and not inside:
            held_by = stages.parts.get(call.module) or stages.of(call.module)
            inside = call.module if held_by else ""
            reached = min((s for s in held_by if s >= reached), default=reached)
        if reached == stage:
            yield call
        if not call.begins and not call.recomputed and call.module == inside:
            inside = ""


def states_of(
    by_unit: Iterable[Sequence[Group]], modules: Sequence[UnitModules], around: Collection[int] = ()
) -> list[UnitState]:
    """The units of these groups before a step; units `around` stay gathered."""
    return [
        UnitState.of(own, reads_backward=not unit.looks_up, stays=unit.encloses or n in around)
        for n, (own, unit) in enumerate(zip(by_unit, modules, strict=True))
    ]


def by_unit(plan: Plan, model: ModelShape) -> list[list[Group]]:
    found: dict[str, list[Group]] = {unit.name: [] for unit in model.units}
    for group in groups(plan, model):
        found[group.unit.name].append(group)
    return [*found.values()]


def order_on(
    plan: Plan,
    every: Sequence[Sequence[Group]],
    modules: Sequence[UnitModules],
    rank: int,
    ahead: int = 1,
) -> UnitOrder:
    """The order of a rank's units, with the groups of `every` one, without a pipeline."""
    further, offload = sums_of(plan, every, rank)
    return UnitOrder(states_of(every, modules), ahead, further=further, offload=offload)


def sums_of(plan: Plan, every: Iterable[Sequence[Group]], rank: int) -> tuple[bool, bool]:
    """Whether further sums follow the first of a gradient, and whether gradients leave."""
    here, own = plan.coordinate(rank), [group for unit in every for group in unit]
    further = (
        len(group.moves.sums) > 1
        or any(len(on.group(here.get(axis, 0))) > 1 for axis, on in group.layout.axes)
        for group in own
        if group.trained
    )
    return any(further), any(group.moves.offload for group in own)


def reads_of(spec: ModelSpec) -> list[tuple[int, int]]:
    """The units of the parameters that operations read, with the number of calls before."""
    numbers = {p.name: n for n, unit in enumerate(spec.shape.units) for p in unit.params}
    return [(calls, numbers[name]) for calls, name in spec.run.reads if name in numbers]
