"""The pool of communication buffers: one piece of memory, from which every message gets its room.

    | room 4 |     free     | room 2 | room 3 |      a ring: rooms are taken in order
                              oldest   newest before 4 wrapped around

A room belongs to one piece of a collective, from its first byte on the way until its result is
written. Where a new room does not fit, the oldest pieces are waited for: the ranks begin their
collectives in the same order, so a rank that waits for the oldest never waits for one that the
others begin later. `core/pool_size.py` has the sizes.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise.core.pool_size import PIECE_BYTES, room_bytes

#: The part of a tensor that is a piece: an index.
At = tuple[slice, ...]


class Room:
    """A part of the pool: bytes `begin` to `stop`; tensors are cut from it one after another."""

    def __init__(self, memory: Tensor, begin: int, stop: int) -> None:
        self.memory, self.begin, self.stop = memory, begin, stop
        self.used = begin
        self.finish: Callable[[], Any] | None = None
        self.made: Any = None

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor in the room, its values undefined."""
        nbytes = prod(shape) * dtype.itemsize
        begin, self.used = self.used, self.used + aligned(nbytes)
        return self.memory[begin : begin + nbytes].view(dtype).view(shape)

    def until(self, finish: Callable[[], Any]) -> Callable[[], Any]:
        """Keep the room until `finish` has run; the result runs it, unless the pool has, once."""
        self.finish = finish
        return self.take

    def take(self) -> Any:
        """What `finish` gave; a second call returns None."""
        self.end()
        made, self.made = self.made, None
        return made

    def end(self) -> None:
        """Run `finish` if nobody has."""
        finish, self.finish = self.finish, None
        if finish is not None:
            self.made = finish()


class Pool:
    """The communication buffers of one rank of a world: nothing until `reserve`.

    Without a size, rooms are new memory each time: for collectives outside of any plan.
    """

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.rooms: deque[Room] = deque()
        self.head = 0

    def reserve(self, size_bytes: int, device: torch.device) -> None:
        """Take the memory; before the first message."""
        if size_bytes:
            self.memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)

    @property
    def most_bytes(self) -> int:
        """The largest room there is."""
        return 2**62 if self.memory is None else room_bytes(len(self.memory))

    def room(self, nbytes: int, device: torch.device) -> Room:
        """A room of so many bytes, when the oldest are over that are in its way.

        Raises:
            ValueError: more than `most_bytes`.
        """
        if self.memory is None or self.memory.device != device:
            return Room(torch.empty(nbytes, dtype=torch.uint8, device=device), 0, nbytes)
        if nbytes > self.most_bytes:
            raise ValueError(f"a room of {nbytes} bytes in a pool of {len(self.memory)}")
        begin = self.head if self.head + nbytes <= len(self.memory) else 0
        room = Room(self.memory, begin, begin + aligned(nbytes))
        while any(each.begin < room.stop and room.begin < each.stop for each in self.rooms):
            self.rooms.popleft().end()
        self._append(room)
        self.head = room.stop
        return room

    def in_turn(self, finish: Callable[[], Any]) -> Callable[[], Any]:
        """Have `finish` run before that of any later room, for a message that needs no room.

        It lies in a mailbox, from which it would be copied to new memory if a later one passed it.
        """
        if self.memory is None:
            return finish
        room = Room(self.memory, self.head, self.head)
        self._append(room)
        return room.until(finish)

    def catch_up(self) -> None:
        """End all rooms, before the wait for a message that would pass theirs in a mailbox."""
        while self.rooms:
            self.rooms.popleft().end()

    def _append(self, room: Room) -> None:
        while self.rooms and self.rooms[0].finish is None:
            self.rooms.popleft()
        self.rooms.append(room)


def aligned(nbytes: int) -> int:
    """So many bytes, rounded up to where the next tensor may begin."""
    return nbytes + -nbytes % PIECE_BYTES


def parts(shape: Sequence[int], most: int) -> Iterator[At]:
    """Index of parts of at most `most` elements, which together are a tensor of that shape."""
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
