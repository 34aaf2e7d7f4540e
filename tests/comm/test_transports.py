"""The pool of buffers, the collectives of a library, threads, and what a ledger counts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.meters import CommunicationBytes
from shardwise.comm import move as c
from shardwise.comm.gloo.gloo import Gloo
from shardwise.comm.gloo.pool import Pool
from shardwise.comm.ledger import Ledger
from shardwise.comm.move import begin_receive, begin_send, begin_sum, move, start
from shardwise.comm.nccl import Nccl
from shardwise.comm.transport import Transport
from shardwise.comm.world import Axis, World, counted_axis
from shardwise.core.errors import InputError
from shardwise.core.layouts.layout import I, P, R, S
from shardwise.engine.optimizer.optimizer_spec import SGD
from shardwise.engine.parallelize import parallelize
from tests.comm.test_mailboxes import gloo_of
from tests.comm.test_move import all_ranks
from tests.pool import CPU, run_gloo, run_threads

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
    meter = CommunicationBytes()
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
