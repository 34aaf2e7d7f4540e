"""Shared memory between the ranks of one host: a mailbox for each pair of ranks and direction.

A message through gloo wakes a thread on each side: on two busy cores 256 KiB each way take 1.6 ms.
Here the ranks copy the message themselves, in 0.1 ms.  Large messages go through gloo, which sends
them while the ranks compute.

A rank never waits to send: if a mailbox is full, the message goes through gloo, and the mailbox
records that.  A rank that waits polls the mailbox for a moment, then yields the CPU between polls,
then sleeps between them; it raises an error if the other process is gone or has ended its program.

Stores become visible in order on x86-64 only; other CPUs have no mailboxes.  The memory never has a
name in a file system, so no rank leaves it behind, however it ends: other ranks open it through the
process that created it.  SHARDWISE_SHARED_MEMORY=0 turns all of this off.
"""

import mmap
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.gloo.mailbox import CODES, HEAD, KINDS, Arrival, Inbox, MailboxMemory, Outbox
from shardwise.comm.ledger import Line
from shardwise.comm.start.rendezvous import host_number, process, read_limits
from shardwise.comm.transport import call_name, naming, rank_name
from shardwise.core.errors import OtherCallError, bad

#: The size of all mailboxes of a group, and of the largest message.
SHARED_BYTES, MESSAGE_BYTES = 2**24, 2**22
TAG = 2
#: Indices after `written`: the sender sends no more; it refused a message of the receiver.
OVER, REFUSED = 1, 2
_AGREE = (
    "All ranks must make the same calls with tensors of the same shapes, and the counts of an "
    "all_to_all must agree. Parameters that are frozen on one rank alone change its calls"
)
#: Polls without a pause, then polls that yield; then sleeps of `SLEEP_S`, which become longer every
#: `LONGER` polls, so a rank in a pipeline's bubble leaves the CPU to ranks that compute.
LOOKS, TURNS, SLEEP_S, LONGER = 300, 3000, 5e-5, 16


_OPEN: "WeakSet[Mailboxes]" = WeakSet()

SWITCH = "SHARDWISE_SHARED_MEMORY"


def shared_memory_wanted(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether SHARDWISE_SHARED_MEMORY is 1, the default. Raises InputError unless 0 or 1."""
    text = variables.get(SWITCH) or "1"
    if text not in ("0", "1"):
        raise bad(
            f"{SWITCH}='{text}' in the environment",
            "0 (messages go through gloo) or 1 (ranks of one host use shared memory; the default)",
            f"export {SWITCH}=0",
        )
    return text == "1"


class SharedMemory:
    """The mailboxes of a group of ranks, opened at the first use."""

    def __init__(self, group: dist.ProcessGroup, *, wanted: bool = True) -> None:
        self.group, self.wanted = group, wanted
        self.mailboxes: Mailboxes | None = None
        self.asked = False

    def open(self) -> "Mailboxes | None":
        """The mailboxes; None if ranks cannot or do not share memory. All make the first call."""
        if not self.asked:
            self.asked = True
            self.mailboxes = open_mailboxes(self.group, wanted=self.wanted)
        return self.mailboxes

    def mailboxes_for(self, x: Tensor) -> "Mailboxes | None":
        """The mailboxes if open and fit for a message like `x`; both ends get the same answer."""
        mailboxes = self.mailboxes
        return mailboxes if mailboxes is not None and x.nbytes <= mailboxes.most_bytes else None


class Mailboxes:
    """The mailboxes of one group of ranks, whose processes are `pids` in the order of the ranks."""

    def __init__(self, memory: mmap.mmap, group: dist.ProcessGroup, pids: Sequence[int]) -> None:
        self.group, self.pids, ranks = group, list(pids), len(pids)
        self.memory = memory  # kept mapped
        self.patience_s = read_limits().patience_s + 60.0  # after the hang detector
        self.most_bytes = min(MESSAGE_BYTES, mailbox_bytes(ranks) // 2)
        me = group.rank()
        others = [rank for rank in range(ranks) if rank != me]
        self.out = {to: Outbox(*self._way(me, to)) for to in others}
        self.into = {
            source: Inbox(
                *self._way(source, me),
                partial(self._receive_by_gloo, source),
                partial(self._refuse, source),
            )
            for source in others
        }
        _OPEN.add(self)
        crowded = ranks > len(os.sched_getaffinity(0))
        self.looks = 0 if crowded else LOOKS

    def _way(self, source: int, to: int) -> tuple[memoryview, MailboxMemory]:
        ranks = len(self.pids)
        number = source * (ranks - 1) + to - (to > source)
        numbers = memoryview(self.memory).cast("q")[number * HEAD : (number + 1) * HEAD]
        size_bytes = mailbox_bytes(ranks)
        return numbers, MailboxMemory(
            self.memory, _head_bytes(ranks) + number * size_bytes, size_bytes
        )

    @property
    def put_bytes(self) -> int:
        return sum(out.put_bytes for out in self.out.values())

    def send(self, x: Tensor, to: int, line: Line) -> list[Callable[[], object]]:
        """Send `x` to rank `to`, counted in `line`; call the result before changing `x`."""
        line.add(x, x.numel())
        if self.out[to].put(x, line.kind):
            return []
        return by_gloo(self.group, x, to, TAG, line)

    def receive(self, x: Tensor, source: int, line: Line) -> Callable[[], object]:
        return self._expect(Arrival(x, x, line), source)

    def read(
        self, like: Tensor, source: int, use: Callable[[Tensor], Tensor], line: Line
    ) -> Callable[[], Any]:
        """Receive a message like `like`; `use` gets it, or a copy, and must keep no view."""
        return self._expect(Arrival(like, None, line, use), source)

    def meet(
        self,
        outgoing: Sequence[Tensor],
        peers: Sequence[int],
        make: Callable[[list[Tensor]], Tensor],
        line: Line,
    ) -> Callable[[], Tensor]:
        """Send one message to each peer, and receive one of its shape from each (Gloo._meet)."""
        met: list[Tensor] = []

        def use(x: Tensor) -> Tensor:
            met.append(x)
            # a message is used inside its mailbox, so the wait for the next one is nested in `use`
            return make(met) if len(met) == len(waits) else waits[len(met)]()

        leaving: list[Callable[[], object]] = []
        waits: list[Callable[[], Any]] = []
        for peer, x in zip(peers, outgoing, strict=True):
            waits.append(self.read(x, peer, use, line))
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
        """`meet` with one peer and an immediate wait, in half the time."""
        inbox, looks = self.into[peer], 0
        if inbox.expected:
            return self.meet([x], [peer], make, line)()
        leaving = self.send(x, peer, line)
        while not inbox.ready:
            looks += 1
            if looks > self.looks:
                self._pause(looks, peer, line)
        made = inbox.use(x, make, line)
        for each in leaving:
            each()
        return made

    def leave(self) -> None:
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
                self._pause(looks, source, arrival.line)
        use, arrival.use = arrival.use, None
        if use is not None and arrival.place is not None:
            arrival.made = use(arrival.place)
        return arrival.made

    def _refuse(
        self, source: int, sent_bytes: int, kind: str, like: Tensor, line: Line
    ) -> NoReturn:
        self.out[source].numbers[REFUSED] = 1 << 32 | CODES.get(line.kind, 0) << 24 | like.nbytes
        raise OtherCallError(
            f"received a message of {sent_bytes} bytes instead of {like.nbytes} from "
            f"{rank_name(self.group, source)}: that rank sent it in {kind or 'another call'}, this "
            f"rank expected it in {call_name(line)}. {_AGREE}"
        )

    def _receive_by_gloo(self, source: int, x: Tensor, line: Line) -> None:
        with naming(self.group, source, line):
            self.group.recv([x.view(-1)], source, TAG).wait()

    def _pause(self, looks: int, source: int, line: Line) -> None:
        if looks < self.looks + TURNS:
            os.sched_yield()
            return
        inbox = self.into[source]
        if refused := inbox.numbers[REFUSED]:
            raise OtherCallError(
                f"{rank_name(self.group, source)} expected a message of {refused & 0xFFFFFF} bytes "
                f"in {KINDS[refused >> 24 & 0xFF] or 'another call'}, and this rank sent another. "
                f"This rank waits in {call_name(line)}. {_AGREE}"
            )
        if inbox.numbers[OVER] and inbox.numbers[0] == inbox.taken:
            raise OtherCallError(
                f"{rank_name(self.group, source)} has left, but this rank waits for its message in "
                f"{call_name(line)}: all ranks must make the same steps"
            )
        slept = looks - self.looks - TURNS
        time.sleep(SLEEP_S * min(1 + slept // LONGER, 20))
        if looks % 1000 == 0 and process(self.pids[source])[0] in "XZ":
            raise RuntimeError(
                f"{rank_name(self.group, source)} is gone: process {self.pids[source]} has ended, "
                f"and this rank waits for its message in {call_name(line)}"
            )
        if slept * 20 * SLEEP_S > self.patience_s:  # much more time than this has passed
            raise RuntimeError(
                f"{rank_name(self.group, source)} has sent no message for {self.patience_s:.0f} s, "
                f"and this rank waits for one in {call_name(line)}"
            )


def by_gloo(
    group: dist.ProcessGroup, x: Tensor, to: int, tag: int, line: Line
) -> list[Callable[[], object]]:
    """Begin to send `x`, of any strides, through gloo; call the result to wait for it."""
    sent = x.contiguous().view(-1)
    with naming(group, to, line):
        work = group.send([sent], to, tag)
    return [partial(await_work, work, group, to, line), lambda: sent]  # `sent` must live until then


def await_work(work: Any, group: dist.ProcessGroup, peer: int | None, line: Line) -> None:
    with naming(group, peer, line):
        work.wait()


def leave() -> None:
    for mailboxes in _OPEN:
        mailboxes.leave()


def mailbox_bytes(ranks: int) -> int:
    size_bytes = SHARED_BYTES // (ranks * (ranks - 1))
    return size_bytes - size_bytes % mmap.PAGESIZE


def open_mailboxes(group: dist.ProcessGroup, *, wanted: bool = True) -> Mailboxes | None:
    """All ranks call it; None if they cannot share memory or a rank does not want to."""
    rank, size = group.rank(), group.size()
    own = [_host() if wanted else 0, os.getpid()]
    mine = torch.tensor(own, dtype=torch.int64, device="cpu")
    everyone = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(everyone, mine, group)
    hosts = {int(host) for host, _ in everyone}
    if len(hosts) > 1 or 0 in hosts or not mailbox_bytes(size):
        return None
    pids = [int(pid) for _, pid in everyone]
    handle = _create(size) if rank == 0 else -1
    try:
        shown = torch.tensor([handle], dtype=torch.int64, device="cpu")
        dist.broadcast(shown, group=group, group_src=0)
        memory = _attach(pids[0], int(shown))
        attached = torch.tensor([memory is not None], dtype=torch.uint8, device="cpu")
        dist.all_reduce(attached, dist.ReduceOp.MIN, group)
    finally:
        if handle != -1:
            os.close(handle)  # the memory lives while any process has it mapped
    return None if memory is None or not attached.item() else Mailboxes(memory, group, pids)


def _head_bytes(ranks: int) -> int:
    head_bytes = 8 * HEAD * ranks * (ranks - 1)
    return head_bytes + -head_bytes % mmap.PAGESIZE


def _host() -> int:
    return host_number() if platform.machine() == "x86_64" else 0


def _create(ranks: int) -> int:
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
