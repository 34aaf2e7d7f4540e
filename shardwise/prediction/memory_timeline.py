"""The memory of a step, moment by moment: predicted from one pass of the plain model.

    event               gathered            kept by autograd           gradients under zero3
    forward embed       embed, block 0      -                          shards
    forward block 0     block 0, block 1    of embed                   .
    loss                head                of all, and of the loss    .
    backward block 1    block 1, block 0    of blocks 0 and 1          shards, all of head
    backward block 0    block 0             of block 0                 shards, all of block 1
    update, end         -                   -                          shards

`parameters`, `optimizer` and `buffers` are those between steps. The order of units says what is
gathered and reduced at a moment (unit_acts.py). The full gradient of a unit is stored from its
first gradient until the reduction has arrived. Kept activations come from the pass, which counts
live tensors that autograd saved.

Not predicted are temporary bytes, which a kernel or a message holds for less than a layer. The step
is not the first one, which allocates gradients and optimizer states.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from shardwise.core.errors import bad
from shardwise.core.memory_table import CATEGORIES, GATHERED, KEPT
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_schedule import schedule_of
from shardwise.core.reduce_order import EARLY_BYTES, Act
from shardwise.core.schedule.action import Action
from shardwise.core.unit_order import CallPlace
from shardwise.prediction.group import Group
from shardwise.prediction.prediction import Prediction
from shardwise.prediction.stored_bytes import block_bytes
from shardwise.prediction.unit_acts import UnitActs, by_unit, gathered_bytes, order_on


class Mark(NamedTuple):
    """A moment of a pass of the plain model, and the bytes that autograd keeps then.

    `call` and `return` of the module `name`; `loss`: the backward pass begins; `gradient`: it has
    reached an output of the module; `complete`: that of the parameter `name` is complete.
    """

    kind: Literal["call", "return", "loss", "gradient", "complete"]
    name: str
    kept_bytes: int
    graded: bool = True  # of "return": whether a gradient will reach its output
    returned: int = -1  # of "gradient": the index of its "return" among the marks
    other_bytes: int = 0  # of the pass that are live and that autograd does not keep


class Event(NamedTuple):
    """A moment of a step: `kind` is forward, loss, backward, update, end or a pipeline action.

    `by_category` has the live bytes of each category; `peak` is the largest sum since the previous
    event, which only a measurement has; `temporary_most`, which only a prediction has, bounds the
    bytes of the category "temporary".
    """

    kind: str
    unit: str
    microbatch: int
    by_category: dict[str, int]
    peak: int = 0
    temporary_most: int = 0

    @property
    def total(self) -> int:
        """All categories."""
        return sum(self.by_category.values())

    def __str__(self) -> str:
        return f"{self.kind} {self.unit}".strip()


class StepBytes:
    """What a rank's units store in a step: `acts` on them, and events.

    filling   the bytes of gradients that backward makes, by unit and group
    leaving   those of gradients that are not on the device between steps, from their sum on
    """

    def __init__(self, found: Prediction, acts: UnitActs) -> None:
        self.found, self.acts, self.order = found, acts, acts.order
        stored = {unit[0].unit.name: unit for unit in by_unit(found.plan, found.model)}
        self.units = [stored.get(unit.name, []) for unit in found.spec.shape.units]
        self.filling, self.leaving = dict[int, dict[int, int]](), dict[int, int]()
        self.microbatch = 0
        self.events: list[Event] = []

    def fill(self, n: int, group: Group) -> None:
        """Backward makes a gradient of this group of unit `n`."""
        made = group.moves.shards_gradient or group.moves.offload is not None
        size = block_bytes(group, sharded=False) if made and group.trained else 0
        self.filling.setdefault(n, {})[id(group)] = size

    def do(self, acts: Iterable[Act]) -> None:
        """Do acts on units; a gradient that is reduced is no longer filled."""
        for act in acts:
            self.acts.do([act])
            if act.kind == "reduce":
                self.filling.pop(act.unit, None)
                self.leaving[act.unit] = sum(map(_leaving_bytes, self.units[act.unit]))
            elif act.kind == "offload":
                self.leaving.pop(act.unit)

    def update(self) -> None:
        """The update, after all sums if a norm is needed, else after the first 2 MiB."""
        ready, arrivals = 0, self.order.arrivals()
        for act in arrivals:
            self.do([act])
            ready += self._shard_bytes(act.unit) if act.kind == "arrive" else 0
            if not self.found.norm and ready >= EARLY_BYTES:
                break
        self.see("update")
        self.do(arrivals)
        self.see("end")

    def _shard_bytes(self, n: int) -> int:
        return sum(block_bytes(g, sharded=True) for g in self.units[n] if g.trained)

    def see(self, kind: str, unit: str = "", kept_bytes: int = 0, other_bytes: int = 0) -> None:
        """Record an event, at which autograd keeps so many bytes."""
        summed = sum(size for sizes in self.filling.values() for size in sizes.values())
        reducing = [g for n in self.acts.reducing for g in self.units[n] if g.moves.shards_gradient]
        summed += sum(block_bytes(group, sharded=False) for group in reducing)
        summed *= not self.found.plan.arenas  # there they have slots, which are buffers
        summed += sum(self.leaving.values())
        memory = self.found.memory
        live = {name: memory[name] for name in CATEGORIES}
        live[GATHERED] = sum(gathered_bytes(self.units[n]) for n in self.acts.gathered)
        live["gradients"] += summed
        live[KEPT] = kept_bytes
        total, most = sum(live.values()), other_bytes + summed
        self.events.append(Event(kind, unit, self.microbatch, live, total, most))


def _leaving_bytes(group: Group) -> int:
    """The bytes of a gradient that is being summed, or is, before it leaves the device."""
    if not group.trained or group.moves.offload is None:
        return 0
    return block_bytes(group, sharded=group.moves.shards_gradient)


class _Passes:
    """The `memory` of a step without a pipeline, at the marks of recorded passes."""

    def __init__(self, found: Prediction, ahead: int) -> None:
        every, modules = by_unit(found.plan, found.model), found.spec.modules
        self.order = order_on(found.plan, every, modules, found.rank, ahead)
        self.acts = UnitActs(self.order)
        self.memory = StepBytes(found, self.acts)
        self.modules, self.states = modules, self.order.units
        self.names = [unit.name for unit in found.model.units]
        self.of_module = {name: n for n, unit in enumerate(modules) for name in unit.modules}
        self.of_param = {
            param.name: (n, group)
            for n, unit in enumerate(self.memory.units)
            for group in unit
            for param in group.params
            if group.trained
        }
        self.places = dict[int, CallPlace]()  # of each return

    def forward(self, marks: Sequence[Mark]) -> None:
        """A forward pass."""
        self.acts.phase = "forward"
        self.order.begin_forward(recorded=True)
        for place, mark in enumerate(marks):
            n = self.of_module.get(mark.name)
            if n is None:
                continue
            if mark.kind == "call":
                self.acts.do(self.order.call(n))
                if self.states[n].depth == 1:
                    self.at("forward", self.names[n], mark)
            else:
                self.places[place] = self.order.place
                ends = mark.name == self.modules[n].modules[-1]
                self.acts.do(self.order.returned(n, ends=ends, graded=mark.graded))

    def backward(self, marks: Sequence[Mark], *, sync: bool) -> None:
        """A backward pass; `sync`: it is the last of the step."""
        self.acts.phase = "backward"
        self.memory.do(self.order.begin_backward(sync=sync))
        for mark in marks:
            if mark.kind == "complete" and mark.name in self.of_param:
                n, group = self.of_param[mark.name]
                self.memory.fill(n, group)
                self.memory.do(self.order.complete(n))
            elif mark.kind == "gradient" and mark.name in self.of_module:
                n = self.of_module[mark.name]
                if self.states[n].reshards:
                    self.memory.do(self.order.reached(n, self.places[mark.returned]))
                self.at("backward", self.names[n], mark)
        self.memory.do(self.order.end_backward())

    def at(self, kind: str, unit: str, mark: Mark) -> None:
        """Record an event at a mark."""
        self.memory.see(kind, unit, mark.kept_bytes, mark.other_bytes)


def unpredicted(plan: Plan) -> str:
    """The word that prevents the prediction of a plan's timeline, of any layer; "" if none."""
    if any(each.has_axes for each in plan.layers):
        return "layers of another mesh"
    every = map(_unpredicted, plan.of_all_layers)
    return next((word for word in every if word), "")


def _unpredicted(plan: Plan) -> str:
    """The same for a plan without plans of layers."""
    words = (
        None if _keeps_weights(plan) else plan.pipeline,
        None if _keeps_inputs(plan) else f"recompute:{plan.recompute}",
        plan.activations and f"activations:{plan.activations}",
        f"offload:{plan.offload}"
        if plan.offloaded and plan.offloaded.undelayed is not None
        else None,
        "arenas" if plan.arenas and plan.recompute else None,
    )
    return next(filter(None, words), "")


def require_predicted(plan: Plan) -> None:
    """Raise InputError for a plan whose timeline is not predicted."""
    if word := unpredicted(plan):
        raise bad(
            f"a timeline of '{plan}' with {word}",
            "plans without activations:host and delayed updates; recompute:full, everyN or names, "
            "without arenas, and with tp only under sp; pipelines that update at the end of the "
            "step, zero bubble without tp and recompute",
            f'shardwise predict "{plan}" --measure',
        )


def _keeps_inputs(plan: Plan) -> bool:
    """Whether recomputed modules keep only their inputs, and only autograd holds these."""
    what = plan.recompute
    if what is None:
        return True
    if plan.mesh.size_of("tp") > 1 and not plan.sp:  # sums in place keep a block's input longer
        return False
    return not (what == "selective" or plan.partitioned or plan.recompute_budget_bytes)


def _keeps_weights(plan: Plan) -> bool:
    """Whether the plan's pipeline updates after all its actions, and W releases what F saved.

    False for asynchronous schedules. With tensor ranks or recomputation, I may do all of B in a
    measured step: W cannot run branches whose saved tensors are unpacked by hooks
    (techniques/pipeline/backward.py).
    """
    schedule = schedule_of(plan)
    if schedule is None or schedule.update:
        return False
    whole = plan.mesh.size_of("tp") == 1 and plan.recompute is None
    actions = (a for each in schedule.rows for a in each if isinstance(a, Action))
    return whole or all(a.op not in "IW" for a in actions)


def predicted_timeline(
    found: Prediction, marks: Sequence[Sequence[Mark]], ahead: int = 1
) -> tuple[Event, ...]:
    """The memory of `found.rank` at each event of a step after the first.

    `marks` are those of a pass of each microbatch. The plan has no pipeline.
    """
    step = _Passes(found, ahead)
    for _ in range(2):  # the first step learns the order of units
        step.memory.events = []
        for microbatch, own in enumerate(marks):
            step.memory.microbatch, before = microbatch, _forward(own)
            step.forward(before)
            step.at("loss", "", own[len(before)])
            step.backward(own[len(before) + 1 :], sync=microbatch == len(marks) - 1)
        step.memory.update()
    return tuple(step.memory.events)


def _forward(marks: Sequence[Mark]) -> Sequence[Mark]:
    """The marks before the backward pass."""
    return marks[: next(k for k, mark in enumerate(marks) if mark.kind == "loss")]
