"""Copies between a device and its host's memory, and how much memory a host may use."""

import gc
from pathlib import Path

import pytest
import torch

from shardwise.comm.ledger import Key, Ledger, Tally
from shardwise.comm.tiers import host_memory
from shardwise.comm.tiers.disk import Disk
from shardwise.comm.tiers.tiers import Tiers, begin_copy
from shardwise.comm.world import alone
from shardwise.core.chunks import ALIGN_BYTES
from shardwise.core.mesh import Mesh

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("numel", [0, 1, 12])
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


@pytest.mark.parametrize("device", DEVICES)
def test_a_buffer_is_used_again_in_order(device: str):
    """Copies from and to one host buffer do not overtake each other, and it can be settled."""
    tiers = Tiers(device=torch.device(device))
    room = tiers.empty(2**20, torch.float32)
    found = []
    for number in range(4):
        x = torch.full((2**20,), float(number), device=device)
        begin_copy(x, tiers, "device", "host", room)
        found.append(begin_copy(room, tiers, "host", "device"))
    for number, arriving in enumerate(found):
        assert (arriving.wait() == number).all()
    tiers.settle(room)
    assert (room == 3).all()


def test_the_tier_is_that_of_the_storage():
    """Views are where their storage is; memory made elsewhere can be owned; freed memory leaves."""
    tiers = Tiers()
    x = torch.zeros(8)
    assert tiers.of(x) == "device"
    assert tiers.of(tiers.own(x)[2:4]) == "host"
    assert tiers.of(torch.zeros(8)) == "device"
    for _ in range(1000):
        tiers.empty(1, torch.uint8)
    gc.collect()
    assert len(tiers._host) < 200


def test_what_is_on_another_tier_is_refused():
    """A copy names the tiers of its tensors."""
    tiers = Tiers()
    x = torch.zeros(8)
    with pytest.raises(ValueError, match="tier device in a copy from host"):
        begin_copy(x, tiers, "host", "device")
    with pytest.raises(ValueError, match="tier device in a copy from device to host"):
        begin_copy(x, tiers, "device", "host", torch.zeros(8))
    with pytest.raises(ValueError, match="no copy from tier device to tier disk"):
        begin_copy(x, tiers, "device", "disk")
    assert tiers.ledger.lines == {}


def test_a_world_counts_copies_in_its_own_ledger():
    """`on` begins a ledger and tiers together."""
    world = alone().on(Mesh())
    begin_copy(torch.zeros(4), world.tiers, "device", "host")
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
    tiers = Tiers()
    room = tiers.empty(4 * 256, torch.uint8)
    parts, ends = room.split(256), [Ending() for _ in range(4)]
    for part, end in zip(parts, ends, strict=True):
        tiers.copying(part[:128].view(torch.float32), end)
    tiers.settle(parts[2])
    tiers.settle(parts[1][128:])
    assert [end.waits for end in ends] == [0, 0, 1, 0]
    again = Ending()
    tiers.copying(parts[0], again)  # it was begun after the first one's copy
    tiers.settle(room.view(2, 512).t()[:, 0])
    assert [end.waits for end in (*ends, again)] == [0, 1, 1, 0, 1]
    for _ in range(100):
        tiers.copying(parts[3][:64], Ending(over=True))
    memory = tiers._memory(room)
    assert memory is not None and len(memory.copies) <= 3


def test_a_buffer_of_a_disk_waits_for_its_own_copies(tmp_path: Path):
    """The one given back first comes first, and copies of other buffers are not waited for."""
    tiers, disk = Tiers(), Disk(tmp_path, 0, Ledger())
    disk.reserve(tiers.empty(3 * 4096 + ALIGN_BYTES, torch.uint8), 4096, tiers.settle)
    buffers, ends = [disk.acquire() for _ in range(3)], [Ending() for _ in range(3)]
    for buffer, end in zip(buffers, ends, strict=True):
        tiers.copying(buffer.tensor(torch.float32, 1024), end)
        disk.release(buffer)
    for number, buffer in enumerate(buffers):
        assert [end.waits for end in ends] == [int(k < number) for k in range(3)]
        assert disk.acquire() is buffer


@pytest.mark.parametrize(
    ("limit", "used", "stat", "cache"),
    [
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ],
)
def test_a_containers_limit_counts(limit: str, used: str, stat: str, cache: str, tmp_path: Path):
    """The cache of files is no use of memory; a group without a limit says nothing."""
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    (tmp_path / limit).write_text("1000\n")
    (tmp_path / used).write_text("700\n")
    (tmp_path / stat).write_text(f"anon 5\n{cache} 300\n")
    own = tmp_path / "own"
    for process in ("", "0::/\n3:cpu,memory:/\n", "0::/job_7/step_0\n3:memory:/job_7/step_0\n"):
        own.write_text(process)
        assert host_memory._limits(tmp_path, own) == [(1000, 400)]
    job = (tmp_path / limit).parent / "job_7"  # of Slurm, below the root, around the process
    job.mkdir()
    for name, text in ((limit, "800"), (used, "500"), (stat, f"{cache} 0")):
        (job / Path(name).name).write_text(text)
    assert host_memory._limits(tmp_path, own) == [(800, 500), (1000, 400)]
    (tmp_path / limit).write_text("max\n")
    assert host_memory._limits(tmp_path, own) == [(800, 500)]


def test_free_memory_is_at_most_what_may_be_used():
    """Of this host."""
    assert host_memory.free_bytes() > 0
    assert host_memory.limit_bytes(10) == 10
