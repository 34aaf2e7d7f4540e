"""Checks of arguments of the public functions and commands, without torch.

engine/checks/validate.py checks torch objects (modules, losses, worlds).
"""

import math
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from numbers import Real
from pathlib import Path
from typing import Any

from shardwise.core.errors import bad

MOST_SEED = 2**63 - 1  # of torch's generators
MAX_CHARS = 60  # characters of a value shown in an error
MAX_RANKS = 8  # ranks named in an error
MOST_COUNT = 2**53  # of steps or tokens: JSON readers and doubles hold it exactly


def short_repr(value: Any) -> str:
    text = getattr(value, "__name__", None) or " ".join(repr(value).split())
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."


def rank_names(ranks: Sequence[int]) -> str:
    """The ranks that an error names, the first ones of many: "rank 3", "ranks 1, 3 and 5 more"."""
    text = ", ".join(map(str, ranks[:MAX_RANKS]))
    more = f" and {len(ranks) - MAX_RANKS} more" if len(ranks) > MAX_RANKS else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}{more}"


def integer(name: str, value: Any, least: int, example: int, most: int | None = None) -> None:
    """Raise InputError unless `value` is an integer from `least` to `most`."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not fits or (most is not None and value > most):
        allowed = f"a whole number from {least} " + ("up" if most is None else f"to {most}")
        sign = " " if name.startswith("--") else "="
        raise bad(f"{name}{sign}{short_repr(value)}", allowed, f"{name}{sign}{example}")


def flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise bad(f"{name}={short_repr(value)}", "True or False", f"{name}=True")


def positive(name: str, value: Any) -> None:
    if value is not None and not (is_number(value) and value > 0):
        allowed = "a number above 0, or None for no bound"
        raise bad(f"{name}={short_repr(value)}", allowed, f"{name}=1.0")


def is_number(value: Any) -> bool:
    """Whether `value` is a real number or a scalar tensor, and not a bool; NaN is none."""
    if isinstance(value, bool):
        return False
    single = getattr(value, "dim", None) is not None and value.dim() == 0
    return (isinstance(value, Real) or single) and not math.isnan(value)


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_COUNT


def choice(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Raise InputError, with the nearest of `allowed`, unless `value` is one of them."""
    words = list(allowed)
    if isinstance(value, str) and value in words:
        return
    near = suggest(value, words) if isinstance(value, str) else words[0]
    listed = " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
    if name.startswith("--"):
        raise bad(f"{name} {value}", listed, f"{name} {near}")
    raise bad(f"{name}={short_repr(value)}", listed, f'{name}="{near}"')


def on_nonfinite(value: Any) -> str:
    """Raise InputError unless `value` is raise, skip, or skip:NUMBER, a number above 0."""
    number = r"skip:(?=.*[1-9])[0-9]{1,9}(\.[0-9]{1,9})?"
    if not (isinstance(value, str) and re.fullmatch(number, value)):
        choice("on_nonfinite", value, ("raise", "skip", "skip:6"))
    return value


# --- suggestions ----------------------------------------------------------------------------------

__all__ = ["beside", "suggest", "suggestions"]


def suggest(word: str, known: Iterable[str], cutoff: float = 0.0) -> str:
    return next(iter(suggestions(word, known, 1, cutoff)), "")


def suggestions(word: str, known: Iterable[str], count: int, cutoff: float = 0.0) -> list[str]:
    """Up to `count` words: first those that start with `word`, then the most similar; of
    equals, one with the same first letter, where typing errors are rare ("dpp2" is dp2, not pp2).
    """
    similarity = SequenceMatcher(b=word)
    found: list[tuple[float, bool, str]] = []
    for each in known:
        similarity.set_seq1(each)
        begun = similarity.ratio() + (word != "" and each.startswith(word))
        found.append((begun, each[:1] == word[:1], each))
    return [each for ratio, _, each in sorted(found, reverse=True)[:count] if ratio >= cutoff]


def setting(key: str, path: Path) -> str:
    """The option that sets a key of a configuration to a path, to paste into a shell."""
    return f"--set {shlex.quote(f'{key}={path}')}"


def beside(path: Path) -> Path:
    """Another name in the same folder: runs/a -> runs/a-2, also for "." and ".."."""
    named = path if path.name not in ("", "..") else path.absolute().resolve()
    return named.with_name(f"{named.name}-2") if named.name else named / "run"


# --- the option `check_every` ---------------------------------------------------------------------

#: Steps between two comparisons, unless the user says otherwise.
CHECK_EVERY = 100
_TEXT = re.compile(r"(?:(?P<ranks>\d+)\s+)?rerun:(?P<rerun>\d+)")


@dataclass(frozen=True)
class CheckEvery:
    """Steps between two comparisons of ranks, and between two reruns; 0: none."""

    ranks: int = CHECK_EVERY
    rerun: int = 0

    @classmethod
    def parse(cls, value: Any) -> "CheckEvery":
        """Read the option. Raises InputError."""
        if is_count(value):
            return cls(value)
        found = _TEXT.fullmatch(value.strip()) if isinstance(value, str) else None
        if found is None:
            allowed = 'a whole number from 0 up, or a text such as "100 rerun:20"'
            raise bad(f"check_every={short_repr(value)}", allowed, "check_every=100")
        numbers = {name: int(n) for name, n in found.groupdict().items() if n}
        return cls(**numbers)


NEVER, USUAL = CheckEvery(0), CheckEvery()
