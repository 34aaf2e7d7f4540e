"""A world, its axes and process groups, over whatever torch.distributed is, and across hosts."""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, TCPStore

import shardwise as sw
from benchmarks.meters import sent_bytes
from shardwise.comm.gloo.gloo import Gloo
from shardwise.comm.move import all_gather, all_reduce
from shardwise.comm.start.rendezvous import host_number
from shardwise.comm.torch_links import TorchLinks
from shardwise.comm.world import World, alone, device_of_rank, init, world_of
from shardwise.core.errors import InputError
from shardwise.core.mesh import Mesh
from shardwise.core.plan.plan import Plan
from tests import test_plans as facts
from tests.comm.hosts import joined_hosts
from tests.comm.test_start import free_port
from tests.engine.cases import squares
from tests.forks import CONTEXT
from tests.plan_runs import OnRanks, run_of
from tests.plans import CANONICAL, LONG
from tests.pool import CPU, Pool, run_gloo, run_threads


def test_worlds_of_one_process(monkeypatch: pytest.MonkeyPatch):
    """`init()` without any environment has one rank; an axis that the mesh has not is free."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    world = init()
    assert (world.rank, world.size, str(world.everyone.name)) == (0, 1, "world")
    world.barrier()
    world.close()
    axis = alone().axis("tp")
    assert (axis.name, axis.rank, axis.size) == ("tp", 0, 1)
    with pytest.raises(InputError, match="cpu or cuda"):
        init("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match='device = "cpu"'):
            init("cuda")


@pytest.mark.parametrize(
    "case",
    [
        (None, 1, 2, {"LOCAL_WORLD_SIZE": "2"}, "cuda:1"),
        (None, 0, 1, {"LOCAL_WORLD_SIZE": "2"}, "cpu"),  # as on the other rank
        ("cuda", 3, 1, {"CUDA_VISIBLE_DEVICES": "5"}, "cuda:0"),  # Slurm, one GPU for each task
        (None, 1, 1, {"CUDA_VISIBLE_DEVICES": "0", "TORCHELASTIC_RUN_ID": "a"}, "cpu"),
    ],
)
def test_each_rank_has_a_gpu_or_none_has(case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch):
    """A GPU for every local rank, also where each process sees its own alone; else the CPU."""
    asked, rank, gpus, variables, expected = case
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name in ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(device_of_rank(asked, rank)) == expected


def part_and_meet() -> None:
    world = init("cpu")
    world.barrier()
    world.close()
    init("cpu")


def test_a_process_has_one_world():
    """The ranks of one that was closed would not find each other again."""
    with pytest.raises(InputError, match=r"sw\.init\(\) after world\.close\(\)"):
        sw.spawn(part_and_meet, 2)


def grouped(world: World) -> list[list[float]]:
    """What a rank gathers along the axes of a grid; sums over groups of several sizes, twice."""
    grid = world.on(Mesh.parse("dp_replicate2 dp_shard2"))
    own = torch.tensor([float(world.rank)])
    found = [
        [x.item() for x in all_gather(own, grid.axis(name))]
        for name in ("dp_shard", "dp_replicate")
    ]
    for _ in range(2):
        here = world.on(Mesh.parse("tp4"))
        axes = here.within("tp", ((0,), (1,), (2, 3))), here.axis("tp")
        found.append([all_reduce(torch.full((1,), 1.0 + world.rank), axis).item() for axis in axes])
    return found


@pytest.mark.parametrize("run", [run_threads, run_gloo])
def test_each_axis_meets_its_own_line(run: Callable[..., list[list[list[float]]]]):
    """Neighbours inside, columns across; ranks that are alone open the groups of others too."""
    for rank, found in enumerate(run(4, grouped)):
        first, column, sums = rank // 2 * 2, rank % 2, [(1, 2, 7, 7)[rank], 10]
        assert found == [[first, first + 1], [column, column + 2], sums, sums]


def in_each_way(rank: int, folder: str, port: int, outbox: Any) -> None:
    """What each way gives: rank and size of the world, and the mean of both ranks' gradients."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")  # and no MASTER_ADDR, no MASTER_PORT
    two: dict[str, Any] = {"rank": rank, "world_size": 2}
    store, found = TCPStore("127.0.0.1", port, 2, is_master=rank == 0), []
    ways: list[dict[str, Any]] = [
        {"backend": "gloo", "init_method": f"file://{folder}/file"} | two,
        {"init_method": f"file://{folder}/none"} | two,
        {"backend": "gloo", "store": store} | two,
        # each rank a world of its own, as under a test runner
        {"backend": "gloo", "store": HashStore(), "rank": 0, "world_size": 1},
    ]
    for way in ways:
        dist.init_process_group(**way)
        world, layer = sw.init("cpu"), nn.Linear(1, 1, bias=False)
        (sw.DDP(layer)(torch.ones(1, 1)) * (rank + 1.0)).sum().backward()
        assert layer.weight.grad is not None
        assert world.size == 1 or isinstance(world.everyone.transport, Gloo)
        found.append((world.rank, world.size, layer.weight.grad.item()))
        world.close()  # the group was begun by somebody else, and is left alone
        dist.barrier()
        dist.destroy_process_group()
    outbox.put((rank, found))


def test_a_group_is_used_however_it_was_initialised(tmp_path: Path) -> None:
    """A file store, a TCPStore, no named backend, a HashStore: none asks for the environment."""
    outbox, port = CONTEXT.Queue(), free_port()
    for rank in range(2):
        args = rank, str(tmp_path), port, outbox
        CONTEXT.Process(target=in_each_way, args=args, daemon=True).start()
    for rank, found in (outbox.get(timeout=60) for _ in range(2)):
        assert found == [*[(rank, 2, 1.5)] * 3, (0, 1, rank + 1.0)]


# --- process groups -------------------------------------------------------------------------------


def counts() -> tuple[int, int, int]:
    gc.collect()
    files, threads = (len([*Path(f"/proc/self/{kind}").iterdir()]) for kind in ("fd", "task"))
    return files, threads, len(dist.distributed_c10d._world.pg_names)


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": sw.DDP,
    "FSDP": sw.FSDP,
    "NO_SHARD": lambda m: sw.FSDP(m, "NO_SHARD"),
    "Pipe": lambda m: sw.Pipe(m, 2),
}


def wrapped_twice() -> dict[str, list[list[int]]]:
    """For each wrapper: the numbers with one and two modules, and after each is unwrapped."""
    sw.init()
    return {how: numbers(wrap) for how, wrap in WRAPS.items()}


def numbers(wrap: Callable[[nn.Module], nn.Module]) -> list[list[int]]:
    def used(model: nn.Module) -> nn.Module:
        model(torch.ones(4, 4)).sum().backward()
        return model

    def made() -> nn.Module:
        return used(wrap(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))))

    used(sw.unwrap(made()))  # what torch opens once and keeps
    found = [counts()]
    one = made()
    found.append(counts())
    two = made()
    found.append(counts())
    used(sw.unwrap(one))
    used(two)  # still works
    found.append(counts())
    sw.unwrap(two)
    found.append(counts())
    return [[a - b for a, b in zip(each, found[0], strict=True)] for each in found[1:]]


@pytest.mark.full
def test_wrapped_modules_share_groups_and_give_them_back() -> None:
    """The second opens none; when both are unwrapped, no group, thread or file is left."""
    rank, _ = sw.spawn(wrapped_twice, 2)
    for how, (one, two, three, none) in rank.items():
        assert one[2] == 1 and two == one == three, how  # its other queue is the world's
        assert none == [0, 0, 0], how


def opened(world: World, bound: bool) -> list[Any]:
    """The calls that open groups of torch for the axes of two meshes."""
    calls: list[Any] = []
    new_group, parent = dist.new_group, dist.group.WORLD
    assert parent is not None

    def creates(ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        calls.append(ranks)
        return new_group(ranks, *args, **kwargs)

    def splits(*, split_ranks: list[list[int]], **_: Any) -> Any:
        calls.append(split_ranks)
        own = next(ranks for ranks in split_ranks if world.rank in ranks)
        return new_group(own, use_local_synchronization=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", creates)
        patch.setattr(dist, "split_group", splits)
        links = TorchLinks(ours=False)
        if bound:
            patch.setattr(links, "parent", SimpleNamespace(bound_device_id=CPU))
        first = world_of(world.rank, 4, CPU, links)
        for mesh in ("dp2 tp2", "dp2 tp2", "tp4"):
            axes = first.on(Mesh.parse(mesh)).axes
            assert [all_reduce(torch.ones(1), axis).item() for axis in axes] == [
                axis.size for axis in axes
            ]
        links.close()
    return calls


def test_each_set_of_ranks_is_opened_once_for_a_queue() -> None:
    """All ranks, then the axes in order; NCCL with a device opens the lines of an axis at once."""
    every, dp, tp = [[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0, 1], [2, 3]]
    assert run_gloo(4, opened, False) == [[*every, *dp, *dp, *tp, *tp, *every]] * 4
    assert run_gloo(4, opened, True) == [[every, dp, dp, tp, tp, every]] * 4


# --- several hosts --------------------------------------------------------------------------------

#: Canonical plans with links in a host and between hosts; a gather, exchanges, rows between hosts.
PLANS = [
    *("tp2 sp", "cp2:ulysses", "dp2 cp2 zero3", "dp2 ep2", "dp2 zero3 | head: tp2"),
    *(p for k, of in CANONICAL.items() for p in of if k != LONG and Plan.parse(p).size > 2),
]


@pytest.fixture(scope="module")
def across() -> Iterator[OnRanks]:
    """Runs a function on ranks of two hosts, half of them on each; of three, if there are three."""
    with joined_hosts(3) as hosts:
        pools = dict[int, Pool]()

        def on_hosts(ranks: int, function: Any, *args: Any) -> list[Any]:
            if ranks not in pools:
                pools[ranks] = Pool(ranks, hosts=hosts if ranks == 3 else hosts[:2])
            return pools[ranks].run(function, args)

        yield on_hosts
        for pool in pools.values():
            pool.close()


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_computes_the_same_across_hosts(plan: str, across: OnRanks):
    """Parity and bytes are those of ranks on one host."""
    run = run_of(across, plan)
    facts.test_parity(run)
    facts.test_bytes(run)


def between_hosts(world: World, plan: str) -> tuple[int, dict[str, int], int]:
    """This rank's host; what the ledger counts in 20 steps, by axis; what left the host."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    engine = sw.parallelize(model, plan, world, optimizer=sw.SGD(lr=1e-3), loss=squares)
    batch = torch.randn(4, 256)
    engine.step(batch)
    world.barrier()
    before, left = engine.ledger.lines, sent_bytes("eth0")
    for _ in range(20):
        engine.step(batch)
    world.barrier()
    lines = engine.ledger.since(before)
    axes = dict.fromkeys((key.axis for key in lines), 0)
    for key, tally in lines.items():
        axes[key.axis] += tally.sent_bytes
    return host_number(), axes, sent_bytes("eth0") - left


@pytest.mark.full
def test_hybrid_sharding_gathers_inside_a_host(across: OnRanks):
    """What the kernel counts is what ranks send along the axis of replicas, and headers."""
    found: list[Any] = across(4, between_hosts, "dp_replicate2 dp_shard2 zero3")
    assert [host == found[0][0] for host, _, _ in found] == [True, True, False, False]
    for pair in (found[:2], found[2:]):
        between = sum(axes["dp_replicate"] for _, axes, _ in pair)
        left = max(sent for _, _, sent in pair)
        assert between <= left <= 1.05 * between < sum(axes["dp_shard"] for _, axes, _ in pair)
