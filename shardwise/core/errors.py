"""The error classes, the text of an InputError, and files that a user names."""

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Final

SPACE, DELETE = 32, 127  # the characters below, and this one, are control characters


class InputError(ValueError):
    """The user's input is wrong; nothing was started. The command line exits with 2.

    `problems` lists the problems that the text states; empty for an error with a text alone.
    """

    problems: "tuple[Problem, ...]" = ()


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, its cause or context, the cause of that, and so on; a chain may be a circle."""
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and not any(each is one for one in seen):
        seen.append(each)
        yield each
        each = each.__cause__ or each.__context__


class RunError(RuntimeError):
    """A run failed after it started, for example with a loss of NaN. The exit code is 1."""


class OtherCallError(RunError):
    """Ranks that must make the same calls made different ones: the text says which, and where."""


class NonFiniteError(RunError):
    """A loss or gradient is infinite or NaN; no weight was updated with it."""


class RankError(RuntimeError):
    """One of several ranks failed, and the others were killed.

    `rank` is the rank that failed first, `text` its error: a traceback, or how it died.
    """

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank = rank
        self.text = text

    def __str__(self) -> str:
        return f"rank {self.rank} failed:\n{self.text}"


@dataclass(frozen=True)
class Problem:
    """One problem of an input, and its remedy. `str` gives the paragraph."""

    given: str
    allowed: str
    instead: str

    def __str__(self) -> str:
        given, allowed, instead = (
            one_line(text.strip().removesuffix("."))
            for text in (self.given, self.allowed, self.instead)
        )
        return f"Given: {given}. Allowed: {allowed}. Write instead: {instead}."


def one_line(text: str) -> str:
    """The text with line ends and control characters escaped, which a path may contain."""
    return "".join(
        char.encode("unicode_escape").decode() if ord(char) < SPACE or ord(char) == DELETE else char
        for char in text
    )


def bad(given: str, allowed: str, instead: str) -> InputError:
    """The error for one input: bad("dp0", "sizes from 1 up", "dp2"), without full stops."""
    return refusal("", [Problem(given, allowed, instead)])


def refusal(what: str, problems: Sequence[Problem]) -> InputError:
    """The error for all problems of `what`: a numbered paragraph each, or as `bad` if only one."""
    listed = "\n".join(f"{number}. {problem}" for number, problem in enumerate(problems, start=1))
    text = f"{len(problems)} things are wrong with {one_line(what)}.\n{listed}"
    error = InputError(str(problems[0]) if len(problems) == 1 else text)
    error.problems = tuple(problems)
    return error


# --- files that a user names ----------------------------------------------------------------------

#: The most bytes of a file that a person writes: a configuration, a cluster, a table.
MOST_BYTES: Final = 4 * 2**20


def expanded(name: str) -> str:
    """The name with `~` and `$VARIABLES` replaced. Raises InputError for an unset variable."""
    found = os.path.expandvars(name)
    if unset := re.search(r"\$([A-Za-z_]\w*|\{[^}]*\})", found):
        variable = unset[0].strip("${}")
        allowed = f"a path whose variables are set, and {variable} is not"
        raise bad(f"'{name}'", allowed, f"export {variable}=... before the command")
    return os.path.expanduser(found)  # noqa: PTH111 (Path raises for ~NAME of nobody)


def open_regular(file: Path) -> BufferedReader:
    """Open a regular file to read. Raises OSError for a pipe or a device, and never waits."""
    opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "it is no regular file")
    return os.fdopen(opened, "rb")


def read_text(file: Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of a UTF-8 file. Raises OSError if it is no regular one, unreadable or too large."""
    with open_regular(file) as stream:
        content = stream.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes / 2**20:g} MiB")
    return content.decode("utf-8-sig")
