"""Schedules for tests: read from text and written as text, checked, and of all sizes up to 8 by 8.

    # 1F1B on two ranks (text after a hash is a comment)
    rank 0  F0.0 F0.1 B0.0 B0.1
    rank 1  F1.0 B1.0 F1.1 B1.1

F1.0 is the forward of stage 1 for microbatch 0; F0 that of microbatch 0 in the rank's own stage.
Lowered schedules also have REDUCE:1, SEND:act0.1>1 (to rank 1) and RECV:act0.1<0.
`home` lists the owner of each stage, `update` and `lag` are for asynchronous schedules.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from shardwise.core.schedule.clock import simulate
from shardwise.core.schedule.library import LIBRARY, Size, size
from shardwise.core.schedule.lower import lower
from shardwise.core.schedule.schedule import (
    COMPUTE_OPS,
    Action,
    Schedule,
    Step,
    Token,
    Transfer,
    makes,
    takes,
)

MOST = 8
_ACTION = re.compile(r"([FBIWU])(?:(\d+)\.)?(\d+)")
_STAGE_ACTION = re.compile(r"(REDUCE):(\d+)")
_TRANSFER = re.compile(r"(SEND|RECV):(act|grad)(\d+)\.(\d+)[<>](\d+)")


def write(schedule: Schedule) -> list[str]:
    return [f"rank {r}  {' '.join(map(str, row))}" for r, row in enumerate(schedule.rows)]


def read(text: str) -> Schedule:
    rows, fields = list[tuple[Step, ...]](), dict[str, tuple[int, ...]]()
    for line in text.splitlines():
        name, *words = line.partition("#")[0].split() or [""]
        if name == "rank":
            rows.append(tuple(_step(word, int(words[0])) for word in words[1:]))
        elif name:
            fields[name] = tuple(map(int, words))
    actions = [(rank, a) for rank, row in enumerate(rows) for a in row if isinstance(a, Action)]
    owners = {a.stage: rank for rank, a in reversed(actions)}
    home = fields.get("home") or tuple(owners[stage] for stage in range(len(owners)))
    (update,) = fields.get("update", (0,))
    last = max(action.microbatch for _, action in actions)
    return Schedule(tuple(rows), home, last + 1, update, fields.get("lag", ()))


def _step(word: str, rank: int) -> Step:
    if found := _ACTION.fullmatch(word):
        op, stage, microbatch = found.groups()
        return Action(op, int(stage or rank), int(microbatch))
    op: Any
    if found := _STAGE_ACTION.fullmatch(word):
        op, stage = found.groups()
        return Action(op, int(stage))
    found = _TRANSFER.fullmatch(word)
    assert found is not None, word
    op, kind, stage, microbatch, peer = found.groups()
    return Transfer(op, Token(kind, int(stage), int(microbatch)), int(peer))  # type: ignore[arg-type]


def check(schedule: Schedule) -> None:
    """Every action once, on the owner of its stage; no deadlock (InputError), nothing left over."""
    stages, every = range(len(schedule.home)), schedule.update
    for rank in range(schedule.ranks):
        assert all(schedule.home[action.stage] == rank for action in schedule.actions(rank))
    count = Counter(action for rank in range(schedule.ranks) for action in schedule.actions(rank))
    for stage in stages:
        for i in range(schedule.microbatches):
            times = [count[Action(op, stage, i)] for op in COMPUTE_OPS]
            assert times in ([1, 1, 0, 0], [1, 0, 1, 1]), (stage, i)
    ends = range(every - 1, schedule.microbatches, every) if every else ()
    updates = Counter(Action("U", stage, i) for stage in stages for i in ends)
    assert Counter({a: n for a, n in count.items() if a.op == "U"}) == updates
    assert sum(1 for _ in simulate(lower(schedule))) == sum(map(len, lower(schedule).rows))
    assert not any(leftovers(schedule))


def leftovers(schedule: Schedule) -> tuple[set[Token], ...]:
    """The tokens on each rank after its last step, except weights."""
    whole = lower(schedule)
    found: list[set[Token]] = []
    for row in whole.rows:
        alive: set[Token] = set()
        for step in row:
            alive.difference_update(takes(step, whole))
            alive.update(makes(step, whole))
        found.append({token for token in alive if token.kind != "weights"})
    return tuple(found)


def allowed(name: str, p: int, m: int) -> bool:
    """Whether the paper of the schedule lets m microbatches go over p ranks."""
    return {
        "naive": m == 1,
        "2bw": m >= p,
        "interleaved": m % p == 0,
        "dualpipe-v": m >= 2 * p,
    }.get(name, True)


def sizes(name: str) -> Iterator[Size]:
    """Every size up to 8 ranks and 8 microbatches (DualPipe-V: 2p+2, as it needs at least 2p)."""
    chunks = LIBRARY[name].chunks
    for p in range(1, MOST + 1):
        for m in range(1, 2 * p + 3 if name == "dualpipe-v" else MOST + 1):
            if allowed(name, p, m):
                yield from (
                    size(name, p, m, v) for v in ([1, 2, 3] if chunks is None else [chunks])
                )
