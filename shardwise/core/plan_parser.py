"""The plan parser: the table of plan words, their meaning, and suggestions for wrong ones.

A word stands alone (`zero3`, `bf16`), or has a number (`dp2`) or a value after a colon
(`bucket:25MiB`). Parsing gives fields of the plan and their values. One error lists all wrong
words, each with the nearest right one.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from shardwise.core.errors import InputError, Problem, bad, refusal
from shardwise.core.mesh import AXES
from shardwise.core.offload import parse as parse_offload
from shardwise.core.suggest import suggest
from shardwise.core.tile import parse as parse_tile
from shardwise.core.zero import ALIASES, ROWS, row_of

PRECISIONS = ("fp64", "fp32", "bf16", "fp16")

#: Pipeline schedules and their numbers: M microbatches, V chunks of the model per rank.
SCHEDULES: dict[str, str] = {
    "gpipe": "M",
    "1f1b": "M",
    "interleaved": "MxV",
    "bfs": "MxV",
    "zb-h1": "M",
    "zb-v": "M",
    "dualpipe-v": "M",
    "dapple": "M",
    "pipedream": "M",
    "2bw": "M",
    "naive": "",
}

#: Values of `recompute` that partition inputs over the tensor axis.
PARTITIONED_WORDS: Final = ("partitioned", "partitioned-host")

#: Units of a SIZE, largest first.
UNITS: dict[str, int] = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}

#: The largest number in a word, and the largest SIZE in bytes.
MOST: Final = 10**9
MOST_BYTES: Final = 2**40


@dataclass(frozen=True)
class Word:
    """One line of the table of words.

    later   a feature that this version does not have
    values  forms of the word with one value each, and their meanings
    """

    form: str
    example: str
    meaning: str
    later: str = ""
    values: tuple[tuple[str, str], ...] = ()

    def said_of(self, text: str) -> str:
        """The meaning of the plan word `text`, and of its value."""
        return ": ".join([self.meaning, *(said for form, said in self.values if form == text)])


_OF_SCHEDULES: Final = {
    "gpipe": "pipeline: all M forwards, then all backwards",
    "1f1b": "pipeline: forwards and backwards of M microbatches alternate",
    "interleaved": "1f1b with V stages per rank",
    "bfs": "V stages per rank: all M microbatches pass one, then the next",
    "zb-h1": "1f1b with weight gradients postponed into the bubble",
    "zb-v": "two stages per rank in a V; no bubble but the ramps from M = ranks on",
    "dualpipe-v": "two stages per rank in a V; forwards paired with backwards",
    "dapple": "early backward: the order of 1f1b",
    "pipedream": "each stage updates after every microbatch, from older weights",
    "2bw": "each stage updates by itself once a step; computes the same as 1f1b",
    "naive": "pipeline without overlap: one microbatch",
}

WORDS: tuple[Word, ...] = (
    Word("dpN", "dp2", "data parallelism on N ranks"),
    Word("dp_replicateN", "dp_replicate2", "hybrid sharding: N groups, each with a full copy"),
    Word("dp_shardN", "dp_shard4", "hybrid sharding: N ranks per group, each with a shard"),
    Word("tpN", "tp2", "tensor parallelism on N ranks"),
    Word("ppN", "pp2", "pipeline on N ranks, under a schedule (the default: 1f1b:2N)"),
    Word("cpN", "cp2", "context parallelism: the sequence on N ranks", "context parallelism is"),
    Word("epN", "ep2", "expert parallelism: each expert on one of N neighbouring data ranks"),
    Word("ddp", "ddp", "every rank keeps all states (the default)"),
    Word("zero1", "zero1", "shard the optimizer's state"),
    Word("zero2", "zero2", "shard the optimizer's state and gradients"),
    Word("zero3", "zero3", "shard parameters too; also written fsdp"),
    Word("row:P,G,O", "row:R,R,S", "any row: placements of parameters, gradients, optimizer state"),
    Word("sp", "sp", "sequence parallelism on the tensor axis"),
    *(
        Word(
            f"{name}:{numbers}" if numbers else name,
            {"M": f"{name}:8", "MxV": f"{name}:8x2", "": name}[numbers],
            _OF_SCHEDULES[name],
        )
        for name, numbers in SCHEDULES.items()
    ),
    Word("fp64", "fp64", "computation in 64 bits"),
    Word("fp32", "fp32", "computation in 32 bits"),
    Word("bf16", "bf16", "computation in bfloat16 over fp32 master weights"),
    Word("fp16", "fp16", "computation in float16 over fp32 master weights, scaled loss"),
    Word("accumulate:N", "accumulate:4", "accumulate gradients over N microbatches per step"),
    Word("bucket:SIZE", "bucket:25MiB", "reduce gradients in buckets of SIZE (the default: 25MiB)"),
    Word(
        "recompute:WHAT",
        "recompute:full",
        "recompute activations in the backward pass",
        values=(
            ("recompute:full", "every block"),
            ("recompute:selective", "every block, without its matrix products and attention"),
            ("recompute:everyN", "blocks 0, N, 2N, ..."),
            ("recompute:NAMES", "modules whose names match: blocks.*.mlp"),
            ("recompute:SIZE", "what must be, to keep at most SIZE of activations on a rank"),
            ("recompute:partitioned", "every block; each tensor rank keeps a part of its input"),
            ("recompute:partitioned-host", "the same, with the parts in host memory"),
        ),
    ),
    Word("activations:host", "activations:host", "keep the activations of blocks in host memory"),
    Word(
        "offload:WHAT",
        "offload:optim",
        "states rest outside of the device",
        values=(
            ("offload:optim", "gradients and optimizer states in host memory, updated there"),
            ("offload:optim=0.6", "the same for the last units with 60 % of the parameters"),
            ("offload:optim-delayed", "updates run beside the next step, after the first 40 steps"),
            ("offload:optim-delayed=N", "the same after the first N steps"),
            ("offload:param", "parameters rest in host memory too"),
            ("offload:optim@disk", "gradients and optimizer states rest on a disk"),
            ("offload:param@disk", "parameters rest on the disk too"),
            ("offload:auto", "the least in host memory that fits into device_memory"),
        ),
    ),
    Word("tile:N", "tile:4", "gather large linear layers in N tiles (tile:N=NAMES: these layers)"),
    Word("buffers:SIZE", "buffers:64MiB", "communication buffers of SIZE (the default: 2 buckets)"),
    Word("arenas", "arenas", "kept inputs and gradients in memory taken before the first step"),
    Word(
        "device_memory:SIZE", "device_memory:8GiB", "the most that a rank may store on its device"
    ),
)


def runnable_forms() -> list[str]:
    """The forms of the plan words that this version runs, in the order of WORDS."""
    return [word.form for word in WORDS if not word.later]


def word_of(text: str) -> Word | None:
    """The line of WORDS that says what the plan word `text` does; None for an unknown word."""
    exact = (word for word in WORDS if word.form == text)
    same_key = (word for word in WORDS if _key(word.form) == _key(text))
    return next(exact, None) or next(same_key, None)


def later(text: str) -> str:
    """The feature of the plan word `text`, as in "offload is", if this version does not have it."""
    word = word_of(text)
    return "" if word is None else word.later


def _key(text: str) -> str:
    return text.partition(":")[0].rstrip("N0123456789")


def words_table() -> str:
    """The table of plan words as text: form, example, meaning, whether this version has it."""
    rows: list[tuple[str, str, str]] = [("word", "example", "meaning")]
    for word in WORDS:
        later = " (not in this version)" * bool(word.later)
        rows.append((word.form, word.example, word.meaning + later))
        rows += [(f"  {form}", "", meaning) for form, meaning in word.values]
    form, example = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{row[0]:{form}}  {row[1]:{example}}  {row[2]}" for row in rows)


def size_text(size_bytes: int) -> str:
    """A number of bytes as a SIZE, in the largest unit that divides it."""
    unit = next(unit for unit, of in UNITS.items() if size_bytes % of == 0)
    return f"{size_bytes // UNITS[unit]}{unit}"


def read(text: Any) -> dict[str, Any]:
    """Parse `text` into the fields of a plan and their values.

    Raises InputError that lists every unknown or wrong word and every contradiction.
    """
    if not isinstance(text, str):
        raise bad(f"Plan.parse({text!r})", "a text of plan words", 'Plan.parse("dp2 zero3")')
    fields: dict[str, Any] = {}
    problems: list[Problem] = []
    unknown: list[str] = []
    first: dict[str, str] = {}  # what was set -> the first word that set it
    for word in text.split():
        found = _read(word)
        if found is None:
            unknown.append(word)
        elif isinstance(found, Problem):
            problems.append(found)
        else:
            field, value = found
            what = f"size of {value[0]}" if field == "axes" else _LABELS[field]
            if what in first:
                problems.append(_twice(what, first[what], word))
            first.setdefault(what, word)
            fields[field] = (*fields.get("axes", ()), value) if field == "axes" else value
    problems += [_unknown(list(dict.fromkeys(unknown)))] if unknown else []
    if problems:
        raise refusal(f"the plan '{text}'", list(dict.fromkeys(problems)))
    return fields


_LABELS: dict[str, str] = {
    "row": "row of the states table",
    "precision": "precision",
    "schedule": "pipeline schedule",
    "sp": "word sp",
    "accumulate": "number of microbatches to accumulate",
    "bucket_bytes": "bucket size",
    "recompute": "choice of recomputation",
    "activations": "tier of activations",
    "offload": "choice of offload",
    "tile": "choice of tiles",
    "buffers_bytes": "size of communication buffers",
    "arenas": "word arenas",
    "device_memory_bytes": "bound on device memory",
}

Found = tuple[str, Any]  # a field and its value

_AXIS = re.compile(rf"({'|'.join(sorted(AXES, key=len, reverse=True))})([-=:]?)(-?[0-9]*)")
_SIZE = re.compile(r"([0-9]+)(GiB|MiB|KiB|B)")
_LIKE_A_SIZE = re.compile(r"[0-9]+[kmgKMG]?i?[bB]?")


def _read(word: str) -> Found | Problem | None:
    """The field and value of a word, or its problem; None for an unknown word."""
    key, _, value = word.partition(":")
    if axis := _AXIS.fullmatch(word):
        return _read_axis(word, axis)
    if key in SCHEDULES:
        return _read_schedule(word)
    if word in ROWS or word in ALIASES:
        return "row", ALIASES.get(word, word)
    if word in PRECISIONS:
        return "precision", word
    if word in ("sp", "arenas"):
        return word, True
    if key in _VALUES:
        return _VALUES[key](key, value)
    return None


def _whole(digits: str, most: int = MOST) -> int:
    """Parse a number from 1 to `most`; 0 if `digits` is not one."""
    number = int(digits) if re.fullmatch("[0-9]{1,99}", digits) else 0
    return number if number <= most else 0


def _read_axis(word: str, found: re.Match[str]) -> Found | Problem:
    name, between, digits = found.groups()
    if not between and _whole(digits):
        return "axes", (name, int(digits))
    allowed = f"{name} and a whole number from 1 to {MOST}"
    return Problem(f"the plan word '{word}'", allowed, f"{name}2, or leave {name} out for one rank")


def _read_schedule(word: str) -> Found | Problem:
    name, _, value = word.partition(":")
    takes = SCHEDULES[name]
    numbers = value.split("x")
    if len(numbers) == len(takes.split("x")) and all(map(_whole, numbers)) and takes:
        return "schedule", f"{name}:{'x'.join(str(int(number)) for number in numbers)}"
    if word == name and not takes:
        return "schedule", name
    allowed, example = {
        "": (f"{name} alone: it has one microbatch", name),
        "M": (f"{name}:M with M microbatches, from 1 to {MOST}", f"{name}:8"),
        "MxV": (
            f"{name}:MxV with M microbatches and V chunks per rank, each from 1 to {MOST}",
            f"{name}:8x2",
        ),
    }[takes]
    return Problem(f"the plan word '{word}'", allowed, example)


def _read_count(key: str, value: str) -> Found | Problem:
    if number := _whole(value):
        return key, number
    allowed = f"{key}: and a whole number from 1 to {MOST}"
    return Problem(f"the plan word '{key}:{value}'", allowed, f"{key}:4")


def _read_size(key: str, value: str) -> Found | Problem:
    if (found := _SIZE.fullmatch(value)) and _whole(found[1], MOST_BYTES // UNITS[found[2]]):
        return f"{key}_bytes", int(found[1]) * UNITS[found[2]]
    allowed = f"{key}: and a whole number from 1 up with its unit, B, KiB, MiB or GiB, "
    allowed += f"{size_text(MOST_BYTES)} at most"
    return Problem(f"the plan word '{key}:{value}'", allowed, f"{key}:25MiB")


def _read_value(key: str, value: str) -> Found | Problem:
    """A word whose values another file parses."""
    try:
        return key, str(_PARSERS[key](value))
    except InputError as error:
        return error.problems[0]


_PARSERS: dict[str, Callable[[str], object]] = {
    "row": lambda value: row_of(f"row:{value}"),
    "offload": parse_offload,
    "tile": parse_tile,
}


_EVERY = re.compile("every([0-9]+)")
_NAMES = re.compile(r"[\w.*?!\[\]-]+(,[\w.*?!\[\]-]+)*")


def recompute_every(what: str) -> int:
    """The N of `recompute:everyN`; 0 for any other value of the word."""
    found = _EVERY.fullmatch(what)
    return _whole(found[1]) if found else 0


def recompute_budget(what: str | None) -> int:
    """The bytes of `recompute:SIZE`; 0 for any other value of the word, and without it."""
    found = _SIZE.fullmatch(what or "")
    return int(found[1]) * UNITS[found[2]] if found else 0


def _read_recompute(key: str, value: str) -> Found | Problem:
    every = _EVERY.fullmatch(value)
    if _LIKE_A_SIZE.fullmatch(value):
        found = _read_size(key, value)
        return found if isinstance(found, Problem) else (key, size_text(found[1]))
    if every and _whole(every[1]) > 1:
        return key, f"every{_whole(every[1])}"
    if _NAMES.fullmatch(value) and not every:
        return key, value
    allowed = (
        "recompute: and full, selective, partitioned, partitioned-host, everyN with N from 2, "
    )
    allowed += "a budget such as 8GiB, or patterns of module names"
    return Problem(f"the plan word '{key}:{value}'", allowed, "recompute:full")


def _read_activations(key: str, value: str) -> Found | Problem:
    """`activations:host`, the only value."""
    if value == "host":
        return key, value
    allowed = "activations:host; without the word they stay on the device"
    return Problem(f"the plan word '{key}:{value}'", allowed, "activations:host")


_VALUES: dict[str, Callable[[str, str], Found | Problem]] = {
    **dict.fromkeys(_PARSERS, _read_value),
    "accumulate": _read_count,
    "bucket": _read_size,
    "buffers": _read_size,
    "device_memory": _read_size,
    "recompute": _read_recompute,
    "activations": _read_activations,
}


def _twice(what: str, first: str, second: str) -> Problem:
    if first == second:
        return Problem(f"'{first}' twice", f"one {what} in a plan", f"{first} once")
    instead = f"{first} alone or {second} alone"
    return Problem(f"both '{first}' and '{second}'", f"one {what} in a plan", instead)


def _unknown(words: list[str]) -> Problem:
    """One problem for all unknown words, since the list of allowed words is long."""
    given = " and ".join(f"'{word}'" for word in words)
    allowed = f"the plan words, with spaces between them: {' '.join(runnable_forms())}"
    near = {word: _nearest(word) for word in words}
    instead = ", ".join(f"{near[word]} for '{word}'" for word in words if near[word])
    given += ", which is no plan word" if len(words) == 1 else ", which are no plan words"
    return Problem(given, allowed, instead or "dp2 zero3, to shard all states over 2 ranks")


def _nearest(word: str) -> str:
    """The example of the plan word most like an unknown one; "" if nothing is close."""
    known = {each.example.partition(":")[0]: each.example for each in WORDS}
    known |= {name: name for name in ALIASES}
    return known.get(suggest(word.lower().partition(":")[0], known, 0.55), "")
