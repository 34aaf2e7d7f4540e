"""Process groups: one for each set of ranks and queue, shared, and given back."""

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.comm.move import all_reduce
from shardwise.comm.torch_links import TorchLinks
from shardwise.comm.world import World, world_of
from shardwise.core.mesh import Mesh
from tests.pool import CPU, run_gloo


def counts() -> tuple[int, int, int]:
    """Open files, threads and process groups of this process."""
    gc.collect()
    files, threads = (len([*Path(f"/proc/self/{kind}").iterdir()]) for kind in ("fd", "task"))
    return files, threads, len(dist.distributed_c10d._world.pg_names)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def used(model: nn.Module) -> nn.Module:
    model(torch.ones(4, 4)).sum().backward()
    return model


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": sw.DDP,
    "FSDP": sw.FSDP,
    "NO_SHARD": lambda m: sw.FSDP(m, "NO_SHARD"),
    "Pipe": lambda m: sw.Pipe(m, 2),
}


def wrapped_twice() -> dict[str, list[list[int]]]:
    """For each wrapper: the numbers with one and two modules, and after each is unwrapped."""
    sw.init()
    return {how: numbers(how) for how in WRAPS}


def numbers(how: str) -> list[list[int]]:
    used(sw.unwrap(WRAPS[how](net())))  # what torch opens once and keeps
    found = [counts()]
    one = used(WRAPS[how](net()))
    found.append(counts())
    two = used(WRAPS[how](net()))
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
    """All ranks of the world, on one queue; then both axes on two, in the order of the lines."""
    every, dp, tp = [[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0, 1], [2, 3]]
    assert run_gloo(4, opened, False) == [[*every, *dp, *dp, *tp, *tp, *every]] * 4


def test_a_group_that_can_be_split_opens_all_lines_of_an_axis_at_once() -> None:
    """One call for each queue of an axis, with all of its lines (NCCL with a device)."""
    every, dp, tp = [[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0, 1], [2, 3]]
    assert run_gloo(4, opened, True) == [[every, dp, dp, tp, tp, every]] * 4
