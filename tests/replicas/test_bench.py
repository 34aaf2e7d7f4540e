import os
import socket
import struct
from pathlib import Path

import pytest

from benchmarks import measure, table
from benchmarks.contenders.contender import Task
from benchmarks.contenders.roster import SUITES
from benchmarks.measure import Record
from shardwise.comm.world import World
from tests.benchmarks.test_bench import TASK, replace
from tests.pool import run_gloo

BYTES_SENT = 200  # the offset of tcpi_bytes_sent in struct tcp_info of <linux/tcp.h>


def sent_by_this_process(interface: str) -> int:
    """The bytes sent through the TCP connections that this process has open now."""
    return sum(map(_sent, Path("/proc/self/fd").iterdir()))


def _sent(descriptor: Path) -> int:
    if not os.path.realpath(descriptor).rpartition("/")[2].startswith("socket:"):
        return 0
    with socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
        if connection.family == socket.AF_UNIX or connection.type != socket.SOCK_STREAM:
            return 0
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_SENT + 8)
        return struct.unpack_from("Q", info, BYTES_SENT)[0]


def measured(world: World, task: Task) -> list[Record]:
    """The records of this rank; other programs also send through the loopback interface."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "sent_bytes", sent_by_this_process)
        return measure.measure(task)


def test_one_process_and_one_process_a_device_train_the_same_model() -> None:
    """All contenders end with one loss; one process sends nothing and has no peak of live bytes."""
    task = replace(TASK, contenders=SUITES["dataparallel"], shared=False)
    rows = {row.contender: row for row in table.lines(task, run_gloo(2, measured, task))}
    assert len(rows) == 5
    for row in rows.values():
        assert row.loss == pytest.approx(rows["sw.DDP"].loss, rel=1e-5), row.note
        assert row.ratio is not None
    assert rows["sw.DDP"].wire_ratio == pytest.approx(1.0, rel=0.02)
    assert rows["sw.DataParallel"].wire_ratio is None
    assert rows["sw.DataParallel"].peak_bytes is None
    assert "moved after" not in rows["sw.DataParallel"].note
