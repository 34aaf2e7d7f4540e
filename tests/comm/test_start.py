"""Ranks that other launchers start: they meet or say who is missing, and watch each other."""

import errno
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from shardwise.comm.start import peers
from shardwise.comm.start.peers import meet
from shardwise.comm.start.rendezvous import (
    Limits,
    Start,
    environment,
    first_host,
    local_rank,
    require_interfaces,
    require_loopback,
)
from shardwise.core.errors import InputError
from tests.comm.hosts import HOSTS, joined_hosts, set_link
from tests.engine.cases import fails
from tests.programs import Program, run_program, start_program

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def program(*what: str) -> list[str]:
    return ["-m", "tests.comm.program", *what]


def ended(
    what: str, ranks: Sequence[int], size: int, **variables: str
) -> list[tuple[int | None, str, str]]:
    """Exit code, output and errors of `ranks` of a world of `size`; one that is stopped is last."""
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1"}
    shared |= variables | {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    argv = program(*what.split())
    with ExitStack() as stack:
        started = [
            stack.enter_context(start_program(argv, ROOT, shared | {"RANK": str(rank)}))
            for rank in ranks
        ]
        found: list[tuple[int | None, str, str]] = []
        stopped = [f"stop {rank}" == what for rank in ranks]
        for process, never in sorted(zip(started, stopped, strict=True), key=itemgetter(1)):
            code = None if never else process.wait(60)
            process.kill()
            found.append((code, *process.communicate()))
        return found


@pytest.mark.full
@pytest.mark.parametrize("what", ["stop 1", "kill 2", "kill 0"])
def test_a_rank_that_is_lost_ends_all_others(what: str):
    """Without a launcher that kills: each says which rank was lost, and one where it was."""
    lost = int(what[-1])
    found = ended(what, range(3), 3, SHARDWISE_FROZEN_S="1")
    others = [each for each in found if each[0] not in (None, -signal.SIGKILL)]
    assert len(others) == 2
    for code, _, said in others:
        assert code == 1
        assert f"rank {lost} failed: its pro" in said or (
            lost == 0 and "on rank 0 or in its" in said
        )
    if lost:
        assert any(said.startswith(f"rank {lost} failed: its pro") for _, _, said in others)


@pytest.mark.full
def test_a_host_whose_link_is_down_ends_all_ranks():
    """On both sides of the link, those beside the store too, with nobody to kill them."""
    shared = {"WORLD_SIZE": "4", "MASTER_ADDR": HOSTS[0], "SHARDWISE_FROZEN_S": "1"}
    shared |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "eth0"}
    with joined_hosts(2) as hosts, ExitStack() as stack:
        ranks: list[Program] = []
        for rank in range(4):
            own = program("sleep"), ROOT, shared | {"RANK": str(rank)}, hosts[rank // 2]
            ranks.append(stack.enter_context(start_program(*own)))
        assert all(process.stdout.readline() == "met\n" for process in ranks)
        time.sleep(2)  # a heartbeat of each
        set_link(hosts, 1, "down")
        said = [process.communicate(timeout=40)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [1] * 4
    for text in said[:2]:
        assert re.search("rank [23] failed: its process .* another host, which is frozen", text)
    for text in said[2:]:
        assert "on rank 0 or in its launcher" in text or "rank 0 failed: its process" in text


@pytest.mark.full
@pytest.mark.parametrize("what", ["part", "pipe", "end"])
def test_a_rank_that_loses_its_connection_names_the_other_end(what: str):
    """Not the error of gloo alone: the rank, the call, and the line; those that end are silent."""
    found = ended(what, range(2), 2, SHARDWISE_SHARED_MEMORY="0")
    if what == "end":
        assert found == [(0, f"rank {rank} has ended\n", "") for rank in range(2)]
        return
    assert found[0][0] == 1
    assert re.search(
        r"connection to rank 1 failed in \w+ on axis \w+, called by .*(started_alone|lose) \(prog",
        found[0][2],
    )


def test_ranks_that_do_not_start_are_named():
    """All that came give up with one paragraph, in place of minutes of silence."""
    for code, _, said in ended("end", (0, 2), 4, SHARDWISE_START_TIMEOUT_S="3"):
        assert code == 2
        assert "4 ranks (WORLD_SIZE), and ranks 1, 3 did not start" in said
        assert said.count("\n") == 1


# --- the meeting ----------------------------------------------------------------------------------


def start(rank: int, port: int, host: str = "127.0.0.1") -> Start:
    return Start(rank, 2, rank, host, port)


@pytest.mark.parametrize(
    ("rank", "host", "port"), [(1, "127.0.0.1", 1), (1, "nowhere.invalid", 29500)]
)
def test_an_address_that_cannot_be_is_told(rank: int, host: str, port: int):
    """With what was waited for, after the time limit."""
    with pytest.raises(InputError, match=f"rank {rank} waited 1 s .*MASTER_ADDR={host}"):
        meet(start(rank, port, host), Limits(start_s=1))


def test_a_port_in_use_is_told():
    """By the rank that would serve the store there."""
    with socket.socket() as listening:
        listening.bind(("", 0))
        listening.listen()
        port = listening.getsockname()[1]
        with pytest.raises(InputError, match=f"MASTER_PORT={port}: .*uses the port"):
            meet(start(0, port), Limits(start_s=1))


def test_a_host_without_the_named_or_any_network_is_told(monkeypatch: pytest.MonkeyPatch):
    """An interface that it does not have, and no way from a process to another."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nope")
    with pytest.raises(InputError, match="no interface nope on"):
        require_interfaces()
    monkeypatch.setattr(socket, "create_connection", fails(errno.ENETUNREACH))
    with pytest.raises(InputError, match="ip link set lo up"):
        require_loopback()


def test_each_meeting_at_an_agents_store_is_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """Whoever comes first, no rank reads the id of an earlier meeting, or waits for a dead rank."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(peers, "_LATER_S", 0.5)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    starts = [start(rank, server.port) for rank in range(2)]
    with pytest.raises(InputError, match="and rank 0 did not start"):
        meet(starts[1], Limits(start_s=1))  # its question stays, as that of a killed rank
    for first in (0, 1, 0):
        with ThreadPoolExecutor() as ranks:
            early = ranks.submit(meet, starts[first], Limits(start_s=20))
            time.sleep(0.3)
            late = ranks.submit(meet, starts[1 - first], Limits(start_s=20))
            stores = early.result(), late.result()
        assert all(isinstance(store, PrefixStore) and not store.check(["x"]) for store in stores)
        stores[0].set("x", str(first))
        assert stores[1].get("x").decode() == str(first)


def test_a_store_that_closes_is_no_raw_error():
    """Rank 0 has given up while another waits."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = start(1, server.port)
    closing = [server]
    threading.Timer(0.5, closing.clear).start()
    del server
    with pytest.raises(InputError, match="the run's store has closed"):
        meet(other, Limits(start_s=20))


SCRIPT = """
import sys, torch
from torch import nn
import shardwise as sw

world = sw.init("cpu")
torch.manual_seed(0)
engine = sw.parallelize(
    nn.Linear(6, 4), "zero3 fp64", world, optimizer=sw.SGD(lr=0.1),
    loss=lambda model, x: model(x).square().mean(),
)
rows = torch.arange(48.0).view(8, 6).cos().chunk(world.size)[world.rank]
losses = [engine.step(rows).loss for _ in range(2)]
sys.stdout.write(f"rank {world.rank} of {world.size}: {losses[-1]:.10f}\\n")
world.close()
"""


#: What stands before the script; none for one process.
LAUNCHERS = {
    "": "",
    "torchrun": "-m torch.distributed.run --nproc-per-node 2 --master-port PORT",
    "accelerate": "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 "
    "--main_process_port PORT --mixed_precision no --dynamo_backend no",
    "deepspeed": "-m deepspeed.launcher.runner --num_gpus 2 --master_port PORT",
}


def printed(folder: Path, launcher: str) -> list[str]:
    """The lines of the script, in the order of ranks."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    paths = os.pathsep.join([str(ROOT), *sys.path])
    argv = [*LAUNCHERS[launcher].replace("PORT", str(free_port())).split(), str(script)]
    done = run_program(argv, folder, {"DS_ACCELERATOR": "cpu", "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "deepspeed"])
def test_a_script_runs_unchanged_under(launcher: str, tmp_path: Path):
    """Both ranks have the loss that one process has."""
    if launcher != "torchrun":
        pytest.importorskip(launcher)
    (alone,) = printed(tmp_path, "")
    loss = alone.removeprefix("rank 0 of 1: ")
    assert printed(tmp_path, launcher) == [f"rank {rank} of 2: {loss}" for rank in range(2)]


# --- the environment of a rank --------------------------------------------------------------------

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[007-012,020],cpu1",
    "SLURM_JOB_ID": "100",
    "SLURM_STEP_ID": "2",
}


@pytest.mark.cases(14)
@pytest.mark.parametrize(
    ("variables", "start"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),
        (TORCHRUN, Start(3, 8, 3, "a", 1)),
        (TORCHRUN | SLURM | {"LOCAL_RANK": "1"}, Start(3, 8, 1, "a", 1)),
        (SLURM, Start(5, 8, 1, "gpu007", 15702)),
        (SLURM | {"MASTER_ADDR": "h", "MASTER_PORT": "9"}, Start(5, 8, 1, "h", 9)),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"RANK": "0"}, "RANK in the environment without WORLD_SIZE and MASTER_ADDR"),
        (TORCHRUN | {"RANK": "8"}, "RANK='8'.*a whole number from 0 to 7"),
        (TORCHRUN | {"RANK": "one"}, "RANK='one'"),
        (TORCHRUN | {"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1'"),
        (TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT='65536'.*from 1 to 65535"),
        (SLURM | {"SLURM_PROCID": "9"}, "SLURM_PROCID='9'.*from 0 to 7"),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, "without SLURM_STEP_NODELIST"),
    ],
)
def test_the_environment_tells_how_a_process_was_started(
    variables: dict[str, str], start: Start | str | None
):
    """Torchrun's variables come first, then a Slurm step's; wrong ones are named in a refusal."""
    if isinstance(start, str):
        with pytest.raises(InputError, match=start):
            environment(variables)
    else:
        assert environment(variables) == start


def test_hosts_and_local_ranks():
    """The first name of Slurm's compressed list; the local rank is the rank if no launcher says."""
    first = {"node1,node2": "node1", "gpu[007-012,020],cpu1": "gpu007", "a[3,5]-ib": "a3-ib"}
    assert {hosts: first_host(hosts) for hosts in first} == first
    told = ({"LOCAL_RANK": "1"}, {"SLURM_LOCALID": "2"}, {"LOCAL_RANK": "x"}, {})
    assert [local_rank(5, variables) for variables in told] == [1, 2, 5, 5]
