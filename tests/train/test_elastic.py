"""Runs whose world shrinks and grows: they go on by themselves, and compute the same."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.cli.elastic import nproc_of, train_elastic, usable_sizes
from shardwise.comm.start.launch import Ended
from shardwise.core.errors import InputError
from shardwise.train import config
from shardwise.train.measure.metrics import read
from shardwise.train.prepare import checked_plan
from tests.comm.hosts import HOSTS, joined_hosts, processes_on
from tests.programs import Program, start_program
from tests.train import runs


@pytest.mark.full
def test_a_run_that_loses_ranks_goes_on_and_grows_again(tmp_path: Path) -> None:
    """Rank 1 of 3 is killed before there is a checkpoint, and again after; the curve is equal."""
    straight = runs.run(runs.settings(tmp_path / "straight", "zero3 fp64"), 1)
    given = runs.settings(tmp_path / "run", "zero3 fp64")
    file, kills = tmp_path / "config.toml", tmp_path / "kills"
    file.write_text(config.dump(given))
    program = [sys.executable, str(Path(__file__).with_name("killed.py")), "train", str(file)]
    variables = os.environ | {"KILLS": str(kills), "MOST": "3"}
    done = subprocess.run(  # its ranks import this program
        [*program, "--nproc", "2:3"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    said = done.stderr
    assert done.returncode == 0, said[-3000:]
    assert kills.read_text() == "xx"
    assert said.count("goes on with 2 of 3 ranks") == 2 and "goes on with 3 ranks" in said
    found = read(given.folder)
    assert [r.step for r in found] == [r.step for r in straight]
    assert [r.loss for r in found] == pytest.approx([r.loss for r in straight], rel=1e-10)
    assert found[0].ranks == 2 and {r.ranks for r in found} == {2, 3}
    assert "it changed: 3 ranks after step " in (given.folder / "report.md").read_text()


def sizes(text: str, plan: str) -> list[int]:
    """The numbers of ranks on which a run of six sequences a step may go on."""
    given = runs.settings(Path("run"), plan, batch=6)
    return usable_sizes(nproc_of(text), lambda ranks: checked_plan(given, ranks), plan)


def test_the_sizes_are_those_on_which_the_plan_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Multiples of the other axes, and at most a row for each data rank."""
    monkeypatch.chdir(tmp_path)
    assert sizes("1:4", "zero3") == [1, 2, 3, 4]
    assert sizes("2:8", "tp2 zero1") == [2, 4, 6, 8]


@pytest.mark.parametrize(
    ("text", "plan", "said"),
    [
        ("3:4", "dp4 zero3", "which runs on 4 ranks alone"),
        ("3:4", "tp2 zero1", "which runs on 4 ranks alone"),
        ("1:8", "zero3", "train.batch = 6"),
        ("4:2", "zero3", "--nproc 4:2"),
        ("2:", "zero3", "--nproc '2:'"),
        ("x:2", "zero3", "--nproc 'x:2'"),
        ("1:" + "9" * 5000, "zero3", "a whole number, or MIN:MAX"),
        ("3:4", "dp2 tp2", "Write instead: the plan without dp2, or --nproc 4"),
        ("3:4", "tp2", "Write instead: a lower MIN, or --nproc 4"),
        ("1:2", "tp2", "Write instead: --nproc 2"),
    ],
)
def test_a_plan_that_cannot_shrink_says_so_at_the_start(
    text: str, plan: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any rank starts."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=said.replace("(", ".")):
        sizes(text, plan)


class Script:
    """Starts that end as written: in each, checkpoints are saved, and then ranks are lost."""

    def __init__(self, folder: Path, *acts: tuple[int, int]) -> None:
        self.folder, self.acts = folder / "checkpoints", [*acts]
        self.ranks, self.steps = list[int](), 0

    def start(self, ranks: int, again: bool, stop_when: Callable[[], bool] | None) -> Ended:
        assert again == bool(self.ranks)
        self.ranks.append(ranks)
        saves, lost = self.acts.pop(0)
        for _ in range(saves):
            self.steps += 1
            path = self.folder / f"step-{999_998 + self.steps:06d}"
            path.mkdir(parents=True)
            for name in (".metadata", "scalars.json"):
                (path / name).write_text(json.dumps({"step": self.steps}))
            if stop_when is not None and stop_when():
                return Ended(0, stopped=True)
        return Ended(1 if lost else 0, lost)


@pytest.mark.parametrize(
    ("acts", "ranks"),
    [
        ([(2, 0)], [4]),
        ([(2, 1), (9, 0), (1, 0)], [4, 3, 4]),
        ([(1, 2), (9, 0), (0, 1), (9, 0), (9, 0)], [4, 2, 4, 3, 4]),
        ([(0, 1), (0, 1), (0, 1)], [4, 3, 2]),
        ([(1, 3)], [4]),
    ],
)
def test_a_world_shrinks_by_what_is_lost_and_grows_after_a_checkpoint(
    acts: list[tuple[int, int]], ranks: list[int], tmp_path: Path
) -> None:
    """Until the run ends, too few ranks are left, or three starts in a row save nothing.

    Names of checkpoints get longer at a million steps.
    """
    script = Script(tmp_path, *acts)
    code = train_elastic(runs.settings(tmp_path), [2, 3, 4], script.start)
    assert script.ranks == ranks and code == (1 if acts[-1][1] else 0)


def test_a_run_that_overwrites_another_never_continues_it(tmp_path: Path) -> None:
    """Until it has a checkpoint of its own, a start again begins anew."""
    script, told = Script(tmp_path, (1, 0)), list[bool]()
    script.start(4, again=False, stop_when=None)  # the other run

    def start(ranks: int, again: bool, stop_when: Callable[[], bool] | None) -> Ended:
        told.append(again)
        script.ranks, script.acts = [0] * again, [[(0, 1), (1, 1), (0, 0)][len(told) - 1]]
        return script.start(ranks, again, stop_when)

    assert train_elastic(runs.settings(tmp_path), [2, 3, 4], start, overwrite=True) == 0
    assert told[:2] == [False, False] and told[2:] == [True] * len(told[2:])


def until(what: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.full
def test_a_host_that_is_lost_and_returns_is_left_out_meanwhile(tmp_path: Path) -> None:
    """Under torchrun --nnodes 1:2 its agent and its rank are killed, and started again later."""
    straight = runs.run(runs.settings(tmp_path / "straight", "zero3 fp64", steps=60), 1)
    given = runs.settings(tmp_path / "run", "zero3 fp64", steps=60)
    file = tmp_path / "config.toml"
    file.write_text(config.dump(given))
    program = [str(Path(__file__).with_name("killed.py")), "train", str(file), "--resume", "auto"]
    meet = f"--nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-endpoint {HOSTS[0]}:29533"
    conf = "is_host={},last_call_timeout=1,join_timeout=60,close_timeout=5"
    shared = {"MOST": "3", "KILLS": str(tmp_path / "xxx"), "GLOO_SOCKET_IFNAME": "eth0"}
    # a shared store would not tell a host that joins later where the ranks meet
    shared |= {"SHARDWISE_FROZEN_S": "2", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    (tmp_path / "xxx").write_text("xx")  # no rank is to end by itself

    def agent(number: int) -> Program:
        own = ["--local-addr", HOSTS[number], "--rdzv-conf", conf.format(int(not number))]
        argv = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", *meet.split(), *own]
        return start_program([*argv, *program], None, shared, hosts[number])

    def trained_by(ranks: int) -> bool:
        return bool(found := read(given.folder)) and found[-1].ranks == ranks

    with joined_hosts(2) as hosts, agent(0) as first:
        with agent(1) as second:
            until(lambda: trained_by(2))
            for pid in processes_on(hosts[1]):
                os.kill(pid, signal.SIGKILL)
        until(lambda: trained_by(1))
        with agent(1) as second:
            until(lambda: trained_by(2))
            texts = [each.communicate(timeout=240)[1] for each in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0), texts
    found = read(given.folder)
    assert [r.loss for r in found] == pytest.approx([r.loss for r in straight], rel=1e-10)
    assert [r.step for r in found] == [r.step for r in straight]
