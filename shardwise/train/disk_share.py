"""The bandwidth at which training steps used the disk, and its share of what the disk gives alone.

Evaluation, samples and checkpoints use the disk too, and do not count.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.comm.disk_bandwidth import FILE_BYTES, DiskBandwidth, measure
from shardwise.comm.disk_use import Used
from shardwise.comm.objects import all_gather_object
from shardwise.core.errors import InputError
from shardwise.engine.engine import Engine


class StepsOnDisk:
    """What this rank reads and writes in steps, from its construction on.

    `use_before` is what it had used by then; `use_outside` and `outside_s` are of no step.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.use_before, self.use_outside = self._use_so_far(), Used()
        self.began_s, self.outside_s = time.perf_counter(), 0.0

    def _use_so_far(self) -> Used:
        disk = self.engine.disk
        if disk is None:
            return Used()
        disk.sync()  # what was begun belongs to what was before
        return disk.use.so_far

    @contextmanager
    def outside_of_steps(self) -> Iterator[None]:
        """Around what is no step: an evaluation, a checkpoint, a sample."""
        before, began_s = self._use_so_far(), time.perf_counter()
        yield
        self.use_outside += self._use_so_far() - before
        self.outside_s += time.perf_counter() - began_s

    def use_in_steps(self) -> Used:
        """All steps so far."""
        return self._use_so_far() - self.use_before - self.use_outside

    @property
    def seconds(self) -> float:
        """The time since the construction that was not outside of steps."""
        return time.perf_counter() - self.began_s - self.outside_s


def disk_line(steps: StepsOnDisk, file_bytes: int = FILE_BYTES) -> str:
    """What to say of the disk on rank 0, which measures it; "" for a run without one.

    Called by all ranks. The time is that in which some request of a rank is under way.
    """
    engine = steps.engine
    if engine.disk is None:
        return ""
    folder = engine.disk.folder
    found, took_s = all_gather_object(steps.use_in_steps(), engine.world), steps.seconds
    if engine.world.rank != 0:
        return ""
    try:
        alone = measure(folder, file_bytes)
    except InputError:  # no room for a file to measure with
        alone = None
    waited_s = max(used.waited_s for used in found)
    return (
        f"disk {folder}: the steps of {len(found)} ranks {_rates_text(found, alone)}; "
        f"they waited {waited_s:.1f} of {took_s:.1f} s for it"
    )


def _rates_text(found: list[Used], alone: DiskBandwidth | None) -> str:
    """The rates of all ranks together, and their shares of those that the disk gives alone."""
    read, written = (sum(used.read_bytes for used in found), sum(u.written_bytes for u in found))
    parts = [
        ("read", read, max(used.read_s for used in found), alone and alone.read_bytes_per_s),
        ("wrote", written, max(u.written_s for u in found), alone and alone.write_bytes_per_s),
    ]
    words = [f"{what} {_rate(count, busy_s, most)}" for what, count, busy_s, most in parts]
    both = (read + written) / max(*(used.busy_s for used in found), 1e-9)
    said = f"{', '.join(words)}; {both / 2**20:.0f} MiB/s while any request was under way"
    if alone is None:
        return said
    most = alone.both_bytes_per_s
    return f"{said}, {both / most:.0%} of the {most / 2**20:.0f} that it gives with both at once"


def _rate(count: int, busy_s: float, most: float | None) -> str:
    rate = count / max(busy_s, 1e-9)
    of = f" (alone it gives {most / 2**20:.0f})" if most else ""
    return f"{count / 2**20:.0f} MiB at {rate / 2**20:.0f} MiB/s{of}"
