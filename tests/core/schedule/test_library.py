"""The library: every schedule against its paper's closed forms, for all sizes up to 8 by 8."""

from collections import Counter
from itertools import combinations, product

import pytest

from shardwise.core.errors import InputError
from shardwise.core.schedule.action import Action
from shardwise.core.schedule.asynchronous import pipedream, two_buffered
from shardwise.core.schedule.classic import dapple, one_f_one_b, one_stage_a_rank
from shardwise.core.schedule.clock import ActionCosts, clock
from shardwise.core.schedule.library import LIBRARY, Size, build, size
from shardwise.core.schedule.live_tokens import peaks, versions
from shardwise.core.schedule.lower import lower
from tests.core.schedule.schedule_check import check, leftovers
from tests.core.schedule.sizes import MOST, allowed, sizes

SQUARE = list(product(range(1, MOST + 1), repeat=2))


def test_the_library_is_the_plan_words():
    """There is a schedule for each plan word, and it takes the numbers that the word has."""
    for name, one in LIBRARY.items():
        word = f"{name}:{one.numbers}".replace("M", "8").replace("V", "2").rstrip(":")
        assert build(word, 4).ranks == 4


@pytest.mark.parametrize("name", LIBRARY)
def test_every_size_is_sound_and_meets_its_forms(name: str):
    """No deadlock, no crossing, nothing left over; span, bubble and tapes as the forms say."""
    entry = LIBRARY[name]
    for n in sizes(name):
        schedule = entry.build(n)
        check(schedule)
        whole = lower(schedule)
        timeline = clock(whole)
        assert timeline.makespan == entry.span(n), n
        assert timeline.bubble == pytest.approx(entry.bubble(n), abs=1e-12), n
        assert peaks(whole) == entry.tapes(n), n
        assert not any(leftovers(whole)), n


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


def bubble(name: str, p: int, m: int, v: int = 1, costs: ActionCosts | None = None) -> float:
    return clock(LIBRARY[name].build(Size(p, m, v)), costs).bubble


def test_gpipe_and_1f1b_wait_p_minus_1_of_m_plus_p_minus_1():
    """GPipe's and 1F1B's bubble is (p-1)/(m+p-1), whatever F and B cost."""
    for (p, m), costs in product(SQUARE, (ActionCosts(), ActionCosts(F=1, B=1.5))):
        for name in ("gpipe", "1f1b", "dapple", "pipedream"):
            assert bubble(name, p, m, costs=costs) == pytest.approx(
                (p - 1) / (m + p - 1), abs=1e-12
            )


def test_chunks_divide_the_bubble():
    """Interleaved 1F1B's bubble is (p-1)/(v·m+p-1) for every multiple m of p."""
    for n in sizes("interleaved"):
        expected = (n.p - 1) / (n.v * n.m + n.p - 1)
        assert bubble("interleaved", *n[:3]) == pytest.approx(expected, abs=1e-12)


def test_one_rank_works_at_a_time_without_a_pipeline():
    """The naive bubble is (p-1)/p."""
    for p in range(1, MOST + 1):
        assert bubble("naive", p, 1) == pytest.approx((p - 1) / p, abs=1e-12)


def test_1f1b_holds_p_minus_r_activations_where_gpipe_holds_m():
    """Rank r holds min(p-r, m) microbatches' activations under 1F1B, and m under GPipe."""
    for p, m in SQUARE:
        assert peaks(build(f"1f1b:{m}", p)) == tuple(min(p - r, m) for r in range(p))
        assert peaks(build(f"gpipe:{m}", p)) == (m,) * p


def test_zb_h1_takes_3m_plus_p_minus_1_in_the_memory_of_1f1b():
    """ZB-H1 takes 3m+p-1 from p microbatches up, 2m+2p-1 below, and holds no more than 1F1B."""
    for p, m in SQUARE:
        schedule = build(f"zb-h1:{m}", p)
        assert clock(schedule).makespan == (3 * m + p - 1 if m >= p else 2 * m + 2 * p - 1)
        assert max(peaks(schedule)) == max(peaks(build(f"1f1b:{m}", p)))


@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 2), (3, 1)])
def test_no_order_is_shorter_than_zb_h1(p: int, m: int):
    """Of all orders that can be run there is none that ends before ZB-H1 does."""
    spans: list[float] = []
    for rows in product(*(orders(r, m) for r in range(p))):
        schedule = one_stage_a_rank(p, m, lambda r, rows=rows: iter(rows[r]))
        try:
            spans.append(clock(schedule).makespan)
        except InputError:
            continue
    assert min(spans) == clock(build(f"zb-h1:{m}", p)).makespan


def orders(stage: int, m: int) -> list[list[Action]]:
    """Every order of one stage's F, I, W in which each microbatch's come in turn (m at most 2)."""
    lines = [[Action(op, stage, i) for op in ("F", "I", "W")] for i in range(m)]
    if m == 1:
        return lines
    found: list[list[Action]] = []
    for first in combinations(range(6), 3):
        takers = [iter(lines[0]), iter(lines[1])]
        found.append([next(takers[k not in first]) for k in range(6)])
    return found


def test_zb_v_has_no_bubble_but_the_ramp_in_the_memory_of_1f1b():
    """From p microbatches up ZB-V takes 6m+p-1; its 2p chunks are as much as 1F1B's p stages."""
    for p, m in SQUARE:
        schedule = build(f"zb-v:{m}", p)
        span = clock(schedule).makespan
        assert span == 6 * m + p - 1 if m >= p else span > 6 * m + p - 1
        assert max(peaks(schedule)) <= 2 * max(peaks(build(f"1f1b:{m}", p)))


def test_no_v_is_shorter_than_zb_v():
    """Some rank has as much to do, after a time before which none of it can reach that rank."""
    for p, m in SQUARE:
        starts = [sorted(earliest(r, p, m)) for r in range(p)]
        bound = max(start + 6 * m - k for row in starts for k, start in enumerate(row))
        assert clock(build(f"zb-v:{m}", p)).makespan == bound


def earliest(r: int, p: int, m: int) -> list[int]:
    """When each action of rank r in a V could start at the earliest, were no rank ever busy."""
    down, up = (r, 4 * p - 1 - r), (2 * p - 1 - r, 2 * p + r)  # F and I of either chunk
    return [
        start + i for f, b in (down, up) for start in (f, b, b + 1) for i in range(m)
    ]  # W comes one after its I


def test_a_v_begins_and_ends_on_the_first_rank():
    """In a V stage s is on rank s on the way down, and on rank 2p-1-s on the way up."""
    for name in ("zb-v", "dualpipe-v"):
        assert build(f"{name}:8", 3).home == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize("policy", ["A", "B"])
def test_dapple_warms_up_as_its_policy_says(policy: str):
    """Rank r does min(p-r, D) or min(2(p-r)-1, D) forwards before its first backward."""
    for (p, m), most in product(SQUARE, (None, 1, 3)):
        schedule = dapple(p, m, policy, most)
        check(schedule)
        for r, row in enumerate(schedule.rows):
            ahead = next(k for k, step in enumerate(row) if step.op == "B")
            policies = {"A": p - r, "B": 2 * (p - r) - 1}
            assert ahead == min(policies[policy], most or m, m)


def test_dapple_hides_a_hop_behind_more_activations():
    """Where messages take long, policy B ends earlier than policy A and holds more."""
    costs = ActionCosts(hop=1.0)
    a, b = dapple(4, 12, "A"), dapple(4, 12, "B")
    assert clock(b, costs).makespan < clock(a, costs).makespan
    assert sum(peaks(b)) > sum(peaks(a))


def test_pipedream_keeps_p_minus_s_versions():
    """Stage s keeps p-s versions of its weights, and with vertical sync every stage keeps p."""
    for p, m in SQUARE:
        if m >= 2 * (p - 1):
            assert versions(pipedream(p, m)) == tuple(p - s for s in range(p))
            assert versions(pipedream(p, m, vertical=True)) == (p,) * p


def test_pipedream_uses_the_newest_weights_on_the_way_forward():
    """Each microbatch uses the version that is newest at its F: on its stage, or on the first."""
    for p, m in SQUARE:
        newest = [newest_at_forward(pipedream(p, m), s) for s in range(p)]
        for vertical in (False, True):
            schedule = pipedream(p, m, vertical=vertical)
            found = [[schedule.version(s, i) for i in range(m)] for s in range(p)]
            assert found == (newest[:1] * p if vertical else newest)


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
    """A batch uses the weights the batch before began with; no stage ever keeps more than two."""
    for p, m in SQUARE:
        if m < p:
            continue
        schedule = two_buffered(p, m, batches=3)
        check(schedule)
        assert versions(schedule) == (2,) * p
        assert [schedule.version(0, i) for i in range(0, 3 * m, m)] == [0, 0, 1]
        ops = Counter(step.op for step in schedule.rows[0])
        assert (ops["U"], ops["B"]) == (3, 3 * m)


def test_batches_of_2bw_follow_without_a_drain():
    """Three batches in a row take less than three times one."""
    one, three = (clock(two_buffered(4, 4, batches)).makespan for batches in (1, 3))
    assert (one, three) == (3 * (4 + 3), 3 * (12 + 3))


def test_breadth_first_gathers_each_stage_twice():
    """Under zero3 breadth-first gathers a stage once each way, the turning one once in all."""
    rows = lower(build("bfs:8x3", 4), gather=True).rows
    count = Counter(step.stage for row in rows for step in row if step.op == "GATHER")
    assert count == {stage: 2 - (stage >= 8) for stage in range(12)}


def test_a_name_and_numbers_that_cannot_be_are_answered():
    """An unknown name gets the nearest; numbers that are none or not its own are said."""
    for word, phrase in [
        ("interleafed:8x2", "Write instead: interleaved"),
        ("1f1b:0", "0 microbatches"),
        ("bfs:4x0", "0 chunks"),
        ("1f1b:4x2", "1 of them with 1f1b, any number with interleaved or bfs"),
        ("zb-v:4x3", "2 of them with zb-v"),
        ("1f1b:many", "a name, a colon, and M or MxV"),
        ("naive:2", "one microbatch"),
    ]:
        with pytest.raises(InputError, match="Write instead") as refused:
            build(word, 4)
        assert phrase in str(refused.value)
    for p, batches in ((0, 1), (4, 0), (4, 2)):
        with pytest.raises(InputError, match=f"{p if not p else batches} "):
            size("1f1b", p, 4, batches=batches)


def test_1f1b_is_the_order_of_the_paper():
    """The figure of PipeDream-flush: p-r forwards, then one backward and one forward in turn."""
    schedule = one_f_one_b(3, 4)
    rows = [" ".join(f"{a.op}{a.microbatch}" for a in schedule.actions(r)) for r in range(3)]
    assert rows == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
