"""When units are gathered, freed and reduced: a machine that takes events and gives acts.

    event            acts, where units are gathered for their use (zero3)
    call k           free the unit used before, use k, gather the next `ahead` units
    returned k       -    k stays gathered: if it is the last unit, backward needs it immediately
    begin_backward   -
    reached k        free the units of later calls, wait for k, gather the units before it
    complete k       free k, reduce k
    end_backward     reduce the units in which some parameter has no gradient, close all

Other rows only reduce during a pass.  Units are numbered in the order of their definition.  Hooks
report the events and do the acts (techniques/data/unit_hooks.py).

Under a schedule, `enter` and `leave` are around each F, B, I and W.  The unit used last stays
gathered until another is used: a B right after its F need not gather it.  Units that a stage reads
outside its layers stay gathered while the rank computes the stage.  Gradients are reduced when all
microbatches are done (`reduce_stage`), in the order of reduce_order.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from shardwise.core.buffer_sizes import IN_FLIGHT
from shardwise.core.reduce_order import Act, ReduceOrder, UnitState

#: The most uses to remember if no backward pass follows.
LONGEST: Final = 2**16


class CallPlace(NamedTuple):
    """Where a call returned in its forward pass: the calls of the pass, and how many came before.
    The unit that returned made the last of these, or encloses the units that did.
    """

    calls: list[int]
    calls_before: int


class UnitOrder:
    """The machine of one rank's units. `stages` has the units of each stage that the rank owns,
    under a schedule.  `last` has the units with parameters of several ranks: their gradients are
    reduced after all others, in this order, which all holders take.  `further`: sums over other
    axes follow a reduction.  `offload`: gradients leave the device for the update.
    """

    def __init__(
        self,
        units: Sequence[UnitState],
        ahead: int = 1,
        in_flight: int = IN_FLIGHT,
        *,
        further: bool = False,
        offload: bool = False,
        stages: Mapping[int, Sequence[int]] | None = None,
        last: Sequence[int] = (),
    ) -> None:
        self.units, self.ahead = units, ahead
        self.forward = [*range(len(units))]  # the order of the last forward pass that used all
        self.staged, self.last = stages is not None, last
        self.stages = {0: self.forward} if stages is None else stages
        self.uses = {stage: _Uses() for stage in self.stages}
        self.stage = next(iter(self.stages))  # the stage that is being computed
        self.recorded = True  # the last forward pass
        self.reads = True  # whether this backward pass reads weights
        self.passed: set[int] = set()  # the places reached in this backward action of a schedule
        self.latest: int | None = None  # the unit used last: gathered until another is used
        self.in_backward = False
        self.reduced: set[int] = set()  # stages, in this run of the schedule
        self.sums = ReduceOrder(units, in_flight, further=further, offload=offload)

    @property
    def place(self) -> CallPlace:
        calls = self.uses[self.stage].calls
        return CallPlace(calls, len(calls))

    def is_around(self, unit: int) -> bool:
        """Whether the unit stays gathered while the rank computes its stage."""
        return self.staged and self.units[unit].stays

    # --- forward ------------------------------------------------------------------------------

    def begin_forward(self, *, recorded: bool) -> None:
        """A forward pass of the root begins; `recorded`: a backward pass may follow."""
        # uses by a loss, after a pass that was not recorded, are no part of this pass either
        self.uses[self.stage].ended |= not (recorded and self.recorded)
        self.recorded = recorded

    def call(self, unit: int) -> list[Act]:
        """A module of the unit is called, in a forward pass or by a recomputation."""
        if self.is_around(unit):
            return []
        state, uses = self.units[unit], self.uses[self.stage]
        state.depth += 1
        if not state.reshards or self.in_backward:
            return [Act("wait", unit)]
        if state.used:
            uses.calls.append(unit)
            return [Act("wait", unit)]
        acts = self._free_latest(unit)
        state.used = True
        uses.use(unit)
        # a repetition may not come in a pass that ends without a backward pass
        following = (n for n in uses.following(self.ahead) if self.recorded or n not in uses.used)
        return [*acts, Act("use", unit), *(Act("gather", n) for n in following)]

    def returned(
        self, unit: int, *, ends: bool, recorded: bool = True, graded: bool | None = True
    ) -> list[Act]:
        """A module of the unit has returned; `ends`: it is the unit's last module.
        `graded` says whether a gradient will arrive at its output; None if that cannot be seen.
        """
        if self.is_around(unit):
            return []
        state = self.units[unit]
        state.depth -= 1
        if self.in_backward:
            return []
        if graded is None:
            state.unwatched = state.stays = True
        elif recorded:
            state.reached = graded
        if state.depth or not ends:
            return []
        if not recorded:
            state.reached = False  # as of a teacher under no_grad
            return [] if state.unwatched else self._free([unit])
        if not state.reshards or state.stays:
            return []
        acts, self.latest = self._free_latest(unit), unit
        return acts

    def end_evaluation(self) -> list[Act]:
        """A forward pass that is not recorded ends: free what it kept, or gathered for a use that
        has not come.
        """
        uses = self.uses[self.stage]
        early = {n for n in uses.following(self.ahead) if not self.units[n].used}
        uses.ended = True
        return self._free(n for n in self.forward if n in early or self.units[n].unwatched)

    def _free_latest(self, now: int | None) -> list[Act]:
        before, self.latest = self.latest, None
        return [] if before is None or before == now else self._free([before])

    def _free(
        self, units: Iterable[int], kind: Literal["free", "free_early", "close"] = "free"
    ) -> list[Act]:
        acts = [Act(kind, unit) for unit in units]
        for act in acts:
            self.units[act.unit].used = False
        return acts

    # --- backward -----------------------------------------------------------------------------

    def begin_backward(self, *, sync: bool = True) -> list[Act]:
        """A backward pass begins; `sync`: it is the last of the step, so all gradients are reduced.
        Units that stay gathered are waited for: a second pass of a graph finds them sharded.
        """
        self.in_backward = True
        uses = self.uses[self.stage]
        if uses.begin_backward() and len(distinct := dict.fromkeys(uses.previous)) == len(
            self.units
        ):
            self.forward = [*distinct]
        self.sums.begin(sync=sync)
        for state in self.units:
            state.missing, state.complete = state.gradients, False
        return [Act("wait", n) for n in self.forward if not self.units[n].reshards]

    def reached(self, unit: int, place: CallPlace) -> list[Act]:
        """A gradient arrives at the output of a call of the unit, which returned at `place`.
        Autograd runs the ready node that was created last. So all nodes of later calls have run,
        and no node reads a unit any more that is in no earlier call, both in B and in I. Gradients
        of its weights may still arrive: column-parallel layers with one input compute them after
        the input's gradient (Entry.line_up in techniques/tensor/linear.py).
        """
        late = place.calls_before in self.passed and min(self.passed) < place.calls_before
        if late or self.is_around(unit) or not self.reads:
            return []  # late: an output of an earlier call, which this one has returned too
        self.passed |= {place.calls_before} if self.staged else set()
        state, to_come = self.units[unit], place.calls[: place.calls_before]
        later = (n for n in set(place.calls[place.calls_before :]).difference(to_come))
        over = [n for n in later if not (self.units[n].stays or self.units[n].depth)]
        acts = self._free(over, "free_early")
        if self.staged:
            self.latest = unit
        if state.complete:
            return acts
        if not state.reads_backward:
            return [*acts, Act("placeholder", unit)]
        if to_come[-1] == unit:
            to_come.pop()
        near = ((n, self.units[n]) for n in to_come[::-1][: self.ahead])
        earlier = [n for n, s in near if s.reads_backward and s.reached and not s.complete]
        return [*acts, Act("wait", unit), *(Act("gather", n) for n in earlier)]

    def complete(self, unit: int) -> list[Act]:
        """The last missing gradient of the unit's parameters is complete for this pass."""
        state = self.units[unit]
        state.missing, state.complete = 0, True
        acts = [] if state.frozen else self._free([unit])
        return [*acts, *self.sums.go_on(self.forward)]

    def end_backward(self) -> list[Act]:
        return [*self.sums.end(self.forward), *self.abandon()]

    def abandon(self) -> list[Act]:
        """A pass, a step or a run of the schedule ends, or has failed."""
        self.in_backward, self.latest = False, None
        return self._free(self.forward, "close")

    def arrivals(self) -> Iterator[Act]:
        return self.sums.arrivals()

    # --- under a schedule ---------------------------------------------------------------------

    def enter(self, stage: int, op: str, *, graded: bool) -> list[Act]:
        """An F, B, I or W of `stage` begins; `graded`: I computes a gradient of its input.
        W reads no weights, unless I did nothing, as in the first stage.
        """
        own = self.stages[stage]
        others = [n for n in self.forward if n not in own] if stage != self.stage else []
        acts = self._free(others)
        self.stage, self.in_backward, self.passed = stage, op != "F", set()
        self.reads = {"I": graded, "W": not graded}.get(op, True)
        uses = self.uses[stage]
        uses.ended = True
        around = [n for n in own if self.units[n].stays]
        acts += [Act("gather", n) for n in around] + [Act("wait", n) for n in around]
        if op == "F":
            return acts
        if not self.reads:
            return acts + [Act("placeholder", n) for n in own]
        first = next(iter(uses.backward_calls), None)
        read = first is not None and self.units[first].reads_backward
        return acts + self._free_latest(first if read else None)

    def leave(self, *, recorded: bool = True) -> list[Act]:
        """The action ends; of the units that its layers used, only the last stays gathered."""
        if not self.in_backward and recorded:
            self.uses[self.stage].begin_backward()
        self.in_backward = False
        own = self.stages[self.stage]
        for state in (self.units[n] for n in own):
            state.depth, state.used = 0, False
        return self._free(n for n in own if n != self.latest and not self.units[n].stays)

    def begin_run(self) -> None:
        self.reduced = set()

    def reduce_stage(self, stage: int) -> list[Act]:
        """All microbatches of a stage are done: reduce the units that no later stage uses."""
        self.reduced.add(stage)
        return self._reduce([n for n in self.stages[stage] if n not in self.last])

    def reduce_last(self) -> list[Act]:
        return self._reduce(self.last)

    def _reduce(self, units: Sequence[int]) -> list[Act]:
        users = {n: {s for s, own in self.stages.items() if n in own} for n in units}
        self.sums.begin(sync=True)
        return self.sums.end([n for n in units if users[n] <= self.reduced])


class _Uses:
    """The order in which a stage uses its units, pass after pass.

        previous pass   0 1 2 3 2
        this pass       0 1 .              2 comes next if this pass repeats the previous one

    used             each use of a unit since the last backward pass
    calls            the unit of each call of a module, in the same passes
    ended            whether the next use begins a new pass
    previous         the uses before the last backward pass
    backward_calls   the calls before the last backward pass, in reverse
    """

    def __init__(self) -> None:
        self.used: list[int] = []
        self.calls: list[int] = []
        self.ended = False
        self.previous: list[int] = []
        self.backward_calls: list[int] = []

    def use(self, unit: int) -> None:
        if self.ended or len(self.used) == LONGEST:
            self.used, self.calls, self.ended = [], [], False
        self.used.append(unit)
        self.calls.append(unit)

    def following(self, ahead: int) -> list[int]:
        """The next `ahead` units if this pass repeats the previous one, else none."""
        place = len(self.used)
        follows = self.previous[place - 1 : place] == self.used[-1:]
        return self.previous[place : place + ahead] if follows else []

    def begin_backward(self) -> bool:
        """Begin a backward pass and store the order; returns whether it is new."""
        self.ended = True
        self.backward_calls = self.calls[::-1]
        if self.used == self.previous:
            return False
        self.previous = list(self.used)
        return True
