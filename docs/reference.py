"""Writes the pages of the reference that the program itself knows: python -m docs.reference

Commands are read from the command line's parser, keys from the models of the configuration, words
of plans from their table, names from `shardwise.__all__`, metrics from the record of a step.
`tests/docs` compares what is written here with the pages that are checked in.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final

import shardwise as sw
from docs.docstrings import rows
from docs.measured import page as measurements
from shardwise.core.errors import InputError
from shardwise.core.plan.plan import WORDS, Plan
from shardwise.core.plan.plan_check import problems
from shardwise.engine.options import EngineOptions
from shardwise.models.registry import NAMED
from shardwise.train.config import Config
from shardwise.train.metrics import Record
from tests import covering, surface
from tests.plans import every_plan

DOCS = Path(__file__).parent
NOTE: Final = "<!-- Written by `make docs` from the program: change the program, not this page. -->"


def write() -> None:
    """Write every page."""
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")


def table(head: str, lines: Iterable[Iterable[str]]) -> str:
    """A table with the columns `head`, separated by bars."""
    columns = [column.strip() for column in head.split("|")]
    body = [[cell.replace("|", "&#124;") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *body])


def page_of(*parts: str) -> str:
    """A page of parts, the first of which is its heading."""
    return "\n\n".join([parts[0], NOTE, *parts[1:]]) + "\n"


# --- commands --------------------------------------------------------------------------------

COMMANDS: Final = """\
Every command ends with exit code 0 for success, 1 if a proof or a run fails, and 2 for bad
input, which is answered in one paragraph that says what to write instead. `python -m
shardwise` is the same program as `shardwise`, and `shardwise COMMAND --help` prints what is
below. `shardwise --version` prints the version."""


def commands() -> str:
    """Every command with its arguments and options."""
    return page_of("# Commands", COMMANDS, *(_command(name) for name in surface.commands()))


def _command(name: str) -> str:
    command = surface.command(name)
    params = [param for param in command.params if param.name != "help"]
    places = [_place(p) for p in params if p.param_type_name == "argument"]
    last = command.context_settings.get("allow_interspersed_args", True)
    words = [*places, "[OPTIONS]"] if last else ["[OPTIONS]", *places]
    usage = " ".join(["shardwise", name, *words])
    said = inspect.cleandoc(command.help or "")
    options = table("argument or option | default | meaning", map(_option, params))
    return "\n\n".join([f"## shardwise {name}", said, f"```text\n{usage}\n```", options])


def _place(param: Any) -> str:
    shown = str(param.metavar or param.name.upper())
    return shown if param.required or shown.startswith("[") else f"[{shown}]"


def _option(param: Any) -> tuple[str, str, str]:
    """A row: the name with its value, the default, the help."""
    if param.param_type_name == "argument":
        return f"`{_place(param)}`", "", param.help or ""
    flag = param.is_flag
    kind = getattr(param.type_descriptor.annotation, "__name__", "")
    value = "" if flag else f" {param.metavar or {'int': 'N', 'float': 'X'}.get(kind, 'TEXT')}"
    default = "" if flag or param.default in (None, (), "") else f"`{param.default}`"
    default = "required" if param.required else default
    return f"`{param.opts[-1]}{value}`", default, param.help or ""


# --- configuration ---------------------------------------------------------------------------

CONFIGURATION: Final = """\
`shardwise train FILE.toml` reads a TOML file. Every key has a default, so a file holds only
the keys that differ. `--set section.key=value` replaces a key; `--plan` is `plan.text`,
`--model` is `model.name`, and `--table` is `plan.table`. The complete configuration of a
run is written into its folder as `config.toml`.

An unknown key, a wrong type (`"8"` is not a number) and an empty file are errors that name
what to write instead."""

SIZES: Final = """\
### Named models

`model.name` of a configuration, and `--model` of the commands. `gpt` alone is `gpt:tiny`.
The published sizes have exactly the published number of parameters."""


def configuration() -> str:
    """Every key of a run."""
    parts = ["# Configuration", CONFIGURATION]
    for name, field in Config.model_fields.items():
        section: Any = type(field.default)
        keys = [_key(name, key, info) for key, info in section.model_fields.items()]
        said = " ".join(inspect.cleandoc(section.__doc__).split())
        parts += [f"## [{name}]", said, table("key | type | default | meaning", keys)]
        parts += [SIZES, _sizes()] * (name == "model")
    return page_of(*parts)


def _key(section: str, key: str, info: Any) -> tuple[str, str, str, str]:
    default = "unset" if info.default is None else f"`{json.dumps(info.default)}`"
    return f"`{section}.{key}`", kind_of(info.annotation), default, info.description or ""


def kind_of(annotation: Any) -> str:
    """The type of a key in plain words."""
    text = str(annotation)
    words = {"bool": "true or false", "int": "whole number", "float": "number", "str": "text"}
    if "tuple" in text:
        kind = "numbers" if "float" in text else "texts"
        return f"list of {kind}" if text.endswith(", ...]") else "two numbers"
    return next((word for name, word in words.items() if name in text), "text")


def _sizes() -> str:
    columns = (
        "layers",
        "hidden_size",
        "heads",
        "kv_heads",
        "intermediate_size",
        "sequence",
        "vocabulary",
    )
    lines = [
        (f"`{name}`", *(f"{getattr(getattr(sizes, 'gpt', sizes), key):,}" for key in columns))
        for name, sizes in NAMED.items()
    ]
    return table(" | ".join(("name", *columns)), lines)


# --- plan words ------------------------------------------------------------------------------

PLAN_WORDS: Final = """\
A plan is a list of words in any order. Every word has a default. Axes that no word names
have one rank, and ranks that no word uses are data ranks. `shardwise plan "dp2 tp2 zero1"`
checks a plan and says how many ranks it needs; `shardwise plan --words` prints this table.

After a bar, single layers get words of their own: `dp4 zero3 | embed,head: tp4 zero1`
([plans of single layers](../explanation/tensor.md#plans-of-single-layers)).

N, M and V are whole numbers. SIZE is a whole number of B, KiB, MiB or GiB, such as `25MiB`.
P, G and O are the placements `R`, `S` and `P` of parameters, gradients and optimizer
states."""

#: The page that explains a word, by the beginning of the word.
EXPLAINED: Final = {
    **dict.fromkeys(("dp", "ddp", "zero", "row", "bucket", "accumulate"), "explanation/states.md"),
    **dict.fromkeys(("fp", "bf16"), "explanation/states.md#precision"),
    **dict.fromkeys(("tp", "sp"), "explanation/tensor.md"),
    "cp": "explanation/context.md",
    **dict.fromkeys(("ep", "experts"), "explanation/experts.md"),
    **dict.fromkeys(("recompute", "activations", "buffers", "arenas"), "explanation/memory.md"),
    **dict.fromkeys(("offload", "device_memory"), "explanation/offload.md"),
    "tile": "explanation/offload.md#tiles",
}


def plan_words() -> str:
    """Every word of a plan."""
    lines = []
    for word in WORDS:
        link = f"[{word.meaning}](../{_explained(word.form)})"
        lines.append((f"`{word.form}`", f"`{word.example}`", link))
        lines += [("", f"`{form}`", meaning) for form, meaning in word.values]
    return page_of("# Plan words", PLAN_WORDS, table("word | example | meaning", lines))


def _explained(form: str) -> str:
    starts = [start for start in EXPLAINED if form.startswith(start)]
    return EXPLAINED[max(starts, key=len)] if starts else "explanation/pipeline.md"


# --- which words go together -----------------------------------------------------------------

TOGETHER: Final = """\
Every two words of a plan that may meet do meet in a plan that the test suite proves: loss,
gradients, weights, bytes and memory equal those of one process and of the theory.

`+` stands for two words that are proved together, `no` for two that a plan refuses, each with
the words to write instead (`shardwise plan "tp2 tile:2"`). Two rows, such as `zero1` and
`zero3`, meet where [single layers](../explanation/tensor.md#plans-of-single-layers) have a plan
of their own."""

#: Words by what they are called in the table, as a pattern of the words of proved plans, and as
#: they are written beside another.
MEETING: Final = {
    **{word: (word, word) for word in ("zero1", "zero2", "zero3")},
    "hybrid": ("dp_replicate2", "dp_replicate2 dp_shard2"),
    "tp": ("tp2", "tp2"),
    "sp": ("sp", "tp2 sp"),
    "cp": ("cp2", "cp2"),
    "ulysses": ("cp2:ulysses", "cp2:ulysses"),
    "ep": ("ep2", "ep2"),
    **{
        name: (rf"{name}(:\S*)?", f"pp2 {name}{size}")
        for name, size in (
            *((each, ":4") for each in ("gpipe", "1f1b", "zb-h1", "zb-v", "pipedream", "2bw")),
            ("interleaved", ":4x2"),
        )
    },
    "accumulate": (r"accumulate:\d+", "accumulate:2"),
    **{f"recompute:{how}": (f"recompute:{how}",) * 2 for how in ("full", "selective")},
    "activations:host": ("activations:host",) * 2,
    **{f"offload:{what}": (f"offload:{what}",) * 2 for what in ("optim", "param", "param@disk")},
    "tile": (r"tile:2\S*", "tile:2"),
    "arenas": ("arenas", "arenas"),
}


def combinations() -> str:
    """Which two words are proved together, run, or are refused."""
    plans = [set(text.replace("|", " ").split()) for text in (*every_plan(), *covering.read())]
    has = {
        name: {k for k, words in enumerate(plans) if any(re.fullmatch(form, w) for w in words)}
        for name, (form, _) in MEETING.items()
    }
    lines = [(f"`{row}`", *(_together(has, row, column) for column in MEETING)) for row in MEETING]
    return page_of(
        "# Which words go together",
        TOGETHER,
        table(" | ".join(["", *(f"`{name}`" for name in MEETING)]), lines),
    )


def _together(has: Mapping[str, set[int]], first: str, second: str) -> str:
    if first == second:
        return "\\"
    if has[first] & has[second]:
        return "+"
    words = dict.fromkeys(f"{MEETING[first][1]} {MEETING[second][1]}".split())
    try:
        plan = Plan.parse(" ".join(words)).completed(None)
        return "no" if problems(plan, plan.size) else "runs"
    except InputError:
        return "no"


# --- metrics ---------------------------------------------------------------------------------

METRICS: Final = """\
`shardwise train` writes `metrics.jsonl` into the folder of the run: a JSON object for each
step. The same numbers go to the trackers of `run.trackers`. Keys without a value
are left out. A resumed run removes the records after its checkpoint, so each step appears
once."""

STEP: Final = """\
## Metrics of a step in Python

`engine.step(batch)` returns an [`sw.Metrics`](python.md#shardwise.Metrics)."""


def metrics() -> str:
    """The keys of metrics.jsonl and of sw.Metrics."""
    said = {
        kind: [(f"`{name}`", text) for name, text in rows(inspect.cleandoc(kind.__doc__ or ""))]
        for kind in (Record, sw.Metrics)
    }
    keys = [table("key | meaning", lines) for lines in said.values()]
    return page_of("# Metrics", METRICS, keys[0], STEP, keys[1])


# --- python ----------------------------------------------------------------------------------

PYTHON: Final = """\
All names are in the package `shardwise`, imported as `sw`:

```python
import shardwise as sw
```

A wrong argument raises [`sw.InputError`](#shardwise.InputError), whose text says what to
write instead."""

#: Headings, and the public names below them; a name that is nowhere here is under the last.
GROUPS: Final = {
    "Train with an engine": (
        "init",
        "World",
        "parallelize",
        "Engine",
        "Metrics",
        "Loader",
        "spawn",
    ),
    "Optimizers": ("AdamW", "Adam", "SGD", "Lion", "Adafactor", "Muon", "Optim"),
    "One technique in a plain loop": (
        *("DDP", "FSDP", "Pipe", "DataParallel", "clip_grad_norm", "no_sync", "unwrap"),
        "replicas",
    ),
    "Save, load, weights": ("save", "load", "full_state_dict", "fill_from"),
    "Prove and predict": ("verify", "predict"),
    "Plans": ("Plan", "Mesh", "core"),
    "Tensor parallelism": ("Table", "derive_table", "cross_entropy"),
    "Experts": ("Gate", "MoE"),
    "Pipelines": ("balance_by_time",),
    "Errors": ("InputError", "RankError", "RunError"),
    "More": (),
}

OPTIONS: Final = """\
### Options of `sw.parallelize`

All are keyword arguments, and `sw.predict` takes them too, except `fill`, `seed` and
`offload_folder`; it has `device` in addition. All ranks must pass the same values. Options of
a technique that the plan does not use have no effect."""


def python() -> str:
    """Every public name; mkdocstrings renders its docstring."""
    grouped = {name for names in GROUPS.values() for name in names}
    groups = GROUPS | {"More": tuple(name for name in sw.__all__ if name not in grouped)}
    parts = ["# Python", PYTHON]
    for heading, names in groups.items():
        parts += [f"## {heading}"] * bool(names)
        for name in names:
            parts.append(_name(name))
            parts += [OPTIONS, _options()] * (name == "parallelize")
            parts += {"Engine": [ENGINE], "World": [WORLD]}.get(name, [])
    return page_of(*parts)


#: The members of a class that programs use; of other classes, all public ones.
MEMBERS: Final = {
    "Engine": (
        *(
            "step",
            "evaluate",
            "outputs",
            "gather",
            "set_lr",
            "data_rank",
            "data_ranks",
            "microbatches",
        ),
        *("memory", "host_memory", "disk_memory", "measured_bytes", "sent", "gradients", "flush"),
    ),
    "World": ("close", "barrier"),
    "MoE": ("forward",),
    "Gate": (),
    "core": ("I", "P", "R", "S"),
    "verify": ("Verify",),
}

ENGINE: Final = """\
| attribute | meaning |
| --- | --- |
| `model`, `plan`, `world` | the arguments of `sw.parallelize`; the plan is the completed one |
| `optimizer` | a `torch.optim.Optimizer`, for torch's schedulers |
| `steps` | the number of steps so far |
| `ledger`, `last` | what this rank sent since the start, and in the last step |"""

WORLD: Final = """\
| attribute | meaning |
| --- | --- |
| `rank`, `size` | the number of this rank, and of all ranks |
| `device` | the device of this rank |"""


def _name(name: str) -> str:
    lines = [f"::: shardwise.{name}"]
    if name in MEMBERS:
        lines += ["    options:", f"      members: [{', '.join(MEMBERS[name])}]"]
    return "\n".join(lines)


def _options() -> str:
    said = dict(_each(rows(inspect.cleandoc(EngineOptions.__doc__ or ""))))
    lines = [
        (f"`{field.name}`", f"`{_default(field)!r}`", said[field.name])
        for field in fields(EngineOptions)
        if field.name in inspect.signature(sw.parallelize).parameters
    ]
    return table("option | default | meaning", lines)


def _each(found: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """A row of several names is one row for each."""
    for names, text in found:
        yield from ((name, text) for name in names.split(", "))


def _default(field: Any) -> Any:
    return None if field.default is MISSING else field.default


PAGES: Final[dict[str, Callable[[], str]]] = {
    "reference/commands.md": commands,
    "reference/configuration.md": configuration,
    "reference/plan-words.md": plan_words,
    "reference/combinations.md": combinations,
    "reference/metrics.md": metrics,
    "reference/python.md": python,
    "explanation/measurements.md": measurements,
}

if __name__ == "__main__":
    write()
