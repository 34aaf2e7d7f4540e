"""The known word that somebody most likely meant by an unknown one."""

from collections.abc import Iterable
from difflib import SequenceMatcher

__all__ = ["suggest", "suggestions"]


def suggest(word: str, known: Iterable[str], cutoff: float = 0.0) -> str:
    """The one of `known` most like `word`; "" where none is as like it as `cutoff` (0 to 1)."""
    return next(iter(suggestions(word, known, 1, cutoff)), "")


def suggestions(word: str, known: Iterable[str], count: int, cutoff: float = 0.0) -> list[str]:
    """Up to `count` of them, the most like first.

    Of two that are equally like, the one that begins as `word` does: typing errors are rarely in
    the first letter ("dpp2" is dp2 and not pp2).
    """
    likeness = SequenceMatcher(b=word)
    found: list[tuple[float, bool, str]] = []
    for each in known:
        likeness.set_seq1(each)
        found.append((likeness.ratio(), each[:1] == word[:1], each))
    return [each for ratio, _, each in sorted(found, reverse=True)[:count] if ratio >= cutoff]
