"""Ranks that watch each other's heartbeats.

    rank 0  <---->  rank 1, rank 2, ...       the first rank that has not left watches all others,
                                              and they watch it

Heartbeats go through the run's store.  Whoever finds a rank frozen, lost or hanging reports it to
our launcher, which kills the ranks, or else to the others through the store.  Then every rank
prints why within a heartbeat, lingers until the others have read it too, and exits, with or without
a launcher that kills.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError

from shardwise.comm.call_stack import CallStack
from shardwise.comm.heartbeat import Heartbeat, HeartbeatMonitor, find_hang
from shardwise.comm.host import host_number
from shardwise.comm.limits import Limits
from shardwise.comm.rendezvous import launched

PEERS = "peers"  # the name of the threads
_FAILED = "shardwise/failed"  # the key that our launcher reads
_STORE = 4  # times `frozen_s` without an answer from the store
_LINGER = 3  # heartbeats in which every rank reads why the run ends
_GLANCE_S = 0.05


class Peers:
    """A thread that sends this rank's heartbeats and watches other ranks', until `stop`.

    Another guards the store, unless it is in our launcher, whose end a rank notices by its pipe.
    """

    def __init__(self, store: Store, rank: int, size: int, limits: Limits, gpu: int | None) -> None:
        self.rank, self.size, self.limits = rank, size, limits
        connected: Any = PrefixStore("shardwise/heartbeats", store)
        self.store: Store = connected.clone()  # a wait on a shared connection would block others
        self.store.set_timeout(timedelta(seconds=limits.frozen_s))
        self.launcher = _innermost(self.store) if launched() else None
        self.call_stack = CallStack(threading.get_ident(), gpu)
        self.beat = Heartbeat(0, os.getpid(), host_number())
        self.monitors = [HeartbeatMonitor(limits, self.beat.host) for _ in range(size)]
        self.first = 0  # the first rank that has not left
        self.rounds, self.closed = 0, ""
        self._send(self.beat)
        self.stopped = threading.Event()
        work = (self._run,) if self.launcher else (self._run, self._guard_store)
        self.threads = [threading.Thread(target=each, name=PEERS, daemon=True) for each in work]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """End the threads and report that this rank leaves.

        So no thread holds a frame of the program while Python shuts down.  A frame can keep a
        process group alive.  If a thread destroyed that group then, the process would abort.
        """
        self.stopped.set()
        for thread in self.threads:
            thread.join(2 * self.limits.frozen_s)
        if self.threads[0].is_alive():  # it waits for the store
            return
        with suppress(RuntimeError):  # the store may have gone first
            self._send(replace(self.beat, left=True, waits_s=0.0, idle_s=0.0))
            last = time.monotonic() + 2 * self.limits.heartbeat_s
            while self.rank == 0 and self.launcher is None and time.monotonic() < last:
                if all(beat.left for beat in self._heartbeats(range(self.size)).values()):
                    return
                time.sleep(_GLANCE_S)  # ranks that stay read that rank 0 leaves: its store closes

    def _run(self) -> None:
        heard = time.monotonic()
        while not self.stopped.wait(self.limits.heartbeat_s):
            elapsed_s, heard = time.monotonic() - heard, time.monotonic()
            try:
                waits_s, idle_s = self.call_stack.waits()
                seen = {"calls": self.call_stack.calls(), "waits_s": waits_s, "idle_s": idle_s}
                self.beat = replace(self.beat, count=self.beat.count + 1, **seen)
                self._send(self.beat)
                self._check(elapsed_s)
                self.rounds += 1
            except DistNetworkError as error:
                self.closed = str(error).splitlines()[0]
            except RuntimeError:  # the store did not answer in time, or the GPU has failed
                continue

    def _guard_store(self) -> None:
        """Exit if the store closes before rank 0 has left, or does not answer.

        Its client may wait for an answer forever.
        """
        seen, silent_s = 0, 0.0
        while not self.stopped.wait(self.limits.heartbeat_s):
            silent_s = silent_s + self.limits.heartbeat_s if self.rounds == seen else 0.0
            seen = self.rounds
            if not self.first and silent_s > self.limits.frozen_s * (1 if self.closed else _STORE):
                why = f"closed, and rank 0 has not left the run: it was lost ({self.closed})"
                if not self.closed:
                    why = f"not answered for {silent_s:.0f} s (SHARDWISE_FROZEN_S). Its process is "
                    why += "frozen or unreachable"
                self._end(
                    f"the run's store, on rank 0 or in its launcher, has {why}. "
                    f"Rank {self.rank} was in {self.call_stack.calls()}"
                )

    def _check(self, elapsed_s: float) -> None:
        if self.store.check(["ended"]):
            self._leave_together(self.store.get("ended").decode())
        watches_all = self.first == self.rank
        beats = self._heartbeats(range(self.size) if watches_all else [self.first])
        if not watches_all and beats and beats[self.first].left:
            self.first += 1
            return
        found = ((rank, self.monitors[rank].receive(beats[rank], elapsed_s)) for rank in beats)
        failed = next((each for each in found if each[1]), None)
        if watches_all and beats and not failed:
            failed = find_hang(beats, self.limits.patience_s)
        if failed:
            self._claim(failed[0], failed[1])

    def _send(self, beat: Heartbeat) -> None:
        self.store.set(f"beat/{self.rank}", beat.text())

    def _heartbeats(self, ranks: Iterable[int]) -> dict[int, Heartbeat]:
        """The latest heartbeats; none while one of these ranks has not begun."""
        keys = {rank: f"beat/{rank}" for rank in ranks}
        if not self.store.check(list(keys.values())):
            return {}
        texts = self.store.multi_get(list(keys.values()))
        return {rank: Heartbeat(**json.loads(text)) for rank, text in zip(keys, texts, strict=True)}

    def _claim(self, rank: int, why: str) -> None:
        """End the run.  Only the first rank that does so prints all of why."""
        if self.launcher is not None:
            self.launcher.compare_set(_FAILED, "", json.dumps([rank, why]))
            return
        text = f"rank {rank} failed: {why}"
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
        if self.stopped.is_set():
            return
        print(text, end="\n" if text else "", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)


def watch_peers(
    store: Store, rank: int, size: int, limits: Limits, gpu: int | None
) -> Peers | None:
    """Start watching, if there are other ranks and the store supports concurrent clients."""
    if size == 1 or not isinstance(_innermost(store), TCPStore):
        return None
    return Peers(store, rank, size, limits, gpu)


def _innermost(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def reported_failure(store: TCPStore) -> tuple[int, str] | None:
    """What a rank has reported to our launcher: a rank that failed, and the error."""
    return tuple(json.loads(store.get(_FAILED))) if store.check([_FAILED]) else None
