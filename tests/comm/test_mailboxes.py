"""Mailboxes in shared memory: order, room, who is gone, where there is none; calls that differ."""

import mmap
import os
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.comm import move as c
from shardwise.comm.gloo import shared
from shardwise.comm.gloo.gloo import Gloo
from shardwise.comm.gloo.shared import SWITCH, Mailboxes, mailbox_bytes, shared_memory_wanted
from shardwise.comm.ledger import Ledger, Line
from shardwise.comm.torch_links import TorchLinks
from shardwise.comm.world import Axis, World
from shardwise.core.errors import InputError
from tests.comm.test_move import all_ranks
from tests.pool import CPU, run_gloo


def gloo_of(axis: Axis) -> Gloo:
    assert isinstance(axis.transport, Gloo)
    return axis.transport


# --- mailboxes in shared memory -------------------------------------------------------------------


class Wire:
    """What gloo does for two ranks of this process: messages in order, by one queue each way."""

    def __init__(self, rank: int, queues: list[deque[Tensor]]) -> None:
        self.own, self.queues = rank, queues

    def rank(self) -> int:
        return self.own

    def send(self, xs: list[Tensor], to: int, tag: int) -> Any:
        self.queues[to].append(xs[0].clone())
        return self

    def recv(self, xs: list[Tensor], source: int, tag: int) -> Any:
        xs[0].copy_(self.queues[self.own].popleft())
        return self

    def wait(self) -> None:
        """Nothing is under way."""


def pair() -> tuple[Mailboxes, Mailboxes, list[deque[Tensor]]]:
    memory = mmap.mmap(-1, shared._head_bytes(2) + shared.SHARED_BYTES)
    queues: list[deque[Tensor]] = [deque(), deque()]
    pids = [os.getpid()] * 2
    wires: list[Any] = [Wire(rank, queues) for rank in (0, 1)]
    a, b = (Mailboxes(memory, wire, pids) for wire in wires)
    return a, b, queues


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 2**20), st.booleans()), min_size=1, max_size=60))
def test_no_message_is_lost_or_changed_whatever_their_sizes(acts: list[tuple[int, bool]]):
    """Sends of any size between takes at any time: what comes out is what was put in, in order.

    The sender may write over its tensor at once.  It never waits: what finds no room goes by gloo.
    """
    a, b, queues = pair()
    waiting = deque[tuple[int, Tensor, Any]]()

    def take() -> None:
        k, x, wait = waiting.popleft()
        wait()
        assert (x == k % 251).all()

    for sent, (size_bytes, takes) in enumerate(acts):
        message = torch.full((size_bytes,), sent % 251, dtype=torch.uint8)
        if a.send(message, 1, Line()) == []:
            message.zero_()
        x = torch.empty(size_bytes, dtype=torch.uint8)
        waiting.append((sent, x, b.receive(x, 0, Line())))
        if takes:
            take()
    while waiting:
        take()
    assert not queues[1]


@pytest.mark.parametrize("overtaken", [False, True])
@pytest.mark.parametrize("full", [True, False])
def test_a_message_is_used_once_in_its_wait(overtaken: bool, full: bool):
    """Where it lies, or where it was put when a later one was waited for, or when gloo brought it.
    In every case it is taken out: what comes next has its place.
    """
    a, b, queues = pair()
    for _ in range(mailbox_bytes(2) // 2**20 if full else 0):
        a.send(torch.zeros(2**20, dtype=torch.uint8), 1, Line())
        b.receive(torch.empty(2**20, dtype=torch.uint8), 0, Line())
    for k in (1, 2):
        a.send(torch.full((4,), k, dtype=torch.int32), 1, Line())
    assert len(queues[1]) == (2 if full else 0)
    total, last = torch.full((4,), 10, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    first = b.read(total, 0, total.add_, Line())
    second = b.receive(last, 0, Line())
    if overtaken:
        second()
    assert total.tolist() == [10] * 4
    assert first() is total
    assert first() is total
    second()
    assert (total.tolist(), last.tolist()) == ([11] * 4, [2] * 4)


@pytest.mark.parametrize("lazy", [torch.conj, Tensor._neg_view])
def test_lazy_conjugates_and_negatives_are_resolved(lazy: Any):
    """Values are sent resolved, and received into a view that is itself conjugate or negative."""
    a, b, _ = pair()
    x, place = torch.full((2,), 1 + 2j), torch.zeros(2, dtype=torch.complex64)
    for into in (place, lazy(place)):
        a.send(lazy(x), 1, Line())
        b.receive(into, 0, Line())()
        assert torch.equal(into, lazy(x))


def test_whoever_waits_for_a_process_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch):
    """A rank that has died is named, nobody waits for it for ever, and it lends no memory."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setattr(shared, "TURNS", 0)
    _, b, _ = pair()
    b.pids[0] = gone.pid
    with pytest.raises(RuntimeError, match=f"rank 0 of the group is gone: process {gone.pid}"):
        b.receive(torch.zeros(1), 0, Line())()
    assert shared._attach(gone.pid, 5) is shared._attach(os.getpid(), 10**6) is None


def opened(world: World, split: bool, full: bool, off: bool) -> tuple[bool, list[float]]:
    """Whether the ranks have mailboxes, and sums over them; on hosts apart, or without memory."""
    own = shared._host, shared._create
    try:
        if split and world.rank:
            shared._host = lambda: 12345
        if full:
            shared._create = lambda _: -1
        wanted = shared_memory_wanted({SWITCH: "0"} if off and world.rank == 1 else {})
        given = gloo_of(all_ranks(world))
        fresh = Gloo(given.group, shared=wanted).with_ledger("dp", Ledger(), CPU)
        x = torch.ones(8) * (world.rank + 1)
        fresh.all_reduce(x).wait()
        strided = torch.ones(3, 2 * world.size).t() * (world.rank + 1)
        block = fresh.begin_reduce_scatter_along(strided, 0)
        x = torch.cat([x, fresh.all_gather_along(block.wait(), 1).flatten()])
    finally:
        shared._host, shared._create = own
    return fresh.memory.mailboxes is not None, x.tolist()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("split", "full", "off", "has"),
    [
        (False, False, False, True),
        (True, False, False, False),
        (False, True, False, False),
        (False, False, True, False),
    ],
    ids=["one host", "two hosts", "no memory left", "switched off on one rank"],
)
def test_ranks_share_memory_where_they_can(
    ranks: int, split: bool, full: bool, off: bool, has: bool
):
    """Real processes: the sum is the same with mailboxes and without, and there are some if any."""
    for found, x in run_gloo(ranks, opened, split, full, off):
        assert found == has
        assert x == [ranks * (ranks + 1) / 2] * (8 + 2 * 3 * ranks)


def looked_at(world: World, value: str) -> tuple[list[bool], int, int]:
    """Whether links share memory under that value of the switch, by default and if asked. And how
    many handles of mailboxes are open, and maps: Python keeps a handle for each map.
    """
    os.environ[SWITCH] = value
    try:
        shares = [TorchLinks(ours=False, shared_memory=x).shared for x in (None, True, False)]
    finally:
        del os.environ[SWITCH]
    gloo_of(world.everyone).ready()
    names = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    handles = sum("memfd:shardwise" in name for name in names)
    return shares, handles, sum("memfd:shardwise" in each for each in maps)


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_environment_switches_memory_off_that_has_no_name(value: str):
    """An argument of `sw.init` goes before it; a rank that is killed leaves nothing behind."""
    for shares, handles, maps in run_gloo(2, looked_at, value):
        assert shares == [value == "1", True, False]
        assert handles == maps > 0
    with pytest.raises(InputError, match=f"{SWITCH}='no' in the environment"):
        shared_memory_wanted({SWITCH: "no"})


# --- ranks whose calls differ ---------------------------------------------------------------------


def disagree(world: World, sent: int, expected: int) -> str:
    """The error where rank 0 sends so many rows to rank 1, which expects another number."""
    axis = all_ranks(world, "ep")
    try:
        if world.rank == 0:
            c.all_to_all(torch.zeros(sent, 2), axis, [0, 0], [0, sent])
        else:
            c.all_to_all(torch.zeros(0, 2), axis, [expected, 0], [0, 0])
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("sent", "expected"), [(2, 3), (0, 1), (1, 0)])
def test_counts_that_disagree_are_an_error_and_no_hang(sent: int, expected: int):
    """Where ranks share memory the message's size is noticed, none at all included."""
    sender, receiver = run_gloo(2, disagree, sent, expected)
    assert sender == ""
    assert f"{8 * sent} bytes instead of {8 * expected}" in receiver
    assert "the counts of an all_to_all must agree" in receiver
    assert "from rank 0: that rank sent it in all_to_all" in receiver
    assert "all_to_all on axis ep, called by disagree (test_mailboxes.py:" in receiver


def call_other(world: World) -> str:
    """The error of each rank where one reduces 88 bytes and the other gathers 8."""
    axis = all_ranks(world)
    try:
        if world.rank == 0:
            c.all_reduce(torch.zeros(11, dtype=torch.float64), axis)
        c.all_gather(torch.zeros(1, dtype=torch.float64), axis)
        axis.transport.barrier()
    except RuntimeError as error:
        return str(error)
    return ""


def test_calls_that_disagree_are_an_error_on_both_sides():
    """Each names the other rank, both kinds of call and the line of its own."""
    for rank, text in enumerate(run_gloo(2, call_other)):
        assert f"rank {1 - rank}" in text and "called by call_other (test_mailboxes.py:" in text
        assert "all_reduce" in text and "all_gather" in text
