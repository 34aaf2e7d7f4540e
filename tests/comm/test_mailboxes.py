"""Transports: mailboxes, calls that differ, the pool of buffers, collectives of a library."""

import mmap
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.meters import communication_bytes
from shardwise.comm import move as c
from shardwise.comm.gloo import shared
from shardwise.comm.gloo.gloo import Gloo
from shardwise.comm.gloo.pool import Pool
from shardwise.comm.gloo.shared import SWITCH, Mailboxes, mailbox_bytes, shared_memory_wanted
from shardwise.comm.ledger import Ledger, Line
from shardwise.comm.move import begin_receive, begin_send, begin_sum, move, start
from shardwise.comm.nccl import Nccl
from shardwise.comm.torch_links import TorchLinks
from shardwise.comm.transport import Transport
from shardwise.comm.world import Axis, World, counted_axis
from shardwise.core.errors import InputError
from shardwise.core.layouts.layout import I, P, R, S
from shardwise.engine.optimizer.optimizer_spec import SGD
from shardwise.engine.parallelize import parallelize
from tests.comm.test_move import all_ranks
from tests.pool import CPU, run_gloo, run_threads


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
    """They come in order, and the sender never waits: what finds no room goes by gloo."""
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
    """Where it lies, put aside by a later wait, or brought by gloo; the next one has its place."""
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


def opened(world: World, where: str) -> tuple[bool, list[float]]:
    """Whether the ranks have mailboxes, and sums over them."""
    with pytest.MonkeyPatch.context() as patch:
        if where == "two hosts" and world.rank:
            patch.setattr(shared, "_host", lambda: 12345)
        if where == "no memory left":
            patch.setattr(shared, "_create", lambda _: -1)
        off = where == "switched off on one rank" and world.rank == 1
        wanted = shared_memory_wanted({SWITCH: "0"} if off else {})
        given = gloo_of(all_ranks(world))
        fresh = Gloo(given.group, shared=wanted).with_ledger("dp", Ledger(), CPU)
        x = torch.ones(8) * (world.rank + 1)
        fresh.all_reduce(x).wait()
        strided = torch.ones(3, 2 * world.size).t() * (world.rank + 1)
        block = fresh.begin_reduce_scatter_along(strided, 0)
        x = torch.cat([x, fresh.all_gather_along(block.wait(), 1).flatten()])
    return fresh.memory.mailboxes is not None, x.tolist()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "where", ["one host", "two hosts", "no memory left", "switched off on one rank"]
)
def test_ranks_share_memory_where_they_can(ranks: int, where: str):
    """Real processes: the sum is the same with mailboxes and without, and all have some or none."""
    for found, x in run_gloo(ranks, opened, where):
        assert found == (where == "one host")
        assert x == [ranks * (ranks + 1) / 2] * (8 + 2 * 3 * ranks)


def looked_at(world: World, value: str) -> tuple[list[bool], int, int]:
    """Whether links share memory by default and if asked; open handles and maps of mailboxes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, value)
        shares = [TorchLinks(ours=False, shared_memory=x).shared for x in (None, True, False)]
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


def counts_differ(world: World, sent: int, expected: int) -> None:
    """Rank 0 sends so many rows to rank 1, which expects another number."""
    rows, axis = torch.zeros(sent * (1 - world.rank), 2), all_ranks(world, "ep")
    out_counts, in_counts = ([0, 0], [0, sent]) if world.rank == 0 else ([expected, 0], [0, 0])
    c.all_to_all(rows, axis, out_counts, in_counts)


def calls_differ(world: World) -> None:
    """One reduces 88 bytes, the other gathers 8."""
    axis = all_ranks(world)
    if world.rank == 0:
        c.all_reduce(torch.zeros(11, dtype=torch.float64), axis)
    c.all_gather(torch.zeros(1, dtype=torch.float64), axis)
    axis.transport.barrier()


def said(world: World, act: Callable[..., None], *args: int) -> str:
    """The error of a rank."""
    try:
        act(world, *args)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("sent", "expected"), [(2, 3), (0, 1), (1, 0)])
def test_counts_that_disagree_are_an_error_and_no_hang(sent: int, expected: int):
    """Where ranks share memory the message's size is noticed, none at all included."""
    sender, receiver = run_gloo(2, said, counts_differ, sent, expected)
    assert sender == ""
    assert f"{8 * sent} bytes instead of {8 * expected}" in receiver
    assert "the counts of an all_to_all must agree" in receiver
    assert "from rank 0: that rank sent it in all_to_all" in receiver
    assert "all_to_all on axis ep, called by counts_differ (test_mailboxes.py:" in receiver


def test_calls_that_disagree_are_an_error_on_both_sides():
    """Each names the other rank, both kinds of call and the line of its own."""
    for rank, text in enumerate(run_gloo(2, said, calls_differ)):
        assert f"rank {1 - rank}" in text and "called by calls_differ (test_mailboxes.py:" in text
        assert "all_reduce" in text and "all_gather" in text


# --- the pool of communication buffers ------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 1024), st.booleans()), max_size=40))
def test_no_two_slots_that_are_kept_overlap(asked: list[tuple[int, bool]]):
    """A slot keeps its bytes until its piece has ended, and pieces end in order or when asked."""
    pool, ended = Pool(), list[int]()
    pool.reserve(4096, CPU)
    slots: dict[int, Tensor] = {}
    for number, (nbytes, now) in enumerate(asked):
        slot = pool.slot(nbytes, CPU)
        slots[number] = slot.tensor((nbytes,), torch.uint8).fill_(number)

        def finish(number: int = number) -> int:
            assert (slots.pop(number) == number).all()  # nobody else has written there
            ended.append(number)
            return number

        take = slot.until(finish)
        assert not now or (take(), take()) == (number, None)
    assert len(set(ended)) == len(ended)
    while pool.slots:
        pool.slots.popleft().end()
    assert sorted(ended) == list(range(len(asked)))
    with pytest.raises(ValueError, match="a slot of 1025 bytes in a pool of 4096"):
        pool.slot(1025, CPU)


def in_pieces(world: World, nbytes: int, dtype: torch.dtype, shared: bool) -> list[Any]:
    """Sums and joins of one axis with a pool of that size and with none, and what they sent."""
    n, found = world.size, list[Any]()
    given = gloo_of(all_ranks(world))
    for size in (nbytes, 0):
        pool, ledger = Pool(), Ledger()
        pool.reserve(size, CPU)
        fresh = Gloo(given.group, shared=shared).with_ledger("dp", ledger, world.device, pool)
        axis = Axis("dp", fresh, fresh, ledger, pool)
        torch.manual_seed(world.rank)
        x = torch.randn(n * 640).to(dtype)
        block, summed, whole = x[:640].clone(), x.clone(), x.new_empty(n * 640)
        waits = [
            start(x, axis, P, S(0), block),
            start(summed, axis, P, R, summed),
            start(x[:640], axis, S(0), R, whole),
            begin_sum(x[:100].double(), axis),
        ]
        last = waits[-1].wait()
        for each in waits[:-1]:
            each.wait()
        wide = x.view(8, n * 16, 5)
        along = fresh.reduce_scatter_along(wide, 1), fresh.all_gather_along(wide, 1)
        turned = fresh.all_gather_along(wide.transpose(0, 1), 2)
        found.append([block, summed, whole, last, *along, turned, ledger.sent_bytes()])
    return found


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.float64), (4, torch.bfloat16)])
def test_pieces_give_the_same_sums_and_send_the_same_bytes(
    ranks: int, dtype: torch.dtype, shared: bool
):
    """With the smallest pool every result has the same bits as with new memory for each message."""
    smallest = 4 * 64 * (2 * (ranks - 1) + 4)
    for pieces, whole in run_gloo(ranks, in_pieces, smallest, dtype, shared):
        for a, b in zip(pieces, whole, strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


# --- the memory of a step's communication ---------------------------------------------------------


def peaks(world: World, plan: str, width: int, layers: int = 1) -> tuple[int, int]:
    """The most bytes that communication held in the second step, and the bytes of the pool."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)), nn.Linear(width, 8))
    meter = communication_bytes()
    batch = torch.randn(4, width, dtype=torch.float64)
    loss = lambda model, x: model(x).square().mean()  # noqa: E731
    with meter:
        settings = {"optimizer": SGD(lr=1e-3), "loss": loss, "least_unit_bytes": 0}
        engine = parallelize(model, plan, world, **settings)
        engine.step(batch)
        meter.peak_bytes = 0
        engine.step(batch)
    return meter.peak_bytes, engine.memory()["buffers"]


@pytest.mark.parametrize(
    ("ranks", "plan"), [(2, "zero2 bf16 accumulate:2"), (4, "zero3 bf16"), (2, "ddp fp64")]
)
def test_communication_takes_the_same_memory_for_a_larger_model(ranks: int, plan: str):
    """Ten times the layer: not a byte more for its messages than the pool and a few numbers."""
    for width in (200, 640):
        for peak, pool in run_gloo(ranks, peaks, f"dp{ranks} {plan} buffers:64KiB", width):
            assert pool == 2**16
            assert pool <= peak <= pool + 2**12


@pytest.mark.parametrize("plan", ["dp2 zero2 fp32 accumulate:2", "dp2 zero3 fp32"])
def test_messages_that_come_early_wait_in_the_mailbox(plan: str):
    """Many units, each of which fits a mailbox: what has come for a later one is not copied out."""
    for peak, pool in run_gloo(2, peaks, f"{plan} buffers:1MiB", 200, 12):
        assert pool <= peak <= pool + 2**12


# --- a library's collectives, and tensors of another device ---------------------------------------


def library(axis: Axis, world: World) -> Axis:
    """The axis over the collectives of torch.distributed, as on NCCL."""
    queues = [Nccl(each.group) for each in (axis.transport, axis.behind) if isinstance(each, Gloo)]
    return counted_axis(axis.name, queues, axis.ledger, world.device)


def results(axis: Axis, rank: int) -> list[Tensor]:
    """What moves, a broadcast, an all-to-all with counts and messages both ways give."""
    own = torch.Generator().manual_seed(rank)
    x = torch.randint(0, 9, (4, 6), generator=own).double()
    found = [move(x, axis, *pair) for pair in ((P, R), (P, S(1)), (S(0), I), (S(0), S(1)))]
    found.append(c.broadcast(x.to(torch.float8_e4m3fn), axis, 1).double())
    counts = [3, 1] if rank == 0 else [1, 3]
    found.append(c.all_to_all(x, axis, counts, counts))
    out, peer = torch.empty(24).double(), 1 - rank
    for each in [begin_send(x, axis, peer), begin_receive(out, axis, peer)]:
        each.wait()
    return [*found, out]


def compared(world: World) -> tuple[bool, bool]:
    """Whether results and ledger are those of the transport of gloo."""
    here, there = all_ranks(world), library(all_ranks(world), world)
    same = all(map(torch.equal, results(here, world.rank), results(there, world.rank)))
    return same, here.ledger.lines == there.ledger.lines


def test_the_librarys_collectives_give_and_count_what_messages_do():
    """Values, calls, elements, bytes and peers, by kind."""
    assert run_gloo(2, compared) == [(True, True)] * 2


#: Every function of a transport, on a tensor of two elements.
CALLS: dict[str, Callable[[Transport, Tensor], Any]] = {
    "all_reduce": lambda t, x: t.all_reduce(x),
    "broadcast": lambda t, x: t.broadcast(x, 0),
    "all_gather": lambda t, x: t.all_gather(x.new_empty(4), x),
    "reduce_scatter": lambda t, x: t.reduce_scatter(x[:1], x),
    "all_to_all": lambda t, x: t.all_to_all(x, x, [1, 1], [1, 1]),
    "send": lambda t, x: t.send(x, 1 - t.rank),
    "receive": lambda t, x: t.receive(x, 1 - t.rank),
    "all_gather_along": lambda t, x: t.all_gather_along(x, 0),
    "reduce_scatter_along": lambda t, x: t.reduce_scatter_along(x, 0),
    "begin_reduce_scatter_along": lambda t, x: t.begin_reduce_scatter_along(x, 0),
}


def refused(world: World, backend: str) -> None:
    """Each call raises on a tensor of another device, by its caller's name; nothing is sent."""
    axis = all_ranks(world)
    axis = library(axis, world) if backend == "nccl" else axis
    for call in CALLS.values():
        with pytest.raises(InputError, match=r"axis dp of a tensor on meta, called by .* \("):
            call(axis.transport, torch.zeros(2, device="meta"))
    assert not axis.ledger.lines


@pytest.mark.cases(3)
@pytest.mark.parametrize("backend", ["threads", "gloo", "nccl"])
def test_every_transport_refuses_a_tensor_of_another_device(backend: str) -> None:
    """On gloo too, where it would go through: NCCL fails on it."""
    public = {name for name in vars(Transport) if not name.startswith("_")}
    others = {"with_ledger", "begin", "count", "require_device", "barrier", "ready", "answered"}
    assert public - others == set(CALLS)
    (run_threads if backend == "threads" else run_gloo)(2, refused, backend)
