"""The clock and the memory of a schedule, against sums done by hand."""

from collections.abc import Callable

from shardwise.core.schedule.action import Token
from shardwise.core.schedule.clock import ActionCosts, clock
from shardwise.core.schedule.library import build
from shardwise.core.schedule.live_tokens import peaks, versions
from shardwise.core.schedule.lower import lower
from tests.core.schedule.as_text import read
from tests.core.schedule.schedule_check import leftovers

ONE = "rank 0 F0 B0\nrank 1 F0 B0"


def sizes(**stage_bytes: tuple[float, ...]) -> Callable[[Token], float]:
    """A size function from bytes per kind and stage: sizes(tape=(4e9, 3e9), act=(1e6, 1e6))."""
    return lambda token: stage_bytes[token.kind][token.stage] if token.kind in stage_bytes else 0.0


def test_costs_by_stage_and_hop_add_up():
    """F 1 and 2, B 3 and 5, and two hops: 1 + .5 + 2 + 5 + .5 + 3."""
    timeline = clock(read(ONE), ActionCosts(F=(1.0, 2.0), B=(3.0, 5.0), hop=0.5))
    assert timeline.makespan == 12
    assert timeline.idle == (8, 5)
    assert timeline.bubble == 13 / 24
    starts = [[span.start for span in row if span.end > span.start] for row in timeline.spans]
    assert starts == [[0, 9], [1.5, 3.5]]


def test_backward_costs_what_its_halves_cost():
    """Where B is not given it is I and W of the stage."""
    costs = ActionCosts(I=(1.0, 2.0), W=4.0)
    assert (costs.of("B", 0), costs.of("B", 1), costs.of("FREE", 0)) == (5, 6, 0)


def test_a_message_between_stages_of_one_rank_takes_no_time():
    """The turn of a V has no hop; p = 1 has none at all."""
    for word in ("zb-v:4", "interleaved:4x2"):
        assert clock(build(word, 1), ActionCosts(hop=9)).bubble == 0


def test_only_who_needs_it_waits_for_a_message():
    """A rank with work left does it beside the hop: the second forward is not late."""
    timeline = clock(read("rank 0 F0 F1 B0 B1\nrank 1 F0 B0 F1 B1"), ActionCosts(hop=1.0))
    assert [span.start for span in timeline.spans[0][:3]] == [0, 1, 6]


def test_what_lowering_adds_can_cost_too():
    """GATHER and REDUCE are actions of the rank: they lengthen its row."""
    schedule = lower(read("rank 0 F0 B0"), gather=True)
    assert clock(schedule, ActionCosts(GATHER=2, REDUCE=0.5)).makespan == 5.5


def test_nothing_costs_nothing():
    """A schedule whose actions take no time has no bubble."""
    timeline = clock(read(ONE), ActionCosts(0, 0, 0))
    assert (timeline.makespan, timeline.bubble, timeline.idle) == (0, 0, (0, 0))


def test_memory_in_bytes():
    """Tapes of 4 and 3 bytes, messages of 1: what each rank of 1F1B holds between two steps."""
    schedule = build("1f1b:4", 2)
    assert peaks(schedule, sizes(tape=(4, 3))) == (8, 3)
    # beside its two tapes rank 0 has the output that it is about to send
    assert peaks(schedule, sizes(tape=(4, 3), act=(1, 1), grad=(0, 1))) == (9, 3)
    assert peaks(schedule, sizes()) == (0, 0)


def test_an_activation_is_held_until_its_w():
    """I gives the tape up for what W needs, which counts until W is done."""
    assert peaks(read("rank 0 F0 I0 F1 W0 I1 W1")) == (2,)
    assert peaks(read("rank 0 F0 I0 W0 F1 I1 W1")) == (1,)
    assert peaks(read("rank 0 F0 I0 F1 W0 I1 W1"), sizes(tape=(4,), rest=(1,))) == (5,)


def test_what_is_left_over_is_told_by_rank():
    """A forward without its backward leaves its tape."""
    left = leftovers(read("rank 0 F0 F1 B0\nrank 1 F0 B0"))
    assert "tape0.1" in map(str, left[0])
    assert left[1] == frozenset()


def test_a_synchronous_schedule_has_one_version():
    """Weights that only change after the step are not stashed."""
    assert versions(build("zb-v:4", 2)) == (1,) * 4
