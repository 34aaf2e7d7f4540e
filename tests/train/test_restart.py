"""Runs whose ranks are killed and whose world changes: they go on, and compute the same."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from shardwise.train import config
from shardwise.train.metrics import read
from tests.comm.hosts import HOSTS, joined_hosts, processes_on
from tests.comm.test_start import free_port
from tests.programs import Program, run_program, start_program, until
from tests.train import runs

#: Kills rank 1 after step 1, and once more after step 5: what is killed at once leaves no
#: checkpoint to go on from, what is killed later does.  A file counts, as the agents' own counts
#: may differ.  While there is a file `slow` steps take long, so that the run can grow meanwhile.
KILLER = """
import os, pathlib, signal, time
import shardwise as sw

KILLS, SLOW = (pathlib.Path({folder!r}, name) for name in ("kills", "slow"))

class Killer(sw.callbacks.Callback):
    all_ranks = True

    def run_began(self, run):
        self.rank = run.rank

    def step_ended(self, step, metrics):
        killed = KILLS.read_text() if KILLS.exists() else ""
        if self.rank == 1 and step == (1, 5, None)[len(killed)]:
            KILLS.write_text(killed + "x")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5 * SLOW.exists())

def make():
    return Killer()
"""


def killed(folder: Path, plan: str, steps: int = 7) -> tuple[config.Config, str]:
    """A run whose rank 1 is killed twice, and its file; the kills are counted in `folder`/kills."""
    callback, file = folder / "killer.py", folder / "config.toml"
    callback.write_text(KILLER.format(folder=str(folder)))
    given = runs.settings(folder / "run", plan, steps=steps)
    given = runs.changed(given, "run", callbacks=(f"{callback}:make",))
    file.write_text(config.dump(given))
    return given, str(file)


TORCHRUN = ["-m", "torch.distributed.run", "--max-restarts", "3"]


@pytest.mark.full
def test_torchrun_restarts_end_in_the_undisturbed_curve(tmp_path: Path) -> None:
    """A rank is killed before there is a checkpoint, and another time after: torchrun goes on."""
    straight = runs.run(runs.settings(tmp_path / "straight", "dp2 zero3 fp64"), 2)
    given, file = killed(tmp_path, "dp2 zero3 fp64")
    place = f"--nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port {free_port()}"
    program = ["-m", "shardwise", "train", file, "--resume", "auto"]
    agents = [[*TORCHRUN, *place.split(), "--node-rank", rank, *program] for rank in "01"]
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(partial(run_program, timeout=240), agents))
    assert [each.returncode for each in done] == [0, 0], done
    assert any("resumed after step 4" in each.stdout for each in done)
    assert (tmp_path / "kills").read_text() == "xx"
    found = read(given.folder)
    assert [(r.step, r.loss) for r in found] == [(r.step, r.loss) for r in straight]


@pytest.mark.full
def test_a_host_that_is_lost_and_returns_is_left_out_meanwhile(tmp_path: Path) -> None:
    """Under torchrun --nnodes 1:2 its agent and its rank are killed, and started again later."""
    straight = runs.run(runs.settings(tmp_path / "straight", "zero3 fp64", steps=60), 1)
    given, file = killed(tmp_path, "zero3 fp64", steps=60)
    (tmp_path / "kills").write_text("xx")  # no rank is to end by itself
    (tmp_path / "slow").touch()

    def trained_by(ranks: int) -> bool:
        return bool(found := read(given.folder)) and found[-1].ranks == ranks

    meet = f"--nnodes 1:2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint {HOSTS[0]}:29533"
    conf = "is_host={},last_call_timeout=1,join_timeout=60,close_timeout=5"
    # a shared store would not tell a host that joins later where the ranks meet
    shared = {"SHARDWISE_FROZEN_S": "2", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    shared |= {"GLOO_SOCKET_IFNAME": "eth0"}
    program = ["-m", "shardwise", "train", file, "--resume", "auto"]

    def agent(number: int) -> Program:
        own = ["--local-addr", HOSTS[number], "--rdzv-conf", conf.format(int(not number))]
        argv = [*TORCHRUN, *meet.split(), *own, *program]
        return start_program(argv, None, shared, hosts[number])

    with joined_hosts(2) as hosts, agent(0) as first:
        with agent(1) as second:
            until(lambda: trained_by(2))
            for pid in processes_on(hosts[1]):
                os.kill(pid, signal.SIGKILL)
        until(lambda: trained_by(1))
        with agent(1) as second:
            until(lambda: trained_by(2))
            (tmp_path / "slow").unlink()
            texts = [each.communicate(timeout=240)[1] for each in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0), texts
    found = read(given.folder)
    assert [r.step for r in found] == [r.step for r in straight]
    assert [r.loss for r in found] == pytest.approx([r.loss for r in straight], rel=1e-10)
