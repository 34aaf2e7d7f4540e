"""Ranks that watch each other's heartbeats, for runs started by torchrun instead of our launcher.

    rank 0 -> rank 1 -> rank 2 -> rank 0       each watches the next rank that has not left

Heartbeats go through the run's store.  If neighbours freeze together (they share a host, say), a
live rank still watches the first of them.  A rank that finds another lost, or that has waited too
long, writes why in the store.  Every rank reads that within a heartbeat, prints it, lingers until
the others have read it too, and exits: with or without a launcher that kills, nobody stays.

A rank whose store has closed exits too, unless rank 0, which served it, has left normally.
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

from shardwise.comm.call_stack import CallStack
from shardwise.comm.heartbeat import Heartbeat, HeartbeatMonitor, find_hang, parse
from shardwise.comm.host import host_number
from shardwise.comm.limits import Limits

_STORE = 4  # times `frozen_s` without an answer from the store
_LINGER = 3  # heartbeats in which every rank reads why the run ends
_GLANCE_S = 0.05


class Peers:
    """A thread that sends this rank's heartbeats and watches another rank's, until `stop`."""

    def __init__(self, store: Store, rank: int, size: int, limits: Limits) -> None:
        self.rank, self.size, self.limits = rank, size, limits
        connected: Any = store
        self.store: Store = connected.clone()  # a wait on a shared connection would block others
        self.store.set_timeout(timedelta(seconds=limits.frozen_s))
        self.call_stack = CallStack(threading.get_ident())
        self.beat = Heartbeat(0, os.getpid(), host_number())
        self.next, self.monitor = rank, HeartbeatMonitor(limits, self.beat.host)
        self.rounds = 0
        self.zero_left = False  # whether rank 0 has left, after which its store may close
        self._send(self.beat)
        self.stopped = threading.Event()
        self.threads = [
            threading.Thread(target=each, name="peers", daemon=True)
            for each in (self._run, self._guard_store)
        ]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """End the threads and report that this rank leaves.  See HangDetector.stop."""
        self.stopped.set()
        for thread in self.threads:
            thread.join(2 * self.limits.frozen_s)
        if not self.threads[0].is_alive():
            with suppress(RuntimeError):  # the store may have gone first
                self._send(replace(self.beat, left=True, waits_s=0.0))
                if self.rank == 0:
                    self._wait_for_readers()

    def _wait_for_readers(self) -> None:
        """Give ranks that stay the time to read that rank 0 leaves, before its store closes."""
        last = time.monotonic() + 2 * self.limits.heartbeat_s
        while time.monotonic() < last:
            beats = [self._heartbeat_of(rank) for rank in range(self.size)]
            if all(beat is None or beat.left for beat in beats):
                return
            time.sleep(_GLANCE_S)

    def _run(self) -> None:
        heard = time.monotonic()
        while not self.stopped.wait(self.limits.heartbeat_s):
            self.call_stack.same_collective()
            count, calls = self.beat.count + 1, self.call_stack.calls()
            waits_s = self.call_stack.waits_s
            self.beat = replace(self.beat, count=count, calls=calls, waits_s=waits_s)
            elapsed_s, heard = time.monotonic() - heard, time.monotonic()
            try:
                self._send(self.beat)
                self._check(elapsed_s)
            except RuntimeError as error:  # it has closed: rank 0 or its launcher has ended
                self._lose_store(str(error).splitlines()[0])
                break
            self.rounds += 1

    def _lose_store(self, why: str) -> None:
        """Exit after a while, unless rank 0 has left or this rank ends by itself."""
        if self.zero_left or self.stopped.wait(self.limits.frozen_s):
            self.stopped.set()
            return
        self._end(
            "the run's store, on rank 0 or in its launcher, has closed, and rank 0 has not left "
            f"the run: it was lost ({why}). Rank {self.rank} was in {self.call_stack.calls()}"
        )

    def _guard_store(self) -> None:
        """Exit if the store stops answering: the store's client may then wait forever."""
        seen, silent_s = 0, 0.0
        while not self.stopped.wait(self.limits.heartbeat_s):
            silent_s = silent_s + self.limits.heartbeat_s if self.rounds == seen else 0.0
            seen = self.rounds
            if silent_s > _STORE * self.limits.frozen_s:
                self._end(
                    "the run's store, on rank 0 or in its launcher, has not answered for "
                    f"{silent_s:.0f} s (SHARDWISE_FROZEN_S). Its process is frozen or unreachable. "
                    f"Rank {self.rank} was in {self.beat.calls}"
                )

    def _check(self, elapsed_s: float) -> None:
        if self.store.check(["ended"]):
            self._leave_together(self.store.get("ended").decode())
        zero = self._heartbeat_of(0)
        self.zero_left = zero is not None and zero.left
        heard = self._heartbeat_of(self.next)
        for _ in range(self.size):
            if self.next != self.rank and not (heard and heard.left):
                break
            self.next = (self.next + 1) % self.size
            heard = self._heartbeat_of(self.next)
        else:  # all others have left
            return
        if why := self.monitor.receive(heard, elapsed_s):
            self._claim(f"rank {self.next} failed: {self.monitor.frozen(why)}")
        elif warning := self.monitor.warning(self.next):
            print(warning, file=sys.stderr, flush=True)
        if self.beat.waits_s >= self.limits.patience_s:
            found = {rank: self._heartbeat_of(rank) for rank in range(self.size)}
            late = find_hang(
                {r: b for r, b in found.items() if b is not None}, self.limits.patience_s
            )
            if late is not None:
                self._claim(f"rank {late[0]} failed: {late[1]}")

    def _send(self, beat: Heartbeat) -> None:
        self.store.set(f"beat/{self.rank}", beat.text())

    def _heartbeat_of(self, rank: int) -> Heartbeat | None:
        key = f"beat/{rank}"
        return parse(self.store.get(key).decode()) if self.store.check([key]) else None

    def _claim(self, text: str) -> None:
        """End the run.  Only the first rank that does so prints all of why."""
        first = self.store.compare_set("ended", "", text).decode()
        self._leave_together(first, whole=first == text)

    def _leave_together(self, text: str, *, whole: bool = False) -> None:
        """Print why the run ends, wait until all ranks have read it, and exit."""
        said = text if whole else f"rank {self.rank} ends: {text.splitlines()[0]}"
        if not self.stopped.is_set():
            print(said, file=sys.stderr, flush=True)
        self.stopped.wait(_LINGER * self.limits.heartbeat_s)
        self._end("")

    def _end(self, text: str) -> None:
        if text and not self.stopped.is_set():
            print(text, file=sys.stderr)
        if not self.stopped.is_set():
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(1)


def watch_peers(store: Store, rank: int, size: int, limits: Limits) -> Peers | None:
    """Start watching, if there are other ranks and the store supports concurrent clients."""
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    if size == 1 or not isinstance(inner, TCPStore):
        return None
    return Peers(PrefixStore("shardwise/heartbeats", store), rank, size, limits)
