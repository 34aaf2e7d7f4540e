"""Shared memory between ranks: order, room, who is gone, and where there is none."""

import mmap
import os
import subprocess
import sys
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.comm.gloo import mailbox, shared
from shardwise.comm.gloo.gloo import Gloo
from shardwise.comm.gloo.mailbox import HEAD
from shardwise.comm.gloo.shared import SWITCH, Mailboxes, mailbox_bytes, shared_memory_wanted
from shardwise.comm.ledger import Ledger, Line
from shardwise.comm.torch_links import TorchLinks
from shardwise.comm.world import World
from shardwise.core.errors import InputError
from shardwise.core.mesh import Mesh
from tests.pool import run_gloo


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
    """Both ends of the mailboxes of two ranks."""
    memory = mmap.mmap(-1, shared._head_bytes(2) + shared.SHARED_BYTES)
    queues: list[deque[Tensor]] = [deque(), deque()]
    pids = [os.getpid()] * 2
    wires: list[Any] = [Wire(rank, queues) for rank in (0, 1)]
    a, b = (Mailboxes(memory, wire, pids) for wire in wires)
    return a, b, queues


def test_messages_come_in_order_however_they_are_waited_for():
    """Each message lands in the tensor that was expected for it, the last waited for first."""
    a, b, _ = pair()
    arrived = [torch.zeros(3) for _ in range(5)]
    waits = [b.receive(x, 0, Line()) for x in arrived]
    for k in range(5):
        a.send(torch.full((3,), float(k)), 1, Line())
    for wait in reversed(waits):
        wait()
    assert [x[0].item() for x in arrived] == [0, 1, 2, 3, 4]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 2**20), st.booleans()), min_size=1, max_size=60))
def test_no_message_is_lost_or_changed_whatever_their_sizes(acts: list[tuple[int, bool]]):
    """Sends of any size between takes at any time: what comes out is what was put in, in order."""
    a, b, _ = pair()
    waiting = deque[tuple[int, Tensor, Any]]()

    def take() -> None:
        k, x, wait = waiting.popleft()
        wait()
        assert (x == k % 251).all()

    for sent, (size_bytes, takes) in enumerate(acts):
        a.send(torch.full((size_bytes,), sent % 251, dtype=torch.uint8), 1, Line())
        x = torch.empty(size_bytes, dtype=torch.uint8)
        waiting.append((sent, x, b.receive(x, 0, Line())))
        if takes:
            take()
    while waiting:
        take()


def test_what_finds_no_room_goes_through_gloo_in_its_turn():
    """A sender far ahead never waits: the mailbox fills, the rest goes by gloo, the order stays."""
    a, b, queues = pair()
    size, count = 2**20, 3 * mailbox_bytes(2) // 2**20
    for k in range(count):
        a.send(torch.full((size,), k, dtype=torch.uint8), 1, Line())
    assert len(queues[1]) == count - mailbox_bytes(2) // size
    for k in range(count):
        x = torch.empty(size, dtype=torch.uint8)
        b.receive(x, 0, Line())()
        assert (x == k).all()
    assert not queues[1]


@pytest.mark.parametrize("overtaken", [False, True])
@pytest.mark.parametrize("full", [False, True])
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


def test_a_message_is_free_to_change_once_it_is_in():
    """What was put in is what comes out, though the sender has written over its own."""
    a, b, _ = pair()
    x, y = torch.ones(4), torch.zeros(4)
    assert a.send(x, 1, Line()) == []
    x.zero_()
    b.receive(y, 0, Line())()
    assert y.tolist() == [1, 1, 1, 1]


def test_whoever_waits_for_a_process_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch):
    """A rank that has died is named, and nobody waits for it for ever."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setattr(shared, "TURNS", 0)
    _, b, _ = pair()
    b.pids[0] = gone.pid
    with pytest.raises(RuntimeError, match=f"rank 0 of the group is gone: process {gone.pid}"):
        b.receive(torch.zeros(1), 0, Line())()


def test_all_mailboxes_of_a_group_lie_apart():
    """Numbers and rooms of three ranks' mailboxes do not overlap, and fit in what is reserved."""
    memory = mmap.mmap(-1, shared._head_bytes(3) + shared.SHARED_BYTES)
    wire: Any = Wire(0, [])
    boxes = Mailboxes(memory, wire, [1, 2, 3])
    ways = [boxes._way(a, b) for a in range(3) for b in range(3) if a != b]
    starts = sorted(hold.first for _, hold in ways)
    assert all(y - x == mailbox_bytes(3) for x, y in pairwise(starts))
    assert starts[-1] + mailbox_bytes(3) - starts[0] <= shared.SHARED_BYTES
    for number, (numbers, _) in enumerate(ways):
        numbers[0] = numbers[HEAD - 1] = number + 1
    assert [way[0][0] for way in ways] == [way[0][HEAD - 1] for way in ways] == [1, 2, 3, 4, 5, 6]


def test_a_message_is_taken_as_it_lies():
    """A block of any strides goes in without a copy of its own, and comes out in its order."""
    a, b, _ = pair()
    x = torch.arange(24.0).view(2, 3, 4)[:, 1:, ::2]
    place = torch.empty(x.numel())
    assert a.send(x, 1, Line()) == []
    b.receive(place, 0, Line())()
    assert place.tolist() == x.flatten().tolist()


@pytest.mark.parametrize("lazy", [torch.conj, Tensor._neg_view])
def test_what_a_view_has_yet_to_do_to_its_numbers_is_done(lazy: Any):
    """A conjugate or negative that is only noted goes in as it is read, and is read as it came."""
    a, b, _ = pair()
    x, place = torch.full((2,), 1 + 2j), torch.zeros(2, dtype=torch.complex64)
    for into in (place, lazy(place)):
        a.send(lazy(x), 1, Line())
        b.receive(into, 0, Line())()
        assert torch.equal(into, lazy(x))


def test_views_of_messages_are_kept_but_not_without_end(monkeypatch: pytest.MonkeyPatch):
    """A view serves again, in a later mode too, and only so many are held."""
    monkeypatch.setattr(mailbox, "VIEWS", 3)
    a, b, _ = pair()
    for turn in range(2):
        for width in range(1, 9):
            x = (torch.arange(4.0 * width) + turn).view(width, 4)[:, ::2]
            with torch.inference_mode(turn == 0):
                a.send(x, 1, Line())
                seen = b.read(x, 0, Tensor.clone, Line())()
            assert torch.equal(seen, x)
    holds = a.out[1].store, b.into[0].store
    assert [0 < len(hold.views) <= 3 for hold in holds] == [True] * 2
    x = torch.arange(8.0).view(2, 4)[:, ::2]
    kept = [hold.tensor(0, x) for hold in holds]
    assert [hold.tensor(0, x) is view for hold, view in zip(holds, kept, strict=True)] == [True] * 2
    a.send(x, 1, Line())
    assert torch.equal(b.read(x, 0, Tensor.clone, Line())(), x)
    assert [torch.equal(view, x) for view in kept] == [True] * 2  # the same memory


def test_ranks_that_expect_other_sizes_are_told():
    """Not given whatever lies behind the message."""
    a, b, _ = pair()
    a.send(torch.ones(3), 1, Line())
    with pytest.raises(RuntimeError, match="of 12 bytes instead of 16"):
        b.receive(torch.zeros(4), 0, Line())()


def test_a_message_without_room_goes_as_it_lies_too():
    """Through gloo, in its order, and used by who reads it."""
    a, b, _ = pair()
    full = torch.zeros(mailbox_bytes(2) // 4)
    x, seen = torch.arange(24.0).view(2, 3, 4)[:, 1:, ::2], list[Tensor]()
    first = b.receive(torch.empty_like(full), 0, Line())
    last = b.read(x, 0, lambda y: seen.append(y.clone()) or y, Line())
    assert a.send(full, 1, Line()) == []
    ends = a.send(x, 1, Line())
    assert len(ends) == 2
    first()
    last()
    for end in ends:
        end()
    assert seen[0].flatten().tolist() == x.flatten().tolist()


def opened(world: World, split: bool, full: bool, off: bool) -> tuple[bool, list[float]]:
    """Whether the ranks have mailboxes, and sums over them; on hosts apart, or without memory."""
    world = world.on(Mesh((("dp", world.size),)))
    own = shared._host, shared._create
    try:
        if split and world.rank:
            shared._host = lambda: 12345
        if full:
            shared._create = lambda _: -1
        x = torch.ones(8) * (world.rank + 1)
        given = world.axis("dp").transport
        assert isinstance(given, Gloo)
        wanted = shared_memory_wanted({SWITCH: "0"} if off and world.rank == 1 else {})
        fresh = Gloo(given.group, shared=wanted).with_ledger("dp", Ledger(), torch.device("cpu"))
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


def links_of(world: World, value: str) -> list[bool]:
    """Whether links opened under that value of the switch share memory, by default and if asked."""
    os.environ[SWITCH] = value
    try:
        return [TorchLinks(ours=False, shared_memory=asked).shared for asked in (None, True, False)]
    finally:
        del os.environ[SWITCH]


def test_the_environment_switches_shared_memory_off():
    """SHARDWISE_SHARED_MEMORY=0; an argument of `sw.init` goes before it."""
    assert run_gloo(2, links_of, "0") == [[False, True, False]] * 2
    assert run_gloo(2, links_of, "1") == [[True, True, False]] * 2
    assert shared_memory_wanted({}) and shared_memory_wanted({SWITCH: ""})
    with pytest.raises(InputError, match=f"{SWITCH}='no' in the environment"):
        shared_memory_wanted({SWITCH: "no"})


def handles(world: World) -> tuple[int, int]:
    """How many handles of mailboxes a rank has open, and maps of them, with one group more.

    Python keeps a handle for each map.
    """
    given = world.everyone.transport
    assert isinstance(given, Gloo)
    fresh = Gloo(given.group)
    fresh.ready()
    names = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum("memfd:shardwise" in n for n in names), sum("memfd:shardwise" in m for m in maps)


def test_the_memory_has_no_name():
    """It is mapped by those who use it, under no path: a rank that is killed leaves nothing."""
    for open_handles, maps in run_gloo(2, handles):
        assert open_handles == maps > 0


def test_a_process_that_cannot_be_asked_lends_no_memory():
    """One that is gone, a handle it does not have, and one that is no memory."""
    assert shared._attach(2**22 + 1, 5) is None
    assert shared._attach(os.getpid(), -1) is None
    assert shared._attach(os.getpid(), 10**6) is None
