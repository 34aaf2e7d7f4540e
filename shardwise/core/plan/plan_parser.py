"""The plan parser: from plan words to the fields of a plan and back, and the table of the words."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from shardwise.core.errors import InputError, Problem, bad, refusal
from shardwise.core.plan.words import AXES_OF_A_PLAN, Field, Technique, Word
from shardwise.core.plan.words import TECHNIQUE as RUN
from shardwise.core.tools.arguments import suggest
from shardwise.core.zero import ALIASES
from shardwise.techniques.context.word import TECHNIQUE as CONTEXT
from shardwise.techniques.data.word import TECHNIQUE as DATA
from shardwise.techniques.expert.word import TECHNIQUE as EXPERT
from shardwise.techniques.offload.word import TECHNIQUE as OFFLOAD
from shardwise.techniques.pipeline.word import TECHNIQUE as PIPELINE
from shardwise.techniques.recompute.word import TECHNIQUE as RECOMPUTE
from shardwise.techniques.tensor.word import TECHNIQUE as TENSOR
from shardwise.techniques.tile.word import TECHNIQUE as TILE


def word_of(text: str) -> Word | None:
    exact = (word for word in WORDS if word.form == text)
    same_key = (word for word in WORDS if _key(word.form) == _key(text))
    return next(exact, None) or next(same_key, None)


def _key(text: str) -> str:
    return text.partition(":")[0].rstrip("N0123456789")


def words_table() -> str:
    """The table of plan words as text: form, example, meaning."""
    rows: list[tuple[str, str, str]] = [("word", "example", "meaning")]
    for word in WORDS:
        rows.append((word.form, word.example, word.meaning))
        rows += [(f"  {form}", "", meaning) for form, meaning in word.values]
    form, example = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{row[0]:{form}}  {row[1]:{example}}  {row[2]}" for row in rows)


def words_of(values: Mapping[str, Any]) -> str:
    return " ".join(FIELDS[name].write(value) for name, value in values.items())


def read(text: Any) -> dict[str, Any]:
    """The fields that `text` sets. Raises InputError that lists every wrong or contrary word."""
    if not isinstance(text, str):
        raise bad(f"Plan.parse({text!r})", "a text of plan words", 'Plan.parse("dp2 zero3")')
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    unknown: list[str] = []
    first: dict[str, str] = {}  # what was set -> the first word that set it
    for word in text.split():
        try:
            name, value = _read(word)
        except InputError as error:
            problems += error.problems
            continue
        if not name:
            unknown.append(word)
            continue
        what = f"size of {value[0][0]}" if name == "axes" else FIELDS[name].what
        if what in first:
            problems.append(_twice(what, first[what], word))
        first.setdefault(what, word)
        values[name] = (*values.get("axes", ()), *value) if name == "axes" else value
    problems += [_unknown(list(dict.fromkeys(unknown)))] if unknown else []
    if problems:
        raise refusal(f"the plan '{text}'", list(dict.fromkeys(problems)))
    return values


def _read(word: str) -> tuple[str, Any]:
    found = ((name, field.read(word)) for name, field in FIELDS.items())
    return next(((name, value) for name, value in found if value is not None), ("", None))


def _twice(what: str, first: str, second: str) -> Problem:
    if first == second:
        return Problem(f"'{first}' twice", f"one {what} in a plan", f"{first} once")
    instead = f"{first} alone or {second} alone"
    return Problem(f"both '{first}' and '{second}'", f"one {what} in a plan", instead)


def _unknown(words: list[str]) -> Problem:
    given = " and ".join(f"'{word}'" for word in words)
    near = {word: " ".join(filter(None, map(_nearest, word.split(",")))) for word in words}
    instead = ", ".join(f"{near[word]} for '{word}'" for word in words if near[word])
    given += ", which is no plan word" if len(words) == 1 else ", which are no plan words"
    allowed = "the words that `shardwise plan --words` prints, with spaces between them"
    if not instead:
        allowed += f": {' '.join(word.form for word in WORDS)}"
    return Problem(given, allowed, instead or "dp2 zero3, to shard all states over 2 ranks")


def _nearest(word: str) -> str:
    if _read(word)[0]:
        return word
    known = {each.example.partition(":")[0]: each.example for each in WORDS}
    known |= {name: name for name in ALIASES}
    return known.get(suggest(word.lower().partition(":")[0], known, 0.55), "")


# --- the list of techniques: a new one is a folder with a word.py, and one line here --------------

TECHNIQUES: tuple[Technique, ...] = (
    *(DATA, TENSOR, CONTEXT, PIPELINE, EXPERT),
    *(RECOMPUTE, OFFLOAD, TILE, RUN),
)

#: The table of plan words.
WORDS: tuple[Word, ...] = tuple(chain.from_iterable(each.words for each in TECHNIQUES))
#: What they set.
FIELDS: dict[str, Field] = {
    field.name: field
    for field in (AXES_OF_A_PLAN, *chain.from_iterable(each.fields for each in TECHNIQUES))
}
