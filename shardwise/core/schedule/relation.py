"""The dependency relation of a pipeline: the tokens that each action needs and makes.

    F(s,i)   needs act(s-1,i)                 makes act(s,i), tape(s,i)
    B(s,i)   needs tape(s,i), grad(s+1,i)     makes grad(s,i), part(s,i)
    I(s,i)   needs tape(s,i), grad(s+1,i)     makes grad(s,i), rest(s,i)
    W(s,i)   needs rest(s,i)                  makes part(s,i)
    REDUCE(s) and U(s,i) need the parts they add up; U makes the next version of the weights
    F, B, I, W need the stage's params if they are sharded, and their version of the weights if it
    is not the first

The first stage needs no act and makes no grad; the last makes no act and needs no grad. A step
consumes what it needs, except weights and params, which other steps read too.

This is the only statement of dependencies: checks, transfers, the clock, memory, and the live
tensors of the runtime all follow from it.
"""

from shardwise.core.schedule.action import COMPUTE_OPS, Action, Step, Token
from shardwise.core.schedule.schedule import Schedule


def needs(step: Step, schedule: Schedule) -> tuple[Token, ...]:
    """The tokens that must be on the rank before it can run `step`; RECV waits for its peer."""
    if not isinstance(step, Action):
        return (step.token,) if step.op == "SEND" else ()
    op, s, i = step
    match op:
        case "F":
            own = (Token("act", s - 1, i),) if s > 0 else ()
        case "B" | "I":
            tape = Token("tape", s, i)
            own = (tape, Token("grad", s + 1, i)) if s < schedule.last_stage else (tape,)
        case "W":
            own = (Token("rest", s, i),)
        case "FREE":
            own = (Token("params", s, 0),)
        case "REDUCE":
            own = tuple(Token("part", s, k) for k in range(schedule.microbatches))
        case "U":
            own = tuple(Token("part", s, k) for k in range(i - schedule.update + 1, i + 1))
        case "GATHER":
            own = ()
    return own + _weights(step, schedule)


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
        case "GATHER":
            return (Token("params", s, 0),)
        case "U":
            return (Token("weights", s, i // schedule.update + 1),)
        case "FREE" | "REDUCE":
            return ()


def takes(step: Step, schedule: Schedule) -> tuple[Token, ...]:
    """The tokens that `step` removes from the rank."""
    if step.op == "FREE":
        return needs(step, schedule)
    return tuple(t for t in needs(step, schedule) if t.kind not in ("weights", "params"))


def _weights(action: Action, schedule: Schedule) -> tuple[Token, ...]:
    """What an action reads without consuming it: gathered parameters, and a weight version."""
    op, s, i = action
    if op in COMPUTE_OPS:
        whole = (Token("params", s, 0),) if schedule.gathers else ()
        version = schedule.version(s, i)
    else:
        whole, version = (), i // schedule.update if op == "U" else 0
    return (*whole, Token("weights", s, version)) if version else whole
