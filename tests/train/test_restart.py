"""Runs that are killed: `--resume auto` goes on after every restart, and disks are left empty."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import pytest

from shardwise.checkpoint.folder import CHECKPOINTS, find
from shardwise.cli.main import with_resume_value
from shardwise.core.errors import InputError
from shardwise.train import config, prepare
from shardwise.train import run_folder as folder
from shardwise.train.config_sections import OffloadSection
from shardwise.train.measure.metrics import read
from shardwise.train.prepare import RunStart
from tests.comm.hosts import HOSTS, joined_hosts
from tests.comm.test_start import free_port
from tests.programs import Program, start_program
from tests.train import runs


@contextmanager
def agents(meeting: str) -> Iterator[list[tuple[list[str], str]]]:
    """The arguments and the host of each torchrun: one, two on this host, or two on their own."""
    launcher = ["-m", "torch.distributed.run", "--max-restarts", "3"]
    if meeting == "one agent":
        yield [([*launcher, "--standalone", "--nproc-per-node", "2"], "")]
        return
    apart, static = "hosts" in meeting, "static" in meeting
    addresses, port = HOSTS[:2] if apart else ("127.0.0.1", "127.0.0.1"), free_port()
    place = f"--rdzv-backend c10d --rdzv-endpoint {addresses[0]}:{port} --rdzv-id again"
    if static:
        place = f"--master-addr {addresses[0]} --master-port {port}"
    with joined_hosts(2) if apart else nullcontext(["", ""]) as hosts:
        each = f"--nnodes 2 --nproc-per-node 1 {place} --local-addr"
        own = "--node-rank {}" if static else "--rdzv-conf is_host={}"
        numbers = (0, 1) if static else (1, 0)
        yield [
            ([*launcher, *each.split(), address, *own.format(number).split()], host)
            for host, address, number in zip(hosts, addresses, numbers, strict=True)
        ]


def ended(programs: list[tuple[list[str], str]], kills: Path) -> list[tuple[int, str, str]]:
    """Run programs, each on its host, at once: exit code, output and error output of each."""
    with ExitStack() as stack:
        started = list[Program]()
        for argv, host in programs:
            variables = {"KILLS": str(kills)} | ({"GLOO_SOCKET_IFNAME": "eth0"} if host else {})
            started.append(start_program(argv, None, variables, host))
            stack.enter_context(started[-1])
            stack.callback(started[-1].kill)
        with ThreadPoolExecutor() as readers:
            texts = list(readers.map(lambda each: each.communicate(timeout=240), started))
        return [(each.wait(), *text) for each, text in zip(started, texts, strict=True)]


@pytest.mark.full
@pytest.mark.parametrize("meeting", ["one agent", "two agents, static", "two hosts"])
def test_torchrun_restarts_end_in_the_undisturbed_curve(tmp_path: Path, meeting: str) -> None:
    """A rank is killed before there is a checkpoint, and another time after: torchrun goes on."""
    straight = runs.run(runs.settings(tmp_path / "straight", "dp2 zero3 fp64"), 2)
    given = runs.settings(tmp_path / "run", "dp2 zero3 fp64")
    file, kills = tmp_path / "config.toml", tmp_path / "kills"
    file.write_text(config.dump(given))
    program = [str(Path(__file__).with_name("killed.py")), "train", str(file), "--resume", "auto"]
    with agents(meeting) as launchers:
        done = ended([([*argv, *program], host) for argv, host in launchers], kills)
    for code, _, said in done:
        assert code == 0, said[-3000:]
    assert any("resumed after step 4" in out for _, out, _ in done)
    assert kills.read_text() == "xx"
    found = read(given.folder)
    assert [(r.step, r.loss) for r in found] == [(r.step, r.loss) for r in straight]


def settled(given: config.Config) -> RunStart:
    """What `--resume auto` comes to, after the checks of any start."""
    start = RunStart(auto=True).resolve_auto(given)
    folder.check(given, start.resume, start.overwrite)
    return start


def test_auto_begins_continues_or_begins_again(tmp_path: Path) -> None:
    """No run; a run that saved nothing; a run with a checkpoint, finished or not."""
    given = runs.settings(tmp_path / "run")
    assert settled(given) == RunStart()
    folder.claim(given, overwrite=False)
    assert settled(given) == RunStart(overwrite=True)
    first = runs.run(given, start=RunStart(auto=True))
    assert settled(given) == RunStart(resume=True)
    longer = runs.settings(tmp_path / "run", steps=9)
    again = runs.run(longer, start=RunStart(auto=True))
    assert [r.loss for r in again[:2]] == [r.loss for r in first[:2]] and len(again) == 9


def test_auto_replaces_nothing_of_others(tmp_path: Path) -> None:
    """A folder with somebody else's files is refused as ever, and so is --overwrite beside it."""
    given = runs.settings(tmp_path / "run")
    given.folder.mkdir()
    (given.folder / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="a folder with other files"):
        settled(given)
    both = RunStart(overwrite=True, auto=True).resolve_auto(given)
    with pytest.raises(InputError, match="both --resume and --overwrite"):
        prepare.prepare(given, 1, both)


@pytest.mark.parametrize(
    ("given", "read_as"),
    [
        ("train x --resume", "train x --resume=always"),
        ("train x --resume auto --nproc 2", "train x --resume=auto --nproc 2"),
        ("train --resume x", "train --resume=always x"),
        ("train auto --resume", "train auto --resume=always"),
        ("train --resume auto auto", "train --resume=auto auto"),
        ("train x", "train x"),
    ],
)
def test_resume_takes_a_word_or_none(given: str, read_as: str) -> None:
    """`auto` behind it is its value; anything else is an argument of its own."""
    assert with_resume_value(given.split()) == read_as.split()


PROGRAM = """
import os, sys
from shardwise.cli.main import main
sys.stdout = open(os.devnull, "w")
main()
"""


@pytest.mark.full
def test_a_killed_run_leaves_the_folder_empty_and_resumes(tmp_path: Path) -> None:
    """SIGKILL after a checkpoint: no file is in the folder, and a resumed run goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def given(name: str, steps: int) -> config.Config:
        made = runs.settings(tmp_path / name, "fp64 offload:param@disk", steps=steps)
        offload = OffloadSection(folder=str(disk))
        return made.model_copy(
            update={"offload": offload, "sample": made.sample.model_copy(update={"tokens": 0})}
        )

    straight = runs.run(given("straight", 7))
    endless = given("run", 10**6)
    file = tmp_path / "config.toml"
    file.write_text(config.dump(endless))
    with start_program(["-c", PROGRAM, "train", str(file), "--nproc", "1"]) as running:
        until = time.monotonic() + 120
        while not list((endless.folder / CHECKPOINTS).glob("step*")) and time.monotonic() < until:
            assert running.returncode is None
            time.sleep(0.05)
        running.kill()
    assert list(disk.iterdir()) == []
    assert find(endless.folder / CHECKPOINTS).is_dir()
    at = max(record.step for record in read(endless.folder))
    resumed = given("run", at + 1)
    found = runs.run(resumed, start=runs.RunStart(resume=True))
    assert found[-1].step == at + 1
    assert [r.loss for r in found[:2]] == [r.loss for r in straight[:2]]
    assert list(disk.iterdir()) == []
