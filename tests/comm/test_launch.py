import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.comm.gloo import shared
from shardwise.comm.move import all_reduce
from shardwise.comm.start.launch import launch, spawn
from shardwise.comm.start.rendezvous import Start, environment, first_host
from shardwise.comm.world import init
from shardwise.core.errors import InputError, RankError, bad
from tests.programs import start_program

ROOT = Path(__file__).parents[2]
START = """
import sys
from shardwise.comm.start.launch import launch
sys.exit(launch(sys.argv[1:], 2, "tests.comm.program").code)
"""


def started(what: str, folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", START, what, str(folder)],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(*paths: Path) -> None:
    end = time.monotonic() + 60
    while not all(path.exists() and path.stat().st_size for path in paths):
        assert time.monotonic() < end, f"{paths} did not appear"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def look_around(greeting: str) -> tuple[int, int, float, int, str, torch.Tensor]:
    world = init()
    x = torch.full((3,), world.rank + 1.0)
    dist.all_reduce(x)
    big = torch.full((1 << 20,), float(world.rank))
    return world.rank, world.size, x.sum().item(), torch.get_num_threads(), greeting, big


@pytest.mark.usefixtures("interpreters")
def test_spawn_returns_the_results_of_all_ranks_in_rank_order(monkeypatch: pytest.MonkeyPatch):
    """Three ranks form one world of one thread each, and their results arrive in rank order."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    results = spawn(look_around, 3, ("hello",))
    assert [result[:5] for result in results] == [(rank, 3, 18.0, 1, "hello") for rank in range(3)]
    assert [result[5].sum().item() for result in results] == [0.0, 2.0**20, 2.0**21]
    assert dict(os.environ) == before


UNGUARDED = """
import sys
import shardwise as sw

def work():
    return 1

try:
    print(sw.spawn(work, 2, fork="fork" in sys.argv))
except (sw.RankError, sw.InputError) as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("source", [pytest.param("file", marks=pytest.mark.full), "text"])
def test_ranks_that_cannot_import_the_main_program_are_refused_or_forked(
    source: str, tmp_path: Path
):
    """A script without a guard, and a program from no file: one paragraph, or a fork."""
    (tmp_path / "script.py").write_text(UNGUARDED)
    program = [str(tmp_path / "script.py")] if source == "file" else ["-c", UNGUARDED]
    runs = [
        subprocess.run(
            [sys.executable, *program, how],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        for how in ("import", "fork")
    ]
    why = "put the script's own code under 'if __name__" if source == "file" else "in a notebook"
    assert why in runs[0].stderr
    assert "Traceback" not in runs[0].stderr
    assert (runs[1].returncode, runs[1].stdout) == (0, "[1, 1]\n"), runs[1].stderr


def part_and_meet() -> None:
    world = init("cpu")
    world.barrier()
    world.close()
    init("cpu")


def test_a_process_has_one_world():
    """The ranks of one that was closed would not find each other again."""
    with pytest.raises(InputError, match=r"sw\.init\(\) after world\.close\(\)"):
        spawn(part_and_meet, 2)


def kill_the_other() -> None:
    """Rank 1 is killed while rank 0 watches a mailbox, and sees it within the launcher's grace."""
    world = init("cpu")
    shared.SLEEP_S = 1e-6
    all_reduce(torch.ones(1), world.everyone)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(torch.ones(1), world.everyone)


@pytest.mark.full
@pytest.mark.usefixtures("interpreters")
def test_a_rank_that_is_killed_is_the_one_that_is_named():
    """Whoever saw that it was gone says so, and is not the cause."""
    with pytest.raises(RankError, match="it was ended by SIGKILL") as caught:
        spawn(kill_the_other, 2)
    assert caught.value.rank == 1


def stay(number: int, frame: FrameType | None) -> None:
    """A SIGTERM handler of a rank that will not leave."""


def fail_on_1(how: str, folder: Path) -> None:
    """Rank 1 fails; rank 0 waits in a gloo collective, rank 2 sleeps and is deaf to SIGTERM."""
    world = init()
    signal.signal(signal.SIGTERM, stay)
    (folder / f"pid-{world.rank}").write_text(str(os.getpid()))
    world.barrier()
    if world.rank == 1:
        (folder / "failed_at").write_text(str(time.monotonic()))
        if how == "raise":
            raise ValueError("mine alone")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)
    if world.rank == 0:
        dist.all_reduce(torch.ones(1))
    for _ in range(60):
        time.sleep(1)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "Traceback .*ValueError: mine alone$"),
        ("exit", "it left with exit code 3"),
        ("killed", "it was ended by SIGKILL"),
    ],
)
def test_a_failed_rank_ends_the_others_and_is_named_first(how: str, said: str, tmp_path: Path):
    """However a rank fails, the others end within 10 s and its own error is the one reported."""
    with pytest.raises(RankError) as caught:
        spawn(fail_on_1, 3, (how, tmp_path))
    took = time.monotonic() - float((tmp_path / "failed_at").read_text())
    assert took < 10
    assert caught.value.rank == 1
    assert re.match("rank 1 failed:\n" + said, str(caught.value), re.DOTALL)
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(3)]
    assert not any(is_alive(pid) for pid in pids)


def fail_everywhere() -> None:
    world = init()
    world.barrier()
    error = ValueError(f"that of {world.rank}\nand more of it")
    error.add_note("a failure")
    raise error


def test_the_errors_of_other_ranks_are_a_line_each():
    """What kind of error, and how its message begins."""
    with pytest.raises(RankError) as caught:
        spawn(fail_everywhere, 2)
    first, other = caught.value.rank, 1 - caught.value.rank
    assert f"ValueError: that of {first}\nand more of it\na failure" in str(caught.value)
    assert str(caught.value).endswith(f"\n(then rank {other}: ValueError: that of {other})")


def leave_silently() -> None:
    os._exit(0)


def return_a_function() -> object:
    return lambda: None


@pytest.mark.full
def test_a_rank_that_leaves_without_a_result_has_failed():
    """Leaving by os._exit(0) is a failure, also when every rank does it."""
    with pytest.raises(RankError, match=r"exit code 0 before its function had returned"):
        spawn(leave_silently, 1)


def test_a_result_that_cannot_be_sent_is_the_ranks_error():
    """A result that cannot be pickled is reported as the error of the rank that returned it."""
    with pytest.raises(RankError, match=r"rank 0 failed(?s:.)*pickle"):
        spawn(return_a_function, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ranks": 0}, "ranks=0.*a whole number from 1 up.*ranks=2"),
        ({"device": "tpu"}, "device='tpu'.*cpu or cuda"),
        ({"device": "cuda", "ranks": 10**6}, "1000000 ranks on cuda.*one GPU for each"),
        ({"args": (lambda: None,)}, "cannot be sent.*top level of a module"),
        ({"ranks": 10**6}, "1000000 processes on this machine.*more on several machines"),
        ({"ranks": "2"}, "ranks='2'.*a whole number from 1 up"),
    ],
)
def test_what_cannot_be_spawned_is_refused(given: dict, message: str):
    """Bad arguments of spawn are refused before any process starts, saying what is allowed."""
    with pytest.raises(InputError, match=message):
        spawn(look_around, **given)


@pytest.mark.parametrize("function", [None, "work", 3])
def test_what_cannot_be_called_is_not_spawned(function: Any):
    """No process is started for it, and the answer says what a function looks like."""
    with pytest.raises(InputError, match=r"spawn of .*Write instead: spawn\(work, 2\)"):
        spawn(function, 2)


def refuse_on(rank: int) -> None:
    """Bad input is found, by all ranks where `rank` is below 0."""
    world = init()
    world.barrier()
    if rank in (-1, world.rank):
        raise bad("a table", "a table that fits", "another")
    world.barrier()


@pytest.mark.parametrize("rank", [-1, 1])
def test_bad_input_found_by_a_rank_is_the_callers_to_mend(rank: int):
    """The rank's InputError is raised here: one paragraph, whose cause is the rank's traceback."""
    with pytest.raises(InputError) as caught:
        spawn(refuse_on, 2, (rank,))
    assert str(caught.value) == str(bad("a table", "a table that fits", "another"))
    assert isinstance(caught.value.__cause__, RankError)
    assert rank in (-1, caught.value.__cause__.rank)


INTERRUPTED = """
import signal, time
import shardwise as sw

def work(folder):
    world = sw.init("cpu")
    world.barrier()
    (folder / f"pid-{world.rank}").write_text(str(__import__("os").getpid()))
    time.sleep(60)

if __name__ == "__main__":
    from pathlib import Path
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    sw.spawn(work, 2, (Path(__file__).parent,))
"""


@pytest.mark.full
def test_ctrl_c_ends_the_ranks_of_spawn(tmp_path: Path):
    """The launcher raises KeyboardInterrupt, and takes its ranks with it."""
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    pids = [tmp_path / f"pid-{rank}" for rank in range(2)]
    with subprocess.Popen([sys.executable, script], stderr=subprocess.PIPE, text=True) as process:
        wait_for(*pids)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=15)
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert not any(is_alive(int(pid.read_text())) for pid in pids)


def test_launch_passes_on_success(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """When every rank ends well the code is 0, and the launcher says nothing of its own."""
    assert launch(["end", str(tmp_path)], 2, "tests.comm.program").code == 0
    assert capfd.readouterr() == ("", "")
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("what", ["refuse", "refuse-on-1"])
def test_launch_shows_a_refusal_once(what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Bad input found by every rank, or only by the second, is one paragraph and exit code 2."""
    assert launch([what, str(tmp_path)], 2, "tests.comm.program").code == 2
    said = capfd.readouterr().err
    assert said == "Given: nothing. Allowed: something. Write instead: this.\n"


def test_launch_shows_the_traceback_of_the_rank_that_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """An exception on one rank is shown with that rank's traceback alone, and the code is 1."""
    assert launch(["raise", str(tmp_path)], 2, "tests.comm.program").code == 1
    said = capfd.readouterr().err
    assert said.startswith("rank 1 failed:\nTraceback")
    assert said.endswith("ArithmeticError: the loss has left the building\n")
    assert "elastic" not in said and "runpy" not in said


@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "number", "code"),
    [("saves", signal.SIGTERM, 0), ("waits", signal.SIGINT, 128 + signal.SIGINT)],
)
def test_launch_forwards_signals(what: str, number: int, code: int, tmp_path: Path):
    """A signal reaches every rank: ranks that save and leave give 0, those that do not 128 + n."""
    pids = [tmp_path / f"pid-{rank}" for rank in range(2)]
    program = ["-c", START, what, str(tmp_path)]
    with start_program(program, ROOT, {"TMPDIR": str(tmp_path)}) as process:
        wait_for(*pids)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (code, "")
    assert len(list(tmp_path.glob("saved-*"))) == (2 if what == "saves" else 0)
    assert not any(is_alive(int(pid.read_text())) for pid in pids)


@pytest.mark.full
def test_ranks_do_not_outlive_their_launcher(tmp_path: Path):
    """When the launcher is killed, its ranks leave by themselves."""
    pids = [tmp_path / f"pid-{rank}" for rank in range(2)]
    with started("saves", tmp_path) as process:
        wait_for(*pids)
        process.kill()
        process.communicate(timeout=60)
    end = time.monotonic() + 10
    while any(is_alive(int(pid.read_text())) for pid in pids):
        assert time.monotonic() < end, "a rank lives on"
        time.sleep(0.05)


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[007-012,020],cpu1",
    "SLURM_JOB_ID": "100",
    "SLURM_STEP_ID": "2",
}


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
    ],
)
def test_the_environment_tells_how_a_process_was_started(variables: dict, start: Start | None):
    """The variables of torchrun come first, then a Slurm step's; a batch script has neither."""
    assert environment(variables) == start


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "RANK in the environment without WORLD_SIZE and MASTER_ADDR"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8 and WORLD_SIZE=8"),
        (TORCHRUN | {"RANK": "one"}, "RANK='one'"),
        (TORCHRUN | {"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1'"),
        (TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT=65536.*a port from 1 to 65535"),
        (SLURM | {"SLURM_PROCID": "9"}, "SLURM_PROCID=9 and SLURM_STEP_NUM_TASKS=8"),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, "without SLURM_STEP_NODELIST"),
    ],
)
def test_a_contradictory_environment_is_refused(variables: dict, message: str):
    """Variables that are missing, no numbers, or out of range are named in an InputError."""
    with pytest.raises(InputError, match=message):
        environment(variables)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[007-012,020],cpu1", "gpu007"),
        ("a[3,5]-ib", "a3-ib"),
    ],
)
def test_the_first_host_of_a_node_list(hosts: str, first: str):
    """The first name of Slurm's compressed node list is where the ranks meet."""
    assert first_host(hosts) == first
