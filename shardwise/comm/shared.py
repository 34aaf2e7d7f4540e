"""this file is shared memory between the ranks of one host: a mailbox for each two, each way.

    src  -->  | 7 | 8 |     free     | 5 | 6 |  -->  dst      messages 5 to 8 are on their way
              written = 9   put in so far, by src             number k in place[k % PLACES]
              taken = 5     taken out so far, by dst

A message through gloo goes through the kernel, and on either side through a thread that has to be
woken on a processor that computes: two ranks on two cores, 256 KiB each way in the middle of a
step, 1.6 ms after the later rank has come.  Here the ranks copy themselves: 0.1 ms.  What is large
is left to gloo, which carries it beside the computation.

A rank never waits to send: what finds no room goes through gloo too, and its place says so.  Who
waits watches the mailbox without sleep for a moment, then lets others run, then sleeps between two
looks, and finds out if the other process is gone, or has said that its program is over.

One store becomes visible after those before it on x86-64 only; elsewhere there are no mailboxes.
"""

import ctypes
import mmap
import os
import platform
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

#: What all mailboxes of a group take together, and the most that one message may.
SHARED_BYTES, MESSAGE_BYTES = 2**24, 2**22
FOLDER = Path("/dev/shm")  # noqa: S108 (memory that has a name, not a place for files)
PLACES, BY_GLOO, TAG = 4096, -1, 2
LINE = 8  # numbers of a cache line, so that two counters never share one
HEAD = 2 * LINE + PLACES  # numbers of a mailbox: written, taken, where messages begin
OVER = 1  # the place, beside `written`, of whether its sender will send no more
#: Looks without a pause, then looks with a turn for others; then a sleep between two, longer by as
#: much again after so many: who waits out a pipeline's bubble takes no processor from who computes.
LOOKS, TURNS, SLEEP_S, LONGER = 300, 3000, 5e-5, 16
VIEWS = 256  # of messages, that a mailbox keeps


_OPEN: "WeakSet[Mailboxes]" = WeakSet()


class _Hold:
    """Where the messages of one mailbox lie: `size_bytes` from byte `first` of the memory on."""

    def __init__(self, memory: mmap.mmap, first: int, size_bytes: int) -> None:
        self.memory, self.first, self.size_bytes = memory, first, size_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + first
        self.views: dict[tuple[int, torch.dtype, torch.Size], Tensor] = {}

    def tensor(self, begin: int, like: Tensor) -> Tensor:
        """A message of the shape of `like`, contiguous, where it lies."""
        key = begin, like.dtype, like.shape
        return self.views[key] if key in self.views else self._view(*key)

    def _view(self, begin: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        """Made once: training sends the same again and again, from the same few places."""
        if len(self.views) == VIEWS:
            self.views.clear()
        numel, offset = shape.numel(), self.first + begin
        with torch.inference_mode(False):  # for use in any mode
            flat = torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=offset)
            view = self.views[begin, dtype, shape] = flat.view(shape)
        return view

    def write(self, begin: int, x: Tensor) -> None:
        """Copy `x` in, of any strides."""
        if _plain(x):
            ctypes.memmove(self.address + begin, x.data_ptr(), x.nbytes)
        else:
            self.tensor(begin, x).copy_(x)

    def read(self, begin: int, x: Tensor) -> None:
        """Copy out into `x`, which is contiguous."""
        if _plain(x):
            ctypes.memmove(x.data_ptr(), self.address + begin, x.nbytes)
        else:
            x.copy_(self.tensor(begin, x))


def _plain(x: Tensor) -> bool:
    """Whether its bytes, in order, are its values: no conjugate or negative that is yet to come."""
    return x.is_contiguous() and not x.is_conj() and not x.is_neg()


class _Outbox:
    """One way to another rank, seen from the sender: what is in it, oldest first."""

    def __init__(self, numbers: memoryview, hold: _Hold) -> None:
        self.numbers, self.hold = numbers, hold
        self.inside: deque[tuple[int, int, int]] = deque()  # message, where it begins and ends
        self.written = self.put_bytes = 0

    def put(self, x: Tensor) -> bool:
        """Copy `x` in, or note that it goes through gloo: False."""
        begin = self._free(x.nbytes)
        if begin != BY_GLOO:
            self.inside.append((self.written, begin, begin + x.nbytes))
            self.hold.write(begin, x)
            self.put_bytes += x.nbytes
        while self.written - self.numbers[LINE] == PLACES:
            os.sched_yield()
        self.numbers[2 * LINE + self.written % PLACES] = begin
        self.written += 1
        self.numbers[0] = self.written
        return begin != BY_GLOO

    def _free(self, size_bytes: int) -> int:
        """Where a message of that size has room: behind the newest, or in front of the oldest."""
        taken = self.numbers[LINE]
        while self.inside and self.inside[0][0] < taken:
            self.inside.popleft()
        if not self.inside:
            return 0
        oldest, newest = self.inside[0][1], -(-self.inside[-1][2] // 64) * 64
        end = self.hold.size_bytes if newest > oldest else oldest
        if newest + size_bytes <= end:
            return newest
        return 0 if newest > oldest and size_bytes <= oldest else BY_GLOO


@dataclass(eq=False, slots=True)
class _Arrival:
    """A message that is expected: one like `like`, for `place`, or to be used where it lies.

    Who is overtaken by a later message's wait is given a place.
    """

    like: Tensor
    place: Tensor | None
    use: Callable[[Tensor], Tensor] | None = None
    made: Tensor | None = None  # what came of its use
    here: bool = False


class _Inbox:
    """One way from another rank, seen from the receiver: what is expected, in order."""

    def __init__(
        self, numbers: memoryview, hold: _Hold, by_gloo: Callable[[Tensor], object]
    ) -> None:
        self.numbers, self.hold, self.by_gloo = numbers, hold, by_gloo
        self.expected: deque[_Arrival] = deque()
        self.taken = 0

    def take(self, wanted: _Arrival) -> None:
        """Take out whatever has come; the one that is `wanted` is used where it lies."""
        while self.expected and self.numbers[0] > self.taken:
            one = self.expected[0]
            begin = self.numbers[2 * LINE + self.taken % PLACES]
            if one is wanted and one.place is None and one.use is not None and begin != BY_GLOO:
                one.made = one.use(self.hold.tensor(begin, one.like))
                one.use = None
            else:
                self._place(one, begin)
            self.taken += 1
            self.numbers[LINE] = self.taken
            self.expected.popleft()
            one.here = True

    def _place(self, one: _Arrival, begin: int) -> None:
        if one.place is None:
            one.place = torch.empty_like(one.like, memory_format=torch.contiguous_format)
        if begin == BY_GLOO:
            self.by_gloo(one.place)
        else:
            self.hold.read(begin, one.place)


class Mailboxes:
    """The mailboxes of one group of ranks, whose processes are `pids` in the order of the ranks."""

    def __init__(self, memory: mmap.mmap, group: dist.ProcessGroup, pids: Sequence[int]) -> None:
        self.group, self.pids, ranks = group, list(pids), len(pids)
        self.memory = memory  # kept mapped
        self.most_bytes = min(MESSAGE_BYTES, room_bytes(ranks) // 2)
        me = group.rank()
        others = [rank for rank in range(ranks) if rank != me]
        self.out = {to: _Outbox(*self._way(me, to)) for to in others}
        self.into = {
            source: _Inbox(*self._way(source, me), partial(self._receive_by_gloo, source))
            for source in others
        }
        _OPEN.add(self)
        crowded = ranks > len(os.sched_getaffinity(0))
        self.looks = 0 if crowded else LOOKS

    def _way(self, source: int, to: int) -> tuple[memoryview, _Hold]:
        """The numbers of a mailbox, and where its messages lie."""
        ranks = len(self.pids)
        number = source * (ranks - 1) + to - (to > source)
        numbers = memoryview(self.memory).cast("q")[number * HEAD : (number + 1) * HEAD]
        size_bytes = room_bytes(ranks)
        return numbers, _Hold(self.memory, _head_bytes(ranks) + number * size_bytes, size_bytes)

    @property
    def put_bytes(self) -> int:
        """Bytes of this rank's messages that have gone this way."""
        return sum(out.put_bytes for out in self.out.values())

    def fits(self, x: Tensor) -> bool:
        """Whether a message goes this way; both ends find the same."""
        return x.nbytes <= self.most_bytes

    def send(self, x: Tensor, to: int) -> list[Callable[[], object]]:
        """Hand `x` to rank `to`; what to call before its memory is free again."""
        if self.out[to].put(x):
            return []
        return by_gloo(self.group, x, to, TAG)

    def receive(self, x: Tensor, source: int) -> Callable[[], object]:
        """Expect a message in `x` after those expected before; call the result to wait for it."""
        return self._expect(_Arrival(x, x), source)

    def read(self, like: Tensor, source: int, use: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
        """As `receive`, of a message like `like`; `use` is given it in the wait, for that time.

        The wait gives what `use` gives.
        """
        return self._expect(_Arrival(like, None, use), source)

    def _expect(self, arrival: _Arrival, source: int) -> Callable[[], Any]:
        self.into[source].expected.append(arrival)
        return partial(self._wait, arrival, source)

    def _wait(self, arrival: _Arrival, source: int) -> Tensor | None:
        inbox, looks = self.into[source], 0
        while not arrival.here:
            inbox.take(arrival)
            looks += 1
            if looks > self.looks and not arrival.here:
                self._pause(looks, source)
        use, arrival.use = arrival.use, None
        if use is not None and arrival.place is not None:
            arrival.made = use(arrival.place)
        return arrival.made

    def _receive_by_gloo(self, source: int, x: Tensor) -> None:
        self.group.recv([x.view(-1)], source, TAG).wait()

    def _pause(self, looks: int, source: int) -> None:
        if looks < self.looks + TURNS:
            os.sched_yield()
            return
        inbox = self.into[source]
        if inbox.numbers[OVER] and inbox.numbers[0] == inbox.taken:
            raise RuntimeError(
                f"rank {source} of the group has ended its program, and is waited for here: "
                "all ranks are to make the same steps"
            )
        slept = looks - self.looks - TURNS
        time.sleep(SLEEP_S * min(1 + slept // LONGER, 20))
        if looks % 1000 == 0 and not _lives(self.pids[source]):
            raise RuntimeError(f"rank {source} of the group is gone: process {self.pids[source]}")


def by_gloo(group: dist.ProcessGroup, x: Tensor, to: int, tag: int) -> list[Callable[[], object]]:
    """Begin to send `x`, of any strides, through gloo; what to call before it is done."""
    sent = x.contiguous().view(-1)
    work = group.send([sent], to, tag)
    return [work.wait, lambda: sent]  # alive until then


def leave() -> None:
    """This rank's program is over: whoever waits for a message of its mailboxes is told."""
    for mailboxes in _OPEN:
        for out in mailboxes.out.values():
            out.numbers[OVER] = 1


def room_bytes(ranks: int) -> int:
    """What one mailbox of a group of so many holds, in whole pages."""
    room = SHARED_BYTES // (ranks * (ranks - 1))
    return room - room % mmap.PAGESIZE


def open_mailboxes(group: dist.ProcessGroup) -> Mailboxes | None:
    """The mailboxes of a group of gloo; None where its ranks cannot share memory.

    Called by all ranks of the group at the same point of the program.
    """
    rank, size = group.rank(), group.size()
    mine = torch.tensor([_host(), os.getpid()])
    everyone = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(everyone, mine, group)
    hosts = {int(host) for host, _ in everyone}
    if len(hosts) > 1 or 0 in hosts or not room_bytes(size):
        return None
    memory = None
    name = torch.zeros(128, dtype=torch.uint8)
    path = _create(size) if rank == 0 else ""
    if path:
        name[: len(path)] = torch.frombuffer(bytearray(path.encode()), dtype=torch.uint8)
    dist.broadcast(name, dist.get_global_rank(group, 0), group)
    path = bytes(name.tolist()).rstrip(b"\0").decode()
    memory = _attach(path) if path else None
    attached = torch.tensor([float(memory is not None)])
    dist.all_reduce(attached, dist.ReduceOp.MIN, group)
    if rank == 0 and path:
        Path(path).unlink()  # it lives for as long as somebody has it mapped
    if memory is None or not attached.item():
        return None
    return Mailboxes(memory, group, [int(pid) for _, pid in everyone])


def _head_bytes(ranks: int) -> int:
    head_bytes = 8 * HEAD * ranks * (ranks - 1)
    return head_bytes + -head_bytes % mmap.PAGESIZE


def _host() -> int:
    """A number that ranks have in common if they share memory, processes and network; 0: none.

    Ranks in network namespaces of their own are on hosts of their own to whoever measures a link.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return 0
    try:
        told = [Path("/proc/sys/kernel/random/boot_id").read_text(), FOLDER.stat().st_dev]
        told += [Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("net", "pid")]
    except OSError:
        return 0
    found = blake2b(repr(told).encode(), digest_size=7)
    return int.from_bytes(found.digest(), "big")


def _create(ranks: int) -> str:
    """The path of new shared memory, reserved and zero; "" where there is not enough."""
    try:
        handle, path = tempfile.mkstemp(prefix="shardwise-", dir=FOLDER)
    except OSError:
        return ""
    try:
        os.posix_fallocate(handle, 0, _head_bytes(ranks) + SHARED_BYTES)
    except OSError:
        Path(path).unlink()
        path = ""
    finally:
        os.close(handle)
    return path


def _attach(path: str) -> mmap.mmap | None:
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        return mmap.mmap(handle, 0)
    except OSError:
        return None
    finally:
        os.close(handle)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    except OSError:
        return True  # somebody else's, and there
    return state != "Z"
