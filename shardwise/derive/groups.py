"""Groups: layers that are sharded along one axis together, and the styles that say so.

    columns   layers whose output has the axis         colwise
    rows      layers whose input has it                rowwise
    summed    modules that apply parameters to shards  replicated

A group is valid if every tensor that has the axis comes from the columns and ends in the rows.  Two
groups that share a layer exclude each other.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.derive.axis_rules import TracedAxis, leaves
from shardwise.derive.axis_trace import OperationTrace, TracedLayer

#: Of more groups that exclude each other, the largest are chosen one by one.
_SEARCHED = 12


@dataclass(frozen=True)
class LayerGroup:
    """Layers along one axis; `why` says why they cannot be sharded, "" if they can."""

    axis: TracedAxis
    columns: tuple[TracedLayer, ...]
    rows: tuple[TracedLayer, ...]
    summed: tuple[str, ...] = ()
    why: str = ""

    @property
    def layers(self) -> tuple[TracedLayer, ...]:
        """Its columns and its rows."""
        return self.columns + self.rows

    @property
    def elements(self) -> int:
        """The elements of the weights that it shards."""
        return sum(each.shape.in_features * each.shape.out_features for each in self.layers)

    @property
    def widths(self) -> set[int]:
        """The numbers of features per position of the axis, in the segments of the columns."""
        return {size // self.axis.size for each in self.columns for size in segments(each)}


@dataclass
class Heads:
    """The numbers of heads of a table, taken from the first group that has any."""

    heads: int | None = None
    kv_heads: int | None = None
    axes: list[TracedAxis] = field(default_factory=list[TracedAxis])

    def take(self, group: LayerGroup) -> bool:
        """Whether the group's axis counts key heads that are those of the table."""
        if group.widths == {1}:
            return False
        kv, heads = group.axis.size, group.axis.size * max(group.widths) // min(group.widths)
        if self.heads is None:
            self.heads, self.kv_heads = heads, kv
        return (self.heads, self.kv_heads) == (heads, kv)


def segments(layer: TracedLayer) -> list[int]:
    """The sizes of the equal or unequal parts into which a layer's output is divided."""
    return [stop - start for start, stop in sorted(layer.segments)] or [layer.outputs.size]


def outputs(layer: TracedLayer) -> list[list[TracedAxis]]:
    """The axes of each segment of a layer's output."""
    if layer.segments:
        return [leaves((axis,)) for _, axis in sorted(layer.segments.items(), key=lambda e: e[0])]
    return [leaves((layer.outputs,))]


def groups(trace: OperationTrace, ranks: int, tied: Iterable[str]) -> list[LayerGroup]:
    """Every group that has columns and rows, valid or not, in the order of the model."""
    linear = [x for x in trace.layers.values() if x.shape.kind == "linear" and x.called]
    axes = dict.fromkeys(axis for each in linear for part in outputs(each) for axis in part)
    found: list[LayerGroup] = []
    for axis in axes:
        columns = [each for each in linear if any(axis in part for part in outputs(each))]
        rows = [each for each in linear if axis in leaves((each.inputs,))]
        if not rows:
            continue
        summed = _summed(trace, axis)
        group = LayerGroup(axis, tuple(columns), tuple(rows), tuple(summed))
        why = _problem(trace, group, ranks, set(tied))
        found.append(LayerGroup(axis, group.columns, group.rows, group.summed, why))
    return found


def _summed(trace: OperationTrace, axis: TracedAxis) -> Iterator[str]:
    """Modules whose parameters are combined with tensors that have the axis in other dims."""
    for name, touched in trace.touched.items():
        if any(axis in leaves(dim) for dims in touched for dim in dims):
            yield name


def _problem(trace: OperationTrace, group: LayerGroup, ranks: int, tied: set[str]) -> str:
    """Why the group cannot be sharded on `ranks`; "" if it can."""
    axis, layers = group.axis, group.layers
    names = {each.name for each in layers}
    around = [n for n in group.summed if not n or any(x.startswith(f"{n}.") for x in names)]
    owned = [n for n, dims in trace.read.items() if any(axis in leaves(d) for d in dims)]
    problems = {
        axis.mixed: bool(axis.mixed),
        f"it has {axis.size} positions for {ranks} ranks": axis.size < ranks,
        "the model returns it": any(axis in leaves(d) for dims in trace.returned for d in dims),
        f"the parameter {min(owned, default='')} has it": bool(owned),
        f"{min(around, default='')} combines its own parameters with it": bool(around),
        "a layer both outputs and reads it": len(names) < len(layers),
        "a layer of it shares its weight": bool(names & tied),
        "a weight of it is read without calling its layer": bool(names & _read(trace)),
        "a layer reads it together with other features": any(
            leaves((each.inputs,))[0] is not axis for each in group.rows
        ),
        "a part of a layer's output is without it": any(
            axis not in part for each in group.columns for part in outputs(each)
        ),
    }
    return next((why for why, wrong in problems.items() if wrong), "")


def _read(trace: OperationTrace) -> set[str]:
    return {name.rpartition(".")[0] for name in trace.read}


def chosen(found: Sequence[LayerGroup]) -> list[LayerGroup]:
    """The valid groups, no two of which share a layer, that shard the most elements."""
    rest, taken = [group for group in found if not group.why], list[LayerGroup]()
    while rest:
        near, more = [rest[0]], True
        while more:
            names = {each.name for group in near for each in group.layers}
            more = [g for g in rest if g not in near and names & {x.name for x in g.layers}]
            near += more
        rest = [group for group in rest if group not in near]
        taken += _best(near)
    return taken


def _best(near: Sequence[LayerGroup]) -> list[LayerGroup]:
    """Of groups that exclude each other, the ones that shard the most; fewer groups first."""
    if len(near) > _SEARCHED:
        kept: list[LayerGroup] = []
        for group in sorted(near, key=lambda group: -group.elements):
            if _apart([*kept, group]):
                kept.append(group)
        return kept
    sets = [
        list(each)
        for count in range(1, len(near) + 1)
        for each in itertools.combinations(near, count)
        if _apart(each)
    ]
    return max(sets, key=lambda each: (sum(g.elements for g in each), -len(each)))


def _apart(given: Sequence[LayerGroup]) -> bool:
    names = [each.name for group in given for each in group.layers]
    return len(set(names)) == len(names)


def styles(group: LayerGroup, heads: Heads, ranks: int) -> Mapping[str, str] | None:
    """The style of each module of a group; None if no style shards it in this way."""
    by_heads = heads.take(group)
    if group.axis.size % ranks and group.widths != {1} and not by_heads:
        return None
    found: dict[str, str] = {}
    for each in group.columns:
        style = _column(each, group, heads) if by_heads else _plain(each, group)
        if style is None:
            return None
        found[each.name] = style
    found |= {each.name: "rowwise:heads" if by_heads else "rowwise" for each in group.rows}
    return dict.fromkeys(group.summed, "replicated") | found


def _plain(layer: TracedLayer, group: LayerGroup) -> str | None:
    parts = _parts(layer, group)
    return None if parts is None else f"colwise:{parts}" if parts > 1 else "colwise"


def _column(layer: TracedLayer, group: LayerGroup, heads: Heads) -> str | None:
    """The style by heads of a layer that outputs queries, keys, values, or several of them."""
    assert heads.heads and heads.kv_heads
    width = min(group.widths)
    sizes, parts = segments(layer), _parts(layer, group)
    if [size // width for size in sizes] == [heads.heads, heads.kv_heads, heads.kv_heads]:
        return "colwise:qkv"
    if parts == 1:
        own = sizes[0] // width
        same_counts = heads.heads == heads.kv_heads  # a head may pack its query, key and value
        return "colwise:heads" if own == heads.heads or same_counts else "colwise:kv_heads"
    if parts == 3 and heads.heads == heads.kv_heads:
        return "colwise:qkv"
    return None


def _parts(layer: TracedLayer, group: LayerGroup) -> int | None:
    """The number of equal parts of the output, each sharded along the axis; None if they differ."""
    found, sizes = outputs(layer), segments(layer)
    before = {math.prod(a.size for a in part[: part.index(group.axis)]) for part in found}
    if len(before) > 1 or len({*sizes}) > 1 or (len(sizes) > 1 and before != {1}):
        return None
    return before.pop() * len(sizes)
