"""Groups: layers that are sharded along one axis together, their styles, and the check of a table.

    columns   layers whose output has the axis         colwise
    rows      layers whose input has it                rowwise
    summed    modules that apply parameters to shards  replicated

A group is valid if every tensor that has the axis comes from the columns and ends in the rows.  Two
groups that share a layer exclude each other.

A model may run under a wrong table: `view(B, -1, heads, D)` turns missing heads into positions.  So
the shapes of results of mixing operations are compared with those of the plain model, with the
sharded axes divided.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardwise.comm.world import traced as counting_world
from shardwise.core.layouts.tensor_table import Table
from shardwise.core.layouts.uneven import even
from shardwise.core.mesh import TENSOR, Mesh
from shardwise.core.plan.plan import Plan
from shardwise.derive.axis_rules import TracedAxis, leaves
from shardwise.derive.axis_trace import OperationTrace, TracedLayer, traced
from shardwise.observe.meta_pass import UNKNOWN, meta_copy, value_copy
from shardwise.techniques.tensor import apply as tensor_parallel

#: Of more groups that exclude each other, the largest are considered.
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
        return self.columns + self.rows

    @property
    def elements(self) -> int:
        return sum(each.shape.in_features * each.shape.out_features for each in self.layers)

    @property
    def widths(self) -> set[int]:
        return {size // self.axis.size for each in self.columns for size in segments(each)}


@dataclass
class Heads:
    """The numbers of heads of a table, taken from the first group that has any."""

    heads: int | None = None
    kv_heads: int | None = None

    def take(self, group: LayerGroup) -> bool:
        """Whether the group's axis counts the key heads of the table."""
        if group.widths == {1}:
            return False
        kv, heads = group.axis.size, group.axis.size * max(group.widths) // min(group.widths)
        if self.heads is None:
            self.heads, self.kv_heads = heads, kv
        return (self.heads, self.kv_heads) == (heads, kv)


def segments(layer: TracedLayer) -> list[int]:
    return [stop - start for start, stop in sorted(layer.segments)] or [layer.outputs.size]


def outputs(layer: TracedLayer) -> list[list[TracedAxis]]:
    divided = [layer.segments[span] for span in sorted(layer.segments)]
    return [leaves((axis,)) for axis in divided or [layer.outputs]]


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
        group = LayerGroup(axis, tuple(columns), tuple(rows), tuple(_summed(trace, axis)))
        found.append(replace(group, why=_problem(trace, group, ranks, set(tied))))
    return found


def _summed(trace: OperationTrace, axis: TracedAxis) -> Iterator[str]:
    """Modules whose parameters are combined with tensors that have the axis in other dims."""
    for name, touched in trace.touched.items():
        if any(axis in leaves(dim) for dims in touched for dim in dims):
            yield name


def _problem(trace: OperationTrace, group: LayerGroup, ranks: int, tied: set[str]) -> str:
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
    few = sorted(near, key=lambda group: -group.elements)[:_SEARCHED]
    counts = range(1, len(few) + 1)
    sets = (each for count in counts for each in itertools.combinations(few, count))
    kept = max(filter(_apart, sets), key=lambda each: (sum(g.elements for g in each), -len(each)))
    return [group for group in near if group in kept]


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
    found, sizes = outputs(layer), segments(layer)
    before = {math.prod(a.size for a in part[: part.index(group.axis)]) for part in found}
    if len(before) > 1 or len({*sizes}) > 1 or (len(sizes) > 1 and before != {1}):
        return None
    return before.pop() * len(sizes)


# --- the check of a table -------------------------------------------------------------------------


@dataclass(frozen=True)
class Sharded:
    """A plain model, on meta or with values, the plan of its tensor axis, and a batch's loss."""

    plain: nn.Module
    plan: Plan
    call: Callable[[nn.Module], Any]


def keeps_shapes(
    model: Sharded, table: Table, trace: OperationTrace, grouped: Sequence[LayerGroup]
) -> bool:
    """Whether the first and the last rank run under `table` with the shapes of their parts."""
    ranks = model.plan.size
    for rank in {0, ranks - 1}:
        try:
            laid_out = _on_tensor_axis(model.plain, model.plan, rank, table)
            checked = traced(laid_out, {}, model.call).checked
        except UNKNOWN:
            return False
        part = {g.axis.root: even(0, g.axis.size, ranks).size(rank) for g in grouped}
        expected = [
            (name, tuple(math.prod(part.get(x, x.size) for x in leaves(dim)) for dim in dims))
            for name, dims, _ in trace.checked
        ]
        found = [(name, shape) for name, _, shape in checked]
        if model.plan.sp:  # the stream is gathered with `cat`
            found, expected = ([e for e in x if e[0] != "cat"] for x in (found, expected))
        if found != expected:
            return False
    return True


def _on_tensor_axis(plain: nn.Module, plan: Plan, rank: int, table: Table | None) -> nn.Module:
    """A copy of a plain model, sharded for `rank` under the styles of `table`; nothing is sent."""
    on_meta = any(p.is_meta for p in plain.parameters())
    laid_out = (meta_copy if on_meta else value_copy)(plain)
    ranks = plan.mesh.size_of(TENSOR)
    place = plan.mesh.coordinate(rank).get(TENSOR, 0)
    world = counting_world(place, ranks).on(Mesh(((TENSOR, ranks),)))
    tensor_parallel.lay_out(laid_out, world, plan.sp, table)
    return laid_out
