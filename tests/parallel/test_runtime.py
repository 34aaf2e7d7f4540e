"""The runtime of pipelines: every schedule on four ranks, its messages, its errors, its clocks."""

import json
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise.comm.transport import Pending
from shardwise.comm.world import World
from shardwise.core.errors import InputError, RankError, bad
from shardwise.core.schedule.draw import as_svg
from shardwise.core.schedule.measured import Measured, as_trace
from shardwise.engine.engine import Engine
from shardwise.techniques.pipeline.runtime import AHEAD, ActionRecorder
from tests.engine.cases import Case, build, rows_task, settled, vectors
from tests.engine.tensors import equals_one, mine
from tests.pool import run_gloo, run_threads


def deep(width: int = 6) -> nn.Module:
    """Eight layers of one size, a function between each two."""
    pairs = [(nn.Linear(width, width), nn.Tanh()) for _ in range(8)]
    return settled(nn.Sequential(*[module for pair in pairs for module in pair]))


def batch(step: int, rows: int = 16, width: int = 6) -> tuple[Tensor, Tensor]:
    return vectors(step, rows, width)


TASK = rows_task(deep, batch)
#: 4 MB and more of each microbatch between two stages.
LARGE = rows_task(partial(deep, 64), partial(batch, rows=4 * 8192, width=64))


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["1f1b:4", "dualpipe-v:4"])
def test_large_messages_cross(word: str):
    """Two processes that send each other 4 MB at once: neither waits for the other to receive."""
    equals_one(run_gloo, LARGE, Case(f"pp2 {word} fp64", steps=1))


class Counted:
    """Sends or receives of a transport: how many, and the most with one peer under way at once."""

    def __init__(self) -> None:
        self.now: Counter[int] = Counter()
        self.all = self.most = 0

    def begin(self, act: Any) -> Any:
        def begun(x: Tensor, peer: int) -> Pending:
            self.all += 1
            self.now[peer] += 1
            self.most = max(self.most, self.now[peer])
            going = act(x, peer)
            return Pending([going.wait, lambda: self.now.subtract([peer])])

        return begun


def engine_of(world: World, word: str) -> Engine:
    """An engine that has run a step."""
    engine = build(world, TASK, Case(f"pp2 {word} fp64"))
    engine.step(mine(engine, batch(0)))
    return engine


def counting(world: World, word: str) -> list[tuple[int, int]]:
    """Of sends and of receives in both queues: how many in a step, and the most with a peer."""
    engine = engine_of(world, word)
    assert engine.staging is not None
    queues = engine.staging.axis.transport, engine.staging.axis.behind
    counted = {(name, q): Counted() for name in ("send", "receive") for q in (0, 1)}
    with ExitStack() as patches:
        for (name, q), each in counted.items():
            begin = each.begin(getattr(queues[q], name))
            patches.enter_context(patch.object(queues[q], name, begin))
        engine.step(mine(engine, batch(1)))
        engine.wait()
    assert not any(any(each.now.values()) for each in counted.values())
    return [(each.all, each.most) for each in counted.values()]


def test_messages_up_and_down_the_axis_have_a_queue_each():
    """Of two ranks with two stages each: 0 to 1 and 2 to 3 go up, 1 to 2 down; grads return."""
    up, down = 2 * (2 + 1), 2 * (1 + 2)  # two microbatches: an act up, its grad down
    found = [[n for n, _ in each] for each in run_threads(2, counting, "interleaved:2x2")]
    assert found == [[up, 0, 0, down], [0, down, up, 0]]


@pytest.mark.parametrize(("word", "kept"), [("gpipe:8", 8), ("1f1b:8", 2)])
def test_so_many_messages_are_under_way_at_once(word: str, kept: int):
    """AHEAD messages are awaited, and those whose arrival is not proved are kept."""
    for found in run_threads(2, counting, word):
        sends, receives = ([most for _, most in part] for part in (found[:2], found[2:]))
        assert (max(sends), max(receives)) == (kept, AHEAD)


# --- failure, and measuring -----------------------------------------------------------------------


def failing(world: World, error: Exception) -> None:
    """The last layer raises in the third microbatch."""
    engine, calls = engine_of(world, "1f1b:4"), list[int]()

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise error

    engine.model.get_submodule("14").register_forward_pre_hook(fail)
    engine.step(mine(engine, batch(1)))


@pytest.mark.parametrize("error", [ArithmeticError("no more"), bad("this", "that", "those")])
def test_an_error_bears_the_row_with_its_step_marked(error: Exception):
    """What a stage raises goes on as it is, with a note of where its rank was."""
    with pytest.raises(RankError) as raised:
        run_threads(2, failing, error)
    cause = raised.value.__cause__
    assert cause is error
    assert isinstance(cause, ArithmeticError | InputError)
    (note,) = [note for note in cause.__notes__ if note.startswith("rank 1 of the pipeline was")]
    head, *lines = note.splitlines()
    line = " ".join(lines)
    assert head.startswith("rank 1 of the pipeline was at step 10 of the ")
    assert line.startswith("RECV:act0.0<0 F1.0 B1.0 SEND:grad1.0>0 RECV:act0.1<0")
    assert line.split().index(">>F1.2<<") == 9


def measured(world: World, word: str, late_s: float) -> Measured | None:
    """A step seen by recorders, where rank r's clock is r times so much late."""
    engine = engine_of(world, word)
    assert engine.staging is not None
    axis, passes = engine.staging.axis, engine.passes
    late_s *= axis.rank
    passes.watch = recorder = ActionRecorder(clock_s=lambda: time.perf_counter() - late_s)
    engine.step(mine(engine, batch(1)))
    return recorder.gather(engine.staging.schedule, axis)


@pytest.mark.parametrize("run_on", [run_threads, run_gloo], ids=["threads", "gloo"])
def test_what_was_measured_is_told_by_rank_0(run_on: Any):
    """Every step of all ranks in order, on the clock of rank 0, which may be a day ahead."""
    found, other = run_on(2, measured, "zb-v:4", 0.0)
    assert other is None
    assert tuple(tuple(seen.step for seen in row) for row in found.rows) == found.schedule.rows
    sent = {s.step.token: s.start_s for row in found.rows for s in row if s.step.op == "SEND"}
    for row in found.rows:
        times = [time_s for seen in row for time_s in seen[1:]]
        assert times == sorted(times)
        assert all(s.end_s > sent[s.step.token] for s in row if s.step.op == "RECV")
    assert 0 < found.predicted.bubble < 1
    assert 0 < found.timeline.bubble < 1
    assert "F0.0" in as_svg(found.timeline, "measured")
    assert len(json.loads(as_trace(found))["traceEvents"]) > len(sent)
    late, _ = run_on(2, measured, "1f1b:2", 86400.0)
    times = [time_s for row in late.rows for seen in row for time_s in seen[1:]]
    assert max(times) - min(times) < 3600


def test_the_device_is_waited_for_only_where_a_recorder_looks_on():
    """A recorder of a CUDA device waits for it before it looks at the clock; a run never does."""
    with patch.object(torch.cuda, "synchronize") as waited:
        run_threads(2, engine_of, "1f1b:2")
        assert ActionRecorder("cpu").now() <= ActionRecorder("cpu").now()
        assert waited.call_count == 0
        ActionRecorder("cuda").now()
        assert waited.call_count == 1
