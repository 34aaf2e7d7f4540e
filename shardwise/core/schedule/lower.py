"""Lowering: adds transfers, gathers and reductions to a schedule.

    rank 0   F0.0 SEND:act0.0>1 RECV:grad1.0<1 B0.0 REDUCE:0
    rank 1   RECV:act0.0<0 F1.0 B1.0 SEND:grad1.0>0 REDUCE:1

A tensor is sent as soon as it is made, and received just before it is needed. Between two ranks,
tensors are received in the order in which they were sent, if necessary earlier than needed. That
causes no extra wait, since a tensor sent earlier has also arrived earlier. So with sends that do
not block, a lowered schedule deadlocks only if the schedule itself does (check.py).
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from shardwise.core.errors import bad
from shardwise.core.schedule.action import Action, Step, Token, Transfer
from shardwise.core.schedule.relation import makes, needs
from shardwise.core.schedule.schedule import Schedule

Channel = tuple[int, int]  # the sending and the receiving rank


def lower(schedule: Schedule, *, gather: bool = False) -> Schedule:
    """Add transfers and reductions to the schedule; a lowered schedule is returned unchanged.

    REDUCE follows a stage's last gradient; in a schedule with updates, U reduces instead. With
    `gather` (zero3), every run of actions on one stage begins with GATHER and ends with FREE; for
    schedules with updates, which keep full versions of the weights, that raises InputError.
    """
    if schedule.lowered:
        return schedule
    if gather and schedule.update:
        given = "zero3 with a schedule that updates by itself, and keeps versions of the weights"
        raise bad(given, "zero3 with schedules that update at the end", "1f1b")
    rows = tuple(tuple(_around(schedule, rank, gather)) for rank in range(schedule.ranks))
    whole = replace(schedule, rows=rows)
    sent = channels(whole)
    return replace(whole, rows=tuple(tuple(_row(whole, r, sent)) for r in range(whole.ranks)))


def channels(schedule: Schedule) -> dict[Channel, list[Token]]:
    """The tokens that each rank makes for each other rank, in order."""
    ranks = range(schedule.ranks)
    user = {t: r for r in ranks for action in schedule.actions(r) for t in needs(action, schedule)}
    found: dict[Channel, list[Token]] = {}
    for rank in ranks:
        made = (token for action in schedule.actions(rank) for token in makes(action, schedule))
        for token in made:
            if user.get(token, rank) != rank:
                found.setdefault((rank, user[token]), []).append(token)
    return found


def _around(schedule: Schedule, rank: int, gather: bool) -> Iterator[Action]:
    """A row's actions with GATHER, FREE and REDUCE added."""
    row = list(schedule.actions(rank))
    left = {stage: sum(a.stage == stage for a in row) for stage in schedule.stages(rank)}
    for stage, run in groupby(row, key=lambda action: action.stage):
        actions = list(run)
        left[stage] -= len(actions)
        yield from (Action("GATHER", stage),) * gather
        yield from actions
        yield from (Action("FREE", stage),) * gather
        over = not schedule.update and not left[stage] and actions[-1].op != "F"
        yield from (Action("REDUCE", stage),) * over


def _row(schedule: Schedule, rank: int, sent: dict[Channel, list[Token]]) -> Iterator[Step]:
    """A row's actions with transfers added; `sent` is the result of `channels`."""
    peer = {t: (a, b) for (a, b), tokens in sent.items() if rank in (a, b) for t in tokens}
    inbox = {a: iter(tokens) for (a, b), tokens in sent.items() if b == rank}
    here: set[Token] = set()
    for action in schedule.rows[rank]:
        for token in needs(action, schedule):
            if token in peer and token not in here:
                received = list(_until(token, inbox[peer[token][0]]))
                yield from (Transfer("RECV", t, peer[t][0]) for t in received)
                here.update(received)
        yield action
        for token in makes(action, schedule):
            if token in peer:
                yield Transfer("SEND", token, peer[token][1])


def _until(wanted: Token, tokens: Iterable[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        if token == wanted:
            return
