"""The disk tier: chunks of a file, in bounded memory; and what a failing disk does."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.comm.ledger import Key, Ledger
from shardwise.comm.tiers import disk as module
from shardwise.comm.tiers.disk import Disk, DiskError, Extent
from shardwise.core.chunks import ALIGN_BYTES, CHUNK_NUMEL, aligned
from shardwise.core.errors import InputError

BUFFER_BYTES = CHUNK_NUMEL * 4


def opened(folder: Path, buffers: int = 3, rank: int = 0) -> Disk:
    disk = Disk(folder, rank, Ledger())
    memory = torch.empty(buffers * BUFFER_BYTES + ALIGN_BYTES, dtype=torch.uint8)
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


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 1000, CHUNK_NUMEL - 1, CHUNK_NUMEL, 2 * CHUNK_NUMEL + 5]),
            st.sampled_from([torch.float32, torch.bfloat16]),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, sizes):
    """Extents of any size and dtype, in fewer buffers than chunks; new ones are zeros."""
    disk = opened(tmp_path_factory.mktemp("disk"))
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
    assert disk.stored_bytes == sum(aligned(n * dtype.itemsize) for n, dtype in sizes)


def test_the_ledger_has_every_byte(tmp_path: Path):
    """Whole blocks of the file, on the axis of the tiers."""
    disk = opened(tmp_path)
    extent = disk.allocate("x", CHUNK_NUMEL + 1, torch.float32)
    write(disk, extent, torch.zeros(extent.numel))
    read(disk, extent)
    lines = disk.ledger.lines
    for kind in ("host_to_disk", "disk_to_host"):
        tally = lines[Key("tier", kind, "start")]
        assert (tally.calls, tally.sent_bytes) == (2, BUFFER_BYTES + ALIGN_BYTES)
    disk.sync()
    used = disk.use.so_far
    assert used.read_bytes == used.written_bytes == BUFFER_BYTES + ALIGN_BYTES
    assert (
        0 < max(used.read_s, used.written_s) <= used.busy_s <= used.read_s + used.written_s + 1e-9
    )


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


def test_the_folder_stays_empty(tmp_path: Path):
    """The file has no name, so that no other run finds it."""
    disk = opened(tmp_path)
    write(disk, disk.allocate("x", 9, torch.float32), torch.ones(9))
    disk.sync()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_leaves_nothing(tmp_path: Path):
    """SIGKILL while states are on the disk: the system frees the file."""
    program = f"""
        import os, signal, torch
        from shardwise.comm.tiers.disk import Disk
        from shardwise.comm.ledger import Ledger
        disk = Disk({str(tmp_path)!r}, 0, Ledger())
        disk.allocate("x", 2**20, torch.float32)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EROFS])
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_an_error_of_the_disk_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
):
    """Full, read-only, gone: the first error reaches the caller, with the system's words."""

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    disk = opened(tmp_path)
    extent = disk.allocate("x", 9 * CHUNK_NUMEL, torch.float32)
    monkeypatch.setattr(os, call, fail)

    def use() -> None:
        write(disk, extent, torch.zeros(extent.numel))
        read(disk, extent)

    with pytest.raises(DiskError, match=os.strerror(code)):
        use()
    with pytest.raises(DiskError, match=os.strerror(code)):
        disk.sync()


def test_a_file_that_was_cut_short_is_an_error(tmp_path: Path):
    """The error has the rank, the folder, the tensor and the chunk; all later calls raise it."""
    disk = opened(tmp_path, rank=3)
    extent = disk.allocate("exp_avg of head", 2 * CHUNK_NUMEL, torch.float32)
    os.ftruncate(disk.file, BUFFER_BYTES)
    with pytest.raises(DiskError, match="the file ends before the chunk") as raised:
        read(disk, extent)
    for words in ("Rank 3", str(tmp_path), "chunk 1 of 2", "'exp_avg of head'"):
        assert words in str(raised.value)
    with pytest.raises(DiskError):
        disk.acquire()
    with pytest.raises(DiskError):
        disk.sync()


def test_a_folder_that_cannot_hold_the_states_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Missing, a file, read-only, full: InputError before anything is trained."""
    (tmp_path / "file").touch()
    for wrong, words in (("none", "not there"), ("file", "no folder")):
        with pytest.raises(InputError, match=words):
            Disk(tmp_path / wrong, 0, Ledger())
    with pytest.raises(InputError, match="Read-only file system"):
        _read_only(tmp_path, monkeypatch)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InputError, match="No space left on device"):
        opened(tmp_path).allocate("x", 10, torch.float32)


def _read_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(module.tempfile, "TemporaryFile", refuse)
        Disk(folder, 0, Ledger())
