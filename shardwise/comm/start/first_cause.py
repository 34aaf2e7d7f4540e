"""Why a run of several ranks failed: what a rank reports, and which report is the first cause."""

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.comm.start.excepthook import LOST_CONNECTION


@dataclass(frozen=True, order=True)
class Failure:
    """Why a rank failed: the time `at_ns` (monotonic clock) and the text of its error.

    `code` is the exit code of a rank that called sys.exit, otherwise None.  `input_error` is the
    text of an InputError, empty for any other error.  `output` is what a dead rank had written.
    """

    at_ns: int
    rank: int
    text: str
    code: int | None = None
    input_error: str = ""
    output: str = ""


def first_cause(failures: Iterable[Failure]) -> Failure:
    """The earliest failure that is no lost connection.

    Several ranks often raise the same InputError: then it is the one of the lowest rank.
    """
    ordered = sorted(failures)
    own = [each for each in ordered if not LOST_CONNECTION.search(each.text)] or ordered
    same = [each for each in own if each.input_error and each.input_error == own[0].input_error]
    return min(same, key=lambda each: each.rank, default=own[0])


def death_text(code: int, started: bool) -> str:
    """How a rank died that reported no error."""
    text = f"it {ended(code)}"
    if code < 0:
        return text + ", as the system does when memory runs out" * (code == -signal.SIGKILL)
    text += " before its function had returned"
    if not started:
        text += (
            ". It had not started yet. Every rank imports the main script, so put the script's own"
            " code under 'if __name__ == \"__main__\":'"
        )
    return text


def ended(code: int) -> str:
    """How a process ended that has this exit code."""
    name = signal.Signals(-code).name if code < 0 else ""
    return f"was ended by {name}" if name else f"left with exit code {code}"


def described(failures: Iterable[Failure], first: Failure) -> str:
    """The error of the first rank that failed, and a line for the error of each other rank."""
    own = f"{first.text}. Its error output:\n{first.output}" if first.output else first.text
    others = (each for each in failures if each.rank != first.rank)
    return own + "".join(f"\n(then rank {o.rank}: {_summary(o.text)})" for o in others)


def _summary(text: str) -> str:
    """The first line of an error's message, below the traceback."""
    lines = text.splitlines()
    below = max((i for i, line in enumerate(lines) if line.startswith("  File ")), default=-1) + 1
    return next((line for line in lines[below:] if not line.startswith(" ")), lines[-1])
