"""Suggestions: the known words most similar to an unknown one."""

import shlex
from collections.abc import Iterable
from difflib import SequenceMatcher
from pathlib import Path

__all__ = ["beside", "suggest", "suggestions"]


def suggest(word: str, known: Iterable[str], cutoff: float = 0.0) -> str:
    """The most similar of the `known` words; "" if no similarity reaches `cutoff` (0 to 1)."""
    return next(iter(suggestions(word, known, 1, cutoff)), "")


def suggestions(word: str, known: Iterable[str], count: int, cutoff: float = 0.0) -> list[str]:
    """Up to `count` words, the most similar first.

    Of two equally similar words, the one with the same first letter comes first: typing errors are
    rarely in the first letter ("dpp2" is dp2, not pp2).
    """
    similarity = SequenceMatcher(b=word)
    found: list[tuple[float, bool, str]] = []
    for each in known:
        similarity.set_seq1(each)
        found.append((similarity.ratio(), each[:1] == word[:1], each))
    return [each for ratio, _, each in sorted(found, reverse=True)[:count] if ratio >= cutoff]


def setting(key: str, path: Path) -> str:
    """The option that sets a key of a configuration to a path, to paste into a shell."""
    return f"--set {shlex.quote(f'{key}={path}')}"


def beside(path: Path) -> Path:
    """Another name in the same folder: runs/a -> runs/a-2, also for "." and ".."."""
    named = path if path.name not in ("", "..") else path.absolute().resolve()
    return named.with_name(f"{named.name}-2") if named.name else named / "run"
