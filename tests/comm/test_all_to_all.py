"""All-to-all with counts: values, backward, bytes, and counts that do not agree."""

import pytest
import torch
from torch import Tensor

from shardwise.comm.ledger import Key, Tally
from shardwise.comm.move import all_gather, all_reduce, all_to_all
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError, RankError
from shardwise.core.mesh import Mesh
from tests.pool import run_gloo, run_threads

WORLDS = [(run_threads, 2), (run_threads, 3), (run_gloo, 2), (run_gloo, 4)]
IDS = ["threads2", "threads3", "gloo2", "gloo4"]
on_worlds = pytest.mark.parametrize(("run", "ranks"), WORLDS, ids=IDS)
on_widths = pytest.mark.parametrize("width", [3, 400_000], ids=["small", "by gloo"])

F64 = torch.float64


def counts(table: str, ranks: int) -> list[list[int]]:
    """How many rows rank r (line) sends to each rank: some pairs none; rank 1 alone; nobody any."""
    if table == "mixed":
        return [[(r + 2 * to) % 3 for to in range(ranks)] for r in range(ranks)]
    return [[2 * (r == 1 and table == "one")] * ranks for r in range(ranks)]


def rows(table: list[list[int]], width: int) -> list[Tensor]:
    """Each rank's rows: all rows of all ranks have different values."""
    sums = [sum(line) for line in table]
    every = torch.arange(sum(sums) * width, dtype=F64).view(-1, width)
    return list(every.split(sums))


def received(xs: list[Tensor], table: list[list[int]], rank: int) -> Tensor:
    """What one process gives: the blocks for `rank`, in the order of the senders."""
    return torch.cat([x.split(line)[rank] for x, line in zip(xs, table, strict=True)])


def transposed(table: list[list[int]]) -> list[list[int]]:
    return [list(line) for line in zip(*table, strict=True)]


def exchanged(world: World, name: str, width: int) -> tuple[bool, bool, dict[Key, Tally]]:
    """Forward and backward against one process, and the ledger of both."""
    here = world.on(Mesh((("ep", world.size),)))
    axis, rank, table = here.axis("ep"), world.rank, counts(name, world.size)
    back = transposed(table)
    xs, ys = rows(table, width), rows(back, width)
    x = xs[rank].clone().requires_grad_()
    out = all_to_all(x, axis, back[rank], table[rank])
    with here.ledger.phase("backward"):
        out.backward(ys[rank])
    assert x.grad is not None
    forth = torch.equal(out.detach(), received(xs, table, rank))
    return forth, torch.equal(x.grad, received(ys, back, rank)), here.ledger.lines


@on_worlds
@on_widths
def test_rows_go_where_one_process_puts_them_and_gradients_go_back(run, ranks, width):
    """Values and gradients equal a permutation in one process; the bytes are those that leave."""
    for table in ("mixed", "one", "none"):
        for rank, (forth, back, lines) in enumerate(run(ranks, exchanged, table, width)):
            assert forth and back
            assert_sent(rank, counts(table, ranks), width, lines)


def assert_sent(rank: int, sent: list[list[int]], width: int, lines: dict[Key, Tally]) -> None:
    """A rank has sent the rows that leave it, forth and back."""
    for phase, matrix in (("start", sent), ("backward", transposed(sent))):
        away = [n for to, n in enumerate(matrix[rank]) if to != rank]
        numel = sum(away) * width
        peers = sum(n > 0 for n in away)
        assert lines[Key("ep", "all_to_all", phase)] == Tally(1, numel, 8 * numel, peers)


def adjoint(world: World) -> tuple[float, float]:
    """<Ax, y> and <x, A*y> over all ranks, of random x and y."""
    axis, rank, table = world.everyone, world.rank, counts("mixed", world.size)
    own = torch.Generator().manual_seed(rank)
    x = torch.randn(sum(table[rank]), 4, generator=own, dtype=F64, requires_grad=True)
    out = all_to_all(x, axis, transposed(table)[rank], table[rank])
    y = torch.randn(out.shape, generator=own, dtype=F64)
    (grad,) = torch.autograd.grad(out, x, y)
    return (out * y).sum().item(), (x * grad).sum().item()


@on_worlds
def test_the_backward_is_the_adjoint(run, ranks):
    """Summed over the ranks, <Ax, y> = <x, A*y>."""
    forth, back = map(sum, zip(*run(ranks, adjoint), strict=True))
    assert forth == pytest.approx(back, rel=1e-12)


def counts_of_counts(world: World) -> list[int]:
    axis, n = world.everyone, world.size
    mine = torch.tensor(counts("mixed", n)[world.rank])
    return all_to_all(mine, axis, [1] * n, [1] * n).tolist()


@on_worlds
def test_ranks_learn_what_they_will_receive(run, ranks):
    """The line that the docstring gives: the counts themselves are exchanged first."""
    assert run(ranks, counts_of_counts) == transposed(counts("mixed", ranks))


def test_on_one_rank_nothing_moves():
    """The tensor itself comes back, with its graph, and nothing is counted."""
    world = alone()
    x = torch.ones(3, 2, requires_grad=True)
    assert all_to_all(x, world.axis("ep"), [3], [3]) is x
    assert world.ledger.lines == {}


WRONG = {
    "too few counts": ([2], [2, 2]),
    "not the rows of x": ([2, 2], [2, 1]),
    "two counts for the rank itself": ([1, 2], [2, 2]),
    "a count below zero": ([2, -1], [2, 2]),
}


@pytest.mark.parametrize("case", WRONG)
def test_counts_that_cannot_be_are_refused(case):
    """Before anything is sent, with the line that makes them."""

    def call(world: World) -> None:
        out_counts, in_counts = WRONG[case]
        if world.rank == 0:
            all_to_all(torch.zeros(4, 2), world.everyone, out_counts, in_counts)

    with pytest.raises(RankError, match="all_to_all of 4 rows on rank 0 of 2") as caught:
        run_threads(2, call)
    assert isinstance(caught.value.__cause__, InputError)


def disagree(world: World, sent: int, expected: int) -> None:
    """Rank 0 sends so many rows to rank 1, which expects another number."""
    axis = world.on(Mesh((("ep", 2),))).axis("ep")
    if world.rank == 0:
        all_to_all(torch.zeros(sent, 2), axis, [0, 0], [0, sent])
    else:
        all_to_all(torch.zeros(0, 2), axis, [expected, 0], [0, 0])


def said(world: World, sent: int, expected: int) -> str:
    try:
        disagree(world, sent, expected)
    except RuntimeError as error:
        return str(error)
    return ""


disagreements = pytest.mark.parametrize(("sent", "expected"), [(2, 3), (3, 2), (0, 1), (1, 0)])


@disagreements
def test_counts_that_disagree_are_an_error_on_threads(sent: int, expected: int):
    """A block of another size, one that nobody expects, and one that nobody sends."""
    with pytest.raises(RankError, match=rf"rank 1 expects \[{2 * expected}, 0\] elements"):
        run_threads(2, disagree, sent, expected)


@disagreements
def test_counts_that_disagree_are_an_error_on_processes_and_no_hang(sent: int, expected: int):
    """Where ranks share memory the message's size is noticed, none at all included."""
    sender, receiver = run_gloo(2, said, sent, expected)
    assert sender == ""
    assert f"{8 * sent} bytes instead of {8 * expected}" in receiver
    assert "the counts of an all_to_all must agree" in receiver
    assert "from rank 0: that rank sent it in all_to_all" in receiver
    assert "all_to_all on axis ep, called by disagree (test_all_to_all.py:" in receiver


def call_other(world: World) -> str:
    """The error of each rank where one reduces 88 bytes and the other gathers 8."""
    axis = world.on(Mesh((("ep", 2),))).axis("ep")
    try:
        if world.rank == 0:
            all_reduce(torch.zeros(11, dtype=torch.float64), axis)
        all_gather(torch.zeros(1, dtype=torch.float64), axis)
        axis.transport.barrier()
    except RuntimeError as error:
        return str(error)
    return ""


def test_calls_that_disagree_are_an_error_on_both_sides():
    """Each names the other rank, both kinds of call and the line of its own."""
    found = run_gloo(2, call_other)
    for rank, text in enumerate(found):
        assert f"rank {1 - rank}" in text and "called by call_other (test_all_to_all.py:" in text
        assert "all_reduce" in text and "all_gather" in text
