"""What a run says of its disk at the end: bytes read and written, rates, and time waited."""

from shardwise.comm.objects import all_gather_object
from shardwise.engine.engine import Engine


def disk_line(engine: Engine) -> str:
    """The line of rank 0; "" on other ranks, and for a run without a disk.  All ranks call it.

    Evaluations, samples and checkpoints count too.  A rate is that of the time in which some
    request of a rank is under way; `shardwise doctor --disk` measures what the disk gives alone.
    """
    if engine.disk is None:
        return ""
    engine.disk.sync()
    found = all_gather_object(engine.disk.use.so_far, engine.world)
    if engine.world.rank != 0:
        return ""
    read = _rate([(used.read_bytes, used.read_s) for used in found])
    wrote = _rate([(used.written_bytes, used.written_s) for used in found])
    waited_s = max(used.waited_s for used in found)
    return (
        f"disk {engine.disk.folder}: {len(found)} ranks read {read} and wrote {wrote}; "
        f"they waited {waited_s:.1f} s for it"
    )


def _rate(ranks: list[tuple[int, float]]) -> str:
    """The bytes of all ranks, and their rate."""
    mib = sum(count for count, _ in ranks) / 2**20
    return f"{mib:.0f} MiB at {mib / max(1e-9, *(busy_s for _, busy_s in ranks)):.0f} MiB/s"
