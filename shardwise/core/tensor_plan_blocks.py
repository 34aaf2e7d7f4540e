"""this file is whether the layers of a block take each other's results as they are cut.

    up    colwise   result cut 0..47 | 48..95
    down  rowwise   takes features 0..47 | 48..95       the same: no value is missing or misplaced

A block is the smallest module that has a colwise and a rowwise, within one layer of the model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from shardwise.core.styles import Style, general, last, parent
from shardwise.core.tensor_plan_match import Fault, Laid
from shardwise.core.uneven import Range, even, wide

__all__ = ["faults"]

_PAIR = "a colwise and, after it in the same block, the rowwise that takes its result"


@dataclass(frozen=True)
class _Block:
    """The colwise and the rowwise of a block."""

    columns: list[str]
    rows: list[str]


def faults(laid: Laid) -> Iterator[Fault]:
    """What is wrong between the layers of each block, where each alone can be cut."""
    blocks, alone = _paired([*laid.named("colwise"), *laid.named("rowwise")], laid.styles)
    beside: dict[tuple[str, str], list[str]] = {}
    for name in alone:
        beside.setdefault((parent(name), laid.style(name).name), []).append(name)
    yield from (_alone(laid, names) for names in beside.values())
    for block in blocks:
        exchanged = list(_exchanged(laid, block))
        yield from exchanged
        if exchanged:
            continue
        yield from _misfits(laid, block)
        yield from _forgotten(laid, block)
        yield from _inside(laid, block)


def _paired(names: list[str], styles: Mapping[str, Style]) -> tuple[list[_Block], list[str]]:
    """The blocks, innermost first; and the names that are in none."""
    around: dict[str, list[str]] = {}
    for name in names:
        for scope in _scopes(name):
            around.setdefault(scope, []).append(name)
    left, blocks = dict.fromkeys(names), list[_Block]()
    for scope in sorted(around, key=lambda scope: -scope.count(".") - bool(scope)):
        here = [name for name in around[scope] if name in left]
        columns = [name for name in here if styles[name].name == "colwise"]
        rows = [name for name in here if styles[name].name == "rowwise"]
        if columns and rows:
            blocks.append(_Block(columns, rows))
            for name in here:
                del left[name]
    return blocks, list(left)


def _scopes(name: str) -> Iterator[str]:
    """The modules around `name` that a result may stay cut in: up to the layer that it is in."""
    scope = parent(name)
    yield scope
    while scope and not last(scope).isdigit():
        scope = parent(scope)
        yield scope


def _alone(laid: Laid, names: list[str]) -> Fault:
    """Results that stay cut, or rowwise that are given nothing cut, of modules side by side."""
    name, style = names[0], laid.style(names[0])
    beside = f", with {', '.join(map(last, names[1:]))}" if len(names) > 1 else ""
    near = [key for key in laid.modules if parent(key) == parent(name) and key not in names]
    near = [key for key in near if laid.modules[key].kind == "linear"]
    by = ":heads" if style.by == "heads" else ""
    mine = laid.modules[name]
    if style.name == "colwise":
        what = f'as "{style}"{beside}, whose result stays cut: no rowwise in its block takes it'
        fits = [key for key in near if laid.modules[key].in_features == mine.out_features]
        other, alone = f"rowwise{by}", "colwise_gather_output"
    else:
        what = f'as "{style}"{beside}, whose input nothing cuts: its block has no colwise'
        fits = [key for key in near if laid.modules[key].out_features == mine.in_features]
        other, alone = f"colwise{by}", "rowwise_split_input"
    both = f'"{general(fits[0])}": "{other}" beside it, or ' if fits else ""
    return Fault(name, what, _PAIR, f'{both}"{{name}}": "{alone}"')


def _exchanged(laid: Laid, block: _Block) -> Iterator[Fault]:
    """A rowwise and, after it, a colwise that gives the stream: a norm beside them is as wide.

    By their sizes alone they may as well be right, and in the model in another order than they run.
    """
    for row, column in product(block.rows, block.columns):
        first, then = laid.modules[row], laid.modules[column]
        across = (then.out_features, then.in_features)
        if parent(row) != parent(column) or (first.in_features, first.out_features) != across:
            continue
        norms = [key for key in laid.beside(column) if laid.modules[key].kind == "other"]
        norm = next((key for key in norms if laid.modules[key].in_features == across[0]), None)
        order = [key for key in laid.beside(column) if key in (row, column)]
        if norm and across[0] != across[1] and order == [row, column]:
            what = (
                f'as "{laid.style(row)}", and {last(column)} after it as "{laid.style(column)}": '
            )
            what += f"they look exchanged, since {last(norm)} is as wide ({across[0]}) as what "
            what += f"{last(row)} takes and {last(column)} gives"
            instead = (
                f'"{{name}}": "{laid.style(column)}", "{general(column)}": "{laid.style(row)}"'
            )
            yield Fault(row, what, _PAIR, instead)


def _misfits(laid: Laid, block: _Block) -> Iterator[Fault]:
    """Rowwise that take their input cut otherwise than the colwise of their block give it."""
    given = {name: _result(laid, name) for name in block.columns}
    by_heads = any(laid.style(name).by in ("heads", "qkv") for name in block.columns)
    for name in block.rows:
        cut, style = laid.cut(name), laid.style(name)
        if cut is None or (by_heads and style.by) or cut.ranges in given.values():
            continue
        says = ", ".join(f"{last(key)} ({laid.style(key)})" for key in block.columns)
        size = laid.modules[name].in_features
        what = f'as "{style}", which takes {size} features cut otherwise than {says} give them'
        yield Fault(name, what, _PAIR, _fitting(laid, name, block, by_heads))


def _result(laid: Laid, name: str) -> tuple[tuple[Range, ...], ...]:
    """How what a colwise gives is cut when a rowwise takes it: of several parts, one part."""
    style, size = laid.style(name), laid.modules[name].out_features
    if not style.by_heads:
        return even(0, size // style.parts, laid.ranks).ranges
    queries, keys = laid.table.head_cuts(laid.ranks)
    if style.by == "kv_heads":
        return wide(keys, 0, size // keys.whole).ranges
    heads = queries.whole + (2 * keys.whole if style.by == "qkv" else 0)
    return wide(queries, 0, size // heads).ranges


def _fitting(laid: Laid, name: str, block: _Block, by_heads: bool) -> str:
    """The entry that would let a rowwise take what the colwise of its block give."""
    if by_heads:
        return '"{name}": "rowwise:heads"'
    if laid.style(name).by:
        return '"{name}": "rowwise", or "colwise:heads" before it'
    size = laid.modules[name].in_features
    for column in block.columns:
        parts, rest = divmod(laid.modules[column].out_features, size)
        if parts > 1 and not rest:
            return f'"{general(column)}": "colwise:{parts}"'
    return '"{name}": "rowwise_split_input", and "colwise_gather_output" before it'


def _forgotten(laid: Laid, block: _Block) -> Iterator[Fault]:
    """Linear layers without an entry, shaped as one beside them that is cut, or as its keys."""
    found: dict[str, Fault] = {}
    for column in block.columns:
        mine, style = laid.modules[column], laid.style(column)
        alike = {mine.out_features: style}
        if style.by == "heads":
            queries, keys = (part.whole for part in laid.table.head_cuts(1))
            alike.setdefault(mine.out_features // queries * keys, Style("colwise", "kv_heads"))
        for name in laid.bare(parent(column)):
            shape = laid.modules[name]
            fitting = alike.get(shape.out_features)
            if fitting and shape.kind == "linear" and shape.in_features == mine.in_features:
                what = f'without an entry beside {last(column)}, which is "{style}"'
                allowed = "layers of a block cut alike, or named as whole"
                instead = f'"{{name}}": "{fitting}", or "whole" if nothing cut meets its result'
                found.setdefault(name, Fault(name, what, allowed, instead))
    yield from found.values()


def _inside(laid: Laid, block: _Block) -> Iterator[Fault]:
    """Norms without an entry whose length is that of what is cut, or of one head of it."""
    lengths: dict[int, tuple[str, str]] = {}
    for column in block.columns:
        lengths = _lengths(laid, column) | lengths
    for name in dict.fromkeys(map(parent, block.columns)):
        whole = {laid.modules[column].in_features for column in block.columns}
        for norm in laid.bare(name):
            size = laid.modules[norm].in_features
            if laid.modules[norm].kind == "other" and size in lengths.keys() - whole:
                what = f"without an entry, and as long ({size}) as {lengths[size][0]}"
                allowed = "an entry for what is used on cut values, whose gradient is a part"
                yield Fault(norm, what, allowed, lengths[size][1])


def _lengths(laid: Laid, column: str) -> dict[int, tuple[str, str]]:
    """Lengths of what a colwise cuts: what has it, and the entry for a norm of this length."""
    style, size = laid.style(column), laid.modules[column].out_features
    cut = f"what {last(column)} cuts"
    gathered = f'"{general(column)}": "colwise_gather_output"; or "{{name}}": "whole"'
    if not style.by_heads:
        return {size // style.parts: (cut, gathered)}
    queries, keys = (part.whole for part in laid.table.head_cuts(1))
    count = {"heads": queries, "kv_heads": keys}.get(style.by, queries + 2 * keys)
    width = size // count
    one = (f"one head of {cut}", '"{name}": "replicated"; or "whole"')
    return {width * (queries if style.by == "qkv" else count): (cut, gathered), width: one}
