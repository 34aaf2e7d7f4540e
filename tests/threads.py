"""A world whose ranks are threads of this process: no sockets, no start-up time.

Ranks meet at a board: each shows its tensor, all wait, each reads what it needs, all wait.

        rank 0   show   |      read  |        write its own result
        rank 1   show   | gate read  | gate   write
        rank 2   show   |      read  |        write

A collective counts by its definition (ledger.py), as in a library.  Tests on threads prove logic,
not transports.  A rank that fails breaks every gate, so the others stop at once.  All ranks may be
on one GPU.

Garbage is not collected while ranks run: in functions of torch with a lock of their own, such as
`Generator.get_state`, a finalizer may switch to a thread that waits for the lock with the GIL.
"""

import gc
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.transport import Links, Pending, Transport
from shardwise.core.errors import RankError, causes
from shardwise.techniques.replicas.replicate import choose_vector_functions

PATIENCE_S = 60.0  # after this time a wait is a hang, and raises

COMBINE = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}

GLANCE_S = 0.1  # how soon a rank that waits for a message sees that its sender has failed


class Board:
    """The memory in which the ranks of one line show tensors to each other."""

    def __init__(self, size: int) -> None:
        self.slots: list[Any] = [None] * size
        self.gate = threading.Barrier(size)
        self.wires: dict[tuple[int, int], queue.Queue[Tensor]] = {
            (a, b): queue.Queue() for a in range(size) for b in range(size)
        }


class Hub:
    """The boards of one world of threads; the first rank that needs a board creates it."""

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
        """Release every waiting rank, because a rank failed."""
        with self.lock:
            self.broken = True
            for board in self.boards.values():
                board.gate.abort()


class Threads(Transport):
    """One line of a world of threads."""

    def __init__(self, rank: int, board: Board) -> None:
        self.rank, self.size, self.board = rank, len(board.slots), board

    def _meet(self, mine: Any, read: Callable[[list[Any]], Tensor], out: Tensor) -> Pending[Any]:
        """Show `mine`; write in `out` the new tensor that `read` computes from all shown tensors.
        `out` may be the tensor that this rank shows: no rank writes before all have read.
        """
        slots, gate = self.board.slots, self.board.gate
        slots[self.rank] = mine
        self._settle(out)
        gate.wait(PATIENCE_S)
        made = read(list(slots))
        self._settle(out)
        gate.wait(PATIENCE_S)
        slots[self.rank] = None  # do not keep the shown tensor alive
        out.copy_(made)
        return Pending()

    def _settle(self, x: Tensor) -> None:
        """Wait for the work of this rank's stream, which the streams of other ranks do not do."""
        if x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()

    def all_reduce(self, x: Tensor, op: str = "sum") -> Pending[Any]:
        self.count("all_reduce", x)
        return self._meet(x, lambda xs: COMBINE[op](torch.stack(xs), 0), x)

    def broadcast(self, x: Tensor, root: int) -> Pending[Any]:
        self.count("broadcast", x, root=root)
        return self._meet(x, lambda xs: xs[root].clone(), x)

    def all_gather(self, out: Tensor, x: Tensor) -> Pending[Any]:
        self.count("all_gather", x, out)
        return self._meet(x, torch.cat, out)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending[Any]:
        self.count("reduce_scatter", x, out)
        return self._meet(
            x, lambda xs: torch.stack([y.chunk(self.size)[self.rank] for y in xs]).sum(0), out
        )

    def all_to_all(
        self, out: Tensor, x: Tensor, out_counts: Sequence[int], in_counts: Sequence[int]
    ) -> Pending[Any]:
        """Each rank reads its own part of the tensors that the others show."""
        self.count("all_to_all", x, out, counts=in_counts)
        return self._meet((x, in_counts), lambda shown: self._received(shown, out_counts), out)

    def _received(self, shown: list[tuple[Tensor, Sequence[int]]], out_counts: Any) -> Tensor:
        sent = [counts[self.rank] for _, counts in shown]
        if sent != list(out_counts):
            raise RuntimeError(
                f"all_to_all: rank {self.rank} expects {list(out_counts)} elements from ranks 0 "
                f"to {self.size - 1}, which send {sent}"
            )
        return torch.cat([x.split(list(counts))[self.rank] for x, counts in shown])

    def send(self, x: Tensor, to: int) -> Pending[Any]:
        self.begin("send", x).add(x, x.numel())
        sent = x.clone()
        self._settle(sent)
        self.board.wires[self.rank, to].put(sent)
        return Pending()

    def receive(self, x: Tensor, source: int) -> Pending[Any]:
        self.require_device("receive", x)
        return Pending([lambda: x.copy_(self._taken(source))])

    def _taken(self, source: int) -> Tensor:
        """The next message from `source`; checks periodically whether a rank has failed."""
        for _ in range(round(PATIENCE_S / GLANCE_S)):
            if self.board.gate.broken:
                raise threading.BrokenBarrierError
            with suppress(queue.Empty):
                return self.board.wires[source, self.rank].get(timeout=GLANCE_S)
        raise TimeoutError(f"rank {source} sent nothing to rank {self.rank}")

    def barrier(self) -> None:
        self.board.gate.wait(PATIENCE_S)


class ThreadLinks(Links):
    """Opens boards on the hub that all threads share."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.opened = 0

    def transport(
        self, axis: str, lines: Sequence[Sequence[int]], rank: int, queue: str = "now"
    ) -> Transport:
        """A separate board for this queue of the line."""
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

    choose_vector_functions()
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    with _without_collections():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # at the end, errors of which another rank's failure is the cause
    failures.sort(key=lambda f: threading.BrokenBarrierError in map(type, causes(f[1])))
    if failures:
        rank, error = failures[0]
        raise RankError(rank, f"{type(error).__name__}: {error}") from error
    return results


@contextmanager
def _without_collections() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
