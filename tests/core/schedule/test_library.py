"""Schedules against their papers' closed forms, for all sizes up to 8 by 8; lowering, drawings."""

from collections import Counter
from collections.abc import Iterator
from itertools import permutations, product

import pytest

from shardwise.core.errors import InputError
from shardwise.core.schedule.builders import pipedream, two_buffered
from shardwise.core.schedule.clock import ActionCosts, clock, simulate
from shardwise.core.schedule.draw import as_text, figure
from shardwise.core.schedule.library import LIBRARY, Size, build, size
from shardwise.core.schedule.lower import lower, peaks, versions
from shardwise.core.schedule.schedule import (
    COMPUTE_OPS,
    Action,
    Schedule,
    Token,
    Transfer,
    makes,
    takes,
)
from shardwise.techniques.pipeline.runtime import acks

MOST = 8


def write(schedule: Schedule) -> list[str]:
    return [f"rank {r}  {' '.join(map(str, row))}" for r, row in enumerate(schedule.rows)]


def read(*rows: str, update: int = 0, lag: tuple[int, ...] = ()) -> Schedule:
    """A schedule with one stage a rank: F0 in a row is the forward of microbatch 0."""
    found = [
        tuple(Action(word[0], rank, int(word[1:])) for word in row.split())  # type: ignore[arg-type]
        for rank, row in enumerate(rows)
    ]
    last = max(action.microbatch for row in found for action in row)
    return Schedule(tuple(found), tuple(range(len(rows))), last + 1, update, lag)


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


SQUARE = list(product(range(1, MOST + 1), repeat=2))
#: The papers' bubbles of p ranks, m microbatches and v chunks.
BUBBLES = {
    **dict.fromkeys(
        ("gpipe", "1f1b", "dapple", "pipedream"), lambda p, m, _: (p - 1) / (m + p - 1)
    ),
    "interleaved": lambda p, m, v: (p - 1) / (v * m + p - 1),
    "naive": lambda p, *_: (p - 1) / p,
}


#: Their activations on rank r.
TAPES = {"gpipe": lambda _, m, __: m, "1f1b": lambda p, m, r: min(p - r, m)}


@pytest.mark.parametrize("name", LIBRARY)
def test_every_size_is_sound_and_meets_its_forms(name: str):
    """No deadlock, nothing left over; span, bubble and tapes as the forms say; each has a word."""
    entry = LIBRARY[name]
    for n in sizes(name):
        schedule = entry.build(n)
        check(schedule)
        whole = lower(schedule)
        timeline = clock(whole)
        assert timeline.makespan == entry.span(n), n
        assert timeline.bubble == pytest.approx(entry.bubble(n), abs=1e-12), n
        assert peaks(whole) == entry.tapes(n), n
        if name in BUBBLES:
            assert timeline.bubble == pytest.approx(BUBBLES[name](n.p, n.m, n.v), abs=1e-12), n
        if name in TAPES:
            assert peaks(whole) == tuple(TAPES[name](n.p, n.m, r) for r in range(n.p)), n
    word = f"{name}:{entry.numbers}".replace("M", "8").replace("V", "2").rstrip(":")
    assert build(word, 4).ranks == 4


@pytest.mark.parametrize("name", LIBRARY)
def test_what_is_forbidden_is_refused_with_what_is_allowed(name: str):
    """A size that the paper forbids, and no other, is refused; what is proposed instead works."""
    for p, m in SQUARE:
        n = size(name, p, m)
        if allowed(name, p, m):
            LIBRARY[name].build(n)
        else:
            with pytest.raises(InputError, match="Allowed: ") as refused:
                LIBRARY[name].build(n)
            word = str(refused.value).partition("Write instead: ")[2].split(",")[0].rstrip(".")
            assert build(word, p).ranks == p


def test_spans_of_zero_bubble_schedules():
    """ZB-H1: 3m+p-1 from p microbatches up, 2m+2p-1 below; ZB-V: 6m+p-1 from p up, none shorter."""
    for p, m in SQUARE:
        one, v = (clock(build(f"{name}:{m}", p)).makespan for name in ("zb-h1", "zb-v"))
        assert one == (3 * m + p - 1 if m >= p else 2 * m + 2 * p - 1)
        assert v == 6 * m + p - 1 if m >= p else v > 6 * m + p - 1
        starts = [sorted(earliest(r, p, m)) for r in range(p)]
        assert v == max(start + 6 * m - k for row in starts for k, start in enumerate(row))


def earliest(r: int, p: int, m: int) -> list[int]:
    """When each action of rank r in a V could start at the earliest, were no rank ever busy."""
    down, up = (r, 4 * p - 1 - r), (2 * p - 1 - r, 2 * p + r)  # F and I of either chunk
    return [
        start + i for f, b in (down, up) for start in (f, b, b + 1) for i in range(m)
    ]  # W comes one after its I


def test_pipedream_keeps_p_minus_s_versions():
    """Stage s keeps p-s versions of its weights. Each microbatch uses the newest at its F."""
    assert versions(build("zb-v:4", 2)) == (1,) * 4  # of a synchronous schedule
    for p, m in SQUARE:
        schedule = pipedream(p, m)
        newest = [newest_at_forward(schedule, s) for s in range(p)]
        assert [[schedule.version(s, i) for i in range(m)] for s in range(p)] == newest
        if m >= 2 * (p - 1):
            assert versions(schedule) == tuple(p - s for s in range(p))


def newest_at_forward(schedule, stage: int) -> list[int]:
    """For each microbatch, how many updates its stage has behind it when it comes by."""
    found: dict[int, int] = {}
    updates = 0
    for step in schedule.rows[stage]:
        updates += step.op == "U"
        if step.op == "F":
            found[step.microbatch] = updates
    return [found[i] for i in range(schedule.microbatches)]


def test_2bw_keeps_two_versions_and_updates_once_a_batch():
    """A batch uses the weights the batch before began with; batches follow without a drain."""
    for p, m in SQUARE:
        if m < p:
            continue
        schedule = two_buffered(p, m, batches=3)
        check(schedule)
        assert versions(schedule) == (2,) * p
        assert [schedule.version(0, i) for i in range(0, 3 * m, m)] == [0, 0, 1]
        ops = Counter(step.op for step in schedule.rows[0])
        assert (ops["U"], ops["B"]) == (3, 3 * m)
        assert clock(schedule).makespan == 3 * (3 * m + p - 1)


@pytest.mark.parametrize(
    ("word", "phrase"),
    [
        ("interleafed:8x2", "Write instead: interleaved"),
        ("1f1b:0", "0 microbatches"),
        ("bfs:4x0", "0 chunks"),
        ("1f1b:4x2", "1 of them with 1f1b, any number with interleaved or bfs"),
        ("1f1b:many", "a name, a colon, and M or MxV"),
        ("naive:2", "one microbatch"),
    ],
)
def test_a_name_and_numbers_that_cannot_be_are_answered(word: str, phrase: str):
    """An unknown name gets the nearest; numbers that are none or not its own are said."""
    with pytest.raises(InputError, match="Write instead") as refused:
        build(word, 4)
    assert phrase in str(refused.value)


ONE = read("F0 B0", "F0 B0")


def test_costs_by_stage_and_hop_add_up():
    """F 1 and 2, B 3 and 5, and two hops: 1 + .5 + 2 + 5 + .5 + 3; without times no bubble."""
    timeline = clock(ONE, ActionCosts(F=(1.0, 2.0), B=(3.0, 5.0), hop=0.5))
    assert timeline.makespan == 12
    assert timeline.idle == (8, 5)
    assert timeline.bubble == 13 / 24
    starts = [[span.start for span in row if span.end > span.start] for row in timeline.spans]
    assert starts == [[0, 9], [1.5, 3.5]]
    nothing = clock(ONE, ActionCosts(0, 0, 0))
    assert (nothing.makespan, nothing.bubble, nothing.idle) == (0, 0, (0, 0))


def test_what_actions_cost():
    """B is I and W if not given; REDUCE lengthens a row; a hop only who waits for it."""
    costs = ActionCosts(I=(1.0, 2.0), W=4.0)
    assert (costs.of("B", 0), costs.of("B", 1)) == (5, 6)
    assert clock(read("F0 B0"), ActionCosts(REDUCE=0.5)).makespan == 3.5
    timeline = clock(read("F0 F1 B0 B1", "F0 B0 F1 B1"), ActionCosts(hop=1.0))
    assert [span.start for span in timeline.spans[0][:3]] == [0, 1, 6]
    for word in ("zb-v:4", "interleaved:4x2"):  # stages of one rank have no hop
        assert clock(build(word, 1), ActionCosts(hop=9)).bubble == 0


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (read("F0 B0 F1 B1", "F1 B1 F0 B0"), "rank 0 at RECV:grad1.1<1, rank 1 at RECV:act0.1<0."),
        (read("F0 F1 B0 U0 B1 U1", update=1, lag=(0,)), "rank 0 at F0.1."),
    ],
    ids=["order", "versions"],
)
def test_a_deadlock_says_what_each_rank_waits_for(schedule: Schedule, said: str):
    """With the step at which it stands."""
    with pytest.raises(InputError, match="Write instead: each action before its use") as refused:
        clock(schedule)
    assert f"deadlocks: {said}" in str(refused.value)


# --- lowering, and the drawings --------------------------------------------------------------


def test_two_ranks_of_1f1b():
    """The figure of lower.py: sent when made, received when needed, reduced after the last."""
    whole = lower(build("1f1b:1", 2))
    assert write(whole) == [
        "rank 0  F0.0 SEND:act0.0>1 RECV:grad1.0<1 B0.0 REDUCE:0",
        "rank 1  RECV:act0.0<0 F1.0 B1.0 SEND:grad1.0>0 REDUCE:1",
    ]
    assert lower(whole) is whole
    assert acks(whole, 0) == {Token("grad", 1, 0): (Token("act", 0, 0),)}
    assert acks(whole, 1) == {Token("act", 0, 0): ()}


@pytest.mark.parametrize("name", LIBRARY)
def test_channels_keep_their_order_and_proofs_are_facts(name: str):
    """Sends between two ranks are in the order of receives; no proof comes before its fact."""
    for n in sizes(name):
        schedule = lower(LIBRARY[name].build(n))
        for a, b in permutations(range(schedule.ranks), 2):
            assert messages(schedule, a, "SEND", b) == messages(schedule, b, "RECV", a)
        proofs = [acks(schedule, rank) for rank in range(n.p)]
        sent: list[set[Token]] = [set() for _ in proofs]
        there: set[Token] = set()
        for rank, step in simulate(schedule):
            if isinstance(step, Transfer) and step.op == "SEND":
                sent[rank].add(step.token)
            elif isinstance(step, Transfer):
                there.add(step.token)
                proved = set(proofs[rank].get(step.token, ()))
                assert proved <= there & sent[rank]
                sent[rank] -= proved


def messages(schedule: Schedule, rank: int, op: str, peer: int) -> list[Token]:
    """What a rank sends to a peer or receives from it, in order."""
    steps = [step for step in schedule.rows[rank] if isinstance(step, Transfer)]
    return [step.token for step in steps if (step.op, step.peer) == (op, peer)]


FIGURES = {
    # forwards down, backwards up, the last microbatch first: figure 2c of the paper, at B = 2F
    "gpipe:3": [
        "F0 F1 F2 .. .. .. .. .. .. B2 -- B1 -- B0 --",
        ".. F0 F1 F2 .. .. .. B2 -- B1 -- B0 -- .. ..",
        ".. .. F0 F1 F2 B2 -- B1 -- B0 -- .. .. .. ..",
    ],
    # the steady state of one backward and one forward, and the drain
    "1f1b:4": [
        "F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --",
        ".. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..",
        ".. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..",
    ],
    # W where a rank would wait: figure 3 of the paper, at F = I = W
    "zb-h1:4": [
        "F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3",
        ".. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        ".. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ],
}


def drawn(word: str, ranks: int, costs: ActionCosts | None = None) -> list[str]:
    return [line[8:].rstrip() for line in as_text(clock(build(word, ranks), costs)).splitlines()]


@pytest.mark.parametrize(("word", "figure"), FIGURES.items())
def test_the_figure_of_the_paper(word: str, figure: list[str]):
    """On three ranks."""
    assert drawn(word, 3) == figure


def test_letters_and_columns():
    """The second chunk has small letters, more are numbered; a column is the shortest action."""
    assert drawn("interleaved:2x2", 2)[1].split()[:4] == ["..", "F0", "F1", "f0"]
    assert drawn("interleaved:2x3", 2)[1].split()[:4] == ["....", "F1.0", "F1.1", "F3.0"]
    assert drawn("1f1b:1", 2, ActionCosts(F=0.5, B=1.5, hop=0.1)) == [
        "F0 .. .. .. .. B0 -- --",
        ".. F0 B0 -- -- .. .. ..",
    ]
    assert drawn("naive", 2, ActionCosts(F=1, B=1, hop=0.6))[1] == ".. .. F0 B0 .."
    assert drawn("naive", 1, ActionCosts(0, 0, 0)) == [""]


def test_a_figure_is_to_scale():
    """One box an action, as wide as its time, with its microbatch; axes name ranks and time."""
    (axes,) = figure(clock(build("naive", 2)), "a < b").axes
    boxes = [path.get_extents() for drawn in axes.collections for path in drawn.get_paths()]
    found = sorted((round(box.y0 + box.height / 2), box.x0, box.x1) for box in boxes)
    assert found == [(0, 0, 1), (0, 4, 6), (1, 1, 2), (1, 2, 4)]
    assert (axes.get_title(), axes.get_xlabel()) == ("a < b", "time")
    assert [text.get_text() for text in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert [text.get_text() for text in axes.texts] == ["0"] * 4
