"""Compares the bytes of a plan's steps with the kernel's interface counters.

The ranks run without shared memory, so every message goes through gloo and TCP over the loopback
interface: in their own network namespace if the system permits it (root, or user namespaces), else
on the host's, which also counts the traffic of other programs. Subtracted from its bytes are

    headers      66 bytes per packet: Ethernet 14, IPv4 20, TCP 32 with its timestamps;
                 acknowledgements are headers only
    idle         the traffic while the ranks do nothing for a second, in proportion to the time
    envelopes    the bytes that gloo adds to a message, measured with messages of one element

The remaining bytes must be within 2 % of those that the ledgers of all ranks have counted.
The rest includes barriers and the launcher's messages, so a step has to send enough: steps are
repeated until they send 32 MiB, or fifty times.
"""

import fcntl
import json
import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.meters import interface
from shardwise.comm.ledger import TIER, rank_bytes
from shardwise.comm.move import receive, send
from shardwise.comm.objects import all_gather_object
from shardwise.comm.start.launch import spawn
from shardwise.comm.world import World, init
from shardwise.core.errors import InputError, RankError, RunError, bad
from shardwise.core.plan.plan import Plan
from shardwise.models.registry import find
from shardwise.models.trainable import Trainable
from shardwise.prediction.prediction import CHECKED_STEPS
from shardwise.verify.oracles.batches import Division
from shardwise.verify.oracles.loads import Routed
from shardwise.verify.parity import alone_of, engine_of, theory_of

MAIN: Final = "from tests.verify.wire import main; main()"
SET_FLAGS: Final = 0x8914  # SIOCSIFFLAGS of <linux/sockios.h>
UP_RUNNING: Final = 0x1 | 0x40  # IFF_UP, IFF_RUNNING of <linux/if.h>
HEADER_BYTES: Final = 66
TOLERANCE: Final = 0.02
ENOUGH_BYTES, MOST_STEPS = 2**25, 50
IDLE_S, SETTLE_S = 1.0, 0.2
MESSAGES: Final = 200  # of one element, from each rank


@dataclass(frozen=True)
class Wire:
    """The bytes of all ranks in `steps` steps: by theory, as counted, as read from the interface.

    `read_bytes` are the `interface_bytes` without headers, idle traffic and envelopes.
    `namespace` is "own", or "host", which includes the traffic of other programs.
    """

    namespace: str
    steps: int
    theory_bytes: int
    counted_bytes: int
    read_bytes: int
    interface_bytes: int
    header_bytes: int
    idle_bytes: int
    envelope_bytes: int

    @property
    def holds(self) -> bool:
        """Whether the bytes counted are those predicted, and the interface's within 2 % of them."""
        near = abs(self.read_bytes - self.counted_bytes) <= TOLERANCE * self.counted_bytes
        return near and self.theory_bytes == self.counted_bytes


def wire_of(plan: Plan, model: str | Trainable, *options: Any) -> Wire:
    """Run the plan's ranks on this machine's loopback interface and read its counters.

    `options` go to `engine_of`.  Raises InputError if the system has no counters, or for a plan of
    one rank, which sends nothing; RankError or RunError if the run fails.
    """
    if plan.size == 1:
        raise bad(f"the plan '{plan}' of one rank on the wire", "a plan that sends", "dp2")
    interface.sent(interface.LOOPBACK)
    prefix = namespace_prefix()
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "asked"), Path(folder, "answer")
        asked.write_bytes(pickle.dumps((plan, model, options, bool(prefix))))
        said = on_loopback(MAIN, [str(asked), str(answer)], prefix)
        if not answer.exists():
            raise RunError(f"the ranks on the loopback interface did not end normally:\n{said}")
        found = json.loads(answer.read_text())
    if "refused" in found:
        raise InputError(found["refused"])
    if "failed" in found:
        raise RankError(found["rank"], found["failed"])
    return Wire(**found)


def main() -> None:
    """The main function of the process that `wire_of` starts; writes the result to a file."""
    asked, answer = Path(sys.argv[1]), Path(sys.argv[2])
    plan, model, options, apart = pickle.loads(asked.read_bytes())  # noqa: S301 (our own file)
    if apart:
        bring_up_loopback()
    try:
        ranks = spawn(_on_rank, plan.size, (plan, model, *options))
        found = asdict(_joined(ranks, "own" if apart else "host"))
    except InputError as error:
        found = {"refused": str(error)}
    except RankError as error:
        found = {"rank": error.rank, "failed": error.text}
    answer.write_text(json.dumps(found))


@dataclass(frozen=True)
class _Measured:
    """The bytes of one rank, and those of the interface that all ranks share."""

    steps: int
    theory_bytes: int
    counted_bytes: int
    messages: int
    step: tuple[interface.Sent, float]
    idle: tuple[interface.Sent, float]
    envelopes: tuple[interface.Sent, float]
    enveloped: int


def _on_rank(plan: Plan, model: str | Trainable, *options: Any) -> _Measured:
    world = init("cpu", shared_memory=False)
    trainable = find(model)
    engine = engine_of(trainable, plan, world, *options)
    predicted = theory_of(trainable, plan, world.rank, *options)
    routed = Routed(alone_of(trainable, plan, world.device).all[-1], engine.plan)

    def step(number: int) -> int:
        """Train, and return the predicted bytes."""
        whole = trainable.batch(2 * engine.data_ranks * engine.microbatches, number, world.device)
        own = Division.of(engine).share(whole, engine.data_rank)
        prediction, loads = predicted(own), routed.step(whole, number)
        engine.step(own)
        lines = prediction.in_step(number, loads=loads)
        return sum(count for line, count in lines.items() if line.axis != TIER)

    for number in range(CHECKED_STEPS):  # these compare more than later ones
        step(number)
    engine.wait()
    sent = sum(all_gather_object(sum(engine.measured_bytes().values()), world))
    steps = max(3, min(MOST_STEPS, -(-ENOUGH_BYTES // max(1, sent))))
    idle = _read(world, lambda: time.sleep(IDLE_S))
    envelopes = _read(world, lambda: _round(world))
    theory = counted = messages = 0

    def every() -> None:
        """All measured steps."""
        nonlocal theory, counted, messages
        for number in range(steps):
            theory += step(CHECKED_STEPS + number)
            counted += rank_bytes(engine.last)
            messages += sum(tally.peers for tally in engine.last.values())
        engine.wait()

    found = _read(world, every)
    return _Measured(steps, theory, counted, messages, found, idle, envelopes, MESSAGES)


def _read(world: World, act: Callable[[], None]) -> tuple[interface.Sent, float]:
    """The interface's traffic while all ranks run `act`, and the seconds it takes."""
    world.barrier()
    time.sleep(SETTLE_S)
    before, began = interface.sent(interface.LOOPBACK), time.perf_counter()
    world.barrier()
    act()
    world.barrier()
    time.sleep(SETTLE_S)  # for late acknowledgements
    after, ended = interface.sent(interface.LOOPBACK), time.perf_counter()
    gone = interface.Sent(*(b - a for a, b in zip(before, after, strict=True)))
    return gone, ended - began


def _round(world: World) -> None:
    """One element from each rank to the next, many times."""
    axis, one = world.everyone, torch.zeros(1)
    for _ in range(MESSAGES):
        if axis.rank % 2 == 0:
            send(one, axis, (axis.rank + 1) % axis.size)
        receive(torch.zeros(1), axis, (axis.rank - 1) % axis.size)
        if axis.rank % 2:
            send(one, axis, (axis.rank + 1) % axis.size)


def _joined(ranks: list[_Measured], namespace: str) -> Wire:
    first = ranks[0]

    def payload(read: tuple[interface.Sent, float]) -> float:
        return read[0].sent_bytes - HEADER_BYTES * read[0].packets

    idle_rate = max(0.0, payload(first.idle)) / first.idle[1]
    small = payload(first.envelopes) - idle_rate * first.envelopes[1]
    number = first.enveloped * len(ranks)
    envelope = max(0.0, small / number - torch.zeros(1).nbytes)
    idle = round(idle_rate * first.step[1])
    envelopes = round(envelope * sum(rank.messages for rank in ranks))
    return Wire(
        namespace,
        first.steps,
        theory_bytes=sum(rank.theory_bytes for rank in ranks),
        counted_bytes=sum(rank.counted_bytes for rank in ranks),
        read_bytes=round(payload(first.step)) - idle - envelopes,
        interface_bytes=first.step[0].sent_bytes,
        header_bytes=HEADER_BYTES * first.step[0].packets,
        idle_bytes=idle,
        envelope_bytes=envelopes,
    )


def namespace_prefix() -> list[str]:
    """A command prefix that runs a command in a new network namespace; empty if not permitted."""
    for options in (["--net"], ["--net", "--map-root-user"]):
        prefix = ["unshare", *options, "--"]
        if shutil.which("unshare") and _succeeds([*prefix, "true"]):
            return prefix
    return []


def _succeeds(line: Sequence[str]) -> bool:
    return subprocess.run(line, capture_output=True, check=False).returncode == 0


def bring_up_loopback() -> None:
    """Switch the loopback interface on.  In a new namespace it is off."""
    request = struct.pack("16sh14x", interface.LOOPBACK.encode(), UP_RUNNING)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, request)


def on_loopback(statement: str, arguments: Sequence[str], prefix: Sequence[str]) -> str:
    """Run `python -c statement arguments` with its ranks on the loopback interface.

    Returns the last lines of its error output.
    """
    settings = {"GLOO_SOCKET_IFNAME": interface.LOOPBACK, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    line = [*prefix, sys.executable, "-c", statement, *arguments]
    ended = subprocess.run(
        line, env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )
    return "\n".join(ended.stderr.splitlines()[-20:])
