"""The runtime of pipelines: every schedule on four ranks, its messages, its errors, its clocks."""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise.comm.fake import Fake
from shardwise.comm.transport import Pending
from shardwise.comm.world import Axis, World
from shardwise.core.errors import InputError, RankError, bad
from shardwise.core.schedule.library import LIBRARY
from shardwise.core.schedule.library import build as build_schedule
from shardwise.core.schedule.lower import lower
from shardwise.core.schedule.schedule import Schedule, Token
from shardwise.engine.engine import Engine
from shardwise.techniques.pipeline.runtime import AHEAD, run
from shardwise.techniques.pipeline.stage_io import Spec
from tests.core.schedule.test_library import allowed
from tests.engine.cases import Case, build, rows_task, settled, vectors
from tests.engine.pipelines import stack
from tests.engine.tensors import equals_one, mine
from tests.pool import run_gloo, run_threads


def deep(width: int = 6) -> nn.Module:
    return settled(stack(width=width))


TASK = rows_task(deep, partial(vectors, rows=16))
#: 4 MB and more of each microbatch between two stages.
LARGE = rows_task(partial(deep, 64), partial(vectors, rows=4 * 8192, width=64))


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
    engine = build(world, TASK, Case(f"pp2 {word} fp64"))
    engine.step(mine(engine, TASK.batch(0)))
    return engine


def counting(world: World, word: str) -> list[tuple[int, int]]:
    """Of sends and of receives: how many in a step, and the most with a peer at once."""
    engine = engine_of(world, word)
    assert engine.staging is not None
    assert [n.calls for key, n in engine.ledger.lines.items() if key.phase == "open"] == [1]
    queue = engine.staging.axis.transport
    counted = {name: Counted() for name in ("send", "receive")}
    with ExitStack() as patches:
        for name, each in counted.items():
            begin = each.begin(getattr(queue, name))
            patches.enter_context(patch.object(queue, name, begin))
        engine.step(mine(engine, TASK.batch(1)))
        engine.wait()
    assert not any(any(each.now.values()) for each in counted.values())
    return [(each.all, each.most) for each in counted.values()]


@pytest.mark.parametrize(("word", "kept"), [("gpipe:8", 8), ("1f1b:8", 2)])
def test_so_many_messages_are_under_way_at_once(word: str, kept: int):
    """AHEAD messages are awaited, and those whose arrival is not proved are kept."""
    found = run_threads(2, counting, word)
    assert max(most for (_, most), _ in found) == kept
    assert [most for _, (_, most) in found] == [AHEAD, AHEAD]


class Recorded:
    """What one rank issues: actions, calls on queues, and waits for them (by their numbers)."""

    device = torch.device("cpu")

    def __init__(self, schedule: Schedule, rank: int, pairs: Sequence[tuple[int, int]]) -> None:
        self.issued: list[tuple[str, Any]] = []
        axis = Axis("pp", Queue(self, rank, schedule.ranks, "all"))
        axis.ways.update({pair: Queue(self, pair.index(rank), 2, f"{pair}") for pair in pairs})
        work: Any = self
        run(schedule, axis, work)

    def specs(self, token: Token) -> list[Spec]:
        return [Spec((1,), torch.float32, True)]

    def __getattr__(self, op: str) -> Any:
        def act(*_: Any) -> Any:
            self.issued.append(("act", op))
            one = [torch.zeros(1)]
            return one if op == "backward" else (one, None)

        return act


class Queue(Fake):
    """A queue of one rank, whose calls are recorded."""

    def __init__(self, of: Recorded, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self.of, self.name = of, name

    def _call(self, source: int, to: int) -> Pending[Any]:
        number = len(self.of.issued)
        self.of.issued.append(("call", (self.name, source, to)))
        return Pending([lambda: self.of.issued.append(("wait", number))])

    def send(self, x: Tensor, to: int) -> Pending[Any]:
        return self._call(self.rank, to)

    def receive(self, x: Tensor, source: int) -> Pending[Any]:
        return self._call(source, self.rank)


def ends(rows: list[list[tuple[str, Any]]]) -> bool:
    """Whether all is done where each queue carries out its calls in order, as NCCL does. A call
    begins when the rank has done what it issued before, and ends when both ranks have begun.
    """
    computed, done = [0] * len(rows), [set[int]() for _ in rows]
    while True:
        before = computed.copy(), sum(map(len, done))
        begun: dict[Any, list[tuple[int, int]]] = {}
        for rank, issued in enumerate(rows):
            stops = (
                n for n, (kind, of) in enumerate(issued) if kind == "wait" and of not in done[rank]
            )
            computed[rank] = next(stops, len(issued))
            waiting = [n for n, (kind, _) in enumerate(issued) if kind == "call"]
            heads: dict[str, int] = {}
            for n in (n for n in waiting if n not in done[rank]):
                heads.setdefault(issued[n][1][0], n)
            for n in (n for n in heads.values() if n < computed[rank]):
                begun.setdefault(issued[n][1], []).append((rank, n))
        for both in (both for both in begun.values() if len(both) == 2):
            for rank, n in both:
                done[rank].add(n)
        if (computed, sum(map(len, done))) == before:
            return all(c == len(issued) for c, issued in zip(computed, rows, strict=True))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_no_ranks_wait_for_each_other_in_a_circle(ranks: int):
    """No schedule stops where each pair of ranks has a queue, as on NCCL; with one, some do."""
    for name, m in product(LIBRARY, (1, 4, 8)):
        if not allowed(name, ranks, m):
            continue
        word = f"{name}:{m}{'x2' if LIBRARY[name].chunks is None else ''}"
        schedule = lower(build_schedule("naive" if name == "naive" else word, ranks))
        ways = {(r, s.peer) for r, row in enumerate(schedule.rows) for s in row if s.op == "SEND"}
        own = [[way for way in sorted(ways) if rank in way] for rank in range(ranks)]
        assert ends([Recorded(schedule, r, own[r]).issued for r in range(ranks)]), (word, ranks)
    stuck = lower(build_schedule("1f1b:8", ranks))
    assert not ends([Recorded(stuck, r, []).issued for r in range(ranks)])


# --- failure, and measuring -----------------------------------------------------------------------


def failing(world: World, error: Exception) -> None:
    engine, calls = engine_of(world, "1f1b:4"), list[int]()

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise error

    engine.model.get_submodule("14").register_forward_pre_hook(fail)
    engine.step(mine(engine, TASK.batch(1)))


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
