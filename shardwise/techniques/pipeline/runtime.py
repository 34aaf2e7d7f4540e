"""The pipeline at run time: one rank executes its row of a schedule, step by step.

    table        token -> value, for all live tokens of this rank. A step removes the tokens that
                 it consumes and adds those that it makes (schedule.py); at the end it is empty.
    messages     sent as soon as their tensors exist; receives are posted ahead of their use
    work         executes F, B, I, W and the other actions on the model

A bundle is a list of tensors. The bundle `act` of stage s has the tensors that it sends to later
stages. The bundle `grad` of stage s has the gradient of each tensor of the previous bundle that
requires one, zeros if there is none. A bundle between two stages of one rank is not copied.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from textwrap import fill
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from shardwise.comm.move import begin_receive, begin_send, open_ways
from shardwise.comm.transport import Pending
from shardwise.comm.world import Axis
from shardwise.core.schedule.lower import lower
from shardwise.core.schedule.schedule import (
    Action,
    Schedule,
    Step,
    Token,
    Transfer,
    makes,
    needs,
    takes,
)
from shardwise.techniques.pipeline.stage_work import StageWork

#: The number of posted receives from each rank: one message arrives while one is used.
AHEAD = 2


#: Observes a run: each step is reported when it has ended.
Watch = Callable[[Step], None]


def open_channels(schedule: Schedule, axis: Axis, device: torch.device) -> None:
    """Open the schedule's channels. All ranks of the axis call it once, before the first run."""
    rows = enumerate(lower(schedule).rows)
    sends = ((rank, step) for rank, row in rows for step in row if step.op == "SEND")
    ways = [(rank, step.peer) for rank, step in sends if isinstance(step, Transfer)]
    open_ways(axis, ways, device)


def forward_only(schedule: Schedule, count: int) -> Schedule:
    """One microbatch forward through the first `count` stages of `schedule`, and nothing else."""
    stages = map(schedule.stages, range(schedule.ranks))
    rows = tuple(tuple(Action("F", s, 0) for s in own if s < count) for own in stages)
    return replace(schedule, rows=rows, microbatches=1, update=0, lag=())


def run(
    schedule: Schedule,
    axis: Axis,
    work: StageWork,
    watch: Watch | None = None,
    table: dict[Token, Any] | None = None,
) -> None:
    """Execute this rank's row. All ranks of the axis call it with the same valid schedule.

    Several schedules can share one `table`, which carries live tokens from one to the next. Without
    it a schedule must leave no token.

    Errors of a step propagate; in a pipeline a note adds the row and marks the step. Messages use
    the ways of the axis (`open_channels`), and its ledger counts them. On CUDA the processor runs
    ahead of the device.
    """
    whole = lower(schedule)
    row, place = whole.rows[axis.rank], 0
    try:
        live = _Live(whole, axis, work, table)
        for place in range(len(row)):
            with record_function(str(row[place])) if _profiler_enabled() else nullcontext():
                live.do(row[place])
            if watch:
                watch(row[place])
        live.end(whole=table is None)
    except BaseException as error:
        if whole.last_stage:
            error.add_note(_marked(row, place, axis.rank))
        raise


class _Live:
    def __init__(
        self, schedule: Schedule, axis: Axis, work: StageWork, table: dict[Token, Any] | None
    ) -> None:
        self.schedule, self.work = schedule, work
        self.post = _Post(schedule, axis, work)
        self.table: dict[Token, Any] = {} if table is None else table

    def do(self, step: Step) -> None:
        """Execute a step: the tokens that it takes go, and those that it makes come."""
        have = {token.kind: self.table[token] for token in needs(step, self.schedule)}
        for token in takes(step, self.schedule):
            del self.table[token]
        made: dict[str, Any] = {}
        if isinstance(step, Action):
            made = self._act(step, have)
        elif step.op == "RECV":
            made[step.token.kind] = self.post.receive(step)
        else:
            self.post.send(step, have[step.token.kind])
        self.table.update({token: made[token.kind] for token in makes(step, self.schedule)})

    def _act(self, action: Action, have: dict[str, Any]) -> dict[str, Any]:
        """Execute an action; returns values by token kind, None for those that `work` keeps. `have`
        has the only references, so memory is freed as soon as the work drops a value.
        """
        op, stage, i = action
        made: dict[str, Any] = {"part": None, "weights": None}
        work = self.work
        match op:
            case "F":
                act, made["tape"] = work.forward(stage, i, have.pop("act", []))
                made["act"] = [x.detach() for x in act]
            case "B":
                made["grad"] = work.backward(stage, i, have.pop("tape"), have.pop("grad", []))
            case "I":
                grads = have.pop("grad", [])
                made["grad"], made["rest"] = work.inputs(stage, i, have.pop("tape"), grads)
            case "W":
                work.weights(stage, i, have.pop("rest"))
            case "U":
                work.update(stage, i)
            case "REDUCE":
                work.reduce(stage)
        return made

    def end(self, whole: bool) -> None:
        """Wait for sends; after a whole schedule, assert that only weights are left."""
        self.post.end()
        if not whole:
            return
        kept = {token: value for token, value in self.table.items() if value is not None}
        left = [str(token) for token in kept if token.kind != "weights"]
        assert not left, f"left over: {', '.join(left)}"


def acks(schedule: Schedule, rank: int) -> dict[Token, tuple[Token, ...]]:
    """For each token that `rank` receives, the tokens it sent whose arrival this newly proves.

    rank 0   SEND:act0.0>1 ................ RECV:grad1.0<1     grad1.0 was sent by a rank that
    rank 1   RECV:act0.0<0 F1.0 B1.0 SEND:grad1.0>0            had received act0.0 before
    """
    row = schedule.rows[rank]
    peers = {step.peer for step in row if isinstance(step, Transfer) and step.op == "RECV"}
    found: dict[Token, tuple[Token, ...]] = {}
    for peer in peers:
        got: list[Token] = []
        for step in schedule.rows[peer]:
            if not isinstance(step, Transfer) or step.peer != rank:
                continue
            if step.op == "RECV":
                got.append(step.token)
            else:
                found[step.token], got = tuple(got), []
    return found


class _Post:
    """The messages of one rank in flight. From the start, the next AHEAD receives from each rank
    are posted, in the order of the row; a rank holds their bundles beyond the schedule's memory. A
    sent bundle is kept until a message proves that it has arrived (`acks`), or until the end.
    """

    def __init__(self, schedule: Schedule, axis: Axis, work: StageWork) -> None:
        self.axis, self.work = axis, work
        self.acks = acks(schedule, axis.rank)
        self.coming: dict[int, deque[Token]] = {}
        self.inbox: dict[Token, tuple[list[Tensor], list[Pending]]] = {}
        self.outbox: dict[Token, list[Pending]] = {}
        for step in schedule.rows[axis.rank]:
            if isinstance(step, Transfer) and step.op == "RECV":
                self.coming.setdefault(step.peer, deque()).append(step.token)
        for peer in self.coming:
            for _ in range(AHEAD):
                self._await(peer)

    def send(self, transfer: Transfer, bundle: list[Tensor]) -> None:
        """Begin to send a bundle, one message per tensor."""
        token, peer = transfer.token, transfer.peer
        told = [(tuple(spec.shape), spec.dtype) for spec in self.work.specs(token)]
        made = [(tuple(x.shape), x.dtype) for x in bundle]
        assert made == told, f"{token} is {made}, but rank {peer} expects {told}"
        full = [x for x in bundle if x.numel()]
        self.outbox[token] = [begin_send(x, self.axis, peer) for x in full]

    def receive(self, transfer: Transfer) -> list[Tensor]:
        """Wait for the bundle, and post the next receive from that rank."""
        bundle, arriving = self.inbox.pop(transfer.token)
        _wait(arriving)
        self._await(transfer.peer)
        for token in self.acks.get(transfer.token, ()):
            _wait(self.outbox.pop(token))
        return bundle

    def end(self) -> None:
        assert not self.inbox
        while self.outbox:
            _wait(self.outbox.popitem()[1])

    def _await(self, peer: int) -> None:
        if self.coming[peer]:
            token, device = self.coming[peer].popleft(), self.work.device
            bundle = [
                torch.empty(tuple(spec.shape), dtype=spec.dtype, device=device)
                for spec in self.work.specs(token)
            ]
            full = [x for x in bundle if x.numel()]
            self.inbox[token] = bundle, [begin_receive(x, self.axis, peer) for x in full]


def _wait(pending: Sequence[Pending]) -> None:
    for one in pending:
        one.wait()


def _marked(row: Sequence[Step], place: int, rank: int) -> str:
    words = [f">>{step}<<" if k == place else str(step) for k, step in enumerate(row)]
    head = f"rank {rank} of the pipeline was at step {place + 1} of the {len(row)} in its row:"
    lines = fill(" ".join(words), 100, break_long_words=False, break_on_hyphens=False)
    return f"{head}\n{lines}"
