"""A run prints a line for each slow link between hosts, with the rank and its host."""

import ctypes
import io
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from rich.console import Console

from shardwise.comm.world import World
from shardwise.train import config, loop
from shardwise.train.measure import slow_links as links
from shardwise.train.measure.metrics import Record
from tests.comm.hosts import joined_hosts
from tests.pool import Pool, run_threads
from tests.train import runs

NAMES = {0: "ant", 2: "bee", 4: "cat"}
EVEN = {(0, 2): 1e-3, (0, 4): 1e-3, (2, 4): 1e-3}
SLOWED, GETS_SLOW = 12, "now"  # the step after which a link gets slow, and what is said then
NOTICED_S = 15
_CLONE_NEWUTS = 0x04000000


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (EVEN, {}),
        ({**EVEN, (2, 4): 9e-3}, {}),  # one link of several: no rank is to blame
        ({**EVEN, (0, 4): 8e-3, (2, 4): 9e-3}, {4: ("rank 4 (cat)", "8 ms", "1 ms between")}),
        ({**EVEN, (0, 2): 5e-3, (0, 4): 5e-3}, {0: ("rank 0 (ant)", "5 ms", "1 ms between")}),
        (dict.fromkeys(EVEN, 2e-3), {}),
        (
            {(0, 2): 7e-3, (0, 4): 6e-3, (2, 4): 8e-3},
            {None: ("all hosts", "6 ms, of rank 0 (ant) with rank 4 (cat)", "took 1 ms at")},
        ),
        ({(0, 2): 7e-3}, {None: ("all hosts", "7 ms, of rank 0 (ant) with rank 2 (bee)")}),
    ],
)
def test_the_rank_whose_links_are_slow_is_told(
    seconds: links.Pairs, told: dict[int | None, tuple[str, ...]]
) -> None:
    """With its host, its time and that of the others; or all of them, beside the start."""
    found = links.slow_links(seconds, EVEN, NAMES)
    assert found.keys() == told.keys()
    assert all(word in found[key] for key, words in told.items() for word in words)


def test_a_step_takes_long_beside_the_median_of_those_before() -> None:
    """The first steps, and one slow step among them, say nothing."""
    assert not links.takes_long(9.0, [1.0, 1.0])
    assert links.takes_long(1.6, [1.0, 9.0, 1.0])
    assert not links.takes_long(1.4, [1.0, 9.0, 1.0])


def looks(world: World, rounds: list[links.Pairs]) -> list[list[str]]:
    """What each look tells, with the times of each measurement."""
    own = links.SlowLinks(world)
    before, alone = world.ledger.copy(), own.look()
    assert not world.ledger.since(before) and not alone  # threads share a host
    own.names, left = NAMES, iter(rounds)
    told, measure = list[list[str]](), links.pairs
    links.pairs = lambda *_: next(left)
    try:
        while True:
            told.append([text[:12] for text in own.look()])
    except StopIteration:
        return told
    finally:
        links.pairs = measure


def test_a_link_is_told_once_and_only_if_it_stays_slow() -> None:
    """The shortest of three times counts, and of the start's; on one host nothing is sent."""
    slow: links.Pairs = {**EVEN, (0, 4): 8e-3, (2, 4): 9e-3}
    late: links.Pairs = {**slow, (0, 2): 7e-3}
    rounds = [slow, late, EVEN, EVEN, slow, EVEN, slow, late, slow, slow, slow, slow]
    (told,) = run_threads(1, looks, rounds)
    assert told == [[], [], [], ["rank 4 (cat)"], []]


def tc(rate: str) -> None:
    """Limit what this host sends."""
    shape = f"tc qdisc replace dev eth0 root tbf rate {rate} burst 32kb latency 4s"
    subprocess.run(shape.split(), check=True, capture_output=True)


def slowed(world: World, given: config.Config) -> str:
    """Train on hosts named by rank; what was said.  The link of the last rank gets slow.

    The run ends when the line is printed, at the latest NOTICED_S after the link became slow.
    """
    ctypes.CDLL(None).unshare(_CLONE_NEWUTS)
    socket.sethostname(f"node{world.rank}")
    said, told, end_s = io.StringIO(), loop.tell, [float("inf")]

    def tell(run: loop.Run, record: Record) -> None:
        told(run, record)
        if record.step == SLOWED:
            run.note(GETS_SLOW)
            end_s[0] = time.monotonic() + NOTICED_S
            tc("10mbit") if world.rank == world.size - 1 else None
        if time.monotonic() > end_s[0] or slow_lines(said.getvalue()):
            os.kill(os.getpid(), signal.SIGTERM)

    loop.tell = tell
    try:
        loop.train(given, world, None, Console(file=said, width=300))
    finally:
        loop.tell = told
    return said.getvalue()


def limited(world: World) -> str:
    """The same limit for what each host sends, so that times hardly depend on processors."""
    try:
        tc("200mbit")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{error} {getattr(error, 'stderr', '')}"
    return ""


def slow_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if " slow" in line]


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "line"), [(3, "rank 2 (node2) has a slow link"), (2, "the links between all hosts")]
)
def test_a_link_that_gets_slow_in_a_run_is_told_in_time(
    tmp_path: Path, ranks: int, line: str
) -> None:
    """By rank 0, and nothing before; a run of several hosts that begins so says it at once."""
    with joined_hosts(ranks) as hosts:
        pool = Pool(ranks, hosts=hosts)
        try:
            for why in filter(None, pool.run(limited, ())):
                pytest.skip(f"no limit of a link here: {why}")
            runs_said = [
                pool.run(slowed, (wide(tmp_path / f"run{k}"),)) for k in range(1 + (ranks > 2))
            ]
        finally:
            pool.close()
    for k, said in enumerate(runs_said):
        before, _, after = said[0].partition(GETS_SLOW)
        (told,) = slow_lines(before if k else after)
        assert told.startswith(line) and f"rank {ranks - 1} (node{ranks - 1})" in told
        assert not slow_lines(after if k else before)
        assert not any(map(slow_lines, said[1:]))


def wide(folder: Path) -> config.Config:
    """An endless run whose steps take the time of their messages, not of computation."""
    given = runs.settings(folder, "zero1", steps=10**6, batch=6, eval_every=0, save_every=0)
    sizes = given.model.model_copy(update={"width": 128, "hidden": 512})
    return given.model_copy(update={"model": sizes})
