"""What a technique is to a plan: its words, the fields that they set, and what they forbid.

The folder of a technique has a file word.py, without torch, that makes its `Technique`; the list of
all techniques is in core/plan/plan_parser.py.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from shardwise.core.errors import Problem, bad
from shardwise.core.mesh import AXES
from shardwise.core.zero import row_of

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
        return ": ".join([self.meaning, *(said for form, said in self.values if form == text)])


@dataclass(frozen=True)
class Field:
    """A field of a plan; `what` names it, as in "one precision in a plan".

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


# --- words of every run ---------------------------------------------------------------------------

PRECISIONS: Final = ("fp64", "fp32", "bf16", "fp16")
_AXIS = re.compile(rf"({'|'.join(sorted(AXES, key=len, reverse=True))})([-=:]?)(-?[0-9]*)")


def _axis(word: str) -> tuple[tuple[str, int], ...] | None:
    found = _AXIS.fullmatch(word)
    if found is None:
        return None
    name, between, digits = found.groups()
    if not between and whole(digits):
        return ((name, int(digits)),)
    allowed = f"{name} and a whole number from 1 to {MOST}"
    raise bad(f"the plan word '{word}'", allowed, f"{name}2, or leave {name} out for one rank")


def _axes_text(axes: tuple[tuple[str, int], ...]) -> str:
    ordered = sorted(axes, key=lambda axis: AXES.index(axis[0]) if axis[0] in AXES else 0)
    return " ".join(f"{name}{size}" for name, size in ordered)


def _device_memory(word: str) -> int | None:
    key, _, value = word.partition(":")
    return read_size(key, value) if key == "device_memory" else None


def _problems(plan: "Plan", _: int | None) -> Iterator[Problem]:
    if plan.arenas and (why := _no_arenas(plan)):
        allowed = "arenas with recompute:full, selective, partitioned, everyN or names; or with "
        allowed += "zero2 or zero3 and no pipeline"
        yield Problem(f"'arenas' with {why}", allowed, f"'{replace(plan, arenas=False)}'")


def _no_arenas(plan: "Plan") -> str:
    if plan.recompute_budget_bytes:
        return f"recompute:{plan.recompute}, which chooses for each batch what is kept"
    if plan.activations_on_host:
        return "activations in host memory"
    if plan.recompute is None and (plan.pipeline or not row_of(plan.row).moves().shards_gradient):
        return f"{plan.row} and no recomputation, where no tensor has a place in them"
    return ""


#: The axes of a plan, which are of all techniques.
AXES_OF_A_PLAN: Final = Field("axes", "axis", _axis, _axes_text)

TECHNIQUE: Final = Technique(
    words=(
        Word("fp64", "fp64", "computation in 64 bits"),
        Word("fp32", "fp32", "computation in 32 bits"),
        Word("bf16", "bf16", "computation in bfloat16 over fp32 master weights"),
        Word("fp16", "fp16", "computation in float16 over fp32 master weights, scaled loss"),
        Word("arenas", "arenas", "kept inputs and gradients in memory taken before the first step"),
        Word(
            "device_memory:SIZE",
            "device_memory:8GiB",
            "the most that a rank may store on its device",
        ),
    ),
    fields=(
        Field("precision", "precision", lambda word: word if word in PRECISIONS else None),
        flag("arenas"),
        Field(
            "device_memory_bytes",
            "bound on device memory",
            _device_memory,
            lambda nbytes: f"device_memory:{size_text(nbytes)}",
        ),
    ),
    problems=_problems,
    beside_layers=lambda plan: "'arenas'" * plan.arenas,
)

# --- values of words ------------------------------------------------------------------------------

#: Units of a SIZE, largest first.
UNITS: Final[dict[str, int]] = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
#: The largest number in a word, and the largest SIZE in bytes.
MOST: Final = 10**9
MOST_BYTES: Final = 2**40
#: Patterns of names with commas between them.
NAMES: Final = re.compile(r"[\w.*?!\[\]-]+(,[\w.*?!\[\]-]+)*")

_SIZE = re.compile(r"([0-9]+)(GiB|MiB|KiB|B)")
_LIKE_A_SIZE = re.compile(r"[0-9]+[kmgKMG]?i?[bB]?")


def whole(digits: str, most: int = MOST) -> int:
    """Parse a number from 1 to `most`; 0 if `digits` is not one."""
    number = int(digits) if re.fullmatch("[0-9]{1,99}", digits) else 0
    return number if number <= most else 0


def read_count(key: str, value: str) -> int:
    if number := whole(value):
        return number
    allowed = f"{key}: and a whole number from 1 to {MOST}"
    raise bad(f"the plan word '{key}:{value}'", allowed, f"{key}:4")


def read_size(key: str, value: str) -> int:
    """The bytes of the word `key:SIZE`. Raises InputError for anything else."""
    if (found := _SIZE.fullmatch(value)) and whole(found[1], MOST_BYTES // UNITS[found[2]]):
        return int(found[1]) * UNITS[found[2]]
    allowed = f"{key}: and a whole number from 1 up with its unit, B, KiB, MiB or GiB, "
    allowed += f"{size_text(MOST_BYTES)} at most"
    raise bad(f"the plan word '{key}:{value}'", allowed, f"{key}:25MiB")


def like_a_size(value: str) -> bool:
    return _LIKE_A_SIZE.fullmatch(value) is not None


def size_bytes(value: str) -> int:
    found = _SIZE.fullmatch(value)
    return int(found[1]) * UNITS[found[2]] if found else 0


def size_text(nbytes: int) -> str:
    """A number of bytes as a SIZE, in the largest unit that divides it."""
    unit = next(unit for unit, of in UNITS.items() if nbytes % of == 0)
    return f"{nbytes // UNITS[unit]}{unit}"
