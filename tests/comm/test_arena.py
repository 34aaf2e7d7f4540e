"""An arena: slots are taken by size, and free when nothing refers to their tensors."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.comm.tiers.arena import Arena
from shardwise.core.arena_slots import ALIGNMENT, arena_bytes, gradient_slots

CPU = torch.device("cpu")


def reserved(**sizes: int) -> Arena:
    arena = Arena()
    arena.reserve({int(size[1:]): count for size, count in sizes.items()}, CPU)
    return arena


def test_tensors_lie_in_the_smallest_slots_that_hold_them():
    """A large slot is left for a large tensor; where none is free there is ordinary memory."""
    arena = reserved(b64=1, b4096=1)
    assert arena.memory is not None and len(arena.memory) == arena_bytes(arena.sizes)
    like = torch.empty(0)
    small, large, third = (arena.empty((n,), like) for n in (16, 1024, 4))
    begin = arena.memory.data_ptr()
    assert small.data_ptr() == begin
    assert large.data_ptr() == begin + ALIGNMENT
    assert [arena.holds(x) for x in (small, large, third)] == [True, True, False]
    assert arena.missed == 1 and not arena.holds(arena.memory)


def test_autograd_keeps_a_slot_taken():
    """A slot is free when the graph that saved its tensor is, not when its name is."""
    arena = reserved(b64=1)
    x = arena.keep(torch.arange(16.0)).requires_grad_()
    y = (x * x).sum()
    leaf = x
    del x
    assert not arena.slots[0].free
    y.backward()
    assert leaf.grad is not None and leaf.grad.equal(2 * torch.arange(16.0))
    del y, leaf
    gc.collect()
    assert arena.slots[0].free


def test_a_tensor_outlives_its_arena():
    """The memory is freed when the last tensor in it is."""
    arena = reserved(b64=2)
    x = arena.keep(torch.ones(16))
    assert arena.memory is not None
    weak = StorageWeakRef(arena.memory.untyped_storage())
    arena.reserve({}, CPU)
    del arena
    assert not weak.expired() and x.sum() == 16
    del x
    assert weak.expired()


@pytest.mark.parametrize(
    ("units", "slots"),
    [
        ([[8]] * 5, {8: 3}),  # one is computed, two are being summed
        ([[64], [8], [8], [8], [64]], {64: 1, 8: 3}),
        ([[8, 4], [8], []], {8: 2, 4: 1}),
        ([], {}),
    ],
)
def test_slots_of_gradients(units: list[list[int]], slots: dict[int, int]):
    """As many as three neighbouring units need at once."""
    assert gradient_slots(units, 2) == slots
