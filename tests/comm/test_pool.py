"""The pool of communication buffers: slots in a ring, pieces, and how much memory a step takes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.meters.communication_bytes import CommunicationBytes
from shardwise.comm.gloo.gloo import Gloo
from shardwise.comm.gloo.pool import Pool, parts
from shardwise.comm.ledger import Ledger
from shardwise.comm.move import begin_sum, start
from shardwise.comm.world import Axis, World
from shardwise.core.layouts.layout import P, R, S
from shardwise.core.mesh import Mesh
from shardwise.core.plan.plan import Plan
from shardwise.core.pool_size import pool_bytes
from shardwise.engine.optimizer.optimizer_spec import SGD
from shardwise.engine.parallelize import parallelize
from shardwise.wrap.pipe import Pipe
from tests.pool import run_gloo

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 9), max_size=4), st.integers(1, 60))
def test_parts_make_up_the_whole(shape: list[int], most: int):
    """Every element is in one part, and no part is larger than what was asked for."""
    seen = torch.zeros(shape, dtype=torch.int64)
    for at in parts(shape, most):
        assert seen[at].numel() <= most
        seen[at] += 1
    assert (seen == 1).all()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 1024), st.booleans()), max_size=40))
def test_no_two_rooms_that_are_kept_overlap(asked: list[tuple[int, bool]]):
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


def test_a_room_larger_than_a_quarter_of_the_pool():
    """It is refused: whoever asks must send pieces."""
    pool = Pool()
    pool.reserve(4096, CPU)
    with pytest.raises(ValueError, match="a slot of 1025 bytes in a pool of 4096"):
        pool.slot(1025, CPU)


def moved(world: World, pool_bytes: int, dtype: torch.dtype, shared: bool) -> list[Any]:
    """Sums and joins of one axis with a pool of that size, and what they sent."""
    n, found = world.size, list[Any]()
    given = world.on(Mesh((("dp", n),))).axis("dp")
    assert isinstance(given.transport, Gloo)
    for size in (pool_bytes, 0):
        pool, ledger = Pool(), Ledger()
        pool.reserve(size, CPU)
        fresh = Gloo(given.transport.group, shared=shared).with_ledger(
            "dp", ledger, world.device, pool
        )
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
    for pieces, whole in run_gloo(ranks, moved, smallest, dtype, shared):
        for a, b in zip(pieces, whole, strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


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
    ("ranks", "plan"),
    [(2, "ddp fp64"), (4, "zero1 fp32"), (2, "zero2 bf16 accumulate:2"), (4, "zero3 bf16")],
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


class Tied(nn.Module):
    """Two layers with one weight, which lie on two ranks: its gradients are summed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


def piped(world: World, width: int) -> tuple[int, int]:
    """The most bytes that communication held in the second step of a pipe, and of the pool."""
    torch.manual_seed(0)
    meter, model = CommunicationBytes(), Tied(width)
    with meter:
        model = Pipe(model, chunks=2, stages=["last"], world=world)
        for _ in range(2):
            meter.peak_bytes = 0
            model(torch.ones(4, width)).sum().backward()
    axis = model.forward.staged.axis
    return meter.peak_bytes, 0 if axis.pool.memory is None else axis.pool.memory.nbytes


def test_a_pipe_has_a_pool_too():
    """Sums of tied weights' gradients take their buffers from it, in pieces."""
    for width in (64, 512):
        for peak, pool in run_gloo(2, piped, width):
            assert pool == pool_bytes(
                Plan.parse("pp2"), Tied(width).first.weight.nbytes + 8 * width
            )
            assert pool <= peak <= pool + 2**12
