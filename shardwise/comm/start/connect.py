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
import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shardwise.comm.start.rendezvous import Limits, Start, launched
from shardwise.core.errors import InputError
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
    ours = start.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    flags = {"is_master": ours, "wait_for_workers": False, "multi_tenant": ours}
    try:
        rest = timedelta(seconds=limit_s)
        store = TCPStore(start.host, start.port, start.size, timeout=rest, **flags)
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
