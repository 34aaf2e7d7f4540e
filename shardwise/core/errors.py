"""The errors a user can cause or meet, and the one way their text is built.

A bad input is answered with three facts: what was given, what is allowed, and the line to write
instead. Whoever reads the message should be able to go on without opening the documentation.
"""

from collections.abc import Sequence
from dataclasses import dataclass


class InputError(ValueError):
    """What the user wrote cannot work; nothing was started. The command line exits with 2.

    `problems` are what is wrong, where it is known one by one.
    """

    problems: "tuple[Problem, ...]" = ()


class RunError(RuntimeError):
    """A run that began well has failed, as by a loss of NaN. The command line exits with 1."""


class NonFiniteError(RunError):
    """A loss or gradient that is infinite or no number; no weight was updated from it."""


class RankError(RuntimeError):
    """One of several ranks has failed, and the others were ended for it.

    `rank` is the one that failed first, `text` its own error: a traceback, or how it died.
    """

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank = rank
        self.text = text

    def __str__(self) -> str:
        return f"rank {self.rank} failed:\n{self.text}"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with an input, and its remedy. `str` gives the paragraph."""

    given: str
    allowed: str
    instead: str

    def __str__(self) -> str:
        given, allowed, instead = (
            text.strip().removesuffix(".") for text in (self.given, self.allowed, self.instead)
        )
        return f"Given: {given}. Allowed: {allowed}. Write instead: {instead}."


def bad(given: str, allowed: str, instead: str) -> InputError:
    """The error to raise for one bad input: `raise bad("dp0", "sizes from 1 up", "dp2")`.

    Each argument is a phrase without its final full stop; the error's text is one paragraph.
    """
    return refusal("", [Problem(given, allowed, instead)])


def refusal(what: str, problems: Sequence[Problem]) -> InputError:
    """The error to raise for all that is wrong with `what` at once: a paragraph for each problem.

    A single problem reads like `bad`; several are numbered under a line that names `what`.
    """
    listed = "\n".join(f"{number}. {problem}" for number, problem in enumerate(problems, start=1))
    text = f"{len(problems)} things are wrong with {what}.\n{listed}"
    error = InputError(str(problems[0]) if len(problems) == 1 else text)
    error.problems = tuple(problems)
    return error
