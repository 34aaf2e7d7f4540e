"""The check that a schedule (the library's or the user's own) is complete and can run.

Every action is on the rank that owns its stage; every microbatch passes every stage once forward
and once backward; nothing deadlocks; between two ranks, tensors are received in the order in which
they are sent; no tensor is left unused.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from shardwise.core.errors import bad
from shardwise.core.schedule.action import COMPUTE_OPS, Action, Token, Transfer
from shardwise.core.schedule.lower import Channel, channels, lower
from shardwise.core.schedule.relation import makes, needs, takes
from shardwise.core.schedule.schedule import Schedule
from shardwise.core.schedule.simulate import simulate


def check(schedule: Schedule) -> None:
    """Raise InputError for the first problem of the schedule, if it has one."""
    _places(schedule)
    _once(schedule)
    _updates(schedule)
    if schedule.lowered:
        _messages(schedule)
    whole = lower(schedule)
    for _ in simulate(whole):
        pass
    if not schedule.lowered:
        _streams(schedule)
    for rank, tokens in enumerate(leftovers(whole)):
        if tokens:
            given = f"rank {rank} that ends with {min(tokens)} unused"
            stage = min(tokens).stage
            raise bad(given, "schedules that use every tensor", f"REDUCE:{stage} at the end")


def _places(schedule: Schedule) -> None:
    """Check that stages and microbatches exist, and actions are on the owners of their stages."""
    home, last = schedule.home, schedule.microbatches - 1
    if not home or not set(home) <= set(range(schedule.ranks)):
        given = f"stages at home on the ranks {', '.join(map(str, home))}"
        raise bad(given, f"ranks that have a row: 0 to {schedule.ranks - 1}", "home 0")
    if last < 0:
        raise bad("a schedule of no microbatches", "one microbatch or more", "microbatches 1")
    for rank in range(schedule.ranks):
        for action in schedule.actions(rank):
            if action.stage >= len(home) or action.microbatch > last:
                allowed = f"stages 0 to {len(home) - 1} and microbatches 0 to {last}"
                raise bad(f"{action} on rank {rank}", allowed, "an action of one of these")
            if home[action.stage] != rank:
                owner = home[action.stage]
                allowed = f"stage {action.stage} on rank {owner}, where it is at home"
                raise bad(f"{action} on rank {rank}", allowed, f"{action} on rank {owner}")


def _once(schedule: Schedule) -> None:
    """Check that every microbatch passes every stage once forward and once backward."""
    count = Counter(action for rank in range(schedule.ranks) for action in schedule.actions(rank))
    for stage in range(len(schedule.home)):
        for i in range(schedule.microbatches):
            times = [count[Action(op, stage, i)] for op in COMPUTE_OPS]
            if times not in ([1, 1, 0, 0], [1, 0, 1, 1]):
                named = zip(COMPUTE_OPS, times, strict=True)
                had = ", ".join(f"{op}{stage}.{i} {_times(n)}" for op, n in named if n)
                given = f"microbatch {i} on stage {stage} with {had or 'nothing to do'}"
                allowed = "F once, and then B once, or I and W once each"
                raise bad(given, allowed, f"F{stage}.{i} and B{stage}.{i}, once each")


def _updates(schedule: Schedule) -> None:
    """Check that U follows every `update` microbatches on every stage, if the schedule updates."""
    every, m, stages = schedule.update, schedule.microbatches, len(schedule.home)
    if len(schedule.lag) != stages * bool(every) or (every and m % every):
        given = f"an update every {every} of {m} microbatches, and {len(schedule.lag)} lags"
        allowed = f"`update` a divisor of {m}, and `lag` with one number for each stage"
        raise bad(given, allowed, f"update {m} and lag {' '.join('0' * stages)}")
    ends = range(every - 1, m, every) if every else ()
    due = Counter(Action("U", stage, i) for stage in range(stages) for i in ends)
    actions = (action for rank in range(schedule.ranks) for action in schedule.actions(rank))
    found = Counter(action for action in actions if action.op == "U")
    for action in sorted((found - due) | (due - found)):
        when = f"that updates after every {every}" if every else "without a line `update N`"
        given = f"{action} {_times(found[action])} in a schedule {when}"
        instead = f"{action} after B{action.stage}.{action.microbatch}" if due[action] else "no U"
        raise bad(given, f"{action} {_times(due[action])}", instead)


def _streams(schedule: Schedule) -> None:
    """Check that neighbouring stages process the microbatches in the same order."""
    for (a, b), made in channels(schedule).items():
        sent = set(made)
        taken = [t for action in schedule.actions(b) for t in needs(action, schedule) if t in sent]
        for kind, stage in sorted({(token.kind, token.stage) for token in made}):
            orders = [[t for t in ts if (t.kind, t.stage) == (kind, stage)] for ts in (made, taken)]
            _same(orders[0], orders[1], (a, b))


def _messages(schedule: Schedule) -> None:
    """Check that each pair of ranks receives what is sent, in the same order."""
    ends: dict[Channel, tuple[list[Token], list[Token]]] = defaultdict(lambda: ([], []))
    for rank, row in enumerate(schedule.rows):
        for step in row:
            if isinstance(step, Transfer) and step.op == "SEND":
                ends[rank, step.peer][0].append(step.token)
            elif isinstance(step, Transfer):
                ends[step.peer, rank][1].append(step.token)
    for channel, (sent, received) in sorted(ends.items()):
        _same(sent, received, channel)


def _same(sent: Sequence[Token], received: Sequence[Token], channel: Channel) -> None:
    """Raise InputError at the first difference between the two ends of a channel."""
    a, b = channel
    for pair in zip_longest(sent, received):
        out, into = pair
        if out == into:
            continue
        instead = f"the row of rank {b} so that it takes {out} before {into}"
        if out is None or into is None:
            instead = f"RECV:{out}<{a} on rank {b}" if out else f"SEND:{into}>{b} on rank {a}"
        given = f"crossed messages: rank {a} sends {out or 'nothing more'} to rank {b}, "
        given += f"which receives {into or 'nothing more'}"
        raise bad(given, f"the same order of SEND and RECV from rank {a} to rank {b}", instead)


def _times(number: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(number, f"{number} times")


def leftovers(schedule: Schedule) -> tuple[frozenset[Token], ...]:
    """The tokens on each rank after its last step, except weights."""
    whole = lower(schedule)
    found: list[frozenset[Token]] = []
    for row in whole.rows:
        alive: set[Token] = set()
        for step in row:
            alive.difference_update(takes(step, whole))
            alive.update(makes(step, whole))
        found.append(frozenset(token for token in alive if token.kind != "weights"))
    return tuple(found)
