"""The `sequence` entries of a derived table: which modules act on shards of the positions.

    embed          the stream begins: "vocabulary:sequence", or a module splits it: "split"
    norm, ...      modules with parameters on the stream: "sequence"
    attention      operations that mix positions are in a module that is given all: "gather"
    norm, head     the head gathers its input, or the last module on the stream: "sequence:join"

A colwise layer outside of a module with "gather" gathers its input itself, and a rowwise layer
leaves shards, so that the stream is sharded from one to the next.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.core.layouts.tensor_table import ModuleShape, parent
from shardwise.derive.axis_rules import TracedAxis
from shardwise.derive.axis_trace import OperationTrace, TraceEvent
from shardwise.derive.groups import LayerGroup


class Refused(Exception):  # noqa: N818  # the reason, which is given to the user
    """Why no entries can be derived."""


@dataclass
class SequenceStream:
    """The events of a pass, the styles of its modules, and the axes that groups shard."""

    events: Sequence[TraceEvent]
    known: Mapping[str, ModuleShape]
    taken: Mapping[str, str]
    sharded: set[TracedAxis]
    positions: set[TracedAxis]
    owners: set[str]
    styles: dict[str, str] = field(default_factory=dict[str, str])

    def column(self, name: str) -> bool:
        style, linear = self.taken.get(name, ""), self.known[name].kind == "linear"
        return style.startswith("colwise") or (style == "vocabulary" and linear)

    def calls(self) -> Iterator[tuple[int, TraceEvent]]:
        for place, event in enumerate(self.events):
            whole = event.has(self.positions) and not event.has(self.sharded)
            if event.kind == "call" and event.name and whole:
                yield place, event

    def mixing(self) -> Iterator[tuple[int, TraceEvent]]:
        for place, event in enumerate(self.events):
            if event.kind == "op" and event.mixes and event.active and not event.has(self.sharded):
                yield place, event

    def end_of(self, place: int) -> int:
        name = self.events[place].name
        rest = range(place, len(self.events))
        return next(i for i in rest if self.events[i].kind == "end" and self.events[i].name == name)


def entries(
    trace: OperationTrace,
    known: Mapping[str, ModuleShape],
    taken: Mapping[str, str],
    grouped: Sequence[LayerGroup],
    owners: set[str],
    *,
    split: bool,
    join: bool,
) -> dict[str, str]:
    """The style of each module under `sp`.

    `split`: a module splits the stream, not the embedding; `join`: the last module gathers it.

    `owners` are the modules with parameters of their own, which no layer in `taken` shares.

    Raises Refused with the reason if the stream is not understood.
    """
    if not trace.sequences:
        raise Refused("no embedding shows which dim has the positions")
    if len({axis.root for axis in trace.sequences}) > 1:
        raise Refused("the model has two sequences, an encoder's and a decoder's")
    sharded = {leaf for group in grouped for leaf in group.axis.leaves}
    positions = {axis.root for axis in trace.positions}
    stream = SequenceStream(trace.events, known, taken, sharded, positions, owners)
    columns = [i for i, e in stream.calls() if e.name in taken and stream.column(e.name)]
    inner = [i for i in columns if taken[trace.events[i].name] != "vocabulary"]
    rows = [
        i
        for i, e in enumerate(trace.events)
        if e.kind == "call" and taken.get(e.name, "").startswith("rowwise")
    ]
    if not inner or not rows:
        raise Refused("no pair of sharded layers is given the positions of the embedding")
    for event in (trace.events[i] for i in inner):
        if len(event.dims[0]) < 3:
            raise Refused(f"{event.name} is given rows and positions as one dim")
    _gather(stream, grouped)
    start = _begin(stream, inner[0], split=split)
    _require_apart(stream, start, rows[-1])
    last = _modules(stream, start, rows[-1])
    heads = [i for i in columns if i not in inner]
    _end(stream, last, rows[-1], heads, join=join)
    return stream.styles


def _gather(stream: SequenceStream, grouped: Sequence[LayerGroup]) -> None:
    """The module around the columns of a group, if it has several or mixes positions."""
    for group in grouped:
        layers = [each.name for each in group.columns]
        place = next(
            (i for i, e in enumerate(stream.events) if e.kind == "call" and e.name == layers[0]),
            None,
        )
        outer = "" if place is None else stream.events[place].inside[-1]
        inside = [e for e in stream.events if e.kind == "op" and outer in e.inside]
        mixed = any(e.mixes and e.has(set(group.axis.leaves)) for e in inside)
        beside = {parent(name) for name in layers} == {parent(layers[0])}
        if outer and beside and (mixed or len(layers) > 1) and _may_gather(stream, outer):
            stream.styles[outer] = "gather"
        elif mixed and outer:
            raise Refused(f"{outer} mixes positions, and is given the stream in several ways")


def _may_gather(stream: SequenceStream, outer: str) -> bool:
    """Whether a module only feeds its columns with its first argument, up to its rows."""
    place = next(i for i, e in enumerate(stream.events) if e.kind == "call" and e.name == outer)
    for event in stream.events[place + 1 : stream.end_of(place)]:
        if event.kind == "call" and stream.taken.get(event.name, "").startswith("rowwise"):
            return True
        whole = event.has(stream.positions) and not event.has(stream.sharded)
        if event.kind == "op" and event.active and whole:
            return False  # a residual in the module needs the unchanged stream
        other = event.kind == "call" and whole and event.name not in stream.taken
        if other and stream.known[event.name].parameters:
            return False
    return True


def _begin(stream: SequenceStream, first: int, *, split: bool) -> int:
    """Where the stream is split: at the embedding, or the outermost module after what mixes it."""
    embeds = [
        i
        for i, e in enumerate(stream.events[:first])
        if e.kind == "call" and e.name in stream.known and stream.known[e.name].kind == "embedding"
    ]
    mixed = [i for i, _ in stream.mixing() if i < first]
    name = stream.events[embeds[0]].name if embeds else ""
    if not split and not mixed and len(embeds) == 1 and stream.taken.get(name) == "vocabulary":
        stream.styles[name] = "vocabulary:sequence"
        return embeds[0]
    after = max([*mixed, *embeds], default=-1)
    for place, event in stream.calls():
        within = event.name in stream.events[first].inside and place < first
        if place > after and within and event.name not in stream.styles:
            stream.styles[event.name] = "split"
            return place
    raise Refused("no module begins after what mixes positions, and contains the first layer")


def _require_apart(stream: SequenceStream, start: int, last: int) -> None:
    gathered = {name for name, style in stream.styles.items() if style == "gather"}
    for place, event in stream.mixing():
        if start < place < last and not gathered & {*event.inside}:
            where = event.inside[-1] or "the model"
            raise Refused(f"{event.name} in {where} mixes positions between the sharded layers")


def _modules(stream: SequenceStream, start: int, last_row: int) -> str:
    """Give modules with parameters on the stream their style; returns the last one after it."""
    final = ""
    mixed = min((i for i, _ in stream.mixing() if i > last_row), default=len(stream.events))
    for place, event in stream.calls():
        if place <= start or place > mixed or event.name not in stream.owners:
            continue
        if any(name.startswith(f"{event.name}.") for name in stream.taken):
            raise Refused(f"{event.name} applies parameters of its own beside its layers")
        around = [n for n in event.inside if stream.styles.get(n) == "gather"]
        if around and not _after_rows(stream, around[-1], place):
            raise Refused(f"{event.name} is given the gathered sequence inside of {around[-1]}")
        stream.styles[event.name] = "sequence"
        final = event.name if place > last_row else final
    return final


def _after_rows(stream: SequenceStream, outer: str, place: int) -> bool:
    """Whether a rowwise layer in the call of `outer` around `place` ended before it."""
    for event in reversed(stream.events[:place]):
        if event.kind == "call" and event.name == outer:
            return False
        if event.kind == "end" and stream.taken.get(event.name, "").startswith("rowwise"):
            return True
    return False


def _end(
    stream: SequenceStream, last: str, last_row: int, heads: Sequence[int], *, join: bool
) -> None:
    """Gather the stream at its end: by the head itself, or by the last module before it."""
    mixed = [i for i, _ in stream.mixing() if i > last_row]
    if heads and not join and not any(i < heads[0] for i in mixed):
        return
    if not last:
        raise Refused("no module of its own is at the end, to gather the stream")
    stream.styles[last] = "sequence:join"
    for place in heads:
        stream.styles[stream.events[place].name] = "vocabulary:whole"
