"""this file is the world whose ranks are threads of this process: no sockets, no start-up time.

Ranks meet at a board: each writes what it brings, all wait, each reads what it needs, all wait.

        rank 0   write  |      read  |
        rank 1   write  | gate read  | gate
        rank 2   write  |      read  |

A tensor on the board counts by the definition of its collective (volume.py), as it does where a
library carries the collective out.  It proves logic, not transports.  A rank that fails breaks
every gate, so the others stop at once.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import volume
from shardwise.comm.ledger import Line
from shardwise.comm.transport import Links, Pending, Transport
from shardwise.core.errors import RankError

PATIENCE_S = 60.0  # no thread of a healthy test is ever this late; a hang becomes an error

GLANCE_S = 0.1  # how soon a rank that waits for a message sees that its sender has failed


class Board:
    """Where the ranks of one line meet."""

    def __init__(self, size: int) -> None:
        self.slots: list[Any] = [None] * size
        self.gate = threading.Barrier(size)
        self.wires: dict[tuple[int, int], queue.Queue[Tensor]] = {
            (a, b): queue.Queue() for a in range(size) for b in range(size)
        }


class Hub:
    """The boards of one world of threads, made by whichever rank asks first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.boards: dict[tuple[Any, ...], Board] = {}
        self.broken = False

    def board(self, key: tuple[Any, ...], size: int) -> Board:
        with self.lock:
            board = self.boards.setdefault(key, Board(size))
            if self.broken:
                board.gate.abort()
            return board

    def abort(self) -> None:
        """Release every rank that waits: somebody failed."""
        with self.lock:
            self.broken = True
            for board in self.boards.values():
                board.gate.abort()


class Threads(Transport):
    """One line of a world of threads."""

    def __init__(self, rank: int, board: Board) -> None:
        self.rank, self.size, self.board = rank, len(board.slots), board

    def _swap(self, mine: Any, x: Tensor, line: Line, sent: volume.Volume) -> list[Any]:
        """Show `mine` to the others, which hands over `sent` elements of `x`; what all show."""
        line.collective(x, sent)
        self.board.slots[self.rank] = mine
        self.board.gate.wait(PATIENCE_S)
        everyone = list(self.board.slots)
        return everyone

    def _done(self) -> Pending:
        self.board.gate.wait(PATIENCE_S)
        self.board.slots[self.rank] = None  # everybody has read; what was shown is not kept
        return Pending()

    def all_reduce(self, x: Tensor, op: str = "sum") -> Pending:
        return self._reduce(x, op, "all_reduce", volume.all_reduce(x.numel(), self.size))

    def _reduce(self, x: Tensor, op: str, kind: str, sent: volume.Volume) -> Pending:
        stack = torch.stack(self._swap(x, x, self.begin(kind), sent))
        total = {"sum": stack.sum, "max": stack.amax, "min": stack.amin}[op](0)
        self.board.gate.wait(PATIENCE_S)  # nobody overwrites before everybody has read
        x.copy_(total)
        return self._done()

    def reduce(self, x: Tensor, root: int, op: str = "sum") -> Pending:
        return self._reduce(x, op, "reduce", volume.reduce(x.numel(), self.rank == root))

    def broadcast(self, x: Tensor, root: int) -> Pending:
        sent = volume.broadcast(x.numel(), self.size, self.rank == root)
        x.copy_(self._swap(x, x, self.begin("broadcast"), sent)[root].clone())
        return self._done()

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        sent = volume.all_gather(x.numel(), self.size)
        parts = [part.clone() for part in self._swap(x, x, self.begin("all_gather"), sent)]
        self.board.gate.wait(PATIENCE_S)
        torch.cat(parts, out=out)
        return self._done()

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        """Every rank adds up its own block of what the others brought."""
        sent = volume.reduce_scatter(out.numel(), self.size)
        shown = self._swap(x, x, self.begin("reduce_scatter"), sent)
        blocks = [whole.chunk(self.size)[self.rank] for whole in shown]
        total = torch.stack(blocks).sum(0)
        self.board.gate.wait(PATIENCE_S)
        out.copy_(total)
        return self._done()

    def all_to_all(
        self, out: Tensor, x: Tensor, out_counts: Sequence[int], in_counts: Sequence[int]
    ) -> Pending:
        """Every rank reads its own part of what the others brought."""
        sent = volume.all_to_all(in_counts, self.rank)
        shown = self._swap((x, in_counts), x, self.begin("all_to_all"), sent)
        parts = [whole.split(list(counts))[self.rank] for whole, counts in shown]
        out.copy_(torch.cat(parts))
        return self._done()

    def send(self, x: Tensor, to: int) -> Pending:
        self.begin("send").message(x)
        self.board.wires[self.rank, to].put(x.clone())
        return Pending()

    def receive(self, x: Tensor, source: int) -> Pending:
        return Pending([lambda: x.copy_(self._taken(source))])

    def _taken(self, source: int) -> Tensor:
        """The next message from `source`; a look now and then at whether somebody has failed."""
        for _ in range(round(PATIENCE_S / GLANCE_S)):
            if self.board.gate.broken:
                raise threading.BrokenBarrierError
            with suppress(queue.Empty):
                return self.board.wires[source, self.rank].get(timeout=GLANCE_S)
        raise TimeoutError(f"rank {source} sent nothing to rank {self.rank}")

    def barrier(self) -> None:
        self.board.gate.wait(PATIENCE_S)


class ThreadLinks(Links):
    """Opens boards on the hub all threads share."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.opened = 0

    def transport(
        self, axis: str, lines: Sequence[Sequence[int]], rank: int, queue: str = "now"
    ) -> Transport:
        """A board of its own for this queue of the line."""
        line = next(line for line in lines if rank in line)
        self.opened += 1
        board = self.hub.board((self.opened, axis, tuple(line)), len(line))
        return Threads(list(line).index(rank), board)

    def close(self) -> None:
        """Nothing stays open."""


def on_threads(ranks: int, body: Callable[[int, Links], Any]) -> list[Any]:
    """Run `body(rank, links)` on each of `ranks` threads; return the results in rank order.

    Raises:
        RankError: a rank failed; the first failure that is not a broken gate, with its cause.
    """
    hub, results = Hub(), [None] * ranks
    failures: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank, ThreadLinks(hub))
        except BaseException as error:  # noqa: BLE001  # whatever it is, release the others
            failures.append((rank, error))
            hub.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures.sort(key=lambda f: isinstance(f[1], threading.BrokenBarrierError))
    if failures:
        rank, error = failures[0]
        raise RankError(rank, f"{type(error).__name__}: {error}") from error
    return results
