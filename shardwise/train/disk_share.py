"""The bandwidth at which a run used its disk, and its share of what the disk gives alone."""

from shardwise.comm.disk_bandwidth import FILE_BYTES, measure
from shardwise.comm.objects import all_gather_object
from shardwise.core.errors import InputError
from shardwise.engine.engine import Engine


def disk_share(engine: Engine, file_bytes: int = FILE_BYTES) -> str:
    """What to say of the disk on rank 0, which measures it; "" for a run without one.

    Called by all ranks. The time is that in which some request of a rank is under way.
    """
    if engine.optimizer.disk is None:
        return ""
    disk = engine.optimizer.disk.disk
    disk.sync()
    own = disk.read_bytes, disk.written_bytes, disk.busy_s
    found = all_gather_object(own, engine.world)
    if engine.world.rank != 0:
        return ""
    read, written, busy_s = (tuple(column) for column in zip(*found, strict=True))
    rate = (sum(read) + sum(written)) / max(*busy_s, 1e-9)
    said = (
        f"disk {disk.folder}: {sum(read) / 2**20:.0f} MiB read and {sum(written) / 2**20:.0f} "
        f"written by {len(found)} ranks, {rate / 2**20:.0f} MiB/s while in use"
    )
    try:
        alone = measure(disk.folder, file_bytes).both_bytes_per_s
    except InputError:  # no room for a file to measure with
        return said
    return f"{said}, {rate / alone:.0%} of the {alone / 2**20:.0f} MiB/s that it gives alone"
