"""Two simulated hosts on one machine, connected at a given rate, by Linux network namespaces.

    namespace sw-PID-0                      namespace sw-PID-1
    rank 0   eth0 10.201.7.1  ---- veth ----  eth0 10.201.7.2   rank 1
             tc tbf, RATE                         tc tbf, RATE

Each end of the veth pair sends through a token bucket filter. The namespaces are created for a run
and removed after it, even if it fails.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from os import getpid
from pathlib import Path
from types import FrameType
from typing import Final

import shardwise
from benchmarks.contenders.contender import Task
from benchmarks.measure import Record
from shardwise.core.errors import InputError, RankError, bad

NETWORK: Final = "10.201.7"
PORT: Final = "29417"
INTERFACE: Final = "eth0"
RATE: Final = re.compile(r"[1-9]\d*(kbit|mbit|gbit)")


def between_hosts(task: Task, rate: str) -> list[list[Record]]:
    """Run the task with one rank on each of two hosts; returns each rank's records.

    `rate` is in tc's notation, "1gbit". Raises InputError if the hosts cannot be created, RankError
    with the end of its error output if a rank fails.
    """
    with hosts(rate) as names, tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "task").write_text(json.dumps(asdict(task)))
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            ranks += [_start(rank, name, Path(folder)) for rank, name in enumerate(names)]
            _wait(ranks, Path(folder))
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return [_records(Path(folder) / f"result.{rank}") for rank in range(len(names))]


@contextmanager
def hosts(rate: str) -> Iterator[tuple[str, str]]:
    """Create two network namespaces connected at `rate`; yields their names, removes them after."""
    if not RATE.fullmatch(rate):
        raise bad(f'the link "{rate}"', "a whole number and kbit, mbit or gbit", "--link 1gbit")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise _refused(f"the commands {', '.join(missing)} of iproute2 are not installed")
    names = (f"sw-{getpid()}-0", f"sw-{getpid()}-1")
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        for line in commands(names, rate):
            _do(line)
        yield names
    finally:
        for name in names:  # this removes the veth pair too
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)  # noqa: S603, S607
        signal.signal(signal.SIGTERM, before)


def commands(names: tuple[str, str], rate: str) -> list[str]:
    """The commands that create the two hosts."""
    first, second = names
    cable = f"link add {INTERFACE} type veth peer name {INTERFACE} netns {second}"
    lines = [f"ip netns add {first}", f"ip netns add {second}", f"ip -n {first} {cable}"]
    for number, name in enumerate(names, start=1):
        lines += [
            f"ip -n {name} address add {NETWORK}.{number}/24 dev {INTERFACE}",
            f"ip -n {name} link set lo up",
            f"ip -n {name} link set {INTERFACE} up",
            f"tc -n {name} qdisc add dev {INTERFACE} root tbf rate {rate} burst 256kb latency 50ms",
        ]
    return lines


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _do(line: str) -> None:
    done = subprocess.run(line.split(), capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise _refused(f"'{line}' says: {done.stderr.strip() or done.returncode}")


def _refused(why: str) -> InputError:
    return bad(
        f"--link, where two hosts cannot be made on this machine ({why})",
        "Linux with iproute2, and permission to create network namespaces (root, CAP_NET_ADMIN)",
        "the same command as root, or without --link",
    )


def _start(rank: int, name: str, folder: Path) -> subprocess.Popen[bytes]:
    """Rank `rank` as a process on the host `name`."""
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": f"{NETWORK}.1",
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(shardwise.__file__).parents[1]),
    }
    settings = [f"{key}={value}" for key, value in variables.items()]
    worker = [sys.executable, "-m", "benchmarks.worker", "task", "result"]
    line = ["ip", "netns", "exec", name, "env", *settings, *worker]
    # rank 0 shows progress; the error output of rank 1 is shown only if it fails
    errors = None if rank == 0 else (folder / "errors").open("wb")
    return subprocess.Popen(line, cwd=folder, stderr=errors)  # noqa: S603


def _wait(ranks: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait until all processes have ended, or one has failed."""
    while any(process.poll() is None for process in ranks):
        if any(process.returncode for process in ranks):
            break
        time.sleep(0.1)
    for rank, process in enumerate(ranks):
        if process.returncode:
            text = (folder / "errors").read_text()[-2000:] if rank else "see its error above"
            raise RankError(rank, text)


def _records(file: Path) -> list[Record]:
    return [Record(**fields) for fields in json.loads(file.read_text())]
