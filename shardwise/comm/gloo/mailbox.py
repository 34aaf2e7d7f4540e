"""A mailbox: messages from one rank to another through memory that both map.

    | 7 | 8 |     free     | 5 | 6 |      messages 5 to 8 are in flight
    written = 9   the number of messages that the sender has put in
    taken = 5     the number that the receiver has taken out
    places        the offset, kind and size of message k, in one number, at k % PLACES

A message is contiguous, behind the previous one or at the front again.  A message that does not fit
goes through gloo, and its place says so.
"""

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from shardwise.comm.ledger import Line

PLACES, BY_GLOO = 4096, -1
LINE = 8  # numbers of a cache line, so that two counters never share one
HEAD = 2 * LINE + PLACES  # numbers of a mailbox: written, taken, places
#: The kinds of calls that send through mailboxes, by the code in a message's place.
KINDS = ("", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
CODES = {kind: code for code, kind in enumerate(KINDS)}
VIEWS = 256  # the number of message views that a mailbox caches


class MailboxMemory:
    """The memory of one mailbox's messages: `size_bytes` from byte `first`."""

    def __init__(self, memory: mmap.mmap, first: int, size_bytes: int) -> None:
        self.memory, self.first, self.size_bytes = memory, first, size_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + first
        self.views: dict[tuple[int, torch.dtype, torch.Size], Tensor] = {}

    def tensor(self, begin: int, like: Tensor) -> Tensor:
        """A view of a contiguous message; cached, since training repeats shapes, offsets."""
        key = begin, like.dtype, like.shape
        if torch._C._len_torch_dispatch_stack():
            return self._view(*key)  # a mode that tracks storages would count cached views
        view = self.views.get(key)
        if view is None:
            if len(self.views) == VIEWS:
                self.views.clear()
            with torch.inference_mode(False):  # for use in any mode
                view = self.views[key] = self._view(*key)
        return view

    def _view(self, begin: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        numel, offset = shape.numel(), self.first + begin
        flat = torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=offset)
        return flat.view(shape)

    def write(self, begin: int, x: Tensor) -> None:
        if _plain(x):
            ctypes.memmove(self.address + begin, x.data_ptr(), x.nbytes)
        else:
            self.tensor(begin, x).copy_(x)

    def read(self, begin: int, x: Tensor) -> None:
        if _plain(x):
            ctypes.memmove(x.data_ptr(), self.address + begin, x.nbytes)
        else:
            x.copy_(self.tensor(begin, x))


def _plain(x: Tensor) -> bool:
    """Whether the bytes in order are the values: no lazy conjugation or negation."""
    return x.is_contiguous() and not x.is_conj() and not x.is_neg()


class Outbox:
    """The sender's side of a mailbox: the messages in it, oldest first."""

    def __init__(self, numbers: memoryview, store: MailboxMemory) -> None:
        self.numbers, self.store = numbers, store
        self.inside: deque[tuple[int, int, int]] = deque()  # message, its begin and end
        self.written = self.put_bytes = 0

    def put(self, x: Tensor, kind: str = "") -> bool:
        """Copy `x` in, for a call of that kind; False if it must go through gloo."""
        size_bytes = x.nbytes
        begin = self._free(size_bytes)
        if begin != BY_GLOO:
            self.inside.append((self.written, begin, begin + size_bytes))
            self.store.write(begin, x)
            self.put_bytes += size_bytes
        while self.written - self.numbers[LINE] == PLACES:
            os.sched_yield()
        self.numbers[2 * LINE + self.written % PLACES] = (
            begin << 32 | CODES.get(kind, 0) << 24 | size_bytes
        )
        self.written += 1
        self.numbers[0] = self.written
        return begin != BY_GLOO

    def _free(self, size_bytes: int) -> int:
        taken = self.numbers[LINE]
        while self.inside and self.inside[0][0] < taken:
            self.inside.popleft()
        if not self.inside:
            return 0
        oldest, newest = self.inside[0][1], -(-self.inside[-1][2] // 64) * 64
        end = self.store.size_bytes if newest > oldest else oldest
        if newest + size_bytes <= end:
            return newest
        return 0 if newest > oldest and size_bytes <= oldest else BY_GLOO


@dataclass(eq=False, slots=True)
class Arrival:
    """An expected message like `like`.  If a later wait overtakes it, it gets a new `place`."""

    like: Tensor
    place: Tensor | None
    line: Line
    use: Callable[[Tensor], Tensor] | None = None
    made: Tensor | None = None  # the result of `use`
    here: bool = False


class Inbox:
    """The receiver's side of a mailbox: the expected messages, in order."""

    def __init__(
        self,
        numbers: memoryview,
        store: MailboxMemory,
        by_gloo: Callable[[Tensor, Line], object],
        refuse: Callable[[int, str, Tensor, Line], NoReturn],
    ) -> None:
        self.numbers, self.store, self.by_gloo, self.refuse = numbers, store, by_gloo, refuse
        self.expected: deque[Arrival] = deque()
        self.taken = 0

    def take(self, wanted: Arrival) -> None:
        """Take out arrived messages, up to the `wanted` one, which is used in the mailbox."""
        while not wanted.here and self.expected and self.numbers[0] > self.taken:
            one = self.expected[0]
            begin = self._next(one.like, one.line)
            if one is wanted and one.place is None and one.use is not None and begin != BY_GLOO:
                one.made = one.use(self.store.tensor(begin, one.like))
                one.use = None
            else:
                self._place(one, begin)
            self.taken += 1
            self.numbers[LINE] = self.taken
            self.expected.popleft()
            one.here = True

    def _next(self, like: Tensor, line: Line) -> int:
        """The start of the next message, which must be of `like`'s size and the same call."""
        place = self.numbers[2 * LINE + self.taken % PLACES]
        sent_bytes, kind = place & 0xFFFFFF, KINDS[place >> 24 & 0xFF]
        if sent_bytes != like.nbytes or (kind and line.kind and kind != line.kind):
            self.refuse(sent_bytes, kind, like, line)
        return place >> 32

    @property
    def ready(self) -> bool:
        return self.numbers[0] > self.taken

    def use(self, like: Tensor, make: Callable[[list[Tensor]], Tensor], line: Line) -> Tensor:
        """Take out the next message, which has arrived, while none is expected."""
        begin = self._next(like, line)
        if begin == BY_GLOO:
            place = torch.empty_like(like, memory_format=torch.contiguous_format)
            self.by_gloo(place, line)
            made = make([place])
        else:
            made = make([self.store.tensor(begin, like)])
        self.taken += 1
        self.numbers[LINE] = self.taken
        return made

    def _place(self, one: Arrival, begin: int) -> None:
        if one.place is None:
            one.place = torch.empty_like(one.like, memory_format=torch.contiguous_format)
        if begin == BY_GLOO:
            self.by_gloo(one.place, one.line)
        else:
            self.store.read(begin, one.place)
