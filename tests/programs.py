"""Programs of Python that start in a tenth of a second, in processes forked from one with torch.

    run_program(["-m", "shardwise", "plan", "dp2"])    as `subprocess.run([sys.executable, ...])`
    start_program(["script.py", "zero3"])              as `subprocess.Popen([sys.executable, ...])`

Output and error output are captured as text. Ranks and torchrun's workers are forked too. A test of
what only a new interpreter shows (what `import` does) calls `subprocess` itself.
"""

import atexit
import gc
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NoReturn, Self, TextIO

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from shardwise.comm.start import launch
from tests.comm.hosts import enter_host
from tests.forks import CONTEXT, Origin, rank_process


def until(what: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait for that; not for ever."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Program:
    """A running program; its output is read as it comes, or by `communicate`."""

    def __init__(
        self, argv: Sequence[str], folder: Path | None, variables: Mapping[str, str], host: str
    ) -> None:
        pipes = os.pipe(), os.pipe()
        streams = pipes[0][1], pipes[1][1]
        self.process = CONTEXT.Process(
            target=_run, args=_job(argv, folder, variables, host, streams)
        )
        self.process.start()
        for _, write in pipes:
            os.close(write)
        self.stdout, self.stderr = (os.fdopen(read) for read, _ in pipes)
        self.pid, self.kill = self.process.pid, self.process.kill

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal that ended it."""
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has one."""
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("the program", timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """The rest of the output and of the error output, after the end of the program."""
        with ThreadPoolExecutor(2) as readers:
            texts = [readers.submit(_read, stream) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            out, err = (text.result() for text in texts)
        return out, err

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.process.join()
        self.stdout.close()
        self.stderr.close()


def _read(stream: TextIO) -> str:
    with stream:
        return stream.read()


def start_program(
    argv: Sequence[str],
    folder: Path | None = None,
    variables: Mapping[str, str] | None = None,
    host: str = "",
) -> Program:
    """Start `python argv` in a folder, with these variables beside those of this process. `host` is
    a network namespace (tests/comm/hosts.py).
    """
    return Program(argv, folder, os.environ | dict(variables or {}), host)


def run_program(
    argv: Sequence[str],
    folder: Path | None = None,
    variables: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python argv` to its end."""
    with start_program(argv, folder, variables) as program:
        out, err = program.communicate(timeout)
        return subprocess.CompletedProcess([*argv], program.wait(), out, err)


def _run(argv: list[str], folder: str, host: str, server: str, origin: Origin) -> None:
    """The entry point of the process."""
    gc.freeze()
    if host:
        enter_host(host)
    _reset_signals()
    origin.enter()
    os.chdir(folder)
    # Ranks and workers come from the process that this one was forked from, which has no threads.
    forkserver._forkserver._forkserver_address = server  # type: ignore[attr-defined]
    forkserver._forkserver.ensure_running = lambda: None
    launch.process_of = rank_process
    subprocess_handler.Popen = partial(_Worker, host)  # type: ignore[attr-defined]
    _interpret(argv)


class _Worker:
    """A worker of torchrun, `python -u argv`, in place of its `subprocess.Popen`."""

    def __init__(self, host: str, args: Sequence[str], env: Mapping[str, str], **_: Any) -> None:
        argv = [word for word in args[1:] if word != "-u"]
        self.process = CONTEXT.Process(target=_run_worker, args=_job(argv, None, env, host, (1, 2)))
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a worker", timeout or 0)
        return self.process.exitcode


def _run_worker(*job: Any) -> None:
    os.setsid()
    _run(*job)


def _job(
    argv: Sequence[str],
    folder: Path | None,
    variables: Mapping[str, str],
    host: str,
    streams: tuple[int, int],
) -> tuple[Any, ...]:
    """The arguments of `_run`."""
    forkserver.ensure_running()
    server = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    return [*argv], str(folder or Path.cwd()), host, server, Origin(variables, streams)


def _reset_signals() -> None:
    """The handlers of a new interpreter, in place of those of the launcher."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _interpret(argv: list[str]) -> NoReturn:
    """What the interpreter does around a program, to the end of the process."""
    if argv[:2] == ["-W", "error"]:
        del argv[:2]
        sys.warnoptions.append("error")
        warnings.simplefilter("error")
    code: Any = 0
    try:
        _execute(argv)
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1 if isinstance(code, str) else code or 0)


def _execute(argv: list[str]) -> None:
    """The program as the main module: of a package, from a text, or from a file."""
    first, *rest = argv
    if first == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))  # noqa: S102 - a program of a test
    else:
        sys.path.insert(0, str(Path(first).parent))
        sys.argv = argv
        runpy.run_path(first, run_name="__main__")
