"""A schedule: for every rank, the ordered list of its actions, and the dependencies between them.

    1F1B, 3 ranks, 4 microbatches                           home = (0, 1, 2)
    rank 0   F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3        rank 0 owns stage 0
    rank 1   F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3
    rank 2   F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3

A schedule is only an order; times follow from the dependencies.  A lowered schedule also contains
transfers (lower.py).

In a synchronous schedule (`update` 0) the runtime updates after the last action.  An asynchronous
one updates every `update` microbatches, with U; on stage s, microbatch i then uses, forward and
backward, the weights after max(0, i // update - lag[s]) updates.  PipeDream's weight stashing and
2BW's two buffers are two values of `lag` (builders.py).

    F  forward of one stage for one microbatch        U       update a stage's weights
    B  backward: I and W at once                      REDUCE  reduce a stage's gradients
    I  gradient of the stage's input                  SEND, RECV  one tensor, to or from a rank
    W  gradient of the stage's weights

`needs` and `makes` are the only statement of dependencies: checks, transfers, the clock, memory,
and the live tensors of the runtime all follow from them.  A step consumes what it needs, except
weights, which other steps read too.

Legend: s a stage, a run of layers, numbered along the model from 0; i a microbatch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple

# --- actions and tokens ---------------------------------------------------------------------------

Op = Literal["F", "B", "I", "W", "U", "REDUCE"]
Kind = Literal["act", "tape", "grad", "rest", "part", "weights"]

OPS: Final[tuple[Op, ...]] = ("F", "B", "I", "W", "U", "REDUCE")
#: The actions that compute with a stage's parameters.
COMPUTE_OPS: Final[tuple[Op, ...]] = ("F", "B", "I", "W")


class Action(NamedTuple):
    """One action of the rank that owns `stage`. Prints as F2.0: stage 2, microbatch 0.
    U updates with the microbatches since the previous update; `microbatch` is the last of them.
    """

    op: Op
    stage: int
    microbatch: int = 0

    def __str__(self) -> str:
        if self.op == "REDUCE":
            return f"{self.op}:{self.stage}"
        return f"{self.op}{self.stage}.{self.microbatch}"


class Token(NamedTuple):
    """One tensor, or bundle of tensors, of one stage and microbatch. Prints as act2.0.

    act      the stage's output, an input of the next stage
    tape     what the forward pass saves for the backward pass; the activation memory
    grad     the gradient of the stage's input, an input of the previous stage
    rest     what I saves for W
    part     one microbatch's contribution to the gradient of the weights
    weights  the weights after `microbatch` updates, in schedules with U
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


class Transfer(NamedTuple):
    """One end of a message: the token, and the rank at the other end. Prints as SEND:act0.3>1."""

    op: Literal["SEND", "RECV"]
    token: Token
    peer: int

    def __str__(self) -> str:
        return f"{self.op}:{self.token}{'>' if self.op == 'SEND' else '<'}{self.peer}"


Step = Action | Transfer


@dataclass(frozen=True)
class Schedule:
    """`rows[rank]` are the actions of a rank in order; `home[stage]` is the owner of a stage."""

    rows: tuple[tuple[Step, ...], ...]
    home: tuple[int, ...]
    microbatches: int
    update: int = 0
    lag: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def last_stage(self) -> int:
        return len(self.home) - 1

    @cached_property
    def lowered(self) -> bool:
        known = (*COMPUTE_OPS, "U")
        return any(step.op not in known for row in self.rows for step in row)

    def stages(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, owner in enumerate(self.home) if owner == rank)

    def version(self, stage: int, microbatch: int) -> int:
        """The number of updates behind the weights that a microbatch uses on a stage."""
        return max(0, microbatch // self.update - self.lag[stage]) if self.update else 0

    def actions(self, rank: int) -> Iterator[Action]:
        return (step for step in self.rows[rank] if isinstance(step, Action))


# --- dependencies ---------------------------------------------------------------------------------


def needs(step: Step, schedule: Schedule) -> tuple[Token, ...]:
    """The tokens that must be on the rank before it can run `step`; RECV waits for its peer."""
    if not isinstance(step, Action):
        return (step.token,) if step.op == "SEND" else ()
    op, s, i = step
    version = schedule.version(s, i) if op in COMPUTE_OPS else 0
    match op:
        case "F":
            own = (Token("act", s - 1, i),) if s > 0 else ()
        case "B" | "I":
            tape = Token("tape", s, i)
            own = (tape, Token("grad", s + 1, i)) if s < schedule.last_stage else (tape,)
        case "W":
            own = (Token("rest", s, i),)
        case "REDUCE":
            own = tuple(Token("part", s, k) for k in range(schedule.microbatches))
        case "U":
            own = tuple(Token("part", s, k) for k in range(i - schedule.update + 1, i + 1))
            version = i // schedule.update
    return (*own, Token("weights", s, version)) if version else own


def makes(step: Step, schedule: Schedule) -> tuple[Token, ...]:
    """The tokens that `step` creates on the rank."""
    if not isinstance(step, Action):
        return (step.token,) if step.op == "RECV" else ()
    op, s, i = step
    before = (Token("grad", s, i),) if s > 0 else ()
    match op:
        case "F":
            tape = Token("tape", s, i)
            return (Token("act", s, i), tape) if s < schedule.last_stage else (tape,)
        case "B":
            return (*before, Token("part", s, i))
        case "I":
            return (*before, Token("rest", s, i))
        case "W":
            return (Token("part", s, i),)
        case "U":
            return (Token("weights", s, i // schedule.update + 1),)
        case "REDUCE":
            return ()


def takes(step: Step, schedule: Schedule) -> tuple[Token, ...]:
    return tuple(t for t in needs(step, schedule) if t.kind != "weights")
