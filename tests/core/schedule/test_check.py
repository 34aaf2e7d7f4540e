"""What is answered to schedules that cannot be run, the user's own above all."""

import pytest

from shardwise.core.errors import InputError
from tests.core.schedule.as_text import read
from tests.core.schedule.schedule_check import check

LOWERED = (
    "rank 0 F0 SEND:act0.0>1 RECV:grad1.0<1 B0 REDUCE:0\n"
    "rank 1 RECV:act0.0<0 F0 B0 SEND:grad1.0>0 REDUCE:1"
)

#: name: (a schedule, what the answer says).
BAD = {
    "deadlock": (
        "rank 0 F0 B0 F1 B1\nrank 1 F1 B1 F0 B0",
        "to do B0.0 for grad1.0 of B1.0 on rank 1; rank 1 waits to do F1.1 for act0.1 of F0.1 on",
    ),
    "a deadlock's way out": (
        "rank 0 F0.0 F1.0 B0.0 B1.0",
        "Write instead: each action before its use",
    ),
    "own row": (
        "rank 0 F0.0 F2.0 B2.0 B0.0\nrank 1 B1.0 F1.0",
        "rank 1 waits to do B1.0 for grad2.0 of B2.0 on rank 0 and tape1.0 of F1.0 on its own row",
    ),
    "crossed": (
        "rank 0 F0 F1 B0 B1\nrank 1 F1 F0 B0 B1",
        "rank 0 sends act0.0 to rank 1, which receives act0.1",
    ),
    "crossed messages": (
        LOWERED.replace("F0 SEND", "F0 F1 SEND:act0.1>1 SEND")
        .replace("B0 REDUCE:0", "B0 RECV:grad1.1<1 B1 REDUCE:0")
        .replace("F0 B0", "RECV:act0.1<0 F0 F1 B0 B1")
        .replace("SEND:grad1.0>0", "SEND:grad1.0>0 SEND:grad1.1>0"),
        "rank 0 sends act0.1 to rank 1, which receives act0.0",
    ),
    "no send": (LOWERED.replace("SEND:act0.0>1 ", ""), "Write instead: SEND:act0.0>1 on rank 0"),
    "no receive": (LOWERED.replace("RECV:act0.0<0 ", ""), "Write instead: RECV:act0.0<0 on rank 1"),
    "no such rank": (LOWERED.replace(">1", ">7"), "rank 0 sends nothing more to rank 1"),
    "not reduced": (LOWERED.replace(" REDUCE:1", ""), "rank 1 that ends with part1.0 unused"),
    "not gathered": (
        LOWERED.replace("rank 0 F0", "rank 0 F0 GATHER:0"),
        "F0.0 for params0.0 of GATHER:0 on its own row",
    ),
    "no backward": (
        "rank 0 F0 F1 B0 B1\nrank 1 F0 F1 B1",
        "microbatch 0 on stage 1 with F1.0 once",
    ),
    "forward twice": ("rank 0 F0 F0 B0", "F0.0 twice, B0.0 once"),
    "B and I": ("rank 0 F0 I0 B0 W0", "B0.0 once, I0.0 once, W0.0 once"),
    "I without W": ("rank 0 F0 I0", "F once, and then B once, or I and W once each"),
    "a stage nowhere": ("home 0 0\nrank 0 F0.0 B0.0", "microbatch 0 on stage 1 with nothing to do"),
    "wrong rank": ("home 0 1\nrank 0 F0.0 F1.0 B1.0 B0.0\nrank 1", "Write instead: F1.0 on rank 1"),
    "no such home": ("home 0 5\nrank 0 F0.0 B0.0", "ranks that have a row: 0 to 0"),
    "no such stage": (
        "home 0\nrank 0 F0.0 B0.0 F3.0 B3.0",
        "stages 0 to 0 and microbatches 0 to 0",
    ),
    "no such microbatch": ("microbatches 1\nrank 0 F0 B0 F1 B1", "and microbatches 0 to 0"),
    "an update too many": ("rank 0 F0 B0 U0", "without a line `update N`"),
    "an update too few": ("update 1\nlag 0\nrank 0 F0 B0", "U0.0 never"),
    "uneven updates": ("update 2\nlag 0\nrank 0 F0 B0", "an update every 2 of 1 microbatches"),
    "a lag too few": ("update 1\nrank 0 F0 B0 U0", "Write instead: update 1 and lag 0"),
    "a lag without updates": ("lag 0\nrank 0 F0 B0", "and 1 lags"),
    "no microbatches": ("microbatches 0\nrank 0", "one microbatch or more"),
    "weights before they are made": (
        "update 1\nlag 0\nrank 0 F0 F1 B0 U0 B1 U1",
        "rank 0 waits to do F0.1 for weights0.1 of U0.0 on its own row",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_schedule_that_cannot_run_is_answered(name: str):
    """Each is refused with what was given, what is allowed, and what to write instead."""
    text, phrase = BAD[name]
    with pytest.raises(InputError, match=r"Given: .* Allowed: .* Write instead: ") as refused:
        check(read(text))
    assert phrase in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        LOWERED,
        "rank 0 F0 F1 B1 B0\nrank 1 F0 F1 B1 B0",
        "rank 0 F0 I0 F1 W0 B1",
        "update 1\nlag 0\nrank 0 F0 B0 U0 F1 B1 U1",
        "update 2\nlag 1 0\nrank 0 F0 F1 B0 B1 U1\nrank 1 F0 B0 F1 B1 U1",
        "home 1 0\nrank 0 F1.0 B1.0\nrank 1 F0.0 B0.0",
    ],
)
def test_a_schedule_of_the_users_own_is_let_pass(text: str):
    """Orders that no paper has are as good, as long as they can be run."""
    check(read(text))
