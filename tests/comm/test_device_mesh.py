"""torch's DeviceMesh over the process groups of a world."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.comm.world import World
from shardwise.core.mesh import Mesh
from tests.pool import run_gloo, run_threads


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
