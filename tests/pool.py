"""Worlds for tests: threads for logic, and pools of gloo processes started once and reused.

    run_threads(4, function, *args)    function(world, *args) on four threads
    run_gloo(4, function, *args)       the same on four processes; function is a module-level name
    run_gpu(4, function, *args)        the same on four processes, with a GPU each; where there are
                                       fewer, on four threads that share the first one

They return the results in rank order and raise RankError for the first rank that fails.
"""

import atexit
import gc
import multiprocessing
import os
import pickle
import queue
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.torch_links import TorchLinks
from shardwise.comm.transport import Links
from shardwise.comm.world import world_of
from shardwise.core.errors import RankError
from tests.comm.hosts import HOSTS, enter_host
from tests.forks import CONTEXT
from tests.threads import on_threads

CPU = torch.device("cpu")
#: How long a rank may take to answer, and how long once another rank has failed.
LONGEST_TEST_S, AFTER_A_FAILURE_S = 400, 5


def run_threads(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(world, *args)` on each of `ranks` threads."""
    return _on_threads(CPU, ranks, function, args)


def _on_threads(
    device: torch.device, ranks: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> list[Any]:
    def body(rank: int, links: Links) -> Any:
        # autograd has one thread for each GPU, in which a rank would wait for the others
        with torch.autograd.set_multithreading_enabled(device.type == "cpu"):
            return function(world_of(rank, ranks, device, links), *args)

    return on_threads(ranks, body)


def _follow_parent() -> None:
    """End this process when that of pytest ends, which may be killed and call no exit handler."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _serve(
    rank: int, ranks: int, address: str, backend: str, host: str, inbox: Any, outbox: Any
) -> None:
    if host:
        enter_host(host)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    threading.Thread(target=_follow_parent, name="parent", daemon=True).start()
    torch.set_num_threads(1)
    gpu = torch.device("cuda", rank) if backend == "nccl" else None
    if gpu is not None:  # as `init` does (comm/world.py)
        torch.cuda.set_device(gpu)
    start: dict[str, Any] = {"init_method": address, "rank": rank, "world_size": ranks}
    dist.init_process_group(backend, **start, timeout=timedelta(seconds=180), device_id=gpu)
    device = gpu or CPU
    world = world_of(rank, ranks, device, TorchLinks(ours=True, device_type=device.type))
    gc.freeze()  # modules need not be looked through after each test
    while True:
        function, args = inbox.get()
        # of this test alone, and gone with it
        links = TorchLinks(ours=False, device_type=device.type)
        try:
            value = function(replace(world, links=links), *args)
            world.barrier()
            gc.collect()
            links.close()
            outbox.put((rank, True, value))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test is told
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            outbox.put((rank, False, text))


class Pool:
    """`ranks` processes that wait for functions to run, on `hosts` if there are any, in blocks."""

    def __init__(self, ranks: int, backend: str = "gloo", hosts: Sequence[str] = ()) -> None:
        context, self.backend = CONTEXT, backend
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = HOSTS[0] if hosts else "127.0.0.1"
            address = f"tcp://{place}:{free.getsockname()[1]}"
        names = [hosts[rank * len(hosts) // ranks] if hosts else "" for rank in range(ranks)]
        self.inboxes = [context.Queue() for _ in range(ranks)]
        self.outbox = context.Queue()
        self.processes = [
            context.Process(
                target=_serve,
                args=(r, ranks, address, backend, names[r], inbox, self.outbox),
                daemon=True,
            )
            for r, inbox in enumerate(self.inboxes)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """Run `function(world, *args)` on every rank; results in rank order."""
        pickle.dumps((function, args))  # here an error is seen; in the queue's thread it is lost
        for inbox in self.inboxes:
            inbox.put((function, args))
        results: list[Any] = [None] * len(self.inboxes)
        failures: list[tuple[int, str]] = []
        silent = set(range(len(results)))
        while silent:
            try:
                patience_s = AFTER_A_FAILURE_S if failures else LONGEST_TEST_S
                rank, good, value = self.outbox.get(timeout=patience_s)
            except queue.Empty:
                silence = f"it did not answer within {patience_s} s"
                failures += [(rank, silence) for rank in sorted(silent)]
                break
            silent.remove(rank)
            results[rank] = value
            if not good:
                failures.append((rank, value))
        if failures:
            self.close()  # the ranks may be out of step: the next test gets a new pool
            raise RankError(*failures[0])
        return results

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        POOLS.pop((self.backend, len(self.inboxes)), None)


POOLS: dict[tuple[str, int], Pool] = {}


def run_gloo(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(world, *args)` on `ranks` gloo processes that outlive the test."""
    return pool_of("gloo", ranks).run(function, args)


def run_gpu(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(world, *args)` on as many GPUs, or on threads that share the first one. What it
    returns must be on the host.
    """
    if ranks > torch.cuda.device_count():
        return _on_threads(torch.device("cuda", 0), ranks, function, args)
    return pool_of("nccl", ranks).run(function, args)


def pool_of(backend: str, ranks: int) -> Pool:
    """The pool of that many processes, which is started once."""
    key = backend, ranks
    if key not in POOLS:
        POOLS[key] = Pool(ranks, backend)
    return POOLS[key]


@atexit.register
def _close_all() -> None:
    for pool in list(POOLS.values()):
        pool.close()
