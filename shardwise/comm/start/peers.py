"""Ranks that meet at the start of a run, and then watch each other's heartbeats.

At the start all connect to the store of rank 0 or of torchrun's agent. Every other rank asks rank 0
for the id of the meeting, until it answers: when all have asked, or when the time is over.

    asks/r       = nonce          ------------>  rank 0 waits for all of these
    answer/nonce = id, or who is missing  <----  run/id/...: the keys of this run alone

The agent's store outlives the ranks, so rank 0 first removes what earlier ranks have asked: one who
lives asks again.  An agent's count of restarts cannot be the id: another host's is no restart here.

    rank 0  <---->  rank 1, rank 2, ...       the first rank that has not left watches all others,
                                              and they watch it

A monitor ends the run in these cases:

    no heartbeat for `frozen_s`, and the process, on the same host, is stopped or has ended
    no heartbeat for 3 `frozen_s`, and the process neither uses nor waits for a processor; of a
      process on another host nothing but the heartbeats is known
    some ranks have waited for `patience_s` in one collective, and another does not join it
    every rank that has not left waits in a collective, and no message moves

Heartbeats, and the report of the rank that finds another one frozen, lost or hanging, go through
the run's store.  Our launcher reads the report and kills the ranks; without it every rank reads it,
prints why the run ends, and exits.
"""

import contextlib
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError, distributed_c10d

from shardwise.comm.ledger import Ledger
from shardwise.comm.start.rendezvous import Limits, Start, host_number, launched, process
from shardwise.core.errors import InputError
from shardwise.core.tools.arguments import rank_names

PEERS = "peers"  # the name of the threads
_PREFIX, _REPORT = "shardwise/heartbeats", "report"
_UNSURE = 3  # times `frozen_s`, where a process may be computing, or the store may be slow
_LINGER = 3  # heartbeats in which every rank reads why the run ends
_GLANCE_S = 0.05
#: How long every rank waits before the run ends: if some rank has left, and if none has.
_LEFT_S, _ALL_S = 3.0, 10.0


@dataclass(frozen=True)
class Heartbeat:
    """The `count`-th heartbeat of a rank, from process `pid` on `host` (see `host_number`).

    calls     where the rank is; it has waited for `waits_s` in one collective, for `idle_s` of them
              without the use of a processor
    left      the rank has ended normally, and sends no more
    sent      the last calls that its ledger counts
    """

    count: int
    pid: int
    host: int = 0
    calls: str = ""
    waits_s: float = 0.0
    idle_s: float = 0.0
    left: bool = False
    sent: str = ""


class HeartbeatMonitor:
    """Watches one rank; `host` is the monitor's own host number."""

    def __init__(self, limits: Limits, host: int) -> None:
        self.limits, self.host = limits, host
        self.beat: Heartbeat | None = None
        self._silent_s = self._cpu_s = 0.0

    def receive(self, beat: Heartbeat, elapsed_s: float) -> str:
        """Take the latest heartbeat, `elapsed_s` after the previous call. Returns the error of a
        rank that is frozen, or "".  If the monitor itself was stopped, that time does not count.
        """
        local = beat.host == self.host and self.host
        state, cpu_s = process(beat.pid) if local else ("?", 0.0)
        runs = state in "Rt" or cpu_s != self._cpu_s  # t: in a debugger
        self._silent_s += min(elapsed_s, 2 * self.limits.heartbeat_s)
        if beat.left or beat != self.beat or runs:
            self._silent_s = 0.0
        self.beat, self._cpu_s = beat, cpu_s
        sure = state in "TXZ"
        if self._silent_s < (1 if sure else _UNSURE) * self.limits.frozen_s:
            return ""
        unsure = "does not run" if local else "is on another host, which is frozen or unreachable"
        why = "has ended without leaving the run (killed, perhaps)" if sure else unsure
        why = "is stopped (by SIGSTOP or the like)" if state == "T" else why
        return (
            f"its process {beat.pid} {why}. It has sent no heartbeat for {self._silent_s:.0f} s "
            "(SHARDWISE_FROZEN_S), and the other ranks would wait for it forever. It was last in "
            f"{beat.calls or 'its start'}{_sent(beat)}"
        )


def find_hang(heartbeats: Mapping[int, Heartbeat], patience_s: float) -> tuple[int, str] | None:
    """A rank that makes others wait too long, or if all wait the longest waiting; and the error."""
    present = {rank: beat for rank, beat in heartbeats.items() if not beat.left}
    left = sorted(heartbeats.keys() - present.keys())
    longest = max(present, key=lambda rank: present[rank].waits_s)
    if present[longest].waits_s >= patience_s:
        late = sorted(rank for rank, beat in present.items() if not beat.waits_s)
        cause = late[0] if late else longest
        named = f"{rank_names(late)} did not join it" if late else "no rank can continue"
        why = (
            f"rank {longest} has waited for {patience_s:.0f} s (SHARDWISE_PATIENCE_S) in one "
            f"collective, and {named}"
        )
    elif min(beat.idle_s for beat in present.values()) >= (_LEFT_S if left else _ALL_S):
        cause = longest
        why = "every rank is waiting in a collective that no other rank will join"
        if left:
            why = f"{rank_names(left)} ended the program, and this collective waits for all ranks"
        why += ". All ranks must run the same number of steps"
    else:
        return None
    places = [
        f"  rank {rank}: {'has ended' if beat.left else beat.calls or 'in its start'}{_sent(beat)}"
        for rank, beat in sorted(heartbeats.items())
    ]
    return cause, f"{why}. Where the main thread of each rank is:\n" + "\n".join(places)


def _sent(beat: Heartbeat) -> str:
    return f"; its last calls: {beat.sent}" if beat.sent else ""


class Peers:
    """A thread that sends this rank's heartbeats and watches other ranks', until `stop`."""

    def __init__(self, store: Store, rank: int, size: int, limits: Limits, gpu: int | None) -> None:
        self.rank, self.size, self.limits = rank, size, limits
        self.launched = launched()  # then the store is of this run alone, and read by the launcher
        connected: Any = PrefixStore(_PREFIX, _innermost(store) if self.launched else store)
        self.store: Store = connected.clone()  # a wait on a shared connection would block others
        self.store.set_timeout(timedelta(seconds=limits.frozen_s))
        self.call_stack = CallStack(threading.get_ident(), gpu)
        self.beat = Heartbeat(0, os.getpid(), host_number())
        self.monitors = [HeartbeatMonitor(limits, self.beat.host) for _ in range(size)]
        self.ledgers = WeakSet[Ledger]()
        self.first = 0  # the first rank that has not left
        self.rounds, self.closed = 0, ""
        self._send(self.beat)
        self.stopped = threading.Event()
        work = (self._run,) if self.launched else (self._run, self._guard_store)
        self.threads = [threading.Thread(target=each, name=PEERS, daemon=True) for each in work]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """End the threads and report that this rank leaves.
        A thread that holds a frame of the program while Python shuts down may keep a process group
        alive. If it destroyed that group then, the process would abort.
        """
        self.stopped.set()
        for thread in self.threads:
            thread.join(2 * self.limits.frozen_s)
        if self.threads[0].is_alive():  # it waits for the store
            return
        with suppress(RuntimeError):  # the store may have gone first
            self._send(replace(self.beat, left=True, waits_s=0.0, idle_s=0.0))
            last = time.monotonic() + 2 * self.limits.heartbeat_s
            while self.rank == 0 and not self.launched and time.monotonic() < last:
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
                last = max(tuple(self.ledgers), key=lambda each: each.begun_at, default=Ledger())
                seen["sent"] = last.recent()
                self.beat = replace(self.beat, count=self.beat.count + 1, **seen)
                self._send(self.beat)
                self._check(elapsed_s)
                self.rounds += 1
            except DistNetworkError as error:  # for good; torch prints a page for each attempt
                self.closed = str(error).splitlines()[0]
                return
            except RuntimeError:  # the store did not answer in time, or the GPU has failed
                continue

    def _guard_store(self) -> None:
        """Exit if the store closes before rank 0 has left, or does not answer."""
        seen, silent_s = 0, 0.0
        while not self.stopped.wait(self.limits.heartbeat_s):
            silent_s = silent_s + self.limits.heartbeat_s if self.rounds == seen else 0.0
            seen = self.rounds
            most_s = (1 if self.closed else _UNSURE) * self.limits.frozen_s
            if not self.first and silent_s > most_s:
                why = f"closed ({self.closed})" if self.closed else "not answered"
                self._end(
                    f"the run's store, on rank 0 or in its launcher, has {why}, since "
                    f"{silent_s:.0f} s (SHARDWISE_FROZEN_S): it was lost or is unreachable. "
                    f"Rank {self.rank} was in {self.call_stack.calls()}"
                )

    def _check(self, elapsed_s: float) -> None:
        if self.store.check([_REPORT]) and not self.launched:
            self._end_together(self.store.get(_REPORT))
        watches_all = self.first == self.rank
        beats = self._heartbeats(range(self.size) if watches_all else [self.first])
        if not watches_all and beats[self.first].left:
            self.first += 1
            return
        begun = [rank for rank, beat in beats.items() if beat.pid]
        found = ((rank, self.monitors[rank].receive(beats[rank], elapsed_s)) for rank in begun)
        failed = next((each for each in found if each[1]), None)
        if watches_all and not failed:
            failed = find_hang(beats, self.limits.patience_s)
        if failed:
            own = json.dumps(failed).encode()
            report = self.store.compare_set(_REPORT, "", own.decode())
            if not self.launched:
                self._end_together(report, whole=report == own)

    def _send(self, beat: Heartbeat) -> None:
        self.store.set(f"beat/{self.rank}", json.dumps(asdict(beat)))

    def _heartbeats(self, ranks: Iterable[int]) -> dict[int, Heartbeat]:
        """The latest heartbeats; of a rank that has not begun, one without a process."""
        keys = {rank: f"beat/{rank}" for rank in ranks}
        if not self.store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        texts = self.store.multi_get(list(keys.values()))
        beats = {rank: Heartbeat(**json.loads(x)) for rank, x in zip(keys, texts, strict=True)}
        return {rank: beats.get(rank, Heartbeat(0, 0)) for rank in ranks}

    def _end_together(self, report: bytes, *, whole: bool = False) -> None:
        """Print why the run ends (`whole`: the full report); exit when all ranks have read it."""
        text = "rank {} failed: {}".format(*json.loads(report))
        said = text if whole else f"rank {self.rank} ends: {text.splitlines()[0]}"
        self._end(said, _LINGER * self.limits.heartbeat_s)

    def _end(self, text: str, linger_s: float = 0.0) -> None:
        if self.stopped.is_set():
            return
        print(text, file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if not self.stopped.wait(linger_s):
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
    key = f"{_PREFIX}/{_REPORT}"
    return tuple(json.loads(store.get(key))) if store.check([key]) else None


# --- the call stack of the main thread ------------------------------------------------------------

#: A thread inside one of these files waits for other ranks.
_COLLECTIVE_FILES = (str(Path(__file__).parent.parent), str(distributed_c10d.__file__))
_TORCH = str(Path(torch.__file__).parent)
_STDLIB = str(Path(contextlib.__file__).parent)
_NOT_THE_PROGRAM = (str(Path(__file__).parents[2]), _TORCH, _STDLIB, "<frozen ")
#: Files that call the program, whose frames and all outside them are not shown.
HIDDEN_FILES = (str(Path(__file__).with_name("worker.py")), "<frozen runpy>")
_BUSY = 0.2  # processors that a rank uses at most while no message moves
_GPU_S = 5.0  # time in one call, after which its wait may be for a GPU
_FIRST, _LAST = 3, 5  # calls shown of a deep stack
_MOST = 1000  # characters shown


class CallStack:
    """The call stack of thread `ident`, and for how long it has waited for other ranks.

        train.py:12 in main > engine.py:144 in step > collectives.py:80 in all_gather
                                                      ^ a collective: other ranks must join it

    To recognise a call it has seen before, it sets a mark on the frame.  Keeping the frame would
    keep all local variables of the stack alive, a step's activations among them.  The mark is
    `f_trace_lines`, which only a debugger reads; a frame has one, so create one CallStack a thread.
    """

    def __init__(self, ident: int, gpu: int | None = None) -> None:
        self.ident, self.gpu = ident, gpu
        self._at = -1  # the instruction inside the frame
        self._since = self._looked = self._busy = time.monotonic()
        self._cpu_s = 0.0

    def waits(self) -> tuple[float, float]:
        """How long the thread has been in one collective, and for how long no message has moved.
        A call in which it waits for its GPU counts too: NCCL's collectives return at once, and the
        rank waits in `.item()`, say.  No message moves while the process, without a GPU, is idle.
        """
        now, cpu_s = time.monotonic(), time.process_time()
        if cpu_s - self._cpu_s > _BUSY * (now - self._looked):
            self._busy = now
        self._looked, self._cpu_s = now, cpu_s
        collective = collective_frame(self.ident)
        frame = collective or sys._current_frames().get(self.ident)
        if frame is None or self._at != frame.f_lasti or frame.f_trace_lines:
            self._since = now
        if frame is not None:
            self._at, frame.f_trace_lines = frame.f_lasti, False
        stays_s = now - self._since
        if collective is None and (stays_s < _GPU_S or not _is_busy(self.gpu)):
            return 0.0, 0.0
        return stays_s, 0.0 if self.gpu is not None else min(stays_s, now - self._busy)

    def calls(self) -> str:
        """The calls of the stack, outermost first, without those inside torch."""
        frame, found = sys._current_frames().get(self.ident), list[str]()
        while frame is not None and frame.f_code.co_filename not in HIDDEN_FILES:
            file = frame.f_code.co_filename
            if not found or not file.startswith((_TORCH, "<frozen ")):
                name = "/".join(Path(file).parts[-2:])
                found.append(f"{name}:{frame.f_lineno} in {frame.f_code.co_name}")
            frame = frame.f_back
        found.reverse()
        if len(found) > _FIRST + _LAST:
            found[_FIRST:-_LAST] = ["..."]
        return " > ".join(found)[-_MOST:]


def _is_busy(gpu: int | None) -> bool:
    return gpu is not None and not torch.cuda.default_stream(gpu).query()


def collective_frame(ident: int) -> FrameType | None:
    """The thread's outermost frame in a collective, else None.  Do not keep it: see CallStack."""
    frame, outermost = sys._current_frames().get(ident), None
    while frame is not None and frame.f_code.co_filename.startswith(_COLLECTIVE_FILES):
        frame, outermost = frame.f_back, frame
    return outermost


def place() -> str:
    """The caller outside comm/ and torch: `step (loop.py:12), from main (train.py:3)`."""
    frames = [(frame, frame.f_code.co_filename) for frame, _ in walk_stack(sys._getframe(1))]
    inside = _COLLECTIVE_FILES[0], _TORCH
    function = next((f for f, file in frames if not file.startswith(inside)), frames[0][0])
    users = next((f for f, file in frames if not file.startswith(_NOT_THE_PROGRAM)), function)
    return ", from ".join(
        f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        for frame in dict.fromkeys((function, users))
    )


# --- the start: all ranks meet --------------------------------------------------------------------

_TOLD_S = 1.0  # in which the others read who is missing, before rank 0 closes its store
_LATER_S = 5.0  # how much longer than rank 0 the others wait for its answer


def meet(start: Start, limits: Limits) -> Store:
    """Connect all ranks of `start`, and return their store.
    Our launcher notices a rank that exits, so there a missing rank is only slow, and the time limit
    is that of a collective.  Raises InputError, with the missing ranks, if they do not connect.
    """
    limit_s = limits.patience_s if launched() else limits.start_s
    deadline = time.monotonic() + limit_s
    waited = f"rank {start.rank} waited {limit_s:.0f} s (SHARDWISE_START_TIMEOUT_S)"
    ours = start.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    flags: Any = {"is_master": ours, "wait_for_workers": False, "multi_tenant": ours}
    flags["timeout"] = timedelta(seconds=limit_s)
    try:
        store = TCPStore(start.host, start.port, start.size, **flags)
    except RuntimeError as error:
        raise InputError(
            f"{waited} for the run's store at MASTER_ADDR={start.host}, MASTER_PORT={start.port}: "
            f"{str(error).splitlines()[0]}. Rank 0 or its launcher has not started, the address is "
            "wrong on this rank, or another program uses the port"
        ) from error
    asked = PrefixStore("shardwise", store)
    try:
        answer = (_ask if start.rank else _lead)(asked, start, deadline)
        if answer.startswith("rank"):
            raise InputError(
                f"{waited} for {start.size} ranks (WORLD_SIZE), and {answer} did not start. Start "
                "WORLD_SIZE processes, with ranks from 0 up and the same MASTER_ADDR and "
                "MASTER_PORT. If they start far apart, set SHARDWISE_START_TIMEOUT_S"
            )
    except RuntimeError as error:  # the rank that served the store has given up
        raise InputError(f"{waited} for {start.size} ranks; the run's store has closed") from error
    return PrefixStore(f"shardwise/run/{answer}", store)


def _ask(store: Store, start: Start, deadline: float) -> str:
    """What rank 0 answers: the id of this meeting, or the ranks that are missing."""
    nonce = uuid.uuid4().hex
    while time.monotonic() < deadline + _LATER_S:
        store.set(f"asks/{start.rank}", nonce)
        if store.check([f"answer/{nonce}"]):
            return store.get(f"answer/{nonce}").decode()
        time.sleep(_GLANCE_S)
    absent = [0, *_absent(store, start.size)]
    store.delete_key(f"asks/{start.rank}")
    return rank_names(absent)


def _lead(store: Store, start: Start, deadline: float) -> str:
    for rank in range(start.size):
        store.delete_key(f"asks/{rank}")
    while (absent := _absent(store, start.size)) and time.monotonic() < deadline:
        time.sleep(_GLANCE_S)
    answer = rank_names(absent) if absent else uuid.uuid4().hex
    for rank in set(range(1, start.size)).difference(absent):
        store.set(f"answer/{store.get(f'asks/{rank}').decode()}", answer)
    time.sleep(_TOLD_S if absent else 0.0)
    return answer


def _absent(store: Store, size: int) -> list[int]:
    keys = [f"asks/{rank}" for rank in range(1, size)]
    if size == 1 or store.check(keys):
        return []
    return [rank for rank, key in enumerate(keys, start=1) if not store.check([key])]
