"""The start of a run: all ranks connect to one store, or the error names the ranks that did not.

    rank 0, or torchrun's agent   serves a store at MASTER_ADDR, MASTER_PORT
    every rank                    adds its number to the store, and waits until all have

The store of torchrun's agent outlives the ranks, and a restarted run meets at the same address, so
every meeting has a fresh id.  The agent's count of restarts cannot be that id: an agent does not
count a restart for another host's sake, so the counts of two hosts differ.

    rank r    asks/r = nonce  ------------->  rank 0 makes the id, and answers every nonce
              round/nonce      <-------------  round/nonce = id
              start/id/...  run/id/...         the keys of this meeting alone

A nonce is new for every meeting, so no rank reads the id of an earlier one.  What a dead rank of an
earlier round asked is answered too, but only ranks that read their answer are counted.

torch would wait for minutes and not say for which rank.  Under our launcher a missing rank can only
be slow (the launcher notices one that exits), so there the time limit is that of a collective.
"""

import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shardwise.comm.limits import Limits
from shardwise.comm.rendezvous import Start, launched
from shardwise.core.errors import InputError, bad

_GLANCE_S = 0.05
_SHOWN = 8  # ranks named in an error


def meet(start: Start, limits: Limits) -> Store:
    """Connect all ranks of `start`, and return their store.

    Raises:
        InputError: the host does not exist, the port is in use, two processes have the same rank,
            the address did not answer within `limits.start_s`, or some ranks did not start.
    """
    host, port = _address(start)
    limit_s = limits.patience_s if launched() else limits.start_s
    deadline = time.monotonic() + limit_s
    waited = f"rank {start.rank} waited {limit_s:.0f} s (SHARDWISE_START_TIMEOUT_S)"
    ours = start.rank == 0 and not _of_agent()
    _reach(host, port, deadline, waited, ours)
    store = _store(host, port, start.size, deadline, waited, ours)
    asked = PrefixStore("shardwise", store)
    try:
        called = uuid.uuid4().hex if start.rank == 0 else _ask(asked, start, deadline, waited)
        if start.rank == 0:
            asked.set("round", called)
        _gather(asked, called, start, deadline, waited)
    except RuntimeError as error:  # the rank that served the store has given up
        raise InputError(f"{waited} for {start.size} ranks; the run's store has closed") from error
    return PrefixStore(f"shardwise/run/{called}", store)


def _address(start: Start) -> tuple[str, int]:
    if start.address != "env://":
        found = urlparse(start.address or "")
        return found.hostname or "", found.port or 0
    port = os.environ["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise bad(f"MASTER_PORT={port}", "a port from 1 to 65535", "export MASTER_PORT=29500")
    return os.environ["MASTER_ADDR"], int(port)


def _of_agent() -> bool:
    """Whether torchrun's agent serves the store instead of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _reach(host: str, port: int, deadline: float, waited: str, ours: bool) -> None:
    """Return when a server listens at the address.  If it is `ours`, check only the host's name.

    torch's own client would print warnings while it retries.
    """
    why = ""
    while time.monotonic() < deadline:
        try:
            if ours:
                socket.getaddrinfo(host, port)
            else:
                socket.create_connection((host, port), deadline - time.monotonic()).close()
            return
        except socket.gaierror as error:
            raise bad(
                f"MASTER_ADDR={host}, which is the address of no host ({error.strerror})",
                "the name or address of rank 0's host, the same on all ranks",
                "export MASTER_ADDR=127.0.0.1 if all ranks are on one host",
            ) from error
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(_GLANCE_S)
    raise InputError(
        f"{waited} for an answer from {host}, port {port}: {why}. Rank 0 or its launcher has not "
        "started, or MASTER_ADDR and MASTER_PORT are wrong on this rank"
    )


def _store(host: str, port: int, size: int, deadline: float, waited: str, ours: bool) -> TCPStore:
    found: list[Any] = []

    def _connect() -> None:
        try:
            rest = timedelta(seconds=max(1.0, deadline - time.monotonic()))
            flags = {"is_master": ours, "wait_for_workers": False, "multi_tenant": ours}
            found.append(TCPStore(host, port, size, timeout=rest, **flags))
        except RuntimeError as error:
            found.append(error)

    # in a thread, because TCPStore waits forever for a server that accepts but never answers
    thread = threading.Thread(target=_connect, name="start", daemon=True)
    thread.start()
    thread.join(max(1.0, deadline - time.monotonic()))
    if found and isinstance(found[0], TCPStore):
        return found[0]
    why = str(found[0]).splitlines()[0] if found else "it accepts connections but does not answer"
    if "EADDRINUSE" in why:
        raise bad(
            f"MASTER_PORT={port}, which another program on this host uses",
            "a port that is free on rank 0's host",
            f"export MASTER_PORT={_free_port()} on all ranks",
        )
    raise InputError(
        f"{waited} for the run's store at {host}, port {port}, where another program seems to "
        f"listen: {why}. Use a MASTER_PORT that is free on rank 0's host"
    )


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def _ask(store: Store, start: Start, deadline: float, waited: str) -> str:
    """The id of this meeting, from rank 0."""
    nonce = uuid.uuid4().hex
    store.set(f"asks/{start.rank}", nonce)
    while not store.check([f"round/{nonce}"]):
        late = time.monotonic() > deadline
        _refuse_second(store, start.rank, late)
        if late:
            raise InputError(_missing(start, waited, "rank 0"))
        time.sleep(_GLANCE_S)
    return store.get(f"round/{nonce}").decode()


def _refuse_second(store: Store, rank: int, late: bool) -> None:
    """Raise InputError if another process is this rank of the round that rank 0 is in.

    An agent's store may still know a round that has ended: there only one that is `late` is sure.
    """
    if not store.check(["round"]) or (_of_agent() and not late):
        return
    key = f"start/{store.get('round').decode()}/name/{rank}"
    if store.check([key]) and (late or store.get(key).decode() != _name()):
        raise _second(rank)


def _second(rank: int) -> InputError:
    return bad(
        f"two processes with rank {rank} at one address ({_name()} is the second)",
        "one process for each rank, and a different port for each run",
        "a different RANK, or another MASTER_PORT",
    )


def _name() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}"


def _answer(store: Store, called: str, ranks: list[int]) -> None:
    """Tell `ranks` the id of this meeting, as far as they have asked."""
    for rank in ranks:
        if store.check([f"asks/{rank}"]):
            store.set(f"round/{store.get(f'asks/{rank}').decode()}", called)


def _gather(asked: Store, called: str, start: Start, deadline: float, waited: str) -> None:
    """Return when all ranks have started.  The first rank to give up tells the others."""
    rank, size = start.rank, start.size
    store = PrefixStore(f"start/{called}", asked)
    if store.add(f"times/{rank}", 1) > 1:
        raise _second(rank)
    store.set(f"name/{rank}", _name())
    store.add("arrived", 1)
    while store.add("arrived", 0) < size and not store.check(["missing"]):
        absent = [r for r in range(size) if not store.check([f"times/{r}"])] if rank == 0 else []
        _answer(asked, called, absent)
        if time.monotonic() > deadline:
            absent = [r for r in range(size) if not store.check([f"times/{r}"])]
            store.set("missing", _named(absent))
            break
        time.sleep(_GLANCE_S)
    if not store.check(["missing"]):
        return
    absent_ranks = store.get("missing").decode()
    with suppress(RuntimeError):
        store.add("told", 1)
        last = time.monotonic() + 2.0
        while rank == 0 and time.monotonic() < last and store.add("told", 0) < _came(store, size):
            time.sleep(_GLANCE_S)
    raise InputError(_missing(start, waited, absent_ranks))


def _missing(start: Start, waited: str, ranks: str) -> str:
    return (
        f"{waited} for {start.size} ranks (WORLD_SIZE), and {ranks} did not start. Start "
        "WORLD_SIZE processes, with ranks from 0 up and the same MASTER_ADDR and MASTER_PORT. If "
        "they start far apart, set SHARDWISE_START_TIMEOUT_S"
    )


def _came(store: Store, size: int) -> int:
    return min(size, store.add("arrived", 0))


def _named(ranks: list[int]) -> str:
    text = ", ".join(map(str, ranks[:_SHOWN]))
    text += f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"
