"""Collectives by name, and those of a library: values, and what the ledger counts of them."""

import pickle

import pytest
import torch
from torch import Tensor

from shardwise.comm import move as c
from shardwise.comm.gloo.gloo import Gloo
from shardwise.comm.ledger import Key, Ledger, Tally
from shardwise.comm.move import all_to_all, begin_receive, begin_send, broadcast, move
from shardwise.comm.nccl import Nccl
from shardwise.comm.world import Axis, World, alone, counted_axis
from shardwise.core.layouts.layout import I, P, R, S
from shardwise.core.mesh import Mesh
from tests.pool import run_gloo, run_threads

WORLDS = [(run_threads, 2), (run_threads, 4), (run_gloo, 2), (run_gloo, 4)]
IDS = ["threads2", "threads4", "gloo2", "gloo4"]
on_worlds = pytest.mark.parametrize(("run", "ranks"), WORLDS, ids=IDS)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


def mine(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Small whole numbers, other ones on each rank: sums are exact in every dtype."""
    own = torch.Generator().manual_seed(rank)
    return torch.randint(0, 8, shape, generator=own).to(dtype)


def reductions(world: World, dtype: torch.dtype) -> list[bool]:
    axis, n = world.everyone, world.size
    all_ = torch.stack([mine(r, dtype, 3, 2 * n) for r in range(n)])
    x = mine(world.rank, dtype, 3, 2 * n)
    good = []
    for op, expected in (("sum", all_.sum(0)), ("max", all_.amax(0)), ("min", all_.amin(0))):
        out = x.clone()
        good.append(c.all_reduce(out, axis, op) is out)
        good.append(torch.equal(out, expected.to(dtype)))
    total = all_.sum(0).to(dtype)
    rows, columns = torch.cat([total] * n), total
    block = c.reduce_scatter(torch.cat([x] * n), axis)
    good.append(torch.equal(block, rows.chunk(n)[world.rank]))
    block = c.reduce_scatter(x, axis, dim=1)
    good.append(torch.equal(block, columns.chunk(n, 1)[world.rank]))
    return good


def copies(world: World, dtype: torch.dtype) -> list[bool]:
    axis, n = world.everyone, world.size
    all_ = [mine(r, dtype, 3, 5) for r in range(n)]
    x = all_[world.rank].clone()
    good = [all(map(torch.equal, c.all_gather(x, axis), all_))]
    good.append(all(map(torch.equal, c.all_gather(x.t(), axis), [a.t() for a in all_])))
    for root in range(n):
        out = x.clone()
        good.append(c.broadcast(out, axis, root) is out)
        good.append(torch.equal(out, all_[root]))
    return good


def exchanges(world: World, dtype: torch.dtype) -> list[bool]:
    """Rank r sends (r + 2 to) % 3 rows to rank `to`: some pairs exchange nothing."""
    axis, n, rank = world.everyone, world.size, world.rank
    good = []
    for shape in ((), (4,), (2, 3)):
        sends = [[(r + 2 * to) % 3 for to in range(n)] for r in range(n)]
        xs = [mine(r, dtype, sum(sends[r]), *shape) for r in range(n)]
        expected = torch.cat([xs[r].split(sends[r])[rank] for r in range(n)])
        out = c.all_to_all(xs[rank], axis, [sends[r][rank] for r in range(n)], sends[rank])
        good.append(torch.equal(out, expected))
    right, left = (rank + 1) % n, (rank - 1) % n
    for turn in range(6):  # in the order they were sent; every other rank receives first
        if turn % 2 == rank % 2:
            c.send(mine(rank + turn, dtype, 7), axis, right)
        else:
            out = c.receive(torch.empty(7, dtype=dtype), axis, left)
            good.append(torch.equal(out, mine(left + turn, dtype, 7)))
    c.barrier(axis)
    return good


def every_dtype(world: World) -> list[bool]:
    """Whether each call gives what it should."""
    functions = (reductions, copies, exchanges)
    return [good for of in functions for dtype in DTYPES for good in of(world, dtype)]


@on_worlds
def test_collectives_give_what_one_process_computes(run, ranks):
    """Every collective by name, on every dtype, equals the same worked out from all parts."""
    assert all(all(good) for good in run(ranks, every_dtype))


def one_rank_only(world: World, sender: int) -> Tensor:
    """Rows of width 3 from `sender` to everyone else; the others have no row to send."""
    n, rows = world.size, torch.arange(6.0).view(2, 3)
    x = torch.cat([rows + r for r in range(n)]) if world.rank == sender else torch.empty(0, 3)
    sent = [2] * n if world.rank == sender else [0] * n
    received = [2 if r == sender else 0 for r in range(n)]
    return c.all_to_all(x, world.everyone, received, sent)


@on_worlds
def test_a_rank_with_nothing_to_send_still_receives(run, ranks):
    """The width of a row is known where there are no rows."""
    for rank, out in enumerate(run(ranks, one_rank_only, 1)):
        assert torch.equal(out, torch.arange(6.0).view(2, 3) + rank)


def counted(world: World) -> dict[str, tuple[int, int]]:
    """Elements and bytes that this rank has sent, by collective."""
    here = world.on(Mesh((("dp", world.size),)))
    axis, n = here.axis("dp"), world.size
    x = torch.zeros(4 * n, dtype=torch.float16)
    calls = {
        "all_reduce": lambda: c.all_reduce(x, axis),
        "max": lambda: c.all_reduce(x, axis, "max"),
        "broadcast": lambda: c.broadcast(x, axis, 1),
        "all_gather": lambda: c.all_gather(x, axis),
        "reduce_scatter": lambda: c.reduce_scatter(x, axis),
        "all_to_all": lambda: c.all_to_all(x, axis, [4] * n, [4] * n),
    }
    found = {}
    for name, call in calls.items():
        before = here.ledger.copy()
        call()
        told = sum(here.ledger.since(before).values(), start=Tally())
        found[name] = (told.elements, told.sent_bytes)
    return found


@on_worlds
def test_the_ledger_counts_what_each_rank_hands_on(run, ranks):
    """Elements by rank and collective, as the algorithms of the door send them; bytes are twice."""
    n = ranks
    for rank, found in enumerate(run(ranks, counted)):
        root = rank == 1
        expected = {
            "all_reduce": 8 * (n - 1),
            "max": 8 * (n - 1),
            "broadcast": 4 * n * (n - 1) if root else 0,
            "all_gather": 4 * n * (n - 1),
            "reduce_scatter": 4 * (n - 1),
            "all_to_all": 4 * (n - 1),
        }
        assert found == {name: (count, 2 * count) for name, count in expected.items()}


def test_in_a_world_of_one_every_collective_is_the_identity_and_uncounted():
    """One rank gets back what it gave, and its ledger stays empty."""
    world = alone()
    axis, x = world.everyone, torch.arange(6.0).view(3, 2)
    assert torch.equal(c.all_reduce(x.clone(), axis), x)
    assert torch.equal(c.all_reduce(x.clone(), axis, "max"), x)
    assert torch.equal(c.broadcast(x.clone(), axis), x)
    assert torch.equal(c.reduce_scatter(x, axis), x)
    assert torch.equal(c.all_to_all(x, axis, [3], [3]), x)
    assert [t.tolist() for t in c.all_gather(x, axis)] == [x.tolist()]
    c.barrier(axis)
    with pytest.raises(ValueError, match="no other rank"):
        c.send(x, axis, 1)
    with pytest.raises(ValueError, match="there is none"):
        c.receive(x, axis, 1)
    assert world.ledger.lines == {}


def grid(world: World) -> tuple[list[float], list[float], int, int]:
    here = world.on(Mesh.parse("dp_replicate2 dp_shard2"))
    inner, outer = here.axis("dp_shard"), here.axis("dp_replicate")
    own = torch.tensor([float(world.rank)])
    inside = [t.item() for t in c.all_gather(own, inner)]
    across = [t.item() for t in c.all_gather(own, outer)]
    return inside, across, inner.rank, outer.rank


@pytest.mark.parametrize("run", [run_threads, run_gloo], ids=["threads", "gloo"])
def test_each_axis_of_a_grid_meets_its_own_line(run):
    """Of four ranks in a 2 by 2 grid, the inner axis joins neighbours and the outer one columns."""
    for rank, (inside, across, inner, outer) in enumerate(run(4, grid)):
        first = rank // 2 * 2
        assert inside == [first, first + 1]
        assert across == [rank % 2, rank % 2 + 2]
        assert (inner, outer) == (rank % 2, rank // 2)


def results(axis: Axis, rank: int) -> list[Tensor]:
    """What moves, a broadcast, an all-to-all with counts and messages both ways give."""
    own = torch.Generator().manual_seed(rank)
    x = torch.randint(0, 9, (4, 6), generator=own).double()
    found = [move(x, axis, *pair) for pair in ((P, R), (P, S(1)), (S(0), I), (S(0), S(1)))]
    found.append(broadcast(x.clone(), axis, 1))
    found.append(
        all_to_all(x, axis, [3, 1] if rank == 0 else [1, 3], [3, 1] if rank == 0 else [1, 3])
    )
    out, peer = torch.empty(24).double(), 1 - rank
    pending = [begin_send(x, axis, peer), begin_receive(out, axis, peer)]
    for each in pending:
        each.wait()
    return [*found, out]


def compared(world: World) -> tuple[bool, bool]:
    """Whether results and ledger are those of the transport of gloo."""
    here, there = (world.on(Mesh((("dp", 2),))) for _ in range(2))
    gloo, groups = here.axis("dp"), list[Nccl]()
    for transport in (there.axis("dp").transport, there.axis("dp").behind):
        assert isinstance(transport, Gloo)
        groups.append(Nccl(transport.group))
    library = counted_axis("dp", groups, there.ledger, world.device)
    one, other = results(gloo, world.rank), results(library, world.rank)
    same = all(map(torch.equal, one, other))
    return same, here.ledger.lines == there.ledger.lines


def test_the_librarys_collectives_give_and_count_what_messages_do():
    """Values, calls, elements, bytes and peers, by kind."""
    assert run_gloo(2, compared) == [(True, True)] * 2


def write(ledger: Ledger, kind: str, numel: int, dtype: torch.dtype) -> None:
    """One call on dp that hands a tensor to one peer."""
    ledger.begin("dp", kind).add(torch.empty(0, dtype=dtype), numel)


def test_lines_of_one_key_add_up():
    """Calls, elements and bytes of the same axis, kind and phase are one line."""
    ledger = Ledger()
    write(ledger, "all_reduce", 10, torch.float32)
    write(ledger, "all_reduce", 5, torch.float16)
    assert ledger.lines == {Key("dp", "all_reduce", "start"): Tally(2, 15, 50, 2)}
    assert ledger.sent_bytes() == 50


def test_a_phase_lasts_for_its_block_even_if_it_raises():
    """Inside `phase` lines carry its name; afterwards the name before is back."""
    ledger = Ledger()
    ledger.now = "backward"
    try:
        with ledger.phase("update"):
            write(ledger, "all_gather", 1, torch.int8)
            raise ArithmeticError
    except ArithmeticError:
        write(ledger, "all_gather", 1, torch.int8)
    assert [key.phase for key in ledger.lines] == ["update", "backward"]


def test_since_gives_what_was_written_in_between():
    """Lines that did not change are left out, the others are differences."""
    ledger = Ledger()
    write(ledger, "all_gather", 3, torch.float32)
    write(ledger, "all_reduce", 3, torch.float32)
    before = ledger.copy()
    assert ledger.since(before) == {}
    write(ledger, "all_gather", 2, torch.float32)
    assert ledger.since(before) == {Key("dp", "all_gather", "start"): Tally(1, 2, 8, 1)}


def test_a_ledger_can_be_handed_to_another_process():
    """As what a rank returns from `sw.spawn`."""
    ledger = Ledger()
    write(ledger, "all_reduce", 5, torch.float32)
    again = pickle.loads(pickle.dumps(ledger))  # noqa: S301 (its own bytes)
    write(again, "all_reduce", 5, torch.float32)
    assert again.lines == {Key("dp", "all_reduce", "start"): Tally(2, 10, 40, 2)}
