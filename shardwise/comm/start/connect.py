"""The start of a run: all ranks connect to one store, or the error names the ranks that did not.

    rank 0, or torchrun's agent   serves a store at MASTER_ADDR, MASTER_PORT
    every other rank              asks rank 0 for the id of the meeting, again and again
    rank 0                        answers when all have asked, or when the time is over

    asks/r       = nonce          ------------>  rank 0 waits for all of these
    answer/nonce = id, or who is missing  <----  run/id/...: the keys of this run alone

The store of torchrun's agent outlives the ranks, and a restarted run meets at the same address.  So
rank 0 first removes what earlier ranks have asked: one that lives asks again.  The agent's count of
restarts cannot be the id, since an agent does not count a restart for another host's sake.
"""

import os
import socket
import threading
import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.utils.distributed import get_free_port

from shardwise.comm.start.rendezvous import Limits, Start, launched
from shardwise.core.errors import InputError, bad
from shardwise.core.tools.arguments import rank_names

_GLANCE_S = 0.05
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
    ours = start.rank == 0 and not _of_agent()
    _reach(start, deadline, waited, ours)
    store = _store(start, deadline, waited, ours)
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


def _of_agent() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _reach(start: Start, deadline: float, waited: str, ours: bool) -> None:
    """Return when a server listens at the address.  If it is `ours`, check only the host's name.
    torch's own client would print warnings while it retries.
    """
    host, port, why = start.host, start.port, ""
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


def _store(start: Start, deadline: float, waited: str, ours: bool) -> TCPStore:
    rest_s = max(1.0, deadline - time.monotonic())
    outcome: list[TCPStore | str] = ["it accepts connections but does not answer"]

    def _connect() -> None:
        flags = {"is_master": ours, "wait_for_workers": False, "multi_tenant": ours}
        try:
            rest = timedelta(seconds=rest_s)
            outcome[0] = TCPStore(start.host, start.port, start.size, timeout=rest, **flags)
        except RuntimeError as error:
            outcome[0] = str(error).splitlines()[0]

    # in a thread, because TCPStore waits forever for a server that accepts but never answers
    thread = threading.Thread(target=_connect, name="start", daemon=True)
    thread.start()
    thread.join(rest_s)
    result = outcome[0]
    if isinstance(result, TCPStore):
        return result
    if "EADDRINUSE" in result:
        raise bad(
            f"MASTER_PORT={start.port}, which another program on this host uses",
            "a port that is free on rank 0's host",
            f"export MASTER_PORT={get_free_port()} on all ranks",
        )
    raise InputError(
        f"{waited} for the run's store at {start.host}, port {start.port}, where another program "
        f"seems to listen: {result}. Use a MASTER_PORT that is free on rank 0's host"
    )


def _ask(store: Store, start: Start, deadline: float) -> str:
    """What rank 0 answers: the id of this meeting, or the ranks that are missing.
    Raises InputError if another process is this rank: in rank 0's store if the meeting is over, in
    an agent's, which may still know an earlier meeting, if in addition nobody answers in time.
    """
    nonce = uuid.uuid4().hex
    while True:
        store.set(f"asks/{start.rank}", nonce)
        late, over = time.monotonic() > deadline + _LATER_S, store.check(["over"])
        if store.check([f"answer/{nonce}"]):
            return store.get(f"answer/{nonce}").decode()
        if over and (late or not _of_agent()):
            name = f"{socket.gethostname()}, process {os.getpid()}"
            raise bad(
                f"two processes with rank {start.rank} at one address ({name} is the second)",
                "one process for each rank, and a different port for each run",
                "a different RANK, or another MASTER_PORT",
            )
        if late:
            absent = [0, *_absent(store, start.size)]
            store.delete_key(f"asks/{start.rank}")
            return rank_names(absent)
        time.sleep(_GLANCE_S)


def _lead(store: Store, start: Start, deadline: float) -> str:
    for rank in range(start.size):
        store.delete_key(f"asks/{rank}")
    while (absent := _absent(store, start.size)) and time.monotonic() < deadline:
        time.sleep(_GLANCE_S)
    answer = rank_names(absent) if absent else uuid.uuid4().hex
    for rank in set(range(1, start.size)).difference(absent):
        store.set(f"answer/{store.get(f'asks/{rank}').decode()}", answer)
    store.set("over", "")
    time.sleep(_TOLD_S if absent else 0.0)
    return answer


def _absent(store: Store, size: int) -> list[int]:
    keys = [f"asks/{rank}" for rank in range(1, size)]
    if size == 1 or store.check(keys):
        return []
    return [rank for rank, key in enumerate(keys, start=1) if not store.check([key])]
