"""A world and its axes, over whatever torch.distributed is, and the DeviceMesh of torch."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardwise as sw
from shardwise.comm.gloo.gloo import Gloo
from shardwise.comm.move import all_reduce
from shardwise.comm.start.rendezvous import local_rank
from shardwise.comm.transport import Links
from shardwise.comm.world import World, alone, init, traced
from shardwise.core.errors import InputError
from shardwise.core.mesh import Mesh
from tests.pool import run_gloo, run_threads


def test_an_axis_that_the_mesh_has_not_is_one_of_one_rank():
    """Nobody asks whether a parallelism is on: the axis is there, and free."""
    world = alone()
    axis = world.axis("tp")
    assert (axis.name, axis.rank, axis.size) == ("tp", 0, 1)
    x = torch.ones(3)
    assert all_reduce(x, axis) is x
    assert world.ledger.lines == {}


def test_without_any_environment_the_world_has_one_rank(monkeypatch: pytest.MonkeyPatch):
    """`init()` in a plain Python process is a world of one on the processor or its first GPU."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    world = init()
    assert (world.rank, world.size, str(world.everyone.name)) == (0, 1, "world")
    world.barrier()
    world.close()


def test_a_device_that_does_not_exist_is_refused():
    """An unknown device, and CUDA where there is none, name what may be written."""
    with pytest.raises(InputError, match="cpu or cuda"):
        init("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match='device = "cpu"'):
            init("cuda")


def test_a_mesh_gets_a_ledger_of_its_own():
    """Two engines on one world do not count each other's bytes."""
    world = traced(0, 4)
    one, two = world.on(Mesh.parse("dp4")), world.on(Mesh.parse("dp4"))
    all_reduce(torch.zeros(8), one.axis("dp"))
    assert one.ledger.sent_bytes() == 48 and two.ledger.sent_bytes() == 0
    assert one.everyone.ledger is one.ledger


@pytest.mark.parametrize("rank", [0, 3, 5])
def test_a_traced_world_knows_the_place_of_any_rank(rank: int):
    """Without any process the axes of rank 5 of 2 x 3 are where the mesh says."""
    mesh = Mesh.parse("dp_replicate2 dp_shard3")
    world = traced(rank, 6).on(mesh)
    here = {name: world.axis(name).rank for name, _ in mesh.axes}
    assert here == mesh.coordinate(rank)


def joined(world: World) -> tuple[int, int, int, int]:
    """Inside a process where torch.distributed runs already, `init` joins it."""
    found = init("cpu")
    found.barrier()
    x = all_reduce(torch.ones(1), found.everyone)
    found.close()  # begun by somebody else: left alone
    y = all_reduce(torch.ones(1), world.everyone)
    return found.rank, found.size, int(x.item()), int(y.item())


def test_init_uses_torch_distributed_as_it_finds_it():
    """The ranks are those of the group that runs already, which outlives the world."""
    assert run_gloo(2, joined) == [(0, 2, 2, 2), (1, 2, 2, 2)]


def own_links(world: World) -> bool:
    return isinstance(world.links, Links) and world.size == 3


def test_a_world_of_threads_is_a_world():
    """Threads are ranks like any other."""
    assert run_threads(3, own_links) == [True] * 3


def grouped(world: World) -> list[float]:
    """Sums over a group of the axis, and over an axis opened afterwards, twice."""
    found: list[float] = []
    for _ in range(2):
        here = world.on(Mesh.parse("tp4"))
        axes = here.within("tp", ((0,), (1,), (2, 3))), here.axis("tp")
        found += [all_reduce(torch.full((1,), 1.0 + world.rank), axis).item() for axis in axes]
    return found


@pytest.mark.parametrize("run", [run_threads, run_gloo])
def test_ranks_that_are_alone_open_the_groups_of_others_too(run: Callable[..., list[list[float]]]):
    """Groups of one axis may differ in size, and what is opened after them still fits together."""
    assert run(4, grouped) == [[own, 10, own, 10] for own in (1, 2, 7, 7)]


def redistributed(world: World) -> tuple[tuple[str, ...] | None, list[float]]:
    """A DTensor of 8 numbers, sharded over both axes and gathered by torch."""
    mesh = world.on(Mesh.parse("dp_replicate2 dp_shard2")).device_mesh()
    local = torch.arange(4.0) + 4 * mesh.get_local_rank("dp_shard")
    whole = DTensor.from_local(local, mesh["dp_shard"], [Shard(0)]).redistribute(
        placements=[Replicate()]
    )
    return mesh.mesh_dim_names, whole.to_local().tolist()


def test_torch_sees_the_axes():
    """What torch's DTensor gathers along an axis is what the axis's ranks hold, in their order."""
    for names, whole in run_gloo(4, redistributed):
        assert names == ("dp_replicate", "dp_shard")
        assert whole == [float(k) for k in range(8)]


def meshed(world: World) -> None:
    """Ask a world of threads for torch's mesh."""
    with pytest.raises(ValueError, match="without a process group"):
        world.on(Mesh.parse("dp2")).device_mesh()


def test_threads_have_no_device_mesh():
    """A world that is not of torch.distributed says so."""
    run_threads(2, meshed)


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
