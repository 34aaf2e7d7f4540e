"""this file is shared memory between the ranks of one host: a mailbox for each two, each way.

A message through gloo goes through the kernel, and on either side through a thread that has to be
woken on a processor that computes: two ranks on two cores, 256 KiB each way in the middle of a
step, 1.6 ms after the later rank has come.  Here the ranks copy themselves: 0.1 ms.  What is large
is left to gloo, which carries it beside the computation.  How a message lies in its mailbox, and
finds its way out again: mailbox.py.

A rank never waits to send: what finds no room goes through gloo too, and its place says so.  Who
waits watches the mailbox without sleep for a moment, then lets others run, then sleeps between two
looks, and finds out if the other process is gone, or has said that its program is over.

One store becomes visible after those before it on x86-64 only; elsewhere there are no mailboxes.
The memory never has a name in a file system, so that no rank, however it ends, leaves it behind:
others open it through the process that made it.
"""

import mmap
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.host import host_number
from shardwise.comm.ledger import Line
from shardwise.comm.limits import read_limits
from shardwise.comm.mailbox import HEAD, Arrival, Hold, Inbox, Outbox

#: What all mailboxes of a group take together, and the most that one message may.
SHARED_BYTES, MESSAGE_BYTES = 2**24, 2**22
TAG = 2
OVER = 1  # the place, beside `written`, of whether its sender will send no more
#: Looks without a pause, then looks with a turn for others; then a sleep between two, longer by as
#: much again after so many: who waits out a pipeline's bubble takes no processor from who computes.
LOOKS, TURNS, SLEEP_S, LONGER = 300, 3000, 5e-5, 16


_OPEN: "WeakSet[Mailboxes]" = WeakSet()


class Mailboxes:
    """The mailboxes of one group of ranks, whose processes are `pids` in the order of the ranks."""

    def __init__(self, memory: mmap.mmap, group: dist.ProcessGroup, pids: Sequence[int]) -> None:
        self.group, self.pids, ranks = group, list(pids), len(pids)
        self.memory = memory  # kept mapped
        self.patience_s = read_limits().patience_s + 60.0  # a rank that hangs is found before
        self.most_bytes = min(MESSAGE_BYTES, room_bytes(ranks) // 2)
        me = group.rank()
        others = [rank for rank in range(ranks) if rank != me]
        self.out = {to: Outbox(*self._way(me, to)) for to in others}
        self.into = {
            source: Inbox(*self._way(source, me), partial(self._receive_by_gloo, source))
            for source in others
        }
        _OPEN.add(self)
        crowded = ranks > len(os.sched_getaffinity(0))
        self.looks = 0 if crowded else LOOKS

    def _way(self, source: int, to: int) -> tuple[memoryview, Hold]:
        """The numbers of a mailbox, and where its messages lie."""
        ranks = len(self.pids)
        number = source * (ranks - 1) + to - (to > source)
        numbers = memoryview(self.memory).cast("q")[number * HEAD : (number + 1) * HEAD]
        size_bytes = room_bytes(ranks)
        return numbers, Hold(self.memory, _head_bytes(ranks) + number * size_bytes, size_bytes)

    @property
    def put_bytes(self) -> int:
        """Bytes of this rank's messages that have gone this way."""
        return sum(out.put_bytes for out in self.out.values())

    def fits(self, x: Tensor) -> bool:
        """Whether a message goes this way; both ends find the same."""
        return x.nbytes <= self.most_bytes

    def send(self, x: Tensor, to: int, line: Line) -> list[Callable[[], object]]:
        """Hand `x` to rank `to`, counted in `line`; what to call before `x` may be changed."""
        line.message(x)
        if self.out[to].put(x):
            return []
        return by_gloo(self.group, x, to, TAG)

    def receive(self, x: Tensor, source: int) -> Callable[[], object]:
        """Expect a message in `x` after those expected before; call the result to wait for it."""
        return self._expect(Arrival(x, x), source)

    def read(self, like: Tensor, source: int, use: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
        """As `receive`, of a message like `like`; `use` is given it in the wait, for that time.

        The wait gives what `use` gives.
        """
        return self._expect(Arrival(like, None, use), source)

    def meet(
        self,
        outgoing: Sequence[Tensor],
        peers: Sequence[int],
        make: Callable[[list[Tensor]], Tensor],
        line: Line,
    ) -> Callable[[], Tensor]:
        """Send one message a peer, and expect one of its shape from each, see gloo.py."""
        met: list[Tensor] = []

        def use(x: Tensor) -> Tensor:
            met.append(x)
            # a message is used where it lies, so the wait for the next is within its use
            return make(met) if len(met) == len(waits) else waits[len(met)]()

        leaving: list[Callable[[], object]] = []
        waits: list[Callable[[], Any]] = []
        for peer, x in zip(peers, outgoing, strict=True):
            waits.append(self.read(x, peer, use))
            leaving += self.send(x, peer, line)

        def end() -> Tensor:
            made = waits[0]()
            for each in leaving:
                each()
            return made

        return end

    def swap(self, x: Tensor, peer: int, use: Callable[[Tensor], Tensor], line: Line) -> Tensor:
        """Send `x`, and wait for what comes of its shape; what `use` makes of that, where it lies.

        `meet` with one peer and at once, in half its time.
        """
        inbox, looks = self.into[peer], 0
        if inbox.expected:
            return self.meet([x], [peer], lambda met: use(met[0]), line)()
        leaving = self.send(x, peer, line)
        while not inbox.ready:
            looks += 1
            if looks > self.looks:
                self._pause(looks, peer)
        made = inbox.use(x, use)
        for each in leaving:
            each()
        return made

    def leave(self) -> None:
        """Tell whoever waits for a message of this rank's that there will be none."""
        for out in self.out.values():
            out.numbers[OVER] = 1

    def _expect(self, arrival: Arrival, source: int) -> Callable[[], Any]:
        self.into[source].expected.append(arrival)
        return partial(self._wait, arrival, source)

    def _wait(self, arrival: Arrival, source: int) -> Tensor | None:
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
                f"rank {source} of the group has left, and is waited for here: "
                "all ranks are to make the same steps"
            )
        slept = looks - self.looks - TURNS
        time.sleep(SLEEP_S * min(1 + slept // LONGER, 20))
        if looks % 1000 == 0 and not _lives(self.pids[source]):
            raise RuntimeError(f"rank {source} of the group is gone: process {self.pids[source]}")
        if slept * 20 * SLEEP_S > self.patience_s:  # no less has passed by far
            raise RuntimeError(
                f"rank {source} of the group has not come for {self.patience_s:.0f} s, and is "
                "waited for here"
            )


def by_gloo(group: dist.ProcessGroup, x: Tensor, to: int, tag: int) -> list[Callable[[], object]]:
    """Begin to send `x`, of any strides, through gloo; what to call before it is done."""
    sent = x.contiguous().view(-1)
    work = group.send([sent], to, tag)
    return [work.wait, lambda: sent]  # alive until then


def leave() -> None:
    """This rank's program is over: whoever waits for a message of its mailboxes is told."""
    for mailboxes in _OPEN:
        mailboxes.leave()


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
    pids = [int(pid) for _, pid in everyone]
    handle = _create(size) if rank == 0 else -1
    try:
        told = torch.tensor([handle])
        dist.broadcast(told, dist.get_global_rank(group, 0), group)
        memory = _attach(pids[0], int(told))
        attached = torch.tensor([float(memory is not None)])
        dist.all_reduce(attached, dist.ReduceOp.MIN, group)
    finally:
        if handle != -1:
            os.close(handle)  # it lives for as long as somebody has it mapped
    return None if memory is None or not attached.item() else Mailboxes(memory, group, pids)


def _head_bytes(ranks: int) -> int:
    head_bytes = 8 * HEAD * ranks * (ranks - 1)
    return head_bytes + -head_bytes % mmap.PAGESIZE


def _host() -> int:
    """The number of this host, where its memory can be shared; 0 elsewhere."""
    return host_number() if platform.machine() == "x86_64" else 0


def _create(ranks: int) -> int:
    """A handle of new memory, reserved and zero; -1 where there is not enough."""
    try:
        handle = os.memfd_create("shardwise")
    except OSError:
        return -1
    try:
        os.posix_fallocate(handle, 0, _head_bytes(ranks) + SHARED_BYTES)
    except OSError:
        os.close(handle)
        return -1
    return handle


def _attach(pid: int, handle: int) -> mmap.mmap | None:
    """The memory that process `pid` has under that handle; None where it cannot be had."""
    try:
        handle = os.open(f"/proc/{pid}/fd/{handle}", os.O_RDWR)
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
