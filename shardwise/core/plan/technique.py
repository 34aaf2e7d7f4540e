"""What a technique is to a plan: its words, the fields that they set, and what they forbid.

The folder of a technique has a file word.py, without torch, that makes its `Technique`; the list of
all techniques is in core/plan/techniques.py.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.core.errors import Problem

if TYPE_CHECKING:
    from shardwise.core.plan.plan import Plan


@dataclass(frozen=True)
class Word:
    """One line of the table of words.

    values     forms of the word with one value each, and their meanings
    of_layers  whether single layers may have it in a plan of their own
    """

    form: str
    example: str
    meaning: str
    values: tuple[tuple[str, str], ...] = ()
    of_layers: bool = False

    def said_of(self, text: str) -> str:
        """The meaning of the plan word `text`, and of its value."""
        return ": ".join([self.meaning, *(said for form, said in self.values if form == text)])


@dataclass(frozen=True)
class Field:
    """A field of a plan that words set.

    name    of the field
    what    it is, as in "one precision in a plan"
    read    the value that a word sets; None for a word of another field. Raises InputError for a
            wrong value
    write   the word that sets a value
    """

    name: str
    what: str
    read: Callable[[str], Any]
    write: Callable[[Any], str] = str


def keyed(name: str, what: str, parse: Callable[[str], object]) -> Field:
    """A field whose word is its name, a colon and a value; `parse` gives the value of a text."""

    def read(word: str) -> object | None:
        key, _, value = word.partition(":")
        return parse(value) if key == name else None

    return Field(name, what, read, lambda value: f"{name}:{value}")


def flag(name: str) -> Field:
    """A field that is set by its name alone."""
    return Field(name, f"word {name}", lambda word: word == name or None, lambda _: name)


@dataclass(frozen=True)
class Technique:
    """The words of a technique, in the order of the table, and the fields that they set.

    problems       what cannot run in a plan, on a world of so many ranks if that is known, each
                   with what to write instead
    beside_layers  a word of a plan, in quotes, that plans of single layers cannot stand beside; ""
    """

    words: tuple[Word, ...]
    problems: Callable[["Plan", int | None], Iterable[Problem]]
    fields: tuple[Field, ...] = ()
    beside_layers: Callable[["Plan"], str] = lambda _: ""
