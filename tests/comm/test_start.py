"""Ranks that other launchers start: they meet or say who is missing, and watch each other."""

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
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

from shardwise.comm.start.connect import meet
from shardwise.comm.start.rendezvous import Limits, Start
from shardwise.core.errors import InputError
from tests.comm.hosts import HOSTS, joined_hosts, set_link
from tests.programs import Program, run_program, start_program

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def ended(
    what: str, ranks: Sequence[int], size: int, **variables: str
) -> list[tuple[int | None, str, str]]:
    """Run `ranks` of a world of `size`: exit code, output and error output of each.

    A rank that is stopped has no exit code, comes last, and is killed when the others have ended.
    """
    port = free_port()
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost"} | variables
    shared |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    program = ["-m", "tests.comm.meeting", what]
    started = [start_program(program, ROOT, shared | {"RANK": str(rank)}) for rank in ranks]
    with ExitStack() as stack:
        for process in started:
            stack.enter_context(process)
            stack.callback(process.kill)
        found: list[tuple[int | None, str, str]] = []
        stopped = [f"stop {rank}" == what for rank in ranks]
        for process, never in sorted(zip(started, stopped, strict=True), key=itemgetter(1)):
            code = None if never else process.wait(60)
            process.kill()
            found.append((code, *process.communicate()))
        return found


@pytest.mark.full
@pytest.mark.parametrize("what", ["stop 1", "stop 0", "kill 2", "kill 0"])
def test_a_rank_that_is_lost_ends_all_others(what: str):
    """Without a launcher that kills: each says which rank was lost, one says where it was."""
    lost = int(what[-1])
    found = ended(what, range(4), 4, SHARDWISE_FROZEN_S="1")
    others = [each for each in found if each[0] not in (None, -signal.SIGKILL)]
    assert len(others) == 3
    for code, _, said in others:
        assert code == 1
        assert f"rank {lost} failed: its pro" in said or (
            lost == 0 and "on rank 0 or in its" in said
        )
    if lost:
        assert sum(said.startswith(f"rank {lost} failed: its pro") for _, _, said in others) == 1


@pytest.mark.full
def test_a_host_whose_link_is_down_ends_all_ranks():
    """On both sides of the link, those beside the store too, with nobody to kill them."""
    shared = {"WORLD_SIZE": "4", "MASTER_ADDR": HOSTS[0], "SHARDWISE_FROZEN_S": "1"}
    shared |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "eth0"}
    program = ["-m", "tests.comm.meeting", "sleep"]
    with joined_hosts(2) as hosts, ExitStack() as stack:
        ranks = [
            start_program(program, ROOT, shared | {"RANK": str(rank)}, hosts[rank // 2])
            for rank in range(4)
        ]
        for process in ranks:
            stack.enter_context(process)
            stack.callback(process.kill)
        assert all(process.stdout.readline() == "met\n" for process in ranks)
        time.sleep(2)  # a heartbeat of each
        set_link(hosts, 1, "down")
        said = [process.communicate(timeout=40)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [1] * 4
    for text in said[:2]:
        found = re.search("rank [23] failed: its process .* another host, (.*), which does n", text)
        assert found is not None and found[1] == HOSTS[1]
    for text in said[2:]:
        store = "on rank 0 or in its launcher" in text or "rank 0 failed: its process" in text
        assert store and f"host, {HOSTS[0]}, " in text and "not answer any more" in text


@pytest.mark.full
def test_a_rank_that_hangs_is_found_by_its_peers():
    """Who has waited too long says where every rank is."""
    (code, _, said), (other, _, short) = sorted(
        ended("hang", range(2), 2, SHARDWISE_PATIENCE_S="2"), key=lambda each: -len(each[2])
    )
    assert code == other == 1 and "ends: rank 1 failed: rank 0 has waited for 2 s" in short
    assert said.startswith("rank 1 failed: rank 0 has waited for 2 s")
    assert all(f"rank {rank}: comm/meeting.py:" in said for rank in (0, 1))
    assert "; its last calls: all_reduce world (start), all_reduce world (start)\n" in said


@pytest.mark.full
def test_ranks_that_are_watched_end_in_peace():
    """The watch ends with the world, and says nothing."""
    for rank, (code, out, said) in enumerate(ended("end", range(2), 2, SHARDWISE_FROZEN_S="1")):
        assert (code, out, said) == (0, f"rank {rank} has ended\n", "")


@pytest.mark.full
@pytest.mark.parametrize("what", ["part", "pipe"])
def test_a_rank_that_loses_its_connection_names_the_other_end(what: str):
    """Not the error of gloo alone: the rank, the call, and the line of the program."""
    (code, _, said), _ = ended(what, range(2), 2, SHARDWISE_SHARED_MEMORY="0")
    assert code == 1
    assert re.search(
        r"the connection to rank 1 failed in \w+ on axis \w+, called by .*main \(meeting.py:", said
    )


def test_ranks_that_do_not_start_are_named():
    """All that came give up with one paragraph, in place of minutes of silence."""
    for code, _, said in ended("end", (0, 2), 4, SHARDWISE_START_TIMEOUT_S="3"):
        assert code == 2
        assert "4 ranks (WORLD_SIZE), and ranks 1, 3 did not start" in said
        assert said.count("\n") == 1


@pytest.fixture
def listener():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening


def start(rank: int, port: int, host: str = "127.0.0.1") -> Start:
    return Start(rank, 2, rank, host, port)


def test_a_port_in_use_is_told_before_anybody_waits(listener: socket.socket):
    """Rank 0 cannot listen there, and is told one that is free."""
    with pytest.raises(InputError, match=r"MASTER_PORT=\d+, which another.*MASTER_PORT=\d+ on all"):
        meet(start(0, listener.getsockname()[1]), Limits(start_s=5))


def test_a_program_that_is_no_store_is_not_waited_for(listener: socket.socket):
    """It takes the connection and says nothing; torch's client would wait without a limit."""
    with pytest.raises(InputError, match="another program seems to listen: it accepts connections"):
        meet(start(1, listener.getsockname()[1]), Limits(start_s=1))


def test_an_address_where_nobody_listens_is_told():
    """With host and port, what was waited for, and why it did not come."""
    with pytest.raises(InputError, match=r"rank 1 waited 1 s .* from 127\.0\.0\.1, port 1: "):
        meet(start(1, 1), Limits(start_s=1))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_address_of_no_host_is_told(rank: int):
    """By rank 0 too, which would listen there."""
    with pytest.raises(InputError, match=r"MASTER_ADDR=nowhere\.invalid, which is the address of"):
        meet(start(rank, 29500, "nowhere.invalid"), Limits(start_s=5))


def test_two_processes_of_one_rank_are_told():
    """The second of them is refused."""
    port, found = free_port(), list[object]()
    first = threading.Thread(target=lambda: found.append(meet(start(0, port), Limits(start_s=30))))
    first.start()
    store = meet(start(1, port), Limits())
    first.join()
    assert isinstance(store, PrefixStore) and len(found) == 1
    with pytest.raises(InputError, match="two processes with rank 1 at one address"):
        meet(start(1, port), Limits(start_s=1))


def test_each_meeting_at_an_agents_store_is_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """Whoever comes first, no rank reads the id of an earlier meeting, or waits for a dead rank."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
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
    with pytest.raises(InputError, match="two processes with rank 1 at one address"):
        meet(starts[1], Limits(start_s=1))


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


def port() -> str:
    return str(free_port())


def torchrun() -> list[str]:
    return ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port()]


def accelerate() -> list[str]:
    one = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    many = ["--multi_gpu", "--num_processes", "2", "--main_process_port", port()]
    return ["-m", "accelerate.commands.launch", *many, *one]


def deepspeed() -> list[str]:
    return ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", port()]


def printed(folder: Path, argv: list[str], **variables: str) -> str:
    """What the script prints when Python runs it with these arguments before it."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    done = run_program([*argv, str(script)], folder, variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(text: str) -> dict[str, str]:
    """The loss that each rank prints."""
    ranks = [line.partition(": ") for line in text.splitlines() if line.startswith("rank ")]
    return {rank: loss for rank, _, loss in ranks}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The loss of one process."""
    alone = losses(printed(tmp_path_factory.mktemp("alone"), []))
    assert list(alone) == ["rank 0 of 1"]
    return alone["rank 0 of 1"]


@pytest.mark.full
@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("accelerate", "deepspeed")),
    ],
)
def test_a_script_runs_unchanged_under(launcher: str, expected: str, tmp_path: Path):
    """Both ranks have the loss that one process has."""
    if launcher != "torchrun" and importlib.util.find_spec(launcher) is None:
        pytest.skip(f"{launcher} is not installed: pip install {launcher}")
    argv = {"torchrun": torchrun, "accelerate": accelerate, "deepspeed": deepspeed}[launcher]()
    found = losses(printed(tmp_path, argv, DS_ACCELERATOR="cpu"))
    assert found == {"rank 0 of 2": expected, "rank 1 of 2": expected}


@pytest.mark.full
def test_a_script_runs_unchanged_in_the_environment_of_srun(expected: str, tmp_path: Path):
    """With the variables that srun sets for each task, whether or not Slurm is here."""
    if shutil.which("srun") and "SLURM_JOB_ID" in os.environ:  # inside of an allocation
        folder = tmp_path / "srun"
        folder.mkdir()
        (folder / "script.py").write_text(SCRIPT)
        command = ["srun", "--ntasks", "2", sys.executable, str(folder / "script.py")]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert losses(done.stdout) == {"rank 0 of 2": expected, "rank 1 of 2": expected}
        return
    job, started = port(), list[Program]()
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    step |= {"SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "MASTER_PORT": port()}
    (tmp_path / "script.py").write_text(SCRIPT)
    for rank in ("0", "1"):
        own = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "PYTHONPATH": str(ROOT)}
        started.append(start_program([str(tmp_path / "script.py")], variables=step | own))
    text = "".join(process.communicate(timeout=120)[0] for process in started)
    assert losses(text) == {"rank 0 of 2": expected, "rank 1 of 2": expected}
