"""The pool of communication buffers: one tensor in which every message gets a slot.

    | slot 4 |     free     | slot 2 | slot 3 |      a ring: slots are taken in order
                              oldest   newest before 4 wrapped around

A slot belongs to one piece of a collective, from the first send until the result is written.  If a
new slot does not fit, the rank waits for the oldest pieces.  All ranks begin their collectives in
the same order, so the oldest piece never waits for a younger one.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise.core.buffer_sizes import PIECE_BYTES, slot_bytes

#: The index of a piece in its tensor.
At = tuple[slice, ...]


class Slot:
    """A part of the pool, bytes `begin` to `stop`; it allocates tensors one after another."""

    def __init__(self, memory: Tensor, begin: int, stop: int) -> None:
        self.memory, self.begin, self.stop = memory, begin, stop
        self.used = begin
        self.finish: Callable[[], Any] | None = None
        self.made: Any = None

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        nbytes = prod(shape) * dtype.itemsize
        begin, self.used = self.used, self.used + aligned(nbytes)
        return self.memory[begin : begin + nbytes].view(dtype).view(shape)

    def until(self, finish: Callable[[], Any]) -> Callable[[], Any]:
        """Keep the slot until `finish` has run once: by the returned function, or by the pool."""
        self.finish = finish
        return self.take

    def take(self) -> Any:
        self.end()
        made, self.made = self.made, None
        return made

    def end(self) -> None:
        finish, self.finish = self.finish, None
        if finish is not None:
            self.made = finish()


class Pool:
    """The communication buffers of one rank of a world; without `reserve`, slots are new memory."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.slots: deque[Slot] = deque()
        self.head = 0

    def reserve(self, size_bytes: int, device: torch.device) -> None:
        if size_bytes:
            self.memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)

    @property
    def most_bytes(self) -> int:
        return 2**62 if self.memory is None else slot_bytes(len(self.memory))

    def slot(self, nbytes: int, device: torch.device) -> Slot:
        """A slot, once older ones that overlap it have finished. ValueError if too large."""
        if self.memory is None or self.memory.device != device:
            return Slot(torch.empty(nbytes, dtype=torch.uint8, device=device), 0, nbytes)
        if nbytes > self.most_bytes:
            raise ValueError(f"a slot of {nbytes} bytes in a pool of {len(self.memory)}")
        begin = self.head if self.head + nbytes <= len(self.memory) else 0
        slot = Slot(self.memory, begin, begin + aligned(nbytes))
        while any(each.begin < slot.stop and slot.begin < each.stop for each in self.slots):
            self.slots.popleft().end()
        self._append(slot)
        self.head = slot.stop
        return slot

    def in_turn(self, finish: Callable[[], Any]) -> Callable[[], Any]:
        """Run `finish` before that of any later slot: for a message that needs no slot."""
        if self.memory is None:
            return finish
        slot = Slot(self.memory, self.head, self.head)
        self._append(slot)
        return slot.until(finish)

    def catch_up(self) -> None:
        """Finish all slots, before a wait for a message that would overtake them in a mailbox."""
        while self.slots:
            self.slots.popleft().end()

    def _append(self, slot: Slot) -> None:
        while self.slots and self.slots[0].finish is None:
            self.slots.popleft()
        self.slots.append(slot)


def aligned(nbytes: int) -> int:
    return nbytes + -nbytes % PIECE_BYTES


def parts(shape: Sequence[int], most: int) -> Iterator[At]:
    """The indices of parts of at most `most` elements that together cover a tensor of `shape`."""
    if not prod(shape):
        return
    dim = max(range(len(shape)), key=lambda d: shape[d], default=0)
    if prod(shape) <= most or not shape:
        yield tuple(slice(None) for _ in shape)
        return
    step = max(1, most * shape[dim] // prod(shape))
    for low in range(0, shape[dim], step):
        high = min(low + step, shape[dim])
        rest = [high - low if d == dim else n for d, n in enumerate(shape)]
        for at in parts(rest, most):
            inner = at[dim]
            first, last = inner.start or 0, high - low if inner.stop is None else inner.stop
            yield (*at[:dim], slice(low + first, low + last), *at[dim + 1 :])
