"""The memory of a step, moment by moment: predicted from one pass of the plain model.

    event               gathered            kept by autograd           gradients under zero3
    forward embed       embed, block 0      -                          shards
    forward block 0     block 0, block 1    of embed                   .
    loss                head                of all, and of the loss    .
    backward block 1    block 1, block 0    of blocks 0 and 1          shards, all of head
    backward block 0    block 0             of block 0                 shards, all of block 1
    update, end         -                   -                          shards

`parameters`, `optimizer` and `buffers` are those between steps. A unit is gathered while the unit
before it is used; its full gradient is stored from its first gradient
until the reduction has arrived; `in_flight` reductions run at once. Kept
activations come from the pass, which counts live tensors that autograd saved.

Not predicted are temporary bytes, which a kernel or a message holds for less than a layer. The step
is not the first one, which allocates gradients and optimizer states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from shardwise.core.arena_slots import IN_FLIGHT
from shardwise.core.errors import bad
from shardwise.core.plan import Plan
from shardwise.core.plan_schedule import schedule_of
from shardwise.core.reduce_order import EARLY_BYTES
from shardwise.core.schedule.action import Action
from shardwise.core.zero import row_of
from shardwise.prediction.group import Group, groups
from shardwise.prediction.prediction import Prediction
from shardwise.techniques.recompute.word import PARTITIONED_WORDS, recompute_budget

#: The predicted categories. A measured timeline has "temporary" too.
PREDICTED: Final = ("parameters", "gathered", "gradients", "optimizer", "buffers", "kept")
TEMPORARY: Final = "temporary"


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


@dataclass(eq=False)
class _Unit:
    """A unit while a step is simulated; the fields are those of techniques/data/units.py."""

    name: str
    modules: tuple[str, ...]
    encloses: bool
    looks_up: bool
    groups: list[Group]
    unsharded: bool = False
    used: bool = False
    depth: int = 0
    reached: bool = False
    missing: set[str] = field(default_factory=set[str])
    complete: bool = False
    filling: set[int] = field(default_factory=set[int])  # groups whose whole gradient is stored

    @property
    def reshards(self) -> bool:
        return self.full_bytes > 0

    @property
    def full_bytes(self) -> int:
        """Bytes of the gathered groups that are freed between uses."""
        return sum(_padded(group) for group in self.groups if group.moves.reshards)

    @property
    def trained(self) -> list[Group]:
        return [group for group in self.groups if group.trained]

    @property
    def sent_bytes(self) -> int:
        """Bytes of a gradient whose reduction is in flight."""
        return sum(_padded(group) for group in self.groups if group.moves.shards_gradient)

    @property
    def shard_bytes(self) -> int:
        return sum(group.flat.share * group.element_bytes for group in self.trained)

    def reshard(self) -> None:
        self.used = self.unsharded = False


def _padded(group: Group) -> int:
    return group.flat.padded * group.element_bytes


class _Step:
    """The units of one rank during a step."""

    def __init__(self, found: Prediction, ahead: int, in_flight: int) -> None:
        self.found, self.ahead, self.in_flight = found, ahead, in_flight
        of_unit: dict[str, list[Group]] = {}
        for group in groups(found.plan, found.model):
            of_unit.setdefault(group.unit.name, []).append(group)
        self.units = [
            _Unit(unit.name, own.modules, own.encloses, own.looks_up, of_unit.get(unit.name, []))
            for unit, own in zip(found.model.units, found.spec.modules, strict=True)
        ]
        self.of_module = {name: unit for unit in self.units for name in unit.modules}
        self.of_param = {
            param.name: (unit, k)
            for unit in self.units
            for k, group in enumerate(unit.groups)
            for param in group.params
            if group.trained
        }
        self.memory = dict(found.memory)
        self.path: list[_Unit] = []  # of the step before
        self.uses: list[_Unit] = []
        self.calls: list[_Unit] = []
        self.counts: dict[int, int] = {}  # the number of calls before each return
        self.latest: _Unit | None = None
        self.flying: list[_Unit] = []  # units whose reductions are in flight
        self.next = 0  # units, from the last, whose sums have begun
        self.microbatch = 0
        self.sync = False  # whether this microbatch is the last of the step
        self.events: list[Event] = []

    # --- the hooks, in their order (techniques/data/hooks.py) -------------------------------------

    def forward(self, marks: Sequence[Mark]) -> None:
        """A forward pass: units are gathered when called, and ahead of it."""
        self.uses, self.calls, self.counts = [], [], {}
        for place, mark in enumerate(marks):
            unit = self.of_module.get(mark.name)
            if unit is None:
                continue
            if mark.kind == "call":
                self._call(unit)
                if unit.depth == 1:
                    self.see("forward", unit.name, mark)
            else:
                self.counts[place] = len(self.calls)
                self._return(unit, mark)

    def _call(self, unit: _Unit) -> None:
        begins = unit.reshards and not unit.used
        if begins:
            self._free_latest(unit)
        unit.depth += 1
        unit.unsharded = True
        if unit.reshards:
            self.calls.append(unit)
        if begins:
            unit.used = True
            self.uses.append(unit)
            place = len(self.uses)
            if self.path[place - 1 : place] == [unit]:
                for following in self.path[place : place + self.ahead]:
                    following.unsharded = True

    def _return(self, unit: _Unit, mark: Mark) -> None:
        unit.depth -= 1
        if unit.reshards:
            unit.reached = mark.graded
        over = not unit.depth and mark.name == unit.modules[-1]
        if over and unit.reshards and not unit.encloses:
            self._free_latest(unit)
            self.latest = unit

    def _free_latest(self, now: _Unit) -> None:
        before, self.latest = self.latest, None
        if before is not None and before is not now:
            before.reshard()

    def backward(self, marks: Sequence[Mark]) -> None:
        """A backward pass: units are gathered again, freed, and their gradients reduced."""
        once = list(dict.fromkeys(self.uses))
        order = once if len(once) == len(self.units) else self.units
        self.next = 0
        for unit in self.units:
            unit.missing = {param.name for group in unit.trained for param in group.params}
            unit.complete = False
        for mark in marks:
            if mark.kind == "complete" and mark.name in self.of_param:
                self._complete(mark.name, order)
            elif mark.kind == "gradient" and (unit := self.of_module.get(mark.name)):
                if unit.reshards:
                    self._reach(unit, self.counts[mark.returned])
                self.see("backward", unit.name, mark)
        for unit in order[::-1][self.next :]:
            self._reduce(unit)
        for unit in self.units:
            unit.reshard()

    def _reach(self, unit: _Unit, count: int) -> None:
        to_come = self.calls[:count]
        for later in set(self.calls[count:]).difference(to_come):
            if (later.complete or not later.trained) and not later.encloses:
                later.reshard()
        if unit.complete or unit.looks_up:
            return
        unit.unsharded = True
        if to_come[-1] is unit:
            to_come.pop()
        for earlier in to_come[::-1][: self.ahead]:
            if not earlier.looks_up and earlier.reached and not earlier.complete:
                earlier.unsharded = True

    def _complete(self, name: str, order: list[_Unit]) -> None:
        unit, k = self.of_param[name]
        if unit.groups[k].moves.shards_gradient:
            unit.filling.add(k)
        unit.missing.discard(name)
        unit.complete = not unit.missing
        if unit.complete:
            if len(unit.trained) == len(unit.groups):
                unit.reshard()
            turns = order[::-1]
            while self.next < len(turns) and (
                turns[self.next].complete or not turns[self.next].trained
            ):
                self._reduce(turns[self.next])
                self.next += 1

    # --- the sums (core/reduce_order.py) ----------------------------------------------------

    def _reduce(self, unit: _Unit) -> None:
        if not unit.trained or not (unit.sent_bytes or self.sync):
            return
        while unit in self.flying:
            self.flying.pop(0)
        self.flying.append(unit)
        unit.filling.clear()
        while unit.sent_bytes and len(self.flying) > self.in_flight:
            self.flying.pop(0)

    def update(self, by_norm: bool) -> None:
        """Begin the update, after all sums if a norm is needed, else after the first 2 MiB."""
        ready = 0
        while self.flying and (by_norm or ready < EARLY_BYTES):
            ready += self.flying.pop(0).shard_bytes
        self.see("update")
        self.flying.clear()

    # --- live bytes -------------------------------------------------------------------------------

    def see(self, kind: str, unit: str = "", mark: Mark | None = None) -> None:
        """Record an event, which is at a mark of the pass unless all activations are gone."""
        mark = mark or Mark("loss", "", 0)
        filling = sum(_padded(u.groups[k]) for u in self.units for k in u.filling)
        flying = sum(unit.sent_bytes for unit in self.flying)
        by_category = {
            "parameters": self.memory["parameters"],
            "gathered": sum(unit.full_bytes for unit in self.units if unit.unsharded),
            "gradients": self.memory["gradients"] + filling + flying,
            "optimizer": self.memory["optimizer"],
            "buffers": self.memory["buffers"],
            "kept": mark.kept_bytes,
        }
        total, most = sum(by_category.values()), mark.other_bytes + filling + flying
        self.events.append(Event(kind, unit, self.microbatch, by_category, total, most))


def unpredicted(plan: Plan) -> str:
    """The word that prevents the prediction of a plan's timeline, of any layer; "" if none."""
    if any(each.has_axes for each in plan.layers):
        return "layers of another mesh"
    every = map(_unpredicted, plan.of_all_layers)
    return next((word for word in every if word), "")


def _unpredicted(plan: Plan) -> str:
    """The same for a plan without plans of layers."""
    words = {
        "pp": None if _stays(plan) else plan.pipeline,
        "recompute": None if _keeps_inputs(plan) else f"recompute:{plan.recompute}",
        "activations": plan.activations,
        "offload": plan.offload,
        "arenas": "arenas" if plan.arenas else None,
    }
    words["row:"] = plan.row if plan.row.startswith("row:") else None
    return next((word for word, given in words.items() if given is not None), "")


def require_predicted(plan: Plan) -> None:
    """Raise InputError for a plan whose timeline is not predicted."""
    if word := unpredicted(plan):
        raise bad(
            f"a timeline of '{plan}' with {word}",
            "plans without offload, activations:host, arenas and row:; recompute:full, everyN or "
            "names, with tp only under sp; with pp ddp and zero1 that update at the end of the "
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
    other = what == "selective" or what in PARTITIONED_WORDS or recompute_budget(what) > 0
    return not other


def _stays(plan: Plan) -> bool:
    """Whether only kept activations change in a step of the plan's pipeline.

    False for asynchronous schedules, and rows that free units or reduce after each backward pass.
    With tensor ranks or recomputation, I may do all of B in a measured step: W cannot run branches
    whose saved tensors are unpacked by hooks (techniques/pipeline/backward.py).
    """
    schedule, moves = schedule_of(plan), row_of(plan.row).moves()
    if schedule is None or schedule.update or moves.reshards or moves.shards_gradient:
        return False
    whole = plan.mesh.size_of("tp") == 1 and plan.recompute is None
    actions = (a for each in schedule.rows for a in each if isinstance(a, Action))
    return whole or all(a.op not in "IW" for a in actions)


def predicted_timeline(
    found: Prediction, marks: Sequence[Sequence[Mark]], ahead: int = 1, in_flight: int = IN_FLIGHT
) -> tuple[Event, ...]:
    """The memory of `found.rank` at each event of a step after the first.

    `marks` are those of a pass of each microbatch. The plan has no pipeline.
    """
    step = _Step(found, ahead, in_flight)
    step.forward(_forward(marks[0]))  # so that the order of uses is known
    step.path, step.events = step.uses, []
    for unit in step.units:
        unit.reshard()
    for microbatch, own in enumerate(marks):
        step.microbatch, step.sync = microbatch, microbatch == len(marks) - 1
        before = _forward(own)
        step.forward(before)
        step.see("loss", "", own[len(before)])
        step.backward(own[len(before) + 1 :])
    step.update(found.norm)
    step.see("end")
    return tuple(step.events)


def _forward(marks: Sequence[Mark]) -> Sequence[Mark]:
    """The marks before the backward pass."""
    return marks[: next(k for k, mark in enumerate(marks) if mark.kind == "loss")]
