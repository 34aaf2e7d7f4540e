"""The tensor-parallel plan of a model: patterns of module names, and their styles.

    Table.of(
        {
            "embed": "vocabulary",
            "blocks.*.attn.q": "colwise:heads",       the first pattern that matches a module wins
            "blocks.*.attn.[kv]": "colwise:kv_heads",
            "blocks.*.attn.out": "rowwise:heads",
            "blocks.*.mlp.up": "colwise",
            "blocks.*.mlp.down": "rowwise",
            "blocks.*.mlp.gate?": "colwise",          a final ? : may match no module
        },
        heads=8,
        kv_heads=2,
        sequence={"embed": "vocabulary:sequence", "*norm": "sequence"},
        sets={"blocks.*.attn": {"num_heads": "heads"}},
    )

Patterns are fnmatch's: `*` matches dots too. Under the plan word sp, `sequence` entries precede the
others. `sets` names attributes that count heads, which become this rank's numbers.
(Megatron-LM, arXiv 1909.08053, section 3; norms and residuals on shards of the sequence, arXiv
2205.05198, section 4.)
"""

import fnmatch
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardwise.core.errors import Problem, bad, refusal
from shardwise.core.layouts.uneven import Cut, even, heads, packed, wide
from shardwise.core.tools.arguments import suggest

#: Every style and its meaning. N is a number from 2 up.
STYLES: dict[str, str] = {
    "colwise": "sharded by output features; the output is sharded",
    "colwise:heads": "as colwise, by whole query heads",
    "colwise:kv_heads": "as colwise, by whole key or value heads; ranks share a head if few",
    "colwise:qkv": "as colwise, for packed queries, keys and values, each by heads",
    "colwise:N": "as colwise, for N equal packed parts, each sharded",
    "rowwise": "sharded by input features; the input is sharded, the output summed",
    "rowwise:heads": "as rowwise, by whole query heads",
    "colwise_gather_output": "sharded by output features; the output is gathered",
    "rowwise_split_input": "sharded by input features; the input is replicated, the output summed",
    "vocabulary": "an embedding or the output layer, sharded by the vocabulary",
    "replicated": "replicated, used on sharded values: gradients are summed",
    "whole": "replicated; later patterns do not apply",
    "sequence": "replicated, used on shards of the sequence: gradients are summed",
    "gather": "its first argument is gathered along the sequence",
    "split": "each rank takes its shard of the sequence of its first argument",
    "vocabulary:sequence": "as vocabulary, for an embedding whose output is sharded by sequence",
    "vocabulary:whole": "as vocabulary, for an output layer whose input is gathered already",
    "sequence:join": "as sequence, and the output is gathered",
    "dropout": "a dropout on shards of the sequence",
}
#: The styles that only `sequence` entries have.
OF_SEQUENCE = (
    *("sequence", "sequence:join", "gather", "split"),
    *("vocabulary:sequence", "vocabulary:whole", "dropout"),
)


@dataclass(frozen=True)
class Style:
    """A style and its qualifier: "heads", "kv_heads", "qkv", "sequence", a number or nothing."""

    name: str
    by: str = ""

    @classmethod
    def parse(cls, text: object) -> "Style":
        """Raises InputError that names the nearest style."""
        known = isinstance(text, str) and (
            (text in STYLES and text != "colwise:N")
            or re.fullmatch(r"colwise:([2-9]|[1-9]\d+)", text, re.ASCII)
        )
        if not known:
            usable = [style for style in STYLES if style != "colwise:N"]
            near = suggest(str(text).lower(), usable)
            shown = f'"{text}"' if isinstance(text, str) else repr(text)
            raise bad(f"the style {shown}", ", ".join(STYLES), f'"{near}"')
        name, _, by = str(text).partition(":")
        return cls(name, by)

    def __str__(self) -> str:
        return f"{self.name}:{self.by}" if self.by else self.name

    @property
    def by_heads(self) -> bool:
        return self.by in ("heads", "kv_heads", "qkv")

    @property
    def parts(self) -> int:
        return int(self.by) if self.by.isdigit() else 1


@dataclass(frozen=True)
class ModuleShape:
    """The properties of one module that a table uses.

    For an embedding, `in_features` is its number of rows and `out_features` its number of columns;
    for other modules, `in_features` is the length of their parameters, if these have one dim and
    one length. `transposed` weights are [in, out], as in Conv1D of transformers. `tied` names the
    earlier module with the same weight. `numbers` are its integer attributes; `parameters` says
    whether the module itself has parameters, and `own` has their names.
    """

    kind: Literal["linear", "embedding", "other"]
    in_features: int = 0
    out_features: int = 0
    bias: bool = False
    transposed: bool = False
    parameters: bool = True
    type_name: str = ""
    tied: str = ""
    numbers: tuple[tuple[str, int], ...] = ()
    own: tuple[str, ...] = ()


def general(name: str) -> str:
    """The name of a module as a pattern for all layers: "blocks.3.mlp.0" gives "blocks.*.mlp.0"."""
    return ".".join(
        ["*" if part.isdigit() else part for part in name.split(".")[:-1]] + [last(name)]
    )


def parent(name: str) -> str:
    return name.rpartition(".")[0]


def last(name: str) -> str:
    return name.rpartition(".")[2]


Entries = tuple[tuple[str, str], ...]
#: The numbers that an attribute of a module may count; they differ between ranks.
NUMBERS = {
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "groups": "query heads per key head",
    "queries": "features of all queries, heads times their width",
}


@dataclass(frozen=True)
class Table:
    """Styles by pattern, in order; see the top of the file. Raises InputError for unknown words.

    `heads` and `kv_heads` are the model's; styles and `sets` that count heads need them.
    `kv_heads` defaults to `heads`. A `derived` table comes from shapes alone: the engine compares
    the first step under it with the plain model.
    """

    styles: Entries
    heads: int | None = None
    kv_heads: int | None = None
    sequence: Entries = ()
    sets: tuple[tuple[str, Entries], ...] = ()
    derived: bool = False

    def __post_init__(self) -> None:
        for name, count in (("heads", self.heads), ("kv_heads", self.kv_heads)):
            whole = isinstance(count, int) and not isinstance(count, bool) and count > 0
            if count is not None and not whole:
                raise bad(f"{name}={count!r} of a table", "a whole number from 1 up", f"{name}=8")
        if self.kv_heads is not None and self.heads is None:
            instead = f"heads={self.kv_heads}, kv_heads={self.kv_heads}"
            raise bad(f"a table with kv_heads={self.kv_heads} and no heads", "both", instead)
        for _, style in (*self.styles, *self.sequence):
            Style.parse(style)
        for pattern, style in self.styles:
            if style in OF_SEQUENCE:
                given = f'"{pattern}": "{style}" among the styles'
                allowed = f"{', '.join(OF_SEQUENCE)} in sequence, which sp reads"
                raise bad(given, allowed, f'Table.of({{...}}, sequence={{"{pattern}": "{style}"}})')
        for pattern, numbers in self.sets:
            for attribute, number in numbers:
                _counted(pattern, attribute, number)

    @classmethod
    def of(
        cls,
        styles: Mapping[str, str],
        heads: int | None = None,
        kv_heads: int | None = None,
        sequence: Mapping[str, str] | None = None,
        sets: Mapping[str, Mapping[str, str]] | None = None,
        *,
        derived: bool = False,
    ) -> "Table":
        """The table from dicts, pattern to style, in their order. `sets` maps a pattern to
        {attribute: "heads", "kv_heads", "groups" or "queries"}. Raises InputError as Table does.
        """
        if not hasattr(styles, "items"):
            instead = 'table={"*.up": "colwise", "*.down": "rowwise"}'
            raise bad(f"table={styles!r}", "a sw.Table, or a dict of pattern to style", instead)
        return cls(
            tuple(styles.items()),
            heads,
            kv_heads,
            tuple((sequence or {}).items()),
            tuple((pattern, tuple(numbers.items())) for pattern, numbers in (sets or {}).items()),
            derived,
        )

    def __str__(self) -> str:
        arguments = [repr(dict(self.styles))]
        arguments += [f"heads={self.heads}"] if self.heads is not None else []
        arguments += [f"kv_heads={self.kv_heads}"] if self.kv_heads is not None else []
        arguments += [f"sequence={dict(self.sequence)!r}"] if self.sequence else []
        sets = {pattern: dict(numbers) for pattern, numbers in self.sets}
        arguments += [f"sets={sets!r}"] if sets else []
        arguments += ["derived=True"] * self.derived
        return f"Table.of({', '.join(arguments)})"

    def under(self, name: str) -> "Table":
        """The table of a model that contains this table's model as its module `name`."""

        def longer(entries: Sequence[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
            return tuple((f"{name}.{pattern}", what) for pattern, what in entries)

        if not name:
            return self
        return replace(
            self, styles=longer(self.styles), sequence=longer(self.sequence), sets=longer(self.sets)
        )

    @property
    def keys(self) -> int | None:
        return self.heads if self.kv_heads is None else self.kv_heads

    def head_cuts(self, ranks: int) -> tuple[Cut, Cut]:
        """The query heads and key heads of each rank, counted in heads; see uneven.heads."""
        if self.heads is None or self.keys is None:
            raise ValueError("a table without heads")
        return heads(self.heads, self.keys, ranks)


def assign(table: Table, modules: Sequence[str], sp: bool) -> dict[str, Style]:
    """The style of each module that has one: the first matching pattern's, `sequence` entries first
    under `sp`. Raises InputError for patterns that match no module.
    """
    problems = unmatched(table, modules, sp)
    if problems:
        raise refusal("the table", problems)
    return {name: s for name, s in matches(table, modules, sp).items() if s != Style("whole")}


def matches(table: Table, modules: Sequence[str], sp: bool) -> dict[str, Style]:
    """As `assign`, but without the check, and including "whole" modules."""
    patterns = [(_pattern(key), Style.parse(style)) for key, style in _entries(table, sp)]
    found: dict[str, Style] = {}
    for name in modules:
        style = next((style for pattern, style in patterns if pattern.match(name)), None)
        if name and style is not None:
            found[name] = style
    return found


def matching(key: str, modules: Iterable[str]) -> list[str]:
    return [name for name in modules if _pattern(key).match(name)]


def by_pattern(entries: Mapping[str, Any], modules: Collection[str]) -> dict[str, Any]:
    """The entries of modules by name, in one for all layers where their pattern matches only
    modules with equal entries.
    """

    def shared(name: str) -> bool:
        return all(entries.get(n) == entries[name] for n in matching(general(name), modules))

    return {general(name) if shared(name) else name: what for name, what in entries.items()}


def unmatched(table: Table, modules: Sequence[str], sp: bool) -> list[Problem]:
    """A problem for each pattern that matches no module of the model."""
    names = [name for name in modules if name]
    keys = [key for key, _ in (*_entries(table, sp), *table.sets)]
    used = {key for key in keys if any(map(_pattern(key).match, names))}
    general_names = list(dict.fromkeys(map(general, names))) or ["*"]
    return [
        Problem(
            f'"{key}" in the table, which matches no module of the model',
            f'names of its modules, * for any part, or "{key}?" if it may match none',
            f'"{suggest(general(key.removesuffix("?")), general_names)}"',
        )
        for key in keys
        if key not in used and not (used and key.endswith("?"))
    ]


def cuts(style: Style, shape: ModuleShape, table: Table, ranks: int) -> Cut | None:
    """The shards of a module's weight; None: replicated. Dim 0 has an nn.Linear's outputs or an
    embedding's rows, dim 1 an nn.Linear's inputs; `transposed` weights exchange them.
    """
    outputs, inputs = (1, 0) if shape.transposed else (0, 1)
    whole = shape.out_features
    if style.name == "vocabulary" and shape.kind == "embedding":
        return even(0, shape.in_features, ranks)
    if style.name in ("vocabulary", "colwise_gather_output"):
        return even(outputs, whole, ranks)
    if style.name == "rowwise_split_input" or str(style) == "rowwise":
        return even(inputs, shape.in_features, ranks)
    if style.name == "rowwise":
        return _by_heads(table.head_cuts(ranks)[0], inputs, shape.in_features)
    if style.name != "colwise":
        return None
    if style.by_heads:
        queries, keys = table.head_cuts(ranks)
        if style.by == "qkv":
            width = _divided(whole, queries.whole + 2 * keys.whole)
            parts = [wide(part, outputs, width) for part in (queries, keys, keys)]
            return packed(outputs, parts)
        return _by_heads(queries if style.by == "heads" else keys, outputs, whole)
    part = even(outputs, _divided(whole, style.parts), ranks)
    return packed(outputs, [part] * style.parts)


def bias_cut(style: Style, shape: ModuleShape, table: Table, ranks: int) -> Cut | None:
    """The shards of the bias of a linear layer, as its outputs; None if it is replicated."""
    if not shape.bias or style.name.startswith("rowwise"):
        return None
    cut = cuts(style, shape, table, ranks)
    return None if cut is None else cut.on(0)


def numbers(
    table: Table,
    styles: Mapping[str, Style],
    modules: Mapping[str, ModuleShape],
    rank: int,
    ranks: int,
) -> dict[str, dict[str, int]]:
    """Attributes to change on `rank`: module name to {attribute: this rank's number}."""
    found: dict[str, dict[str, int]] = {}
    for name, style in styles.items():
        shape = modules[name]
        by_outputs = style.name in ("colwise", "colwise_gather_output", "vocabulary")
        if shape.transposed and by_outputs and "nf" in dict(shape.numbers):
            cut = cuts(style, shape, table, ranks)
            found[name] = {} if cut is None else {"nf": cut.size(rank)}
    for name, attribute, number in counted_attributes(table, modules):
        whole = dict(modules[name].numbers)[attribute]
        found.setdefault(name, {})[attribute] = _number(table, number, whole, rank, ranks)
    return found


def counted_attributes(table: Table, modules: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Module, attribute and the number it counts, for all entries of `table.sets`."""
    for key, attributes in table.sets:
        for name in filter(_pattern(key).match, modules):
            yield from ((name, attribute, number) for attribute, number in attributes)


def _number(table: Table, number: str, whole: int, rank: int, ranks: int) -> int:
    queries, keys = (cut.size(rank) for cut in table.head_cuts(ranks))
    if number == "queries":
        return whole * queries // (table.heads or 1)
    return {"heads": queries, "kv_heads": keys, "groups": queries // keys}[number]


def _by_heads(cut: Cut, dim: int, features: int) -> Cut:
    return wide(cut, dim, _divided(features, cut.whole))


def _divided(features: int, count: int) -> int:
    if features % count:
        raise ValueError(f"{features} features do not divide by {count}")
    return features // count


def _entries(table: Table, sp: bool) -> Entries:
    return (*(table.sequence if sp else ()), *table.styles)


def _pattern(key: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(key.removesuffix("?")))


def _counted(pattern: str, attribute: str, number: object) -> None:
    if number not in NUMBERS:
        allowed = ", ".join(f'"{key}" ({what})' for key, what in NUMBERS.items())
        near = suggest(str(number), NUMBERS)
        given = f"sets of {pattern} with {attribute!r}: {number!r}"
        raise bad(given, allowed, f"{{{attribute!r}: {near!r}}}")
