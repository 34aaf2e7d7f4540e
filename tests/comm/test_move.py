"""Moves and collectives on threads and on gloo processes: values, backward, and the ledger."""

import gc
import weakref
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.comm import move as c
from shardwise.comm.move import (
    all_gather_along,
    begin_reduce_scatter,
    begin_sum,
    move,
    reduce_scatter,
    start,
)
from shardwise.comm.world import Axis, World, alone, traced
from shardwise.core.layouts.layout import I, P, Placement, R, S, price
from shardwise.core.mesh import Mesh
from shardwise.core.tally import Key, Tally
from tests.pool import run_gloo, run_threads

PLACEMENTS = [R, I, P, S(0), S(1)]
MOVES = [pair for pair in product(PLACEMENTS, PLACEMENTS) if pair not in ((R, P), (I, P), (R, I))]
SHAPE = (12, 24)
NUMEL = SHAPE[0] * SHAPE[1]
WORLDS = [(run_threads, 2), (run_threads, 3), (run_gloo, 2), (run_gloo, 4)]
IDS = ["threads2", "threads3", "gloo2", "gloo4"]
on_worlds = pytest.mark.parametrize(("run", "ranks"), WORLDS, ids=IDS)


def all_ranks(world: World, name: str = "dp") -> Axis:
    """An axis of all ranks with a ledger of its own."""
    return world.on(Mesh(((name, world.size),))).axis(name)


# --- moves between placements ---------------------------------------------------------------------


def part(placement: Placement, axis: Axis, seed: int) -> Tensor:
    """This rank's part of a random tensor of SHAPE in that placement."""
    own = torch.Generator().manual_seed(100 * seed + (axis.rank if placement.kind == "P" else 99))
    whole = torch.randn(SHAPE, generator=own, dtype=torch.float64)
    if placement.dim is None:
        return whole
    return whole.chunk(axis.size, placement.dim)[axis.rank].clone()


def whole_of(x: Tensor, placement: Placement, axis: Axis) -> Tensor:
    """The value that the ranks' parts stand for."""
    parts = torch.empty(axis.size * x.numel(), dtype=x.dtype)
    axis.transport.all_gather(parts, x.contiguous().view(-1)).wait()
    every = list(parts.view(axis.size, *x.shape))
    if placement.kind == "P":
        return torch.stack(every).sum(0)
    return every[axis.rank] if placement.dim is None else torch.cat(every, placement.dim)


def total(x: Tensor, y: Tensor, placement: Placement, axis: Axis) -> float:
    """<x, y> of a value in `placement` and a gradient in its dual, over all ranks."""
    sums = whole_of((x * y).sum().view(1), S(0), axis)
    return float(sums[0] if placement.kind == "I" else sums.sum())


def sent(tallies: dict[Key, Tally]) -> dict[str, int]:
    return {key.kind: tally.elements for key, tally in tallies.items()}


def priced(src: Placement, dst: Placement, ranks: int) -> dict[str, float]:
    expected = price(src, dst, NUMEL, ranks)
    return {expected.what: expected.sent} if expected.sent else {}


def all_moves(world: World) -> list[str]:
    """Moves that change the value, or whose backward or price is not what it should be."""
    wrong = []
    for src, dst in MOVES:
        axis = all_ranks(world)
        x, y = part(src, axis, 1).requires_grad_(), part(dst.dual, axis, 2)
        out = move(x, axis, src, dst)
        before = axis.ledger.lines
        (back,) = torch.autograd.grad(out, x, y, allow_unused=True)
        counts = sent(before), sent(axis.ledger.since(before))
        prices = priced(src, dst, world.size), priced(dst.dual, src.dual, world.size)
        out, x = out.detach(), x.detach()
        same = torch.allclose(whole_of(out, dst, axis), whole_of(x, src, axis))
        forth = total(out, y, dst, axis)
        adjoint = forth == pytest.approx(total(x, back, src, axis), rel=1e-12)
        if not (same and adjoint and counts == prices):
            wrong.append(f"{src} -> {dst}: {same}, {adjoint}, {counts}, {prices}")
    return wrong


@on_worlds
def test_every_move(run: Any, ranks: int):
    """It keeps the value; <Ax, y> = <x, A*y> for its backward; the ledger is the price of both."""
    assert run(ranks, all_moves) == [[]] * ranks


def test_what_does_not_move():
    """No move counts a value twice; flat tensors have one dim; on one rank every move is free."""
    axis, world, x = traced(0, 2).everyone, alone(), torch.randn(4, 6)
    for pair in ((R, P), (I, P), (R, I)):
        for ask in (partial(move, torch.zeros(4), axis), lambda *of: price(*of, 4, 1)):
            with pytest.raises(ValueError, match="no move"):
                ask(*pair)
    with pytest.raises(ValueError, match="use move"):
        start(torch.zeros(4), axis, S(0), S(1), torch.zeros(4))
    assert axis.ledger.lines == {}
    assert all(move(x, world.axis("dp"), src, dst) is x for src, dst in MOVES)
    assert c.all_to_all(x, world.axis("ep"), [4], [4]) is x and world.ledger.lines == {}
    for call in (c.send, c.receive):
        with pytest.raises(ValueError, match=r"no other rank|there is none"):
            call(x, world.everyone, 1)


def derivatives(world: World) -> list[bool]:
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    found: list[bool] = []
    for in_turn in (False, True):
        out = move(x * x, world.everyone, P, I).sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=in_turn)
        found += [grad.tolist() == [2.0, 2.0], grad.requires_grad == in_turn]
    y = (move(x * x, world.everyone, P, R) ** 2).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    return found


def test_derivatives():
    """The first is the same whether it is to be differentiated or not; a second one is refused."""
    assert run_threads(2, derivatives) == [[True] * 4] * 2


# --- moves of flat tensors ------------------------------------------------------------------------


def in_place(world: World) -> list[bool]:
    """start() with `out` a block of `x` and `x` a block of `out`; both queues; ended in order."""
    axis, n, good = world.everyone, world.size, list[bool]()
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
    for dtype, numel, behind in product(dtypes, (1, 1000), (False, True)):
        ranks = [torch.arange(n * numel).remainder(5).add(r).to(dtype) for r in range(n)]
        summed = torch.stack(ranks).double().sum(0)
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


def at_once(world: World) -> list[bool]:
    """Several moves under way, large all-reduces beside small ones, a gather, and empty tensors."""
    axis, n = world.everyone, world.size
    sizes = [16 * n, 2**19 * n, 16 * n + 1, 24 * n]
    xs = [torch.full((size,), float(world.rank + 1)) for size in sizes]
    waits = [start(x, axis, P, R, x, behind=k % 2 == 0) for k, x in enumerate(xs)]
    block = torch.full((8,), float(world.rank))
    out = torch.empty(8 * n)
    waits.append(start(block, axis, S(0), R, out))
    for wait in waits:
        wait.wait()
    good = [bool((x == n * (n + 1) / 2).all()) for x in xs]
    good.append(torch.equal(out, torch.arange(n).repeat_interleave(8).float()))
    good.append(move(torch.empty(0), axis, P, R).numel() == 0)
    good.append(move(torch.empty(0, 4), axis, S(0), R).numel() == 0)
    return good


@on_worlds
def test_flat_moves(run: Any, ranks: int):
    """In place, of few elements and many; under way at once they do not mix; without elements."""
    for body in (in_place, at_once):
        assert all(all(good) for good in run(ranks, body))


def along(world: World, numel: int, dtype: torch.dtype) -> list[bool]:
    """Along the middle dim of a view: sums ended in reverse, gathers meanwhile, a sum at once."""
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
def test_blocks_along_a_dim_arrive_in_any_order(run: Any, ranks: int, elements: int):
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


@pytest.mark.parametrize("numel", [16, 2**21], ids=["small", "by gloo"])
def test_nothing_lives_longer_than_its_exchange(numel: int):
    """No cycle holds what was sent or what came."""
    assert run_gloo(2, kept_alive, numel) == [[True] * 3] * 2


def summed(world: World, numel: int) -> tuple[bool, int]:
    """Whether doubles are summed exactly, and how many elements a rank received for it."""
    axis = all_ranks(world)
    own = (torch.arange(numel, dtype=torch.float64) + world.rank).view(-1, 5)
    before, n = own.clone(), world.size
    total = begin_sum(own, axis).wait()
    exact = torch.equal(total, n * before + n * (n - 1) / 2 - n * world.rank)
    return exact and torch.equal(own, before), sum(sent(axis.ledger.lines).values())


@on_worlds
def test_many_numbers_are_summed_by_an_all_reduce(run: Any, ranks: int):
    """A few are gathered from all ranks; of many, a rank sends and receives less than twice."""
    few, many = 10, 6000
    assert run(ranks, summed, few) == [(True, few * (ranks - 1))] * ranks
    assert run(ranks, summed, many) == [(True, 2 * many * (ranks - 1) // ranks)] * ranks


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


def mine(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Small whole numbers, other ones on each rank: sums are exact in every dtype."""
    own = torch.Generator().manual_seed(rank)
    return torch.randint(0, 8, shape, generator=own).to(dtype)


def by_name(world: World, dtype: torch.dtype) -> list[bool]:
    """Reductions, copies, and messages in a ring, of which every other rank receives first."""
    axis, n, rank = all_ranks(world), world.size, world.rank
    every = [mine(r, dtype, 3, 2 * n) for r in range(n)]
    x, good = every[rank].clone(), list[bool]()
    total = torch.stack(every).sum(0).to(dtype)
    largest, least = torch.stack(every).amax(0), torch.stack(every).amin(0)
    for op, expected in (("sum", total), ("max", largest), ("min", least)):
        out = x.clone()
        good += [c.all_reduce(out, axis, op) is out, torch.equal(out, expected)]
    good.append(torch.equal(c.reduce_scatter(torch.cat([x] * n), axis), total))
    good.append(torch.equal(c.reduce_scatter(x, axis, dim=1), total.chunk(n, 1)[rank]))
    good.append(all(map(torch.equal, c.all_gather(x.t(), axis), [a.t() for a in every])))
    for root in range(n):
        out = x.clone()
        good += [c.broadcast(out, axis, root) is out, torch.equal(out, every[root])]
    good.append(sent(axis.ledger.lines)["broadcast"] == x.nbytes * (n - 1))
    right, left = (rank + 1) % n, (rank - 1) % n
    for turn in range(6):
        if turn % 2 == rank % 2:
            c.send(mine(rank + turn // 2, dtype, 7), axis, right)
        else:
            out = c.receive(torch.empty(7, dtype=dtype), axis, left)
            good.append(torch.equal(out, mine(left + turn // 2, dtype, 7)))
    c.barrier(axis)
    return good


@on_worlds
def test_collectives_by_name(run: Any, ranks: int):
    """On every dtype they give what one process computes; a broadcast counts on its root alone."""
    for dtype in DTYPES:
        assert all(all(good) for good in run(ranks, by_name, dtype))


def counts(table: str, ranks: int) -> list[list[int]]:
    """How many rows rank r (line) sends to each rank: some pairs none; rank 1 alone; nobody any."""
    if table == "mixed":
        return [[(r + 2 * to) % 3 for to in range(ranks)] for r in range(ranks)]
    return [[2 * (r == 1 and table == "one")] * ranks for r in range(ranks)]


def rows(table: list[list[int]], width: int) -> list[Tensor]:
    sums = [sum(line) for line in table]
    every = torch.arange(sum(sums) * width, dtype=torch.float64).view(-1, width)
    return list(every.split(sums))


def received(xs: list[Tensor], table: list[list[int]], rank: int) -> Tensor:
    """What one process gives: the blocks for `rank`, in the order of the senders."""
    return torch.cat([x.split(line)[rank] for x, line in zip(xs, table, strict=True)])


def exchanged(world: World, name: str, width: int) -> tuple[bool, bool, bool]:
    """Values, gradients and bytes of an exchange against one process."""
    axis, rank, table = all_ranks(world, "ep"), world.rank, counts(name, world.size)
    back = [list(line) for line in zip(*table, strict=True)]
    xs, ys = rows(table, width), rows(back, width)
    x = xs[rank].clone().requires_grad_()
    out = c.all_to_all(x, axis, back[rank], table[rank])
    with axis.ledger.phase("backward"):
        out.backward(ys[rank])
    assert x.grad is not None
    tallies = {}
    for phase, matrix in (("start", table), ("backward", back)):
        away = [n for to, n in enumerate(matrix[rank]) if to != rank]
        numel, peers = sum(away) * width, sum(n > 0 for n in away)
        tallies[Key("ep", "all_to_all", phase)] = Tally(1, numel, 8 * numel, peers)
    forth = torch.equal(out.detach(), received(xs, table, rank))
    grads = torch.equal(x.grad, received(ys, back, rank))
    return forth, grads, axis.ledger.lines == tallies


@on_worlds
@pytest.mark.parametrize("width", [3, 400_000], ids=["small", "by gloo"])
def test_rows_go_where_one_process_puts_them(run: Any, ranks: int, width: int):
    """Values and gradients equal a permutation in one process; the bytes are those that leave."""
    for table in ("mixed", "one", "none"):
        assert run(ranks, exchanged, table, width) == [(True, True, True)] * ranks
