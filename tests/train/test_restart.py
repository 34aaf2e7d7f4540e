"""Runs that are killed: `--resume auto` goes on after every restart, and disks are left empty."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import pytest

from shardwise.checkpoint.folder import CHECKPOINTS, find
from shardwise.cli.main import with_resume_value
from shardwise.core.errors import InputError
from shardwise.train import config, folder, loop, prepare
from shardwise.train.config_sections import OffloadSection
from shardwise.train.metrics import read
from shardwise.train.prepare import RunStart
from tests.comm.hosts import HOSTS, two_hosts
from tests.comm.test_start import free_port
from tests.train import killed, runs


@contextmanager
def agents(meeting: str) -> Iterator[list[list[str]]]:
    """The command of each torchrun: one, two on this host, or two in namespaces of their own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3"]
    if meeting == "one agent":
        yield [[*launcher, "--standalone", "--nproc-per-node", "2"]]
        return
    apart = "hosts" in meeting
    addresses, port = HOSTS if apart else ("127.0.0.1", "127.0.0.1"), free_port()
    place = f"--rdzv-backend c10d --rdzv-endpoint {addresses[0]}:{port} --rdzv-id again"
    if "static" in meeting:
        place = f"--master-addr {addresses[0]} --master-port {port}"
    with two_hosts() if apart else nullcontext([[], []]) as enters:
        each = f"--nnodes 2 --nproc-per-node 1 {place} --local-addr"
        own = "--node-rank {}" if "static" in meeting else "--rdzv-conf is_host={}"
        yield [
            [*enter, *launcher, *each.split(), address, *own.format(number).split()]
            for enter, address, number in zip(
                enters, addresses, (0, 1) if "static" in meeting else (1, 0), strict=True
            )
        ]


def ended(commands: list[list[str]], kills: Path) -> list[tuple[int, str, str]]:
    """Run the commands at once: exit code, output and error output of each."""
    with ExitStack() as stack:
        started = [
            subprocess.Popen(
                command,
                env=os.environ | {"KILLS": str(kills)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for command in commands
        ]
        for each in started:
            stack.enter_context(each)
            stack.callback(each.kill)
        with ThreadPoolExecutor() as readers:
            texts = list(readers.map(lambda each: each.communicate(timeout=240), started))
        return [(each.returncode, *text) for each, text in zip(started, texts, strict=True)]


@pytest.mark.full
@pytest.mark.parametrize("meeting", ["one agent", "two agents", "two hosts", "two hosts, static"])
def test_torchrun_restarts_end_in_the_undisturbed_curve(tmp_path: Path, meeting: str) -> None:
    """A rank is killed before there is a checkpoint, and another time after: torchrun goes on."""
    straight = runs.run(runs.settings(tmp_path / "straight", "dp2 zero3 fp64"), 2)
    given = runs.settings(tmp_path / "run", "dp2 zero3 fp64")
    file, kills = tmp_path / "config.toml", tmp_path / "kills"
    file.write_text(config.dump(given))
    program = [str(Path(killed.__file__)), "train", str(file), "--resume", "auto"]
    with agents(meeting) as commands:
        done = ended([[*command, *program] for command in commands], kills)
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


PROGRAM = "from shardwise.cli.main import main; main()"


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
    command = [sys.executable, "-c", PROGRAM, "train", str(file), "--nproc", "1"]
    environment = os.environ | {"PYTHONPATH": str(Path(loop.__file__).parents[2])}
    running = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    until = time.monotonic() + 120
    while not list((endless.folder / CHECKPOINTS).glob("step*")) and time.monotonic() < until:
        assert running.poll() is None
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    assert list(disk.iterdir()) == []
    assert find(endless.folder / CHECKPOINTS).is_dir()
    at = max(record.step for record in read(endless.folder))
    resumed = given("run", at + 1)
    found = runs.run(resumed, start=runs.RunStart(resume=True))
    assert found[-1].step == at + 1
    assert [r.loss for r in found[:2]] == [r.loss for r in straight[:2]]
    assert list(disk.iterdir()) == []
