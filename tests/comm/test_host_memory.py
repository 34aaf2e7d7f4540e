"""The memory that a host's processes may use, from the files of control groups."""

from pathlib import Path

import pytest

from shardwise.comm import host_memory


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
    assert host_memory._limits(tmp_path) == [(1000, 400)]
    (tmp_path / limit).write_text("max\n")
    assert host_memory._limits(tmp_path) == []


def test_free_memory_is_at_most_what_may_be_used():
    """Of this host."""
    assert host_memory.free_bytes() > 0
    assert host_memory.limit_bytes(10) == 10
