"""Every schedule sends and stores what its closed form says, and leaves nothing."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise.comm.ledger import Key, Tally
from shardwise.comm.move import begin_receive, begin_send
from shardwise.comm.transport import Pending
from shardwise.comm.world import World, alone, traced
from shardwise.core.errors import InputError, RankError, bad
from shardwise.core.mesh import Mesh
from shardwise.core.schedule.draw import as_svg
from shardwise.core.schedule.library import LIBRARY, build
from shardwise.core.schedule.live_tokens import peaks
from shardwise.core.schedule.lower import lower
from shardwise.core.schedule.measured import Measured, as_trace
from shardwise.core.schedule.schedule import Schedule
from shardwise.techniques.pipeline.runtime import AHEAD, ActionRecorder, run
from tests.core.schedule.schedules import allowed, read
from tests.parallel.pipes import Layers, Ran, Size, in_one_process, piped
from tests.pool import run_gloo, run_threads

SYNCHRONOUS = [name for name in LIBRARY if name not in ("pipedream", "2bw")]


def words() -> Iterator[str]:
    """Every synchronous schedule that four ranks can have, with few and with many microbatches."""
    for name in SYNCHRONOUS:
        chunks = "x2" if LIBRARY[name].chunks is None else ""
        yield from (f"{name}:{m}{chunks}" for m in (1, 3, 8) if allowed(name, 4, m))


def assert_one_process(schedule: Schedule, ran: list[Ran], size: Size) -> None:
    """Losses and gradients of all ranks are those of one process, to 1e-12."""
    wanted = in_one_process(len(schedule.home), schedule.microbatches, size)
    last = ran[schedule.home[schedule.last_stage]]
    assert last.outcome.losses == pytest.approx(wanted.losses, rel=1e-12, abs=0)
    found = {name: grad for one in ran for name, grad in one.outcome.grads.items()}
    assert found.keys() == wanted.grads.keys()
    for name, grad in wanted.grads.items():
        assert float((found[name] - grad).abs().max() / grad.abs().max()) <= 1e-12, name


def assert_costs(schedule: Schedule, ran: list[Ran], size: Size) -> None:
    """Bytes by the closed form, tapes as the schedule says, and nothing left."""
    sent: Counter[int] = Counter()
    for a, b in zip(schedule.home, schedule.home[1:], strict=False):
        sent[a] += schedule.microbatches * size.act_bytes * (a != b)
        sent[b] += schedule.microbatches * size.grad_bytes * (a != b)
    assert [one.sent.sent_bytes for one in ran] == [sent[rank] for rank in range(len(ran))]
    assert [one.peak for one in ran] == list(peaks(schedule))
    assert [one.left for one in ran] == [0] * len(ran)


def assert_good(ranks: int, schedule: Schedule, ran: list[Ran], size: Size) -> None:
    assert_one_process(schedule, ran, size)
    assert_costs(schedule, ran, size)
    for rank in range(ranks):
        assert ran[rank].asked == [f"REDUCE:{s}" for s in reductions(schedule, rank)]


def reductions(schedule: Schedule, rank: int) -> list[int]:
    return [step.stage for step in schedule.actions(rank) if step.op == "REDUCE"]


@pytest.mark.parametrize("word", [*words()])
def test_every_schedule_has_its_costs(word: str):
    """Bytes, live tapes and leftovers on four ranks; values, as tests/test_plans.py on two."""
    schedule = lower(build(word, 4))
    assert_good(4, schedule, run_threads(4, piped, schedule), Size())


@pytest.mark.parametrize("word", ["1f1b:4", "dualpipe-v:4"])
def test_large_messages_cross(word: str):
    """Two processes that send each other 4 MB at once: neither waits for the other to receive."""
    schedule, size = lower(build(word, 2)), Size(width=64, rows=8192)
    ran = run_gloo(2, piped, schedule, size)
    assert_costs(schedule, ran, size)
    assert_one_process(schedule, ran, size)


@pytest.mark.parametrize("word", ["1f1b:3", "interleaved:2x3", "zb-v:2"])
def test_one_rank_needs_no_messages(word: str):
    """In a world of one all stages are at home on one rank, and nothing travels."""
    schedule = lower(build(word, 1))
    ran = piped(alone(), schedule)
    assert ran.sent.calls == 0
    assert_good(1, schedule, [ran], Size())


def test_ranks_reduce_as_the_schedule_says():
    """Gradients are reduced in the order of the row; hooks gather and free, whatever it says."""
    schedule = lower(build("bfs:2x2", 2), gather=True)
    for rank, ran in enumerate(run_threads(2, piped, schedule)):
        assert ran.asked == [str(a) for a in schedule.actions(rank) if a.op == "REDUCE"]


def test_a_schedule_may_update_by_itself():
    """PipeDream's U is asked of the work after each backward; weights outlive the run."""
    schedule = lower(build("pipedream:3", 2))
    for rank, ran in enumerate(run_threads(2, piped, schedule)):
        assert ran.asked == [f"U{rank}.{i}" for i in range(3)]
        assert ran.left == 0


def test_a_schedule_of_the_users():
    """Stages as the user likes them: two at home on one rank, the third on another."""
    text = "home 0 0 1\nrank 0 F0.0 F1.0 F0.1 F1.1 B1.0 I0.0 B1.1 W0.0 B0.1\n"
    schedule = lower(read(text + "rank 1 F2.0 B2.0 F2.1 B2.1"))
    assert_good(2, schedule, run_threads(2, piped, schedule), Size())


def test_what_a_world_would_send_is_told_without_it():
    """A traced rank goes through its row alone, and writes the same ledger."""
    schedule = lower(build("zb-v:4", 2))
    real = [one.sent for one in run_threads(2, piped, schedule)]
    assert [piped(traced(rank, 2), schedule).sent for rank in range(2)] == real


# --- messages --------------------------------------------------------------------------------


def both_ways(world: World, count: int) -> list[list[float]]:
    """Three messages of `count` each way, begun before any is received."""
    axis = world.on(Mesh((("pp", 2),))).axis("pp")
    peer = 1 - axis.rank
    xs = [torch.full((count,), 10.0 * axis.rank + k) for k in range(3)]
    sent = [begin_send(x, axis, peer) for x in xs]
    outs = [torch.empty(count) for _ in xs]
    coming = [begin_receive(out, axis, peer) for out in outs]
    for pending in [*coming, *sent]:
        pending.wait()
    assert axis.ledger.lines == {Key("pp", "send", "start"): Tally(3, 3 * count, 12 * count, 3)}
    return [out.unique().tolist() for out in outs]


@pytest.mark.parametrize("run_on", [run_threads, run_gloo], ids=["threads", "gloo"])
def test_two_ranks_send_to_each_other_at_once(run_on: Any):
    """8 MB each way, three times, in the order in which they were begun; counted as sent."""
    assert run_on(2, both_ways, 2_000_000) == [[[10.0], [11.0], [12.0]], [[0.0], [1.0], [2.0]]]


def queues(world: World) -> list[tuple[int, int]]:
    """Of both queues: how many messages of a loop over the ranks it takes, and brings."""
    axis = world.on(Mesh((("pp", world.size),))).axis("pp")
    schedule = lower(build("interleaved:2x2", world.size))
    with ExitStack() as patches:
        spies = [
            [patches.enter_context(patch.object(q, name, wraps=getattr(q, name))) for name in NAMES]
            for q in (axis.transport, axis.behind)
        ]
        run(schedule, axis, Layers(schedule, axis.rank, Size()))
    return [(sends.call_count, receives.call_count) for sends, receives in spies]


NAMES = ("send", "receive")


def test_messages_up_and_down_the_axis_have_a_queue_each():
    """Of two ranks with two stages each: 0 to 1 and 2 to 3 go up, 1 to 2 down; grads return."""
    up = 2 * (2 * 2 + 1)  # two microbatches: two acts of two tensors, and a grad of one
    down = 2 * (1 * 2 + 2)
    assert run_threads(2, queues) == [[(up, 0), (0, down)], [(0, up), (down, 0)]]


class Counted:
    """Sends or receives of a transport, and the most of them with one peer that were under way."""

    def __init__(self) -> None:
        self.now: Counter[int] = Counter()
        self.most = 0

    def begin(self, act: Any) -> Any:
        def begun(x: Tensor, peer: int) -> Pending:
            self.now[peer] += 1
            self.most = max(self.most, self.now[peer])
            going = act(x, peer)
            return Pending([going.wait, lambda: self.now.subtract([peer])])

        return begun


def counting(world: World, word: str) -> tuple[int, int]:
    """The most messages from one rank that this one awaits at once, and to one that it keeps."""
    axis = world.on(Mesh((("pp", world.size),))).axis("pp")
    schedule = lower(build(word, world.size))
    awaited, kept = Counted(), Counted()
    with ExitStack() as patches:
        for queue in (axis.transport, axis.behind):
            patched = {"receive": awaited.begin(queue.receive), "send": kept.begin(queue.send)}
            patches.enter_context(patch.multiple(queue, **patched))
        run(schedule, axis, Layers(schedule, axis.rank, Size()))
    assert not any(awaited.now.values())
    assert not any(kept.now.values())
    return awaited.most, kept.most


@pytest.mark.parametrize(("word", "kept"), [("gpipe:8", [16, 8]), ("1f1b:8", [4, 2])])
def test_so_many_messages_are_under_way_at_once(word: str, kept: list[int]):
    """An act is two messages, a grad one.  AHEAD bundles are awaited, those not proved are kept."""
    assert run_threads(2, counting, word) == [(AHEAD, kept[0]), (2 * AHEAD, kept[1])]


# --- failure ---------------------------------------------------------------------------------


class Failing:
    """Layers whose forward of one microbatch raises."""

    def __init__(self, layers: Layers, error: Exception) -> None:
        self.layers, self.error = layers, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layers, name)

    def forward(self, stage: int, microbatch: int, inputs: list[Tensor]) -> Any:
        if (stage, microbatch) == (1, 2):
            raise self.error
        return self.layers.forward(stage, microbatch, inputs)


def failing(world: World, error: Exception) -> None:
    axis = world.on(Mesh((("pp", world.size),))).axis("pp")
    schedule = lower(build("1f1b:4", world.size))
    run(schedule, axis, Failing(Layers(schedule, axis.rank, Size()), error))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("error", [ArithmeticError("no more"), bad("this", "that", "those")])
def test_an_error_bears_the_row_with_its_step_marked(error: Exception):
    """What a stage raises goes on as it is, with a note of where its rank was."""
    with pytest.raises(RankError) as raised:
        run_threads(2, failing, error)
    cause = raised.value.__cause__
    assert cause is error
    assert isinstance(cause, ArithmeticError | InputError)
    (note,) = cause.__notes__
    head, *lines = note.splitlines()
    line = " ".join(lines)
    assert head == "rank 1 of the pipeline was at step 10 of the 17 in its row:"
    assert line.startswith("RECV:act0.0<0 F1.0 B1.0 SEND:grad1.0>0 RECV:act0.1<0")
    assert line.split().index(">>F1.2<<") == 9
    assert line.endswith("REDUCE:1")


# --- measuring -------------------------------------------------------------------------------


def measured(world: World, word: str, late_s: float) -> Measured | None:
    """A run seen by recorders, where rank r's clock is r times so much late."""
    axis = world.on(Mesh((("pp", world.size),))).axis("pp")
    schedule, late_s = lower(build(word, world.size)), late_s * axis.rank
    recorder = ActionRecorder(clock_s=lambda: time.perf_counter() - late_s)
    run(schedule, axis, Layers(schedule, axis.rank, Size()), recorder)
    return recorder.gather(schedule, axis)


@pytest.mark.parametrize("run_on", [run_threads, run_gloo], ids=["threads", "gloo"])
def test_what_was_measured_is_told_by_rank_0(run_on: Any):
    """It has every step of all ranks in order; nothing is received before it is sent."""
    whole, other = run_on(2, measured, "zb-v:4", 0.0)
    assert other is None
    steps = tuple(tuple(seen.step for seen in row) for row in whole.rows)
    assert steps == whole.schedule.rows
    sent = {s.step.token: s.start_s for row in whole.rows for s in row if s.step.op == "SEND"}
    for row in whole.rows:
        times = [time_s for seen in row for time_s in seen[1:]]
        assert times == sorted(times)
        assert all(s.end_s > sent[s.step.token] for s in row if s.step.op == "RECV")
    assert 0 < whole.predicted.bubble < 1
    assert 0 < whole.timeline.bubble < 1
    assert "F0.0" in as_svg(whole.timeline, "measured")
    assert len(json.loads(as_trace(whole))["traceEvents"]) > len(sent)


@pytest.mark.parametrize("run_on", [run_threads, run_gloo], ids=["threads", "gloo"])
def test_clocks_of_other_machines_are_set(run_on: Any):
    """A rank whose clock is a day late is told on the clock of rank 0, to well under an hour."""
    whole, _ = run_on(2, measured, "1f1b:2", 86400.0)
    times = [time_s for row in whole.rows for seen in row for time_s in seen[1:]]
    assert max(times) - min(times) < 3600


def test_the_device_is_waited_for_only_where_a_recorder_looks_on():
    """A recorder of a CUDA device waits for it before it looks at the clock; a run never does."""
    with patch.object(torch.cuda, "synchronize") as waited:
        piped(alone(), "1f1b:2")
        assert ActionRecorder("cpu").now() <= ActionRecorder("cpu").now()
        assert waited.call_count == 0
        ActionRecorder("cuda").now()
        assert waited.call_count == 1
