"""Zero-bubble schedules, which split the backward pass into I and W: ZB-H1, ZB-V, DualPipe-V.

The previous stage waits only for I, so W can be postponed until its rank would otherwise wait.
V-shaped schedules give each rank two chunks, one on the way down and one on the way up:

    rank 0   stage 0   stage 5     The last rank has two consecutive stages, and gradients start on
    rank 1   stage 1   stage 4     the rank with the oldest activations, so every rank needs the
    rank 2   stage 2   stage 3     same memory.

Legend: p ranks, m microbatches, r a rank. Closed forms are for F = I = W = 1.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwise.core.errors import bad
from shardwise.core.schedule.builders import one_stage_a_rank
from shardwise.core.schedule.schedule import Action, Op, Schedule, Step, Token, makes, needs

Phase = tuple[int, str]  # repetitions, and ops with chunks: (3, "F0 I0 F1 I1")


def zb_h1(p: int, m: int) -> Schedule:
    """1F1B with W postponed by r microbatches on rank r (arXiv 2401.10241, section 2.1).
    Makespan 3m+p-1 if m >= p, else 2m+2p-1. With one stage per rank no schedule is shorter: the
    last rank starts at p-1 and has work 3m; rank 0 gets its first gradient at 2p-1 and has work 2m
    after it. Every rank holds the activations of min(p, m) microbatches, as rank 0 does in 1F1B.
    """

    def order(r: int) -> Iterator[Action]:
        """1F1B's row of rank r with I instead of B, and every W `late` microbatches later."""
        ahead, late = min(p - r, m), min(r, m)
        yield from (Action("F", r, i) for i in range(ahead - 1))
        for i in range(m + late):
            if ahead - 1 + i < m:
                yield Action("F", r, ahead - 1 + i)
            if i < m:
                yield Action("I", r, i)
            if i >= late:
                yield Action("W", r, i - late)

    return one_stage_a_rank(p, m, order)


def zb_v(p: int, m: int) -> Schedule:
    """Two chunks per rank in a V, with W wherever a rank would wait (arXiv 2401.10241, 2405.15362).
    Makespan 6m+p-1 if m >= p: no bubble except the last rank's start at p-1. In general it is the
    largest of 6m+p-1, 4m+3p-1 and 2m+4p-1, the minimum possible: for m < p, the work that rank 0
    has left when its first gradients arrive (at 2p and 4p-1) decides. A rank holds the activations
    of at most min(2p, 2m) chunks of half a stage each, as many as 1F1B's rank 0.
    """
    steady = max(m, 2 * p - 1)  # fewer microbatches: the same order without the others

    def phases(r: int) -> list[Phase]:
        """The row of rank r without W, which fills the gaps."""
        return [
            (2 * (p - r) - 1, "F0"),
            (r, "F1 F0"),
            (p - r, "F1 I1"),
            (steady - 2 * p + r + 1, "F0 I0 F1 I1"),
            (p - r - 1, "I0 F1 I1"),
            (r, "I0 I1"),
            (p - r, "I0"),
        ]

    return filled(_v_shape(p, m, [phases(r) for r in range(p)]), most=2 * p)


def dualpipe_v(p: int, m: int) -> Schedule:
    """DeepSeek-V3's DualPipe cut in half (arXiv 2412.19437, section 3.2.1), for m >= 2p.
    It pairs F and B of two chunks, so that one's messages overlap with the other's computation.
    Makespan 6m+p-1 without that overlap; every rank holds the activations of 2p+1 chunks.
    """
    fills(p, m)

    def phases(r: int) -> list[Phase]:
        """The row of rank r; while draining, the second half of its backward passes are split."""
        turns = ["B1", "B0"] * (r + 1)
        whole, split = turns[: r + 1], [f"I{turn[1]}" for turn in turns[r + 1 :]]
        return [
            (2 * (p - r - 1), "F0"),
            (r + 1, "F0 F1"),
            (p - r - 1, "I1 W F1"),
            (m - 2 * p + r + 1, "F0 B1 F1 B0"),
            (p - r - 1, "B1 F1 B0"),
            (1, " ".join([*whole, *split])),
            (p - r - 1, "W I0"),
            (r + 1, "W"),
        ]

    return _v_shape(p, m, [phases(r) for r in range(p)])


def filled(schedule: Schedule, most: int) -> Schedule:
    """Insert a W where its rank would wait or hold over `most` tapes; actions take equal time."""
    todo = [deque(row) for row in schedule.rows]
    late: list[deque[Action]] = [deque() for _ in todo]  # each rank's postponed W
    rows: list[list[Step]] = [[] for _ in todo]
    held = [0] * len(rows)
    made: dict[Token, int] = {}

    def can(step: Step, rank: int) -> bool:
        if step.op == "F" and held[rank] == most:
            return False
        return all(made.get(token, now + 1) <= now for token in needs(step, schedule))

    now = 0
    while any(todo) or any(late):
        for rank, row in enumerate(rows):
            if todo[rank] and can(todo[rank][0], rank):
                step = todo[rank].popleft()
            elif late[rank]:
                step = late[rank].popleft()
            else:
                continue
            row.append(step)
            held[rank] += {"F": 1, "W": -1}.get(step.op, 0)
            late[rank].extend(_owed(step))
            made.update(dict.fromkeys(makes(step, schedule), now + 1))
        now += 1
    return replace(schedule, rows=tuple(map(tuple, rows)))


def _v_shape(p: int, m: int, phases: Sequence[Sequence[Phase]]) -> Schedule:
    rows: list[tuple[Action, ...]] = []
    for r, phase in enumerate(phases):
        row: list[Action] = []
        late: deque[Action] = deque()
        count: Counter[str] = Counter()
        for word in (word for times, words in phase for word in words.split() * times):
            if word == "W":
                row.append(late.popleft())
                continue
            op, chunk = word
            turn = f"{'F' if op == 'F' else 'B'}{chunk}"
            action = Action(_OPS[op], r if chunk == "0" else 2 * p - 1 - r, count[turn])
            count[turn] += 1
            row.append(action)
            late.extend(_owed(action))
        rows.append(tuple(action for action in row if action.microbatch < m))
    return Schedule(tuple(rows), (*range(p), *reversed(range(p))), m)


_OPS: dict[str, Op] = {"F": "F", "B": "B", "I": "I"}


def _owed(step: Step) -> tuple[Action, ...]:
    return (Action("W", *step[1:]),) if isinstance(step, Action) and step.op == "I" else ()


def fills(p: int, m: int) -> None:
    if m < 2 * p:
        given = f"{m} microbatches for DualPipe-V on {p} ranks"
        raise bad(given, f"twice the ranks or more: from {2 * p} up", f"dualpipe-v:{2 * p}")
