"""An initialised torch.distributed is used, however it was initialised."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch._C._distributed_c10d import HashStore, TCPStore

import shardwise as sw
from shardwise.comm.gloo import Gloo
from shardwise.comm.rendezvous import local_rank


def _begin(how: str, rank: int, folder: str, port: int) -> None:
    """Initialise torch.distributed as a user's program may, on two ranks."""
    if how == "file":
        dist.init_process_group("gloo", f"file://{folder}/file", rank=rank, world_size=2)
    elif how == "no backend":
        dist.init_process_group(init_method=f"file://{folder}/none", rank=rank, world_size=2)
    elif how == "tcp":
        store = TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    else:  # each rank a world of its own, as under a test runner
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


WAYS = ["file", "no backend", "tcp", "hash"]


def _ways(rank: int, folder: str, port: int, outbox: Any) -> None:
    """What each way gives: rank and size of the world, and the mean of both ranks' gradients."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")  # and no MASTER_ADDR, no MASTER_PORT
    found = []
    for how in WAYS:
        _begin(how, rank, folder, port)
        world = sw.init("cpu")
        layer = nn.Linear(1, 1, bias=False)
        model = sw.DDP(layer)
        (model(torch.ones(1, 1)) * (rank + 1.0)).sum().backward()
        assert layer.weight.grad is not None
        assert world.size == 1 or isinstance(world.everyone.transport, Gloo)
        found.append((world.rank, world.size, layer.weight.grad.item()))
        dist.barrier()
        dist.destroy_process_group()
    outbox.put((rank, found))


@pytest.mark.full
def test_a_group_is_used_however_it_was_initialised(tmp_path: Path) -> None:
    """A file store, a TCPStore, no named backend, a HashStore: none asks for the environment."""
    context = mp.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outbox = context.Queue()
    args = [(rank, str(tmp_path), port, outbox) for rank in range(2)]
    processes = [context.Process(target=_ways, args=each, daemon=True) for each in args]
    for process in processes:
        process.start()
    found = dict(outbox.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    for rank in range(2):
        assert found[rank] == [*[(rank, 2, 1.5)] * 3, (0, 1, rank + 1.0)]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"LOCAL_RANK": "1"}, 1),
        ({"SLURM_LOCALID": "2"}, 2),
        ({"LOCAL_RANK": "x"}, 5),
        ({}, 5),
    ],
)
def test_the_local_rank_is_what_a_launcher_says(told: dict[str, str], expected: int) -> None:
    """Else it is the rank, as on one host."""
    assert local_rank(5, told) == expected
