"""Ranks watch each other where our launcher does not, as under torchrun: through the run's store.

    rank 0 -> rank 1 -> rank 2 -> rank 0       each hears the beats of the next that has not left

Of neighbours that freeze together, as on one host, the first is heard by a rank that lives.  The
one that finds another frozen, or has itself waited too long, says so and ends its process: whoever
started the ranks then ends the others.
"""

import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shardwise.comm.beat import Beat, Listener, hung, parse
from shardwise.comm.host import host_number
from shardwise.comm.limits import Limits
from shardwise.comm.standing import Standing

_STORE = 4  # times `frozen_s` without an answer of the store


class Peers:
    """The watch of one rank, by a thread beside the one that makes it, until `stop`."""

    def __init__(self, store: Store, rank: int, size: int, limits: Limits) -> None:
        self.rank, self.size, self.limits = rank, size, limits
        connected: Any = store
        self.store: Store = connected.clone()  # another's wait would hold up a shared connection
        self.store.set_timeout(timedelta(seconds=limits.frozen_s))
        self.standing = Standing(threading.get_ident())
        self.beat = Beat(0, os.getpid(), host_number())
        self.next, self.listener = rank, Listener(limits, self.beat.host)
        self.rounds = 0
        self._send(self.beat)  # all have one before any can be missed
        self.stopped = threading.Event()
        self.threads = [
            threading.Thread(target=each, name="peers", daemon=True)
            for each in (self._watch, self._guard)
        ]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """End the watch: this rank leaves.  See LookOut.stop."""
        self.stopped.set()
        for thread in self.threads:
            thread.join(2 * self.limits.frozen_s)
        if not self.threads[0].is_alive():
            with suppress(RuntimeError):  # the store may have gone first
                self._send(replace(self.beat, left=True, waits_s=0.0))

    def _watch(self) -> None:
        heard = time.monotonic()
        while not self.stopped.wait(self.limits.beat_s):
            self.standing.look()
            count, calls = self.beat.count + 1, self.standing.calls()
            waits_s = self.standing.waits_s
            self.beat = replace(self.beat, count=count, calls=calls, waits_s=waits_s)
            elapsed_s, heard = time.monotonic() - heard, time.monotonic()
            try:
                self._send(self.beat)
                self._hear(elapsed_s)
            except RuntimeError:  # it has closed: rank 0 has ended
                break
            self.rounds += 1
        self.stopped.set()

    def _guard(self) -> None:
        """End where the store gives no answer at all: its client may wait without a limit."""
        seen, silent_s = 0, 0.0
        while not self.stopped.wait(self.limits.beat_s):
            silent_s = silent_s + self.limits.beat_s if self.rounds == seen else 0.0
            seen = self.rounds
            if silent_s > _STORE * self.limits.frozen_s:
                self._end(
                    "the store of the run, which rank 0 or its launcher holds, has given no answer "
                    f"for {silent_s:.0f} s (SHARDWISE_FROZEN_S): it is frozen or out of reach. "
                    f"Rank {self.rank} was in {self.beat.calls}"
                )

    def _hear(self, elapsed_s: float) -> None:
        heard = self._beat_of(self.next)
        for _ in range(self.size):
            if self.next != self.rank and not (heard and heard.left):
                break
            self.next = (self.next + 1) % self.size
            heard = self._beat_of(self.next)
        else:  # all others have left
            return
        if why := self.listener.hear(heard, elapsed_s):
            self._claim(f"rank {self.next} failed: {self.listener.frozen(why)}")
        elif warning := self.listener.warning(self.next):
            print(warning, file=sys.stderr, flush=True)
        if self.beat.waits_s >= self.limits.patience_s:
            found = {rank: self._beat_of(rank) for rank in range(self.size)}
            late = hung({r: b for r, b in found.items() if b is not None}, self.limits.patience_s)
            if late is not None:
                self._claim(f"rank {late[0]} failed: {late[1]}")

    def _send(self, beat: Beat) -> None:
        self.store.set(f"beat/{self.rank}", beat.text())

    def _beat_of(self, rank: int) -> Beat | None:
        key = f"beat/{rank}"
        return parse(self.store.get(key).decode()) if self.store.check([key]) else None

    def _claim(self, text: str) -> None:
        """End this process; the first to do so says why."""
        first = self.store.add("ended", 1) == 1
        self._end(text if first else "")

    def _end(self, text: str) -> None:
        if text and not self.stopped.is_set():
            print(text, file=sys.stderr)
        if not self.stopped.is_set():
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(1)


def watch_peers(store: Store, rank: int, size: int, limits: Limits) -> Peers | None:
    """The watch, where there are others, and the store can be asked by several at once."""
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    if size == 1 or not isinstance(inner, TCPStore):
        return None
    return Peers(PrefixStore("shardwise/beats", store), rank, size, limits)
