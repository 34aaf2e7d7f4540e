"""The tiers below the device: host memory, chunks of a file on a disk, and arenas on the device."""

import errno
import gc
import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.comm.ledger import Ledger
from shardwise.comm.tiers import disk as module
from shardwise.comm.tiers import host_memory
from shardwise.comm.tiers.arena import Arena
from shardwise.comm.tiers.disk import Disk, DiskError, Extent
from shardwise.comm.tiers.tiers import Tiers, begin_copy
from shardwise.comm.world import alone
from shardwise.core.buffer_sizes import (
    ALIGN_BYTES,
    ALIGNMENT,
    CHUNK_NUMEL,
    arena_bytes,
    in_blocks,
)
from shardwise.core.errors import InputError
from shardwise.core.mesh import Mesh
from shardwise.core.tally import Key, Tally
from tests.engine.cases import fails
from tests.pool import CPU

BUFFER_BYTES = CHUNK_NUMEL * 4


# --- a disk ---------------------------------------------------------------------------------------


def opened(folder: Path, rank: int = 0) -> Disk:
    disk = Disk(folder, rank, Ledger())
    memory = torch.empty(3 * BUFFER_BYTES + ALIGN_BYTES, dtype=torch.uint8)
    disk.reserve(memory, BUFFER_BYTES)
    return disk


def write(disk: Disk, extent: Extent, values: torch.Tensor) -> None:
    for chunk in range(extent.chunks):
        first, last = extent.span(chunk)
        buffer = disk.acquire()
        buffer.tensor(extent.dtype, last - first).copy_(values[first:last])
        disk.begin_write(extent, chunk, buffer)


def read(disk: Disk, extent: Extent) -> torch.Tensor:
    out = torch.empty(extent.numel, dtype=extent.dtype)
    for chunk in range(extent.chunks):
        first, last = extent.span(chunk)
        buffer = disk.acquire()
        disk.begin_read(extent, chunk, buffer).result()
        out[first:last] = buffer.tensor(extent.dtype, last - first)
        disk.release(buffer)
    return out


NUMELS = st.sampled_from([1, 1000, CHUNK_NUMEL - 1, CHUNK_NUMEL, 2 * CHUNK_NUMEL + 5])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@settings(max_examples=15)
@given(st.lists(st.tuples(NUMELS, DTYPES), min_size=1, max_size=3))
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, sizes: Any):
    """Extents of any size and dtype, in fewer buffers than chunks; new ones are zeros."""
    folder = tmp_path_factory.mktemp("disk")
    disk = opened(folder)
    extents = [disk.allocate(f"tensor {k}", *size) for k, size in enumerate(sizes)]
    values = [torch.randn(numel).to(dtype) for numel, dtype in sizes]
    for extent, value in zip(extents, values, strict=True):
        assert not read(disk, extent).any()
        for again in (value + 1, value):  # the second write follows the first
            write(disk, extent, again)
    for extent, value in zip(extents, values, strict=True):
        assert torch.equal(read(disk, extent), value)
    disk.sync()
    for extent, value in zip(extents, values, strict=True):
        assert torch.equal(extent.tensor, value)
    assert disk.free == 3
    assert disk.stored_bytes == sum(in_blocks(n * dtype.itemsize) for n, dtype in sizes)
    assert list(folder.iterdir()) == []  # no other run finds a file without a name


@pytest.mark.parametrize("direct", [True, False])
def test_values_written_to_the_map_are_read(
    tmp_path: Path, direct: bool, monkeypatch: pytest.MonkeyPatch
):
    """A checkpoint is loaded through the map: after `drop` its values are in the file."""
    if not direct:
        monkeypatch.setattr(module, "set_direct", lambda _: False)
    disk = opened(tmp_path)
    extent = disk.allocate("x", CHUNK_NUMEL + 9, torch.float32)
    values = torch.randn(extent.numel)
    extent.tensor.copy_(values)
    disk.drop()
    assert torch.equal(read(disk, extent), values)
    assert torch.equal(extent.tensor, values)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_an_error_of_the_disk_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str):
    """Full, read-only, gone: the first error reaches the caller, with the system's words."""
    disk = opened(tmp_path)
    extent = disk.allocate("x", 9 * CHUNK_NUMEL, torch.float32)
    monkeypatch.setattr(os, call, fails(errno.ENOSPC))

    def use() -> None:
        write(disk, extent, torch.zeros(extent.numel))
        read(disk, extent)

    for act in (use, disk.sync):
        with pytest.raises(DiskError, match="No space left on device"):
            act()


def test_a_folder_that_cannot_hold_the_states_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Missing, a file, read-only, full: InputError before anything is trained."""
    (tmp_path / "file").touch()
    for wrong, words in (("none", "not there"), ("file", "no folder")):
        with pytest.raises(InputError, match=words):
            Disk(tmp_path / wrong, 0, Ledger())
    with monkeypatch.context() as patch:
        patch.setattr(module.tempfile, "TemporaryFile", fails(errno.EROFS))
        with pytest.raises(InputError, match="Read-only file system"):
            Disk(tmp_path, 0, Ledger())
    disk = opened(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", fails(errno.ENOSPC))
    with pytest.raises(InputError, match="No space left on device"):
        disk.allocate("x", 10, torch.float32)


# --- host memory ----------------------------------------------------------------------------------

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_GPU)])


@on_devices
@pytest.mark.parametrize("numel", [0, 12])
def test_a_copy_to_the_host_and_back_is_equal_and_counted(device: str, numel: int):
    """Values, shape and order of dims stay; each way has a line of its own, in its phase."""
    ledger = Ledger()
    tiers = Tiers(ledger, torch.device(device))
    x = torch.arange(2.0 * numel, dtype=torch.float64, device=device).view(2, numel).t()
    with ledger.phase("forward"):
        there = begin_copy(x, tiers, "device", "host").wait()
    with ledger.phase("backward"):
        back = begin_copy(there, tiers, "host", "device").wait()
    assert there.device.type == "cpu" and back.device.type == device
    assert torch.equal(there, x.cpu()) and torch.equal(back, x)
    assert there.stride() == back.stride() == torch.empty_like(x).stride()
    assert tiers.of(there) == "host" and tiers.of(back) == tiers.of(x) == "device"
    tally = Tally(1, 2 * numel, 16 * numel, 0)
    assert ledger.lines == {
        Key("tier", "device_to_host", "forward"): tally,
        Key("tier", "host_to_device", "backward"): tally,
    }
    assert ledger.sent_bytes() == 0  # nothing went to another rank


def test_the_tier_is_that_of_the_storage():
    """Of views too, and of memory that is owned; a copy names the tiers of its tensors."""
    tiers, x = Tiers(), torch.zeros(8)
    assert tiers.of(x) == "device"
    assert tiers.of(tiers.own(torch.zeros(8))[2:4]) == "host"
    for _ in range(1000):
        tiers.empty(1, torch.uint8)
    gc.collect()
    assert len(tiers._host) < 200
    for said, *way in (
        ("tier device in a copy from host", "host", "device"),
        ("tier device in a copy from device to host", "device", "host", torch.zeros(8)),
        ("no copy from tier device to tier disk", "device", "disk"),
    ):
        with pytest.raises(ValueError, match=said):
            begin_copy(x, tiers, *way)  # type: ignore[arg-type]
    assert tiers.ledger.lines == {}
    world = alone().on(Mesh())
    begin_copy(x, world.tiers, "device", "host")
    assert list(world.ledger.lines) == [Key("tier", "device_to_host", "start")]


class Ending:
    """The end of a copy on a device: waited for once, or over already."""

    def __init__(self, *, over: bool = False) -> None:
        self.over, self.waits = over, 0

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over, self.waits = True, self.waits + 1


def test_a_copy_is_waited_for_by_its_part_of_the_memory():
    """Of buffers in one storage what overlaps is settled; copies that are over are dropped."""
    tiers, ending = Tiers(), cast(Any, Ending)
    room = tiers.empty(4 * 256, torch.uint8)
    parts, ends = room.split(256), [ending() for _ in range(4)]
    for part, end in zip(parts, ends, strict=True):
        tiers.copying(part[:128].view(torch.float32), end)
    tiers.settle(parts[2])
    tiers.settle(parts[1][128:])
    assert [end.waits for end in ends] == [0, 0, 1, 0]
    again = ending()
    tiers.copying(parts[0], again)  # it was begun after the first one's copy
    tiers.settle(room.view(2, 512).t()[:, 0])
    assert [end.waits for end in (*ends, again)] == [0, 1, 1, 0, 1]
    for _ in range(100):
        tiers.copying(parts[3][:64], ending(over=True))
    memory = tiers._memory(room)
    assert memory is not None and len(memory.copies) <= 3


def test_a_buffer_of_a_disk_waits_for_its_own_copies(tmp_path: Path):
    """The one given back first comes first, and copies of other buffers are not waited for."""
    tiers, disk = Tiers(), Disk(tmp_path, 0, Ledger())
    disk.reserve(tiers.empty(3 * 4096 + ALIGN_BYTES, torch.uint8), 4096, tiers.settle)
    buffers, ends = [disk.acquire() for _ in range(3)], [cast(Any, Ending)() for _ in range(3)]
    for buffer, end in zip(buffers, ends, strict=True):
        tiers.copying(buffer.tensor(torch.float32, 1024), end)
        disk.release(buffer)
    for number, buffer in enumerate(buffers):
        assert [end.waits for end in ends] == [int(k < number) for k in range(3)]
        assert disk.acquire() is buffer


FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory/": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@pytest.mark.parametrize("version", FILES)
def test_a_containers_limit_counts(version: str, tmp_path: Path):
    """The cache of files is no use of memory; a group without a limit says nothing."""
    folder, own = tmp_path / version, tmp_path / "own"

    def group(where: Path, *numbers: str) -> None:
        where.mkdir(exist_ok=True)
        limit, used, cache = FILES[version]
        texts = numbers[0], numbers[1], f"anon 5\n{cache} {numbers[2]}\n"
        for name, text in zip((limit, used, "memory.stat"), texts, strict=True):
            (where / name).write_text(text)

    group(folder, "1000\n", "700\n", "300")
    for process in ("", "0::/\n3:cpu,memory:/\n", "0::/job_7/step_0\n3:memory:/job_7/step_0\n"):
        own.write_text(process)
        assert host_memory._limits(tmp_path, own) == [(1000, 400)]
    group(folder / "job_7", "800", "500", "0")  # of Slurm, below the root, around the process
    assert host_memory._limits(tmp_path, own) == [(800, 500), (1000, 400)]
    group(folder, "max\n", "700\n", "300")
    assert host_memory._limits(tmp_path, own) == [(800, 500)]
    assert host_memory.free_bytes() > 0 and host_memory.limit_bytes(10) == 10


# --- arenas ---------------------------------------------------------------------------------------


def reserved(sizes: dict[int, int]) -> Arena:
    arena = Arena()
    arena.reserve(sizes, CPU)
    return arena


def test_tensors_lie_in_the_smallest_slots_that_hold_them():
    """A large slot is left for a large tensor; where none is free there is ordinary memory."""
    arena = reserved({64: 1, 4096: 1})
    assert arena.memory is not None and len(arena.memory) == arena_bytes(arena.sizes)
    like = torch.empty(0)
    small, large, third = (arena.empty((n,), like) for n in (16, 1024, 4))
    begin = arena.memory.data_ptr()
    assert (small.data_ptr(), large.data_ptr()) == (begin, begin + ALIGNMENT)
    assert [arena.holds(x) for x in (small, large, third)] == [True, True, False]
    assert arena.missed == 1 and not arena.holds(arena.memory)


def test_a_slot_is_taken_while_anything_refers_to_it():
    """Free when the graph that saved its tensor is; its memory outlives the arena."""
    arena = reserved({64: 1})
    x = arena.keep(torch.arange(16.0)).requires_grad_()
    y = (x * x).sum()
    leaf = x
    del x
    assert not arena.slots[0].free
    y.backward()
    assert leaf.grad is not None and leaf.grad.equal(2 * torch.arange(16.0))
    del y, leaf
    gc.collect()
    assert arena.slots[0].free
    x = arena.keep(torch.ones(16))
    assert arena.memory is not None
    weak = StorageWeakRef(arena.memory.untyped_storage())
    arena.reserve({}, CPU)
    del arena
    assert not weak.expired() and x.sum() == 16
    del x
    assert weak.expired()
