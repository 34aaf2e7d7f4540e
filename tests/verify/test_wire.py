"""The counters of the network interface beside the ledgers and the prediction.

The ranks run without shared memory, so every message goes through gloo and TCP over the loopback
interface: in a network namespace of their own if the system permits it (root, or user namespaces),
else on the host's, which also counts the traffic of other programs. Subtracted from its bytes are
the headers, 66 bytes per packet: Ethernet 14, IPv4 20, TCP 32 with its timestamps; acknowledgements
are headers only.
"""

import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from benchmarks.meters import interface
from shardwise.comm.ledger import TIER, rank_bytes
from shardwise.comm.start.launch import spawn
from shardwise.comm.world import World, init
from shardwise.core.plan.plan import Plan
from shardwise.models.registry import find
from shardwise.prediction.prediction import CHECKED_STEPS
from shardwise.verify.parity import engine_of, equal_share, theory_of

STATEMENT = "import sys; from tests.verify.test_wire import main; main(*sys.argv[1:])"
SET_FLAGS = 0x8914  # SIOCSIFFLAGS of <linux/sockios.h>
UP_RUNNING = 0x1 | 0x40  # IFF_UP, IFF_RUNNING of <linux/if.h>
HEADER_BYTES = 66
STEPS = 4
SETTLE_S = 0.2


class Wire(NamedTuple):
    """The bytes of all ranks: by theory, by their ledgers, and as the interface has them."""

    theory_bytes: int
    counted_bytes: int
    read_bytes: int


def sent_bytes(world: World) -> int:
    """What the interface has carried, without headers, once all ranks are here."""
    world.barrier()
    time.sleep(SETTLE_S)  # for late acknowledgements
    found = interface.sent(interface.LOOPBACK)
    world.barrier()
    return found.sent_bytes - HEADER_BYTES * found.packets


def on_rank(plan: Plan, uncounted_bytes: int) -> Wire:
    """Bytes of this rank by theory and by its ledger, and of the interface of all ranks."""
    world, trainable = init("cpu", shared_memory=False), find("gpt")
    engine = engine_of(trainable, plan, world)
    theory = theory_of(trainable, plan, world.rank)
    predicted = counted = before = 0
    for step in range(CHECKED_STEPS + STEPS):
        if step == CHECKED_STEPS:  # the steps before compare more than later ones
            predicted, counted, before = 0, 0, sent_bytes(world)
        batch = equal_share(trainable, engine, step)
        engine.step(batch)
        lines = theory(batch).in_step(step)
        predicted += sum(count for line, count in lines.items() if line.axis != TIER)
        counted += rank_bytes(engine.last)
        if step >= CHECKED_STEPS and uncounted_bytes:
            dist.all_reduce(torch.zeros(uncounted_bytes, dtype=torch.uint8))
    return Wire(predicted, counted, sent_bytes(world) - before)


def main(plan: str, uncounted_bytes: str, namespace: str) -> None:
    """Print the `Wire` of a plan, whose ranks this process starts."""
    if namespace == "own":  # in which the interface is off
        request = struct.pack("16sh14x", interface.LOOPBACK.encode(), UP_RUNNING)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, SET_FLAGS, request)
    read = Plan.parse(plan)
    ranks = spawn(on_rank, read.size, (read, int(uncounted_bytes)))
    predicted, counted = (sum(rank[at] for rank in ranks) for at in range(2))
    print(json.dumps(Wire(predicted, counted, ranks[0].read_bytes)))


def wire(plan: str, uncounted_bytes: int = 0) -> tuple[Wire, bool]:
    """What a plan sends, and whether nothing else did."""
    prefixes = (["unshare", "--net", *user, "--"] for user in ([], ["--map-root-user"]))
    own = [p for p in prefixes if shutil.which("unshare") and succeeds([*p, "true"])]
    prefix, namespace = (own[0], "own") if own else ([], "host")
    line = [*prefix, sys.executable, "-c", STATEMENT, plan, str(uncounted_bytes), namespace]
    settings = {"GLOO_SOCKET_IFNAME": interface.LOOPBACK, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    said = subprocess.run(
        line, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True, check=True
    )
    return Wire(*json.loads(said.stdout.splitlines()[-1])), bool(own)


def succeeds(line: list[str]) -> bool:
    return subprocess.run(line, capture_output=True, check=False).returncode == 0


@pytest.mark.full
@pytest.mark.parametrize("uncounted_bytes", [0, 2**19])
def test_the_interface_has_what_was_counted(uncounted_bytes: int):
    """Theory equals the ledgers, the kernel's counters within 2 %: an all-reduce more is seen."""
    found, alone = wire("dp2 fp64", uncounted_bytes)
    assert found.theory_bytes == found.counted_bytes > 2**24
    sent = found.counted_bytes + 2 * STEPS * uncounted_bytes
    assert found.read_bytes >= 0.98 * sent
    assert not alone or found.read_bytes <= 1.02 * sent
    assert uncounted_bytes == 0 or sent > 1.04 * found.counted_bytes
