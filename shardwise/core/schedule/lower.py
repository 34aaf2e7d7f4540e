"""Lowering adds transfers and reductions to a schedule, from which its memory follows.

    rank 0   F0.0 SEND:act0.0>1 RECV:grad1.0<1 B0.0 REDUCE:0
    rank 1   RECV:act0.0<0 F1.0 B1.0 SEND:grad1.0>0 REDUCE:1

A tensor is sent as soon as it is made, and received just before it is needed.  Between two ranks,
tensors are received in the order in which they were sent, if necessary earlier than needed.  That
causes no extra wait, since a tensor sent earlier has also arrived earlier.  So with sends that do
not block, a lowered schedule deadlocks only if the schedule itself does (clock.py).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace

from shardwise.core.schedule.schedule import (
    COMPUTE_OPS,
    Action,
    Schedule,
    Step,
    Token,
    Transfer,
    makes,
    needs,
    takes,
)

Channel = tuple[int, int]  # the sending and the receiving rank


def lower(schedule: Schedule) -> Schedule:
    """Add transfers and reductions to the schedule; a lowered schedule is returned unchanged.
    REDUCE follows a stage's last gradient; in a schedule with updates, U reduces instead.
    """
    if schedule.lowered:
        return schedule
    rows = tuple(tuple(_reduced(schedule, rank)) for rank in range(schedule.ranks))
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


def _reduced(schedule: Schedule, rank: int) -> Iterator[Action]:
    row = list(schedule.actions(rank))
    last = {action.stage: place for place, action in enumerate(row)}
    for place, action in enumerate(row):
        yield action
        if last[action.stage] == place and action.op != "F" and not schedule.update:
            yield Action("REDUCE", action.stage)


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


# --- the memory of a schedule ---------------------------------------------------------------------


def _is_activation(token: Token) -> bool:
    return token.kind in ("tape", "rest")


def peaks(schedule: Schedule) -> tuple[int, ...]:
    """The most activations on each rank: one for each microbatch and stage whose backward pass is
    not complete.
    """
    ranks = range(schedule.ranks)
    return tuple(max(sum(n.values()) for n in most_alive(schedule, rank)) for rank in ranks)


def most_alive(schedule: Schedule, rank: int) -> list[dict[int, int]]:
    """The number of live activations of each stage of `rank`, at the rank's maximal moments.
    The peak in bytes is at one of them, for any bytes per activation of each stage.
    """
    whole = lower(schedule)
    alive = dict.fromkeys(whole.stages(rank), 0)
    found: list[dict[int, int]] = []
    for step in whole.rows[rank]:
        for token in filter(_is_activation, takes(step, whole)):
            alive[token.stage] -= 1
        for token in filter(_is_activation, makes(step, whole)):
            alive[token.stage] += 1
        if not any(all(n <= other[stage] for stage, n in alive.items()) for other in found):
            found = [o for o in found if any(n > alive[stage] for stage, n in o.items())]
            found.append(dict(alive))
    return found


def versions(schedule: Schedule) -> tuple[int, ...]:
    """The most weight versions of each stage at once: the newest, and those still to be used."""
    return tuple(_versions(schedule, stage) for stage in range(len(schedule.home)))


def _versions(schedule: Schedule, stage: int) -> int:
    if not schedule.update:
        return 1
    row = list(enumerate(schedule.actions(schedule.home[stage])))
    mine = [(k, action) for k, action in row if action.stage == stage]
    born = {0: -1} | {a.microbatch // schedule.update + 1: k for k, a in mine if a.op == "U"}
    used = {schedule.version(*a[1:]): k for k, a in mine if a.op in COMPUTE_OPS}  # the last use
    known, uses = sorted(used), sorted(used.values())
    # older versions of which a use comes after the update at k
    return max(1 + bisect_left(known, v) - bisect_right(uses, k) for v, k in born.items())
