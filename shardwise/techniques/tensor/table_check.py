"""Checks a tensor-parallel table against a model, before anything runs.

    names      every pattern matches a module             "blocks.*.upp"
    kinds      a style fits the kind of module            colwise of a norm
    heads      every rank has a head                      tp8 for 4 heads
    sizes      every rank has a feature                   a vocabulary of 3 on 4 ranks
    results    a rowwise input fits its colwise output    q, k and v in one weight, as plain colwise
    ties       one weight is sharded in one way           the embedding sharded, its head whole
    sets       attributes that count heads exist          "num_head", or 8 where heads=4

A check runs only if the earlier ones find nothing. Other mistakes appear when the model runs: torch
raises errors for wrong shapes, and the first step compares the gradients of all replicated
parameters between ranks (engine/checks/consistency.py).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwise.core.errors import Problem
from shardwise.core.layouts.tensor_table import (
    ModuleShape,
    Style,
    Table,
    counted_attributes,
    cuts,
    general,
    last,
    matches,
    parent,
    unmatched,
)
from shardwise.core.layouts.uneven import Cut, Range, even, wide

#: The end of the name of a layer that peft wrapped, or added.
_ADAPTER = re.compile(r"\.(base_layer|original_module|(lora_[AB]|modules_to_save)\.[^.]+)$")
_LINEAR = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input")


def check(table: Table, modules: Mapping[str, ModuleShape], sp: bool, ranks: int) -> list[Problem]:
    """The problems of `table` for a model with these modules on `ranks` ranks; empty if none."""
    if problems := unmatched(table, list(modules), sp):
        return problems
    if sp and not table.sequence:
        allowed = "entries for all modules with parameters that work on shards of the sequence"
        instead = 'sequence={"embed": "vocabulary:sequence", "*norm": "sequence"}'
        given = "sp with a table that has no entries for the sequence"
        return [Problem(given, allowed, f"{instead}; see docs/how-to/tables.md")]
    placed = _Placed(table, modules, ranks, matches(table, list(modules), sp))
    if problems := list(_heads(placed)):
        return problems
    for faults in (_kinds, _sizes):
        if problems := list(_merged(faults(placed))):
            return problems
    return list(_merged([*_results(placed), *_ties(placed), *_sets(placed)]))


@dataclass(frozen=True)
class _Placed:
    """A table applied to a model; `styles` includes "whole" modules."""

    table: Table
    modules: Mapping[str, ModuleShape]
    ranks: int
    styles: Mapping[str, Style]

    def cut_of(self, name: str) -> Cut | None:
        return cuts(self.style(name), self.modules[name], self.table, self.ranks)

    def style(self, name: str) -> Style:
        return self.styles.get(name, Style("whole"))


@dataclass(frozen=True)
class _Fault:
    """A problem of one module; {name} in `instead` becomes its pattern for all layers."""

    name: str
    what: str
    allowed: str
    instead: str


def _merged(faults: Iterator[_Fault] | list[_Fault]) -> Iterator[Problem]:
    kinds: dict[tuple[str, str], list[_Fault]] = {}
    for fault in faults:
        kinds.setdefault((general(fault.name), fault.what), []).append(fault)
    for (pattern, _), same in kinds.items():
        first = same[0]
        more = f" (and {len(same) - 1} more like it)" if len(same) > 1 else ""
        instead = first.instead.replace("{name}", pattern)
        yield Problem(f"{first.name}{more}, {first.what}", first.allowed, instead)


def _kinds(placed: _Placed) -> Iterator[_Fault]:
    for name, style in placed.styles.items():
        shape = placed.modules[name]
        inside = next((key for key in placed.styles if key.startswith(f"{name}.")), "")
        what = f'of type {shape.type_name or shape.kind}, as "{style}"'
        kinds = _allowed_kinds(style)
        if shape.kind not in kinds:
            allowed = f"{style} for a module of kind {' or '.join(kinds)}"
            yield _Fault(name, what, allowed, f'"{{name}}": "whole", or "{style}" for one in it')
        elif style.name in ("replicated", "sequence") and inside:
            given = f'{what}, which includes {general(inside)}, "{placed.style(inside)}"'
            allowed = f"{style} for a module that contains no module with an entry"
            yield _Fault(name, given, allowed, 'an entry for each module in "{name}"')


def _allowed_kinds(style: Style) -> tuple[str, ...]:
    if style.name in _LINEAR or str(style) == "vocabulary:whole":
        return ("linear",)
    if style.name == "vocabulary":
        return ("embedding",) if style.by == "sequence" else ("embedding", "linear")
    return ("other",) if style.name in ("gather", "split") else ("linear", "embedding", "other")


def _heads(placed: _Placed) -> Iterator[Problem]:
    table, counting = placed.table, [name for name, s in placed.styles.items() if s.by_heads]
    counting += [pattern for pattern, _ in table.sets]
    keys = table.keys or table.heads
    if counting and (table.heads is None or keys is None):
        given = f'"{general(counting[0])}", sharded by heads, in a table without heads='
        allowed = "the model's number of query heads, and of key and value heads if there are fewer"
        yield Problem(given, allowed, "sw.Table.of({...}, heads=8, kv_heads=2)")
    elif counting and table.heads and keys and table.heads % keys:
        given = f"a table with heads={table.heads}, kv_heads={keys}"
        yield Problem(given, "kv_heads that divide heads", "the model's number of key heads")
    elif counting and table.heads and table.heads < placed.ranks:
        given = f"tp{placed.ranks} for a model of {table.heads} query heads"
        allowed = f"the degrees 1 to {table.heads}, so that every rank has a head"
        yield Problem(given, allowed, f"tp{table.heads}")


def _sizes(placed: _Placed) -> Iterator[_Fault]:
    for name, style in placed.styles.items():
        shape = placed.modules[name]
        rows = style.name == "vocabulary" and shape.kind == "embedding"
        by_inputs = rows or style.name.startswith("rowwise")
        size = shape.in_features if by_inputs else shape.out_features
        what = "rows" if rows else "input features" if by_inputs else "output features"
        try:
            cut = placed.cut_of(name)
        except ValueError:
            counts = f" with heads={placed.table.heads}, kv_heads={placed.table.keys}"
            given = f'which has {size} {what}, as "{style}"{counts if style.by_heads else ""}'
            instead = "heads= and kv_heads= of the model, in sw.Table.of({...}, heads=..., ...)"
            instead = instead if style.by_heads else f'"{{name}}": "{style.name}"'
            yield _Fault(name, given, f"a multiple of what {style} counts", instead)
            continue
        if cut is not None and min(map(cut.size, range(placed.ranks))) == 0:
            given = f"which has {size} {what}, on {placed.ranks} ranks"
            instead = f'tp{size // style.parts}, or "{{name}}": "whole"'
            yield _Fault(name, given, f"one or more {what} for each rank", instead)


def _results(placed: _Placed) -> Iterator[_Fault]:
    """Rowwise layers whose input shards differ from the output shards of their colwise layers. With
    several parts packed in one weight, neither shapes nor gradients would reveal it.
    """
    for name in (name for name in placed.styles if placed.style(name).name == "rowwise"):
        beside = [k for k in placed.styles if parent(_plain(k)) == parent(_plain(name))]
        columns = [k for k in beside if placed.style(k).name == "colwise"]
        cut, style = placed.cut_of(name), placed.style(name)
        by_heads = any(placed.style(key).by in ("heads", "qkv") for key in columns)
        if cut is None or not columns or (by_heads and style.by):
            continue
        if cut.ranges not in [_result(placed, key) for key in columns]:
            says = ", ".join(f"{last(key)} ({placed.style(key)})" for key in columns)
            size = placed.modules[name].in_features
            what = f'as "{style}", whose {size} input features are sharded differently from the '
            what += f"output of {says}"
            allowed = "a colwise, and a rowwise whose input is sharded in the same way"
            instead = '"rowwise:heads" after heads, "colwise:N" for N parts in one weight, or '
            instead += '"colwise_gather_output" and "rowwise_split_input"'
            yield _Fault(name, what, allowed, instead)


def _plain(name: str) -> str:
    return _ADAPTER.sub("", name)


def _result(placed: _Placed, name: str) -> tuple[tuple[Range, ...], ...]:
    """The shards of a colwise output as a rowwise uses it; one part of several packed parts."""
    style, size = placed.style(name), placed.modules[name].out_features
    if not style.by_heads:
        return even(0, size // style.parts, placed.ranks).ranges
    queries, keys = placed.table.head_cuts(placed.ranks)
    if style.by == "kv_heads":
        return wide(keys, 0, size // keys.whole).ranges
    heads = queries.whole + (2 * keys.whole if style.by == "qkv" else 0)
    return wide(queries, 0, size // heads).ranges


def _ties(placed: _Placed) -> Iterator[_Fault]:
    for name, shape in placed.modules.items():
        if shape.tied and placed.cut_of(name) != placed.cut_of(shape.tied):
            mine, other = placed.style(name), placed.style(shape.tied)
            what = f'which is "{mine}" and shares its weight with {shape.tied}, "{other}"'
            instead = f'"{general(shape.tied)}": "vocabulary", "{{name}}": "vocabulary"'
            yield _Fault(name, what, "one style for one weight", instead)


def _sets(placed: _Placed) -> Iterator[_Fault]:
    queries, keys = (c.whole for c in placed.table.head_cuts(1)) if placed.table.sets else (1, 1)
    right = {"heads": queries, "kv_heads": keys, "groups": queries // keys}
    for name, attribute, number in counted_attributes(placed.table, placed.modules):
        known = dict(placed.modules[name].numbers)
        value = known.get(attribute)
        if value is None:
            what = f"which has no attribute {attribute} that is a whole number"
            allowed = f"whole numbers of the module: {', '.join(known) or 'it has none'}"
            yield _Fault(name, what, allowed, f'{{"num_heads": "{number}"}}')
        elif value != right.get(number, value) or (number == "queries" and value % queries):
            expected = right.get(number, f"multiples of {queries} heads")
            what = f"whose {attribute} is {value}, and the table's {number} are {expected}"
            allowed = "the model's numbers of heads in the table"
            yield _Fault(name, what, allowed, f"sw.Table.of({{...}}, heads={value})")
