"""Shared memory between the ranks of one host: a mailbox for each pair of ranks and direction.

A message through gloo goes through the kernel, and on either side through a thread that has to be
woken on a processor that computes: two ranks on two cores, 256 KiB each way in the middle of a
step, 1.6 ms after the later rank has come.  Here the ranks copy the message themselves: 0.1 ms.
Large messages are left to gloo, which sends them beside the computation.  mailbox.py has the layout
of a mailbox.

A rank never waits to send: a message that finds no room goes through gloo, and the mailbox says so.
A rank that waits polls the mailbox for a moment, then yields the processor between two polls, then
sleeps between them; it raises an error if the other process is gone or has ended its program.

Stores become visible in order on x86-64 only; elsewhere there are no mailboxes.  The memory never
has a name in a file system, so that no rank, however it ends, leaves it behind: others open it
through the process that made it.

SHARDWISE_SHARED_MEMORY=0, or `sw.init(shared_memory=False)`, turns all of this off.
"""

import mmap
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
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
from shardwise.core.errors import bad

#: What all mailboxes of a group take together, and the most that one message may.
SHARED_BYTES, MESSAGE_BYTES = 2**24, 2**22
TAG = 2
OVER = 1  # the place, beside `written`, of whether its sender will send no more
#: Looks without a pause, then looks with a turn for others; then a sleep between two, longer by as
#: much again after so many: who waits out a pipeline's bubble takes no processor from who computes.
LOOKS, TURNS, SLEEP_S, LONGER = 300, 3000, 5e-5, 16


_OPEN: "WeakSet[Mailboxes]" = WeakSet()

SWITCH = "SHARDWISE_SHARED_MEMORY"


def shared_memory_wanted(variables: Mapping[str, str] | None = None) -> bool:
    """Whether ranks of one host use shared memory, by the environment; the default is that they do.

    Raises:
        InputError: the variable is neither 0 nor 1.
    """
    text = (os.environ if variables is None else variables).get(SWITCH) or "1"
    if text not in ("0", "1"):
        raise bad(
            f"{SWITCH}='{text}' in the environment",
            "0 (messages go through gloo) or 1 (ranks of one host use shared memory; the default)",
            f"export {SWITCH}=0",
        )
    return text == "1"


class SharedMemory:
    """The mailboxes of a group of ranks, opened when they are first needed."""

    def __init__(self, group: dist.ProcessGroup, *, wanted: bool = True) -> None:
        self.group, self.wanted = group, wanted
        self.mailboxes: Mailboxes | None = None
        self.asked = False

    def open(self) -> "Mailboxes | None":
        """The mailboxes; None where the ranks cannot share memory, or one does not want to.

        The first call must be made by all ranks of the group.
        """
        if not self.asked:
            self.asked = True
            self.mailboxes = open_mailboxes(self.group, wanted=self.wanted)
        return self.mailboxes

    def fitting(self, x: Tensor) -> "Mailboxes | None":
        """The mailboxes, where they are open and take a message like `x`; both ends find the same.

        Large messages are left to gloo.
        """
        mailboxes = self.mailboxes
        return mailboxes if mailboxes is not None and x.nbytes <= mailboxes.most_bytes else None


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
        """The counters of a mailbox, and the memory of its messages."""
        ranks = len(self.pids)
        number = source * (ranks - 1) + to - (to > source)
        numbers = memoryview(self.memory).cast("q")[number * HEAD : (number + 1) * HEAD]
        size_bytes = room_bytes(ranks)
        return numbers, Hold(self.memory, _head_bytes(ranks) + number * size_bytes, size_bytes)

    @property
    def put_bytes(self) -> int:
        """Bytes of this rank's messages that have gone this way."""
        return sum(out.put_bytes for out in self.out.values())

    def send(self, x: Tensor, to: int, line: Line) -> list[Callable[[], object]]:
        """Send `x` to rank `to`, counted in `line`; what to call before `x` may change."""
        line.add(x, x.numel())
        if self.out[to].put(x):
            return []
        return by_gloo(self.group, x, to, TAG)

    def receive(self, x: Tensor, source: int) -> Callable[[], object]:
        """Expect the next message, in `x`; call the result to wait for it."""
        return self._expect(Arrival(x, x), source)

    def read(self, like: Tensor, source: int, use: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
        """Expect the next message, of the shape of `like`; the wait returns what `use` makes of it.

        `use` is called with the message in its mailbox, or with a copy, and must keep no view.
        """
        return self._expect(Arrival(like, None, use), source)

    def meet(
        self,
        outgoing: Sequence[Tensor],
        peers: Sequence[int],
        make: Callable[[list[Tensor]], Tensor],
        line: Line,
    ) -> Callable[[], Tensor]:
        """Send one message a peer, and expect one of its shape from each (Gloo._meet)."""
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

        return end if leaving else waits[0]

    def swap(
        self, x: Tensor, peer: int, make: Callable[[list[Tensor]], Tensor], line: Line
    ) -> Tensor:
        """`meet` with one peer, and wait for it at once, in half its time."""
        inbox, looks = self.into[peer], 0
        if inbox.expected:
            return self.meet([x], [peer], make, line)()
        leaving = self.send(x, peer, line)
        while not inbox.ready:
            looks += 1
            if looks > self.looks:
                self._pause(looks, peer)
        made = inbox.use(x, make)
        for each in leaving:
            each()
        return made

    def leave(self) -> None:
        """Say to ranks that wait for a message of this rank that there will be none."""
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
                "all ranks must make the same steps"
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
    """Say to all other ranks that this rank's program is over."""
    for mailboxes in _OPEN:
        mailboxes.leave()


def room_bytes(ranks: int) -> int:
    """What one mailbox of a group of so many holds, in whole pages."""
    room = SHARED_BYTES // (ranks * (ranks - 1))
    return room - room % mmap.PAGESIZE


def open_mailboxes(group: dist.ProcessGroup, *, wanted: bool = True) -> Mailboxes | None:
    """The mailboxes of a group of gloo; None where its ranks cannot share memory or do not want to.

    Called by all ranks of the group at the same point of the program.
    """
    rank, size = group.rank(), group.size()
    mine = torch.tensor([_host() if wanted else 0, os.getpid()])
    everyone = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(everyone, mine, group)
    hosts = {int(host) for host, _ in everyone}
    if len(hosts) > 1 or 0 in hosts or not room_bytes(size):
        return None
    pids = [int(pid) for _, pid in everyone]
    handle = _create(size) if rank == 0 else -1
    try:
        shown = torch.tensor([handle])
        dist.broadcast(shown, group=group, group_src=0)
        memory = _attach(pids[0], int(shown))
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
