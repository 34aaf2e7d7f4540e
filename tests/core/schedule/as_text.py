"""The text form of a schedule: writing it, and reading one that a user wrote.

    # 1F1B on two ranks (text after a hash is a comment)
    home 0 1
    microbatches 2
    rank 0  F0.0 F0.1 B0.0 B0.1
    rank 1  F1.0 B1.0 F1.1 B1.1

F1.0 is the forward of stage 1 for microbatch 0; B, I, W and U likewise. If every rank has one
stage, F0 is enough for microbatch 0. Lowered schedules also have GATHER:1, FREE:1 and REDUCE:1 for
stage 1, SEND:act0.1>1 (to rank 1) and RECV:act0.1<0 (from rank 0). `home` lists the owner of each
stage, `microbatches` is their number; both default to what the rows imply. `update` and `lag` are
for asynchronous schedules.
"""

import re
from collections.abc import Iterable, Mapping

from shardwise.core.errors import InputError, bad
from shardwise.core.schedule.action import OPS, Action, Op, Step, Token, Transfer
from shardwise.core.schedule.schedule import Schedule

_OPS: dict[str, Op] = {op: op for op in OPS}
_FIELDS = ("home", "microbatches", "update", "lag")
_SEVERAL = {"home": "the rank of each stage", "lag": "the lag of each stage"}
_MOST = 99999
_SHOWN = 60  # characters of a line in an error
_EXAMPLE = "rank 0  F0.0 B0.0"
_ACTION = re.compile(r"([FBIWU])(?:(\d{1,5})\.)?(\d{1,5})")
_STAGE_ACTION = re.compile(r"(GATHER|FREE|REDUCE):(\d{1,5})")
_NUMBER = re.compile(r"\d{1,5}")
_TRANSFER = re.compile(r"(SEND|RECV):(act|grad)(\d{1,5})\.(\d{1,5})([<>])(\d{1,5})")


def write(schedule: Schedule) -> str:
    """The schedule as text, which `read` parses back."""
    numbers: dict[str, Iterable[int]] = {
        "home": schedule.home,
        "microbatches": (schedule.microbatches,),
        "update": (schedule.update,) if schedule.update else (),
        "lag": schedule.lag,
    }
    lines = [f"{name} {' '.join(map(str, found))}" for name, found in numbers.items() if found]
    rows = (f"rank {r}  {' '.join(map(str, row))}" for r, row in enumerate(schedule.rows))
    return "\n".join([*lines, *rows]) + "\n"


def read(text: str) -> Schedule:
    """Parse a schedule. Raises InputError for a line or word that cannot be parsed.

    check.py decides whether it can run.
    """
    fields: dict[str, tuple[int, ...]] = {}
    rows: list[tuple[int, list[str]]] = []
    lines = [found for line in text.splitlines() if (found := line.partition("#")[0].split())]
    if not lines:
        allowed = "one line for each rank, from 0 up, with its actions"
        raise bad("a schedule without lines", allowed, _EXAMPLE)
    for name, *words in lines:
        if name == "rank" and words and _NUMBER.fullmatch(words[0].rstrip(":")):
            rows.append((int(words[0].rstrip(":")), words[1:]))
        elif name in _FIELDS and name not in fields:
            fields[name] = _numbers(name, words)
        else:
            allowed = f"rank N and its actions, or once: {', '.join(_FIELDS)} with whole numbers"
            raise bad(f"the line '{_short([name, *words])}' of a schedule", allowed, _EXAMPLE)
    rows.sort()
    ranks = [rank for rank, _ in rows]
    if ranks != list(range(len(ranks))) or not ranks:
        given = f"a schedule with lines for the ranks {', '.join(map(str, ranks)) or '(none)'}"
        raise bad(given, "one line for each rank, from 0 up", _EXAMPLE)
    return _schedule([row for _, row in rows], fields)


def _numbers(name: str, words: list[str]) -> tuple[int, ...]:
    """The numbers of a field's line. Raises InputError for wrong ones."""
    several = name in _SEVERAL
    if not words or not all(map(_NUMBER.fullmatch, words)) or (len(words) > 1 and not several):
        allowed = f"{name} with {_SEVERAL.get(name, 'one whole number')}, from 0 to {_MOST}"
        instead = f"{name} {'0 1' if several else '1'}, or no such line"
        raise bad(f"the line '{_short([name, *words])}' of a schedule", allowed, instead)
    return tuple(map(int, words))


def _short(words: list[str]) -> str:
    line = " ".join(words)
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."


def _schedule(rows: list[list[str]], fields: Mapping[str, tuple[int, ...]]) -> Schedule:
    home = fields.get("home") or _home(rows)
    own = [[s for s, owner in enumerate(home) if owner == rank] for rank in range(len(rows))]
    steps = tuple(tuple(_step(word, own[r]) for word in row) for r, row in enumerate(rows))
    last = max((s.microbatch for row in steps for s in row if isinstance(s, Action)), default=0)
    microbatches, *_ = fields.get("microbatches", (last + 1,))
    update, *_ = fields.get("update", (0,))
    return Schedule(steps, home, microbatches, update, fields.get("lag", ()))


def _home(rows: list[list[str]]) -> tuple[int, ...]:
    """The rank whose row has each stage; 0 for a stage in no row."""
    found: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in filter(None, map(_ACTION.fullmatch, row)):
            found.setdefault(int(action[2] or rank), rank)
    stages = max(found, default=0) + 1
    return tuple(found.get(stage, 0) for stage in range(stages))


def _step(word: str, stages: list[int]) -> Step:
    """Parse one word on the row of a rank that owns `stages`."""
    if found := _ACTION.fullmatch(word):
        op, stage, microbatch = found.groups()
        if stage is None and len(stages) != 1:
            given = f"the word '{word}' on a rank of {len(stages)} stages"
            instead = f"{op}{(stages or [0])[0]}.{microbatch}"
            raise bad(given, f"{op}, the stage, a dot and the microbatch", instead)
        return Action(_OPS[op], int(stage or stages[0]), int(microbatch))
    if found := _STAGE_ACTION.fullmatch(word):
        return Action(_OPS[found[1]], int(found[2]))
    if (found := _TRANSFER.fullmatch(word)) and (found[1] == "SEND") == (found[5] == ">"):
        token = Token("act" if found[2] == "act" else "grad", int(found[3]), int(found[4]))
        return Transfer("SEND" if found[1] == "SEND" else "RECV", token, int(found[6]))
    raise _unknown(word)


def _unknown(word: str) -> InputError:
    allowed = (
        "F, B, I, W or U with STAGE.MICROBATCH, as F0.3; GATHER:0, FREE:0, REDUCE:0; "
        "SEND:act0.3>1, RECV:act0.3<0"
    )
    again = word.upper()
    return bad(f"'{word}' in a schedule", allowed, again if _ACTION.fullmatch(again) else "F0.3")
