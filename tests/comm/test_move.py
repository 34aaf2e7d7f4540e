import gc
import weakref
from itertools import product

import pytest
import torch
from torch import Tensor

from shardwise.comm.move import (
    all_gather_along,
    begin_reduce_scatter,
    begin_sum,
    move,
    reduce_scatter,
    start,
)
from shardwise.comm.world import Axis, World, alone, traced
from shardwise.core.errors import RankError
from shardwise.core.layouts.layout import I, P, Placement, R, S
from shardwise.core.mesh import Mesh
from shardwise.core.moves import price
from tests.pool import run_gloo, run_threads

PLACEMENTS = [R, I, P, S(0), S(1)]
SHAPE = (12, 24)
WORLDS = [(run_threads, 2), (run_threads, 3), (run_gloo, 2), (run_gloo, 4)]
IDS = ["threads2", "threads3", "gloo2", "gloo4"]
on_worlds = pytest.mark.parametrize(("run", "ranks"), WORLDS, ids=IDS)


def is_move(src: Placement, dst: Placement) -> bool:
    try:
        price(src, dst, 1, 2)
    except ValueError:
        return False
    return True


MOVES = [pair for pair in product(PLACEMENTS, PLACEMENTS) if is_move(*pair)]


def part(placement: Placement, axis: Axis, seed: int) -> Tensor:
    """This rank's part of a random tensor of SHAPE in that placement."""
    own = torch.Generator().manual_seed(100 * seed + (axis.rank if placement.kind == "P" else 99))
    whole = torch.randn(SHAPE, generator=own, dtype=torch.float64)
    if placement.dim is None:
        return whole
    return whole.chunk(axis.size, placement.dim)[axis.rank].clone()


def total(x: Tensor, y: Tensor, placement: Placement, axis: Axis) -> float:
    """<x, y> of a value in `placement` and a gradient in its dual, over all ranks."""
    products = [torch.empty((), dtype=torch.float64) for _ in range(axis.size)]
    gathered = torch.empty(axis.size, dtype=torch.float64)
    axis.transport.all_gather(gathered, (x * y).sum().view(1)).wait()
    products = gathered.tolist()
    return products[0] if placement.kind == "I" else sum(products)


def whole_of(x: Tensor, placement: Placement, axis: Axis) -> Tensor:
    """The value that the ranks' parts stand for."""
    parts = torch.empty(axis.size * x.numel(), dtype=x.dtype)
    axis.transport.all_gather(parts, x.contiguous().view(-1)).wait()
    every = list(parts.view(axis.size, *x.shape))
    if placement.kind == "P":
        return torch.stack(every).sum(0)
    return every[axis.rank] if placement.dim is None else torch.cat(every, placement.dim)


def all_moves(world: World) -> list[tuple[str, float, float, bool]]:
    """For each move: its name, <Ax, y>, <x, A*y>, and whether A left the value what it was."""
    axis = world.on(Mesh((("dp", world.size),))).axis("dp")
    found = []
    for src, dst in MOVES:
        x = part(src, axis, 1).requires_grad_()
        out = move(x, axis, src, dst)
        y = part(dst.dual, axis, 2)
        same = torch.allclose(whole_of(out.detach(), dst, axis), whole_of(x.detach(), src, axis))
        (back,) = torch.autograd.grad(out, x, y, allow_unused=True)
        forth, back_ = total(out.detach(), y, dst, axis), total(x.detach(), back, src, axis)
        found.append((f"{src} -> {dst}", forth, back_, same))
    return found


@on_worlds
def test_the_backward_of_every_move_is_its_adjoint(run, ranks):
    """A move keeps the value that the parts stand for, and <Ax, y> = <x, A*y> for its backward."""
    results = run(ranks, all_moves)
    assert len(results[0]) == len(MOVES) == 22
    for rank in results:
        for name, forth, back, same in rank:
            assert forth == pytest.approx(back, rel=1e-12), name
            assert same, name


def lines_of_moves(world: World) -> list[tuple[str, dict, float]]:
    found = []
    for src, dst in MOVES:
        here = world.on(Mesh((("dp", world.size),)))
        axis = here.axis("dp")
        x = part(src, axis, 1).requires_grad_()
        out = move(x, axis, src, dst)
        forth = {key.kind: tally.elements for key, tally in here.ledger.lines.items()}
        expected = price(src, dst, SHAPE[0] * SHAPE[1], world.size)
        before = here.ledger.copy()
        out.backward(part(dst.dual, axis, 2))
        back = {k.kind: t.elements for k, t in here.ledger.since(before).items()}
        adjoint = price(*expected.adjoint, SHAPE[0] * SHAPE[1], world.size)
        found.append((f"{src} -> {dst}", (forth, expected), (back, adjoint)))
    return found


@on_worlds
def test_the_ledger_of_a_move_is_its_price(run, ranks):
    """What each rank writes for a move and for its backward is the table's kind and elements."""
    for rank in run(ranks, lines_of_moves):
        for name, *ways in rank:
            for written, expected in ways:
                said = {expected.what: expected.sent} if expected.sent else {}
                assert written == said, name


def test_on_one_rank_every_move_is_free():
    """With one rank a move returns the tensor it was given and nothing is written."""
    world = alone()
    x = torch.randn(4, 6)
    assert all(move(x, world.axis("dp"), src, dst) is x for src, dst in MOVES)
    assert world.ledger.lines == {}


@pytest.mark.parametrize(("src", "dst"), [(R, P), (I, P), (R, I)], ids=str)
def test_there_is_no_move_that_would_count_a_value_twice(src, dst):
    """R -> P, I -> P and R -> I are refused."""
    axis = traced(0, 2).everyone
    with pytest.raises(ValueError, match="no move"):
        move(torch.zeros(4), axis, src, dst)


def test_start_has_no_all_to_all():
    """Flat tensors have one dim: S(0) -> S(1) is refused before anything is sent."""
    axis = traced(0, 2).everyone
    with pytest.raises(ValueError, match="use move"):
        start(torch.zeros(4), axis, S(0), S(1), torch.zeros(4))
    assert axis.ledger.lines == {}


def second_derivative(world: World) -> None:
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    y = (move(x * x, world.everyone, P, R) ** 2).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    first.sum().backward()


def test_a_second_derivative_is_refused():
    """Backward through a move's backward raises instead of being wrong."""
    with pytest.raises(RankError, match="once_differentiable"):
        run_threads(2, second_derivative)


def derivative(world: World) -> list[bool]:
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    found: list[bool] = []
    for in_turn in (False, True):
        (grad,) = torch.autograd.grad(
            move(x * x, world.everyone, P, I).sum(), x, create_graph=in_turn
        )
        found += [grad.tolist() == [2.0, 2.0], grad.requires_grad == in_turn]
    return found


def test_a_first_derivative_is_the_same_whether_it_is_to_be_differentiated_or_not():
    """Only what is asked to be differentiable in turn is marked as such."""
    assert run_threads(2, derivative) == [[True] * 4] * 2


def in_place(world: World) -> list[bool]:
    """Flat moves in place, of few elements and of many."""
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
    return [good for d in dtypes for numel in (1, 1000) for good in moved_in_place(world, numel, d)]


def moved_in_place(world: World, numel: int, dtype: torch.dtype) -> list[bool]:
    """start() with `out` a block of `x` and `x` a block of `out`; both queues; ended in order."""
    axis, n, good = world.everyone, world.size, []
    ranks = [torch.arange(n * numel).remainder(5).add(r).to(dtype) for r in range(n)]
    summed = torch.stack(ranks).double().sum(0)
    for behind in (False, True):
        x = ranks[world.rank].clone()
        block = x.view(n, -1)[world.rank]
        start(x, axis, P, S(0), block, behind).wait()
        good.append(torch.equal(block.double(), summed.view(n, -1)[world.rank]))
        pending = start(block, axis, S(0), R, x, behind)
        pending.wait()
        pending.wait()  # a second time is nothing
        good.append(torch.equal(x.double(), summed))
        y = ranks[world.rank].clone()
        start(y, axis, P, R, y, behind).wait()
        good.append(torch.equal(y.double(), summed))
    return good


@on_worlds
def test_flat_moves_work_in_place(run, ranks):
    """A block may be reduced into the whole it is part of, and gathered back into it."""
    assert all(all(good) for good in run(ranks, in_place))


def large_beside_small(world: World) -> list[bool]:
    """Several moves under way at once, large and small all-reduces among them, ended in order."""
    axis, n = world.everyone, world.size
    sizes = [16 * n, 2**19 * n, 16 * n + 1, 24 * n]
    xs = [torch.full((size,), float(world.rank + 1)) for size in sizes]
    waits = [start(x, axis, P, R, x, behind=k % 2 == 0) for k, x in enumerate(xs)]
    block = torch.full((8,), float(world.rank))
    out = torch.empty(8 * n)
    waits.append(start(block, axis, S(0), R, out))
    for wait in waits:
        wait.wait()
    expected = n * (n + 1) / 2
    ranks = torch.arange(n).repeat_interleave(8)
    return [*(bool((x == expected).all()) for x in xs), torch.equal(out, ranks.float())]


@on_worlds
def test_moves_under_way_at_once_do_not_mix(run, ranks):
    """Large all-reduces (one call), small ones (two halves), odd ones and a gather, all pending."""
    assert all(all(good) for good in run(ranks, large_beside_small))


def along(world: World, numel: int, dtype: torch.dtype) -> list[bool]:
    """Along the middle dim of a view: two sums ended the other way, gathers while they are on
    their way and after, and a sum at once.
    """
    axis, n, good = world.everyone, world.size, list[bool]()
    draw = torch.Generator().manual_seed(0)
    wholes = [torch.randn(n, 3, 2 * n, numel, generator=draw).to(dtype) for _ in range(2)]
    mine = [whole[world.rank].transpose(0, 1).transpose(0, 1) for whole in wholes]
    parts = [x.transpose(0, 2).chunk(n, 1)[world.rank] for x in (whole[0] for whole in wholes)]
    sums = [begin_reduce_scatter(x, axis, 1) for x in mine]
    gathered = [all_gather_along(x, axis, 1) for x in parts]
    for k in (1, 0):
        total = wholes[k].double().sum(0)
        expected = total.chunk(n, 1)[world.rank].to(dtype)
        for block in (sums[k].wait(), reduce_scatter(mine[k], axis, 1)):
            good.append(block.is_contiguous() and torch.allclose(block, expected, 1e-2, 1e-2))
        for whole in (gathered[k], all_gather_along(parts[k], axis, 1)):
            good.append(whole.is_contiguous() and torch.equal(whole, wholes[k][0].transpose(0, 2)))
    return good


@on_worlds
@pytest.mark.parametrize("elements", [4, 400_000], ids=["small", "by gloo"])
def test_blocks_along_a_dim_arrive_in_any_order(run, ranks, elements):
    """Of any strides, several under way, small or too large for shared memory; 16 bits too."""
    for dtype in (torch.float32, torch.bfloat16):
        assert all(all(good) for good in run(ranks, along, elements // ranks, dtype))


def rounded(world: World) -> list[float]:
    """256, 1 and 1 in bf16, where 256 + 1 is 256; in new memory, and in place."""
    axis = world.everyone
    x = torch.full((world.size, 4), 1.0 if world.rank else 256.0, dtype=torch.bfloat16)
    block = begin_reduce_scatter(x, axis, 0).wait()
    out = torch.empty(4, dtype=torch.bfloat16)
    start(x.view(-1), axis, P, S(0), out).wait()
    return [*block.view(-1).tolist(), *out.tolist()]


def test_many_terms_of_16_bits_are_rounded_once():
    """Their sum is taken in fp32."""
    assert run_gloo(3, rounded) == [[258.0] * 8] * 3


def kept_alive(world: World, numel: int) -> list[bool]:
    """Whether anything of an exchange lives once it is over, with no collector to end it."""
    axis, n = world.everyone, world.size
    gc.disable()
    try:
        x, out = torch.ones(n, numel), torch.empty(numel)
        known = [weakref.ref(x)]
        start(x.view(-1), axis, P, S(0), out).wait()
        y = begin_reduce_scatter(x, axis, 0).wait()
        known.append(weakref.ref(y))
        z = all_gather_along(y, axis, 0)
        known.append(weakref.ref(z))
        del x, y, z
        return [ref() is None for ref in known]
    finally:
        gc.enable()


def summed(world: World, numel: int) -> tuple[bool, int]:
    """Whether doubles are summed exactly, and how many elements a rank received for it."""
    axis = world.on(Mesh((("dp", world.size),))).axis("dp")
    own = (torch.arange(numel, dtype=torch.float64) + world.rank).view(-1, 5)
    before, n = own.clone(), world.size
    total = begin_sum(own, axis).wait()
    exact = torch.equal(total, n * before + n * (n - 1) / 2 - n * world.rank)
    sent = sum(tally.elements for tally in axis.ledger.lines.values())
    return exact and torch.equal(own, before), sent


@on_worlds
def test_many_numbers_are_summed_by_an_all_reduce(run, ranks):
    """A few are gathered from all ranks; of many, a rank sends and receives less than twice."""
    few, many = 10, 6000
    assert run(ranks, summed, few) == [(True, few * (ranks - 1))] * ranks
    assert run(ranks, summed, many) == [(True, 2 * many * (ranks - 1) // ranks)] * ranks


@pytest.mark.parametrize("numel", [16, 2**21], ids=["small", "by gloo"])
def test_nothing_lives_longer_than_its_exchange(numel):
    """No cycle holds what was sent or what came."""
    assert run_gloo(2, kept_alive, numel) == [[True] * 3] * 2


def test_a_sum_of_blocks_needs_a_dim_that_divides():
    """What to pad it to is said."""

    def uneven(world: World) -> None:
        begin_reduce_scatter(torch.ones(3, 5), world.everyone, 1)

    with pytest.raises(RankError, match="pad the dim to 6"):
        run_threads(2, uneven)


def empty(world: World) -> tuple[int, int]:
    axis = world.everyone
    nothing = torch.empty(0)
    out = move(nothing, axis, P, R)
    rows = move(torch.empty(0, 4), axis, S(0), R)
    return out.numel(), rows.numel()


@pytest.mark.parametrize(("run", "ranks"), [(run_threads, 2), (run_gloo, 2)], ids=["t", "gloo"])
def test_tensors_without_elements_move(run, ranks):
    """Nothing to send is normal input."""
    assert run(ranks, empty) == [(0, 0)] * ranks
