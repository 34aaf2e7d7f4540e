"""The launcher: starts several ranks on this machine, and ends all of them when one fails.

launcher   ranks.py     starts processes, reads their pipes, kills them
ranks      worker.py    call the function, report the result or the error
           peers.py     watch each other's heartbeats, report a rank that is stopped or hangs
"""

import multiprocessing
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm.start.excepthook import install_excepthook
from shardwise.comm.start.ranks import SAVE_S, Ranks, described, first_cause
from shardwise.comm.start.rendezvous import read_limits, require_local
from shardwise.comm.start.worker import run_command
from shardwise.core.errors import InputError, RankError, bad
from shardwise.core.tools.arguments import choice, integer, short_repr


def spawn(
    function: Callable[..., Any],
    ranks: int = 4,
    args: Sequence[Any] = (),
    device: str = "cpu",
    *,
    fork: bool = False,
) -> list[Any]:
    """Call `function(*args)` in `ranks` new processes, and return the results in rank order.

    Inside the function, `sw.init()` returns the world.  Function, arguments and results are
    pickled, so the function must be at the top level of a module.  Each rank has one thread, unless
    OMP_NUM_THREADS is set.  With device "cpu" the ranks see no GPU; with "cuda" each has its own.

    With `fork` the ranks are forked from this process.  Then the function and its arguments need
    not be pickled, so they may be defined in a notebook or inside another function, and the main
    script needs no guard.  Ranks cannot be forked on a machine with a GPU (`can_fork`).

    Raises:
        RankError: a rank failed; the others have been killed.
        InputError: a rank raised one (`__cause__` names the rank); there are too few GPUs or
            processors; the function cannot be called or pickled.
    """
    install_excepthook()
    require_ranks(ranks, device)
    if not callable(function):
        given = f"spawn of {short_repr(function)}"
        allowed = "a function at the top level of a module"
        raise bad(given, allowed, "spawn(work, 2), after def work(): ...")
    if not isinstance(args, tuple | list):
        given = f"spawn with args={short_repr(args)}"
        raise bad(given, "a tuple of the function's arguments", "spawn(work, 2, args=(3,))")
    work = (function, tuple(args)) if fork else _pickled(function, tuple(args))
    started = Ranks()
    started.run(ranks, work, device, signals=[])
    if (results := started.results()) is not None:
        return [pickle.loads(result) for result in results]  # noqa: S301
    failures = started.failures()
    first = first_cause(failures)
    failed = RankError(first.rank, described(failures, first))
    if first.input_error:
        raise InputError(first.input_error) from failed
    raise failed


def can_fork(device: str = "cpu") -> bool:
    """Whether ranks on `device` can be forked from this process.

    Neither CUDA nor the threads of autograd, which a GPU has, work in a forked process.
    """
    return sys.platform == "linux" and device == "cpu" and not torch.cuda.is_available()


@dataclass(frozen=True)
class Ended:
    """How the ranks of a command ended.

    code       one exit code
    lost       how many ranks failed by themselves, none of them with an exit code of its own
    stopped    whether `stop_when` ended them, and they did so
    """

    code: int
    lost: int = 0
    stopped: bool = False


def launch(
    argv: Sequence[str],
    nproc: int,
    module: str = "shardwise.cli.main",
    *,
    stop_when: Callable[[], bool] | None = None,
) -> Ended:
    """Run the command `main()` of `module` with `argv` as `nproc` ranks; return how they ended.

    The code is 0 if every rank exited with 0, otherwise that of the rank that failed first, whose
    error is printed once.  Error output of rank 0 appears as it is written, that of other ranks
    only if they fail first.

    SIGTERM and SIGINT are forwarded as SIGTERM, and the ranks have a minute to save.  A second
    signal kills them at once, with the code 128 + its number.  Ranks are stopped in this way too
    when `stop_when` returns true.

    Raises InputError for fewer than one process.
    """
    require_ranks(nproc, None)
    work, started = pickle.dumps((run_command, (module, tuple(argv)))), Ranks()
    with _signals() as received:
        started.run(nproc, work, None, received, quiet=True, stop_when=stop_when)
    if started.results() is not None:
        return Ended(0, stopped=started.stopped and not received)
    failures = started.failures()
    if not failures and len(received) > 1:
        why = "killed by a second signal; checkpoints reported as saved are complete"
        print(why, file=sys.stderr)
        return Ended(128 + received[1])
    if not failures:
        late = ", ".join(str(rank.number) for rank in started.ranks if rank.killed)
        print(f"ranks {late} did not end within {SAVE_S:.0f} s", file=sys.stderr)
        return Ended(1)
    first = first_cause(failures)
    if received and started.ranks[first.rank].process.exitcode == -signal.SIGTERM:
        return Ended(128 + received[0])
    if first.code is not None:  # it has printed its error; that of rank 0 is on the screen
        if not any(each.rank == 0 and each.code == first.code for each in failures):
            print(first.output or f"rank {first.rank} failed: {first.text}", file=sys.stderr)
        return Ended(first.code)
    print(RankError(first.rank, described(failures, first)), file=sys.stderr)
    lost = {first.rank, *(each.rank for each in failures if each.lost)}
    return Ended(1, 0 if received else len(lost))


def require_ranks(ranks: int, device: str | None) -> None:
    """Raise InputError if so many ranks cannot run on this machine's `device`.

    A rank that imports a main script without a guard ends here, and its launcher says why.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(1)
    integer("--nproc" if device is None else "ranks", ranks, 1, 2)
    if device is not None:
        choice("device", device, ("cpu", "cuda"))
    if device == "cuda" and ranks > torch.cuda.device_count():
        gpus = torch.cuda.device_count()
        on_cpu = 'device="cpu" (on the command line: --device cpu)'
        raise bad(
            f"{ranks} ranks on cuda, with {gpus} GPUs available",
            "one GPU for each rank",
            f"ranks={gpus}, or {on_cpu}" if gpus else on_cpu,
        )
    require_local(ranks)
    read_limits()


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    allowed = "a function at the top level of a module, and arguments that can be pickled"
    try:
        work = pickle.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise bad(
            f"a function or arguments that cannot be sent to another process ({error})",
            allowed,
            "def work(...): ... outside any other function, then spawn(work, ...)",
        ) from error
    if b"__main__" in work and not hasattr(sys.modules["__main__"], "__file__"):
        raise bad(
            f"{short_repr(function)} or arguments that are defined in a notebook or an interactive "
            "session, which new processes cannot import",
            allowed,
            "the same functions in a file: from file import build",
        )
    return work


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT instead of ending."""
    received: list[int] = []
    wanted = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda n, _: received.append(n)) for number in wanted]
    try:
        yield received
    finally:
        for number, handler in zip(wanted, before, strict=True):
            signal.signal(number, handler)
