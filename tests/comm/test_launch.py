"""Ranks of `spawn` and of the command line: results, failures, signals, and what is refused."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.cli import run_command
from shardwise.cli.main import main
from shardwise.comm.start import excepthook
from shardwise.comm.start.launch import launch, spawn
from shardwise.comm.world import init
from shardwise.core.errors import InputError, RankError, bad
from tests.programs import run_program, until

ROOT = Path(__file__).parents[2]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def any_alive(folder: Path) -> bool:
    pids = [int(file.read_text()) for file in folder.glob("pid-*")]
    assert pids
    return any(map(is_alive, pids))


# --- spawn ----------------------------------------------------------------------------------------


def look_around(greeting: str) -> tuple[int, int, float, int, str, torch.Tensor]:
    world = init()
    x = torch.full((3,), world.rank + 1.0)
    dist.all_reduce(x)
    big = torch.full((1 << 20,), float(world.rank))
    return world.rank, world.size, x.sum().item(), torch.get_num_threads(), greeting, big


@pytest.mark.usefixtures("interpreters")
def test_spawn_returns_the_results_of_all_ranks_in_rank_order(monkeypatch: pytest.MonkeyPatch):
    """Ranks form one world of one thread each, and their results arrive in rank order."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    results = spawn(look_around, 2, ("hello",))
    assert [result[:5] for result in results] == [(rank, 2, 9.0, 1, "hello") for rank in range(2)]
    assert [result[5].sum().item() for result in results] == [0.0, 2.0**20]
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


@pytest.mark.full
@pytest.mark.parametrize("source", ["file", "text"])
def test_ranks_that_cannot_import_the_main_program_are_refused_or_forked(
    source: str, tmp_path: Path
):
    """A script without a guard, and a program from no file: one paragraph, or a fork."""
    (tmp_path / "script.py").write_text(UNGUARDED)
    program = [str(tmp_path / "script.py")] if source == "file" else ["-c", UNGUARDED]
    more: dict[str, Any] = {"env": os.environ | {"PYTHONPATH": str(ROOT)}, "text": True}
    runs = [
        subprocess.run([sys.executable, *program, how], capture_output=True, check=False, **more)
        for how in ("import", "fork")
    ]
    why = "put the script's own code under 'if __name__" if source == "file" else "in a notebook"
    assert why in runs[0].stderr
    assert "Traceback" not in runs[0].stderr
    assert (runs[1].returncode, runs[1].stdout) == (0, "[1, 1]\n"), runs[1].stderr


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
        if how == "aborts":  # as NCCL's watchdog does
            os.abort()
        os._exit(3)
    if world.rank == 0:
        dist.all_reduce(torch.ones(1))
    for _ in range(60):
        time.sleep(1)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "Traceback .*ValueError: mine alone$"),
        ("killed", "it was ended by SIGKILL"),
        ("exit", "it left with exit code 3"),
        ("aborts", "it was ended by SIGABRT.*Fatal Python error: Aborted.*in fail_on_1"),
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
    assert not any_alive(tmp_path)


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


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (return_a_function, r"rank 0 failed(?s:.)*pickle"),
        (leave_silently, "exit code 0 before its function had returned"),
    ],
)
def test_a_rank_without_a_result_has_failed(function: Callable[[], object], said: str):
    """One that leaves by os._exit(0), and one whose result cannot be pickled."""
    with pytest.raises(RankError, match=said):
        spawn(function, 1)


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


# --- launch, and signals --------------------------------------------------------------------------


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("end", 0, ""),
        ("refuse-on-1", 2, "Given: nothing. Allowed: something. Write instead: this.\n"),
        ("refuse", 2, "Given: nothing. Allowed: something. Write instead: this.\n"),
        ("raise", 1, "rank 1 failed:\nTraceback .*ArithmeticError: the loss is not finite\n"),
    ],
)
def test_launch_shows_what_the_ranks_say_once(
    what: str, code: int, said: str, capfd: pytest.CaptureFixture[str]
):
    """Nothing of its own; a refusal of one rank or of all; the traceback of who failed alone."""
    assert launch([what], 2, "tests.comm.program") == code
    printed = capfd.readouterr().err
    assert re.fullmatch(said, printed, re.DOTALL)
    assert "runpy" not in printed


SPAWN = """
import signal, sys
from pathlib import Path
import shardwise as sw
from tests.comm.program import meet_and_wait

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    sw.spawn(meet_and_wait, 2, (Path(sys.argv[1]),))
"""


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("fork", [False, True])
def test_ranks_end_with_their_launcher(number: int, fork: bool, tmp_path: Path):
    """It is interrupted, and raises KeyboardInterrupt; or killed, and its ranks leave alone."""
    script = tmp_path / "script.py"
    script.write_text(SPAWN.replace(",))", f",), fork={fork})"))
    environ = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, str(script), str(tmp_path)]
    with subprocess.Popen(argv, env=environ, stderr=subprocess.PIPE, text=True) as process:
        pids = [tmp_path / f"pid-{rank}" for rank in range(2)]
        until(lambda: all(file.exists() and file.stat().st_size for file in pids))
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert number == signal.SIGKILL or said.rstrip().endswith("KeyboardInterrupt")
    until(lambda: not any_alive(tmp_path), 10)


# --- an InputError that ends a run of several ranks -----------------------------------------------

SCRIPT = """
import atexit
import sys
import torch.distributed as dist
from torch import nn
import shardwise as sw

def work(where):
    world = sw.init("cpu")
    left = open(f"left-{world.rank}.txt", "w")
    left.write("in an open file, ")
    atexit.register(left.write, "by a handler")
    try:
        sw.FSDP(nn.Linear(3, 3), "OTHER", world=world)
    except sw.InputError as error:
        print("caught", type(error).__name__, flush=True)
    dist.barrier()  # torchrun ends the other rank as soon as one has failed
    if where in ("all", str(world.rank)):
        sw.FSDP(nn.Linear(3, 3), "SOME", world=world)
    dist.barrier()

if __name__ == "__main__":
    how, where = sys.argv[1:]
    sw.spawn(work, 2, (where,)) if how == "spawn" else work(where)
"""
#: Where it is not caught.
LINE = 1 + next(i for i, line in enumerate(SCRIPT.split("\n")) if '"SOME"' in line)


@pytest.mark.full
@pytest.mark.parametrize(("how", "where"), [("torchrun", "all"), ("torchrun", "1"), ("spawn", "1")])
def test_an_input_error_is_one_paragraph(how: str, where: str, tmp_path: Path):
    """Of rank 0 or the one that has it, if nobody catches it; files and handlers are not lost."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    argv = [*(launcher if how == "torchrun" else []), str(script), how, where]
    done = run_program(argv, tmp_path, timeout=60)
    said = [line for line in done.stderr.splitlines() if "Given: " in line]
    assert len(said) == 1, done.stderr
    whose = "rank 1: " if where == "1" else ""
    assert said[0].startswith(f"shardwise: {whose}train.py, line {LINE}: Given: sharding_strategy=")
    if how == "spawn":
        assert (done.stderr.count("\n"), done.returncode) == (1, 2)
        return
    assert done.stdout.count("caught") == 2
    assert "[rank" not in done.stderr
    assert done.stderr.count("Traceback") == 1  # torchrun's own
    assert "exitcode  : 2" in done.stderr
    # of the rank that prints; torchrun may end others before they come to their error
    left = tmp_path / f"left-{1 if where == '1' else 0}.txt"
    assert left.read_text() == "in an open file, by a handler"


def test_other_errors_of_a_rank_are_shown_as_before(monkeypatch: pytest.MonkeyPatch):
    """By the hook that was there, of a lost connection too where nobody has refused anything."""
    shown: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: shown.append(kind.__name__))
    excepthook.install_excepthook(0, 2)
    for error in (KeyError("x"), RuntimeError("Connection closed by peer")):
        sys.excepthook(type(error), error, None)
    assert shown == ["KeyError", "RuntimeError"]


def test_a_script_is_run_with_what_stands_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its own options too, with its folder first in the path, as python runs it."""
    script, seen = tmp_path / "script.py", list[Any]()
    script.write_text("import sys, beside\nbeside.seen += [__name__, *sys.argv]")
    (tmp_path / "beside.py").write_text("seen = []")
    monkeypatch.setattr(run_command, "launch", lambda *args: seen.append(args) or 3)
    with pytest.raises(SystemExit, match="3"):
        main(["run", "--nproc", "4", str(script), "--resume", "x"])
    assert seen == [([str(script), "--resume", "x"], 4, run_command.__name__)]
    monkeypatch.setattr(sys, "argv", ["", *seen[0][0]])
    monkeypatch.setattr(sys, "path", [*sys.path])
    run_command.main()
    assert sys.modules.pop("beside").seen == ["__main__", str(script), "--resume", "x"]
    with pytest.raises(SystemExit, match="2"):
        main(["run", str(tmp_path / "none.py")])
