"""`sw.derive_table`: the table of a model that has none, and what stays replicated.

    trace      one forward pass shows which axes are not mixed           axis_trace.py
    groups     layers along one of these are sharded together            groups.py
    words      the embedding and the head by the vocabulary, if a cross-entropy reads the logits
    sets       attributes that count heads: the fewest with which the sharded model runs

Of all valid tables, the one that shards the most weights is chosen; of several, the one that sends
the least.
"""

import copy
import fnmatch
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from shardwise.core.errors import InputError, bad
from shardwise.core.layouts.tensor_table import ModuleShape, Table, general, matches, parent
from shardwise.core.mesh import TENSOR
from shardwise.core.plan.plan import Plan
from shardwise.core.tools.arguments import flag
from shardwise.derive.axis_trace import OperationTrace, traced
from shardwise.derive.groups import (
    Heads,
    LayerGroup,
    Sharded,
    chosen,
    groups,
    keeps_shapes,
    outputs,
    styles,
)
from shardwise.derive.sequence_styles import Refused, entries
from shardwise.engine.checks import validate
from shardwise.engine.options import Loss, own_loss
from shardwise.engine.predict import predict
from shardwise.observe.meta_pass import UNKNOWN, meta_copy
from shardwise.techniques.tensor.source import own_table, shapes
from shardwise.techniques.tensor.table_check import check

#: More attributes than this are not tried in all combinations.
_TRIED = 4


@dataclass(frozen=True)
class Whole:
    """Parameters of the modules `name` that every rank holds in full, with the reason."""

    name: str
    bytes: int
    why: str


@dataclass(frozen=True)
class Derived:
    """A derived table.  A rank sends `sent_bytes` on the tensor axis in a step of `batch`.
    `cut_bytes` are the bytes of the parameters that are sharded, before they are.
    """

    table: Table
    whole: tuple[Whole, ...]
    cut_bytes: int
    sent_bytes: int


def derive_table(
    model: nn.Module, batch: Any, ranks: int, loss: Loss | None = None, *, sp: bool = False
) -> Derived:
    """The table of styles for `model` on `ranks` tensor ranks, from one pass on `batch`.

    `model` is not changed.  It runs on the meta device, or on the CPU if its forward reads values.
    With `sp` the table has entries for the sequence.

    Raises InputError if no layer can be sharded, with the reasons, or if the forward pass fails;
    with `sp` also if the positions of the model are not understood.
    """
    validate.model(model, "sw.derive_table")
    flag("sp", sp)
    objective = own_loss if loss is None else loss
    plan, known = Plan((("tp", ranks),)), shapes(model)

    def call(whole: nn.Module) -> Tensor:
        return objective(whole, batch)

    trace, plain = _trace(model, known, call)
    sharded = Sharded(plain, plan, call)
    tied = {n for n, s in known.items() if s.tied} | {s.tied for s in known.values() if s.tied}
    found = groups(trace, ranks, tied)
    widest_first = sorted(found, key=lambda group: -len(group.layers))
    why = {each.name: group.why for group in widest_first for each in group.layers}

    def runs(table: Table, grouped: Sequence[LayerGroup]) -> bool:
        return not table.styles or keeps_shapes(sharded, table, trace, grouped)

    def joins(table: Table) -> bool:
        try:
            sent = predict(model, plan, batch, loss=objective, table=table).sent()
        except (RuntimeError, InputError):  # the loss takes a part of the logits for the whole
            return True
        return (TENSOR, "all_gather", "forward") in sent

    words, grouped = _vocabulary(trace, known, ranks, logits=True), chosen(found)
    table = _table(words, grouped, ranks, known, runs)
    if table is None:  # the code has numbers of heads that no attribute holds
        counted = [each.name for group in grouped if group.widths != {1} for each in group.layers]
        why |= dict.fromkeys(counted, "its code does not run on a part of the heads")
        grouped = [group for group in grouped if group.widths == {1}]
        table = _table(words, grouped, ranks, known, runs)
    if table is not None and words and joins(table):
        words = _vocabulary(trace, known, ranks, logits=False)
        table = _table(words, grouped, ranks, known, runs) or table
    taken = {} if table is None else matches(table, list(known), sp=False)
    whole = _whole(model, trace, {name: style.name for name, style in taken.items()}, why)
    if table is None or not table.styles or check(table, known, False, ranks):
        raise _nothing(model, ranks, whole)
    if sp:
        table = _with_sequence(model, table, trace, known, grouped, sharded)
        plan = replace(plan, sp=True)
    cut = sum(p.numel() * p.element_size() for p in model.parameters())
    cut -= sum(each.bytes for each in whole)
    sent = predict(model, plan, batch, loss=objective, table=table)
    sent_bytes = sum(count for line, count in sent.sent().items() if line.axis == "tp")
    return Derived(table, whole, cut, sent_bytes)


def _with_sequence(
    model: nn.Module,
    table: Table,
    trace: OperationTrace,
    known: Mapping[str, ModuleShape],
    grouped: Sequence[LayerGroup],
    sharded: Sharded,
) -> Table:
    """The table with `sequence` entries with which the sharded model runs, else InputError."""
    taken = {name: str(style) for name, style in matches(table, list(known), sp=False).items()}
    within = replace(sharded, plan=replace(sharded.plan, sp=True))
    held = {id(p) for name in taken for p in model.get_submodule(name).parameters(recurse=False)}
    owners = {
        name
        for name, module in model.named_modules()
        if any(id(p) not in held for p in module.parameters(recurse=False))
    }
    ranks, why = sharded.plan.size, "the model does not run on shards of the positions"
    try:
        for split, join in itertools.product((False, True), repeat=2):
            found = entries(trace, known, taken, grouped, owners, split=split, join=join)
            made = replace(table, sequence=tuple(_patterns(found, known, taken).items()))
            if not check(made, known, True, ranks) and keeps_shapes(within, made, trace, grouped):
                return made
    except Refused as error:
        why = str(error)
    raise bad(
        f"sp of a {type(model).__name__}: {why}",
        "models whose blocks act on each position separately, apart from attention",
        f"tp{ranks} without sp, or a table of your own (docs/how-to/tables.md)",
    )


def _table(
    words: Mapping[str, str],
    grouped: Sequence[LayerGroup],
    ranks: int,
    known: Mapping[str, ModuleShape],
    runs: Callable[[Table, Sequence[LayerGroup]], bool],
) -> Table | None:
    heads, taken = Heads(), dict[str, str]()
    for group in grouped:
        taken |= styles(group, heads, ranks) or {}
    kv_heads = None if heads.kv_heads == heads.heads else heads.kv_heads
    styled = _patterns({**words, **taken}, known)
    table = Table.of(styled, heads.heads, kv_heads, derived=True)
    return _with_sets(table, taken, known, lambda tried: runs(tried, grouped))


def _trace(
    model: nn.Module, known: Mapping[str, ModuleShape], call: Callable[[nn.Module], Tensor]
) -> tuple[OperationTrace, nn.Module]:
    """The trace of a copy of the model, on meta or else with values; and another such copy."""
    try:
        return traced(meta_copy(model), known, call), meta_copy(model)
    except UNKNOWN as error:
        if any(p.is_meta for p in model.parameters()):
            raise _fails(model, error, "on the meta device ") from error
    try:
        return traced(copy.deepcopy(model), known, call), copy.deepcopy(model)
    except UNKNOWN as error:
        raise _fails(model, error) from error


def _fails(model: nn.Module, error: Exception, where: str = "") -> InputError:
    why = " ".join(str(error).split())[:200]
    return bad(
        f"a {type(model).__name__} whose forward pass {where}gives {type(error).__name__}: {why}",
        "a model that computes the loss of the given batch",
        "the same command, once it does" if not where else "the model built on the CPU",
    )


def _with_sets(
    table: Table,
    taken: Mapping[str, str],
    known: Mapping[str, ModuleShape],
    runs: Callable[[Table], bool],
) -> Table | None:
    """The table with the fewest attributes in `sets` with which the sharded model runs."""
    if runs(table):
        return table
    if table.heads is None or table.keys is None:
        return None
    counts = {table.heads // table.keys: "groups", table.keys: "kv_heads", table.heads: "heads"}
    found: list[tuple[str, str, str]] = []
    for block in dict.fromkeys(parent(name) for name, style in taken.items() if ":" in style):
        inside = [n for n, style in taken.items() if parent(n) == block and ":" in style]
        queries = {known[n].in_features for n in inside if taken[n].startswith("rowwise")}
        for attribute, value in known[block].numbers if block in known else ():
            number = "queries" if value in queries else counts.get(value, "")
            if number and value > 1:
                found.append((general(block), attribute, number))
    found = sorted(dict.fromkeys(found), key=lambda entry: entry[2] == "queries")
    every = [[e for e in found if e[2] != "queries"], found]
    every += [list(c) for n in range(1, _TRIED) for c in itertools.combinations(found, n)]
    for tried in every:
        if runs(_setting(table, tried)):
            for entry in list(tried):
                fewer = [each for each in tried if each != entry]
                tried = fewer if runs(_setting(table, fewer)) else tried
            return _setting(table, tried)
    return None


def _setting(table: Table, entries: Sequence[tuple[str, str, str]]) -> Table:
    sets: dict[str, dict[str, str]] = {}
    for block, attribute, number in entries:
        sets.setdefault(block, {})[attribute] = number
    return replace(table, sets=Table.of({}, sets=sets).sets)


def _vocabulary(
    trace: OperationTrace, known: Mapping[str, ModuleShape], ranks: int, *, logits: bool
) -> dict[str, str]:
    """The embedding with the most rows, and with `logits` layers whose output the model returns."""
    ends = [axis for dims in trace.returned if dims for axis in dims[-1]]
    read = {name.rpartition(".")[0] for name in trace.read}
    called = [x for x in trace.layers.values() if x.called and x.name not in read]
    holders = {name: known[name].tied or name for name in known if known[name].kind != "other"}
    heads = [
        each.name
        for each in called
        if each.shape.kind == "linear" and logits
        if any(outputs(each) == [[axis]] and not axis.mixed for axis in ends)
        if each.shape.out_features >= ranks
    ]
    tables = [x for x in called if x.shape.kind == "embedding" and x.shape.in_features >= ranks]
    largest = max(tables, key=lambda each: each.shape.in_features, default=None)
    words = heads + [x.name for x in tables if largest and holders[x.name] == holders[largest.name]]
    # a weight that several modules share is sharded in all of them or in none
    apart = {holders[x.name] for x in trace.layers.values() if x.called and x.name not in words}
    shared = {holders[name] for name in words} - apart
    return {name: "vocabulary" for name, holder in holders.items() if holder in shared}


def _patterns(
    given: Mapping[str, str], known: Mapping[str, ModuleShape], others: Mapping[str, str] = {}
) -> dict[str, str]:
    """Styles by patterns for all layers, where they match no other module; else by names."""
    found: dict[str, str] = {}
    for name, style in given.items():
        pattern = general(name)
        matching = fnmatch.filter(known, pattern)
        same = all(given.get(n) == style for n in matching)
        found[pattern if same and not {*matching} & {*others} - {*given} else name] = style
    return found


def _whole(
    model: nn.Module, trace: OperationTrace, taken: Mapping[str, str], why: Mapping[str, str]
) -> tuple[Whole, ...]:
    found: dict[tuple[str, str], int] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        if taken.get(name, "replicated") != "replicated":
            seen |= {id(p) for p in module.parameters(recurse=False)}
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen |= {id(p) for p in own}
        if own:
            size = sum(p.numel() * p.element_size() for p in own)
            key = general(name) or type(module).__name__, _why(trace, name, why)
            found[key] = found.get(key, 0) + size
    return tuple(Whole(name, size, said) for (name, said), size in found.items())


def _why(trace: OperationTrace, name: str, why: Mapping[str, str]) -> str:
    layer = trace.layers.get(name)
    if layer is None:
        return "no layer of features in and out"
    if not layer.called:
        return "it is not called as a module"
    mixed = [axis.mixed for part in outputs(layer) for axis in part if axis.mixed]
    if layer.shape.kind == "embedding":
        return "only the largest embedding is sharded"
    return why.get(name) or next(iter(mixed), "") or "no other layer reads its output"


def _nothing(model: nn.Module, ranks: int, whole: Sequence[Whole]) -> InputError:
    largest = sorted(whole, key=lambda each: -each.bytes)[:3]
    why = "; ".join(f"{each.name} ({each.bytes:,} bytes): {each.why}" for each in largest)
    return bad(
        f"tp{ranks} of a {type(model).__name__}, of which no layer can be sharded ({why})",
        "models with two linear layers in a row, or an embedding of more rows than ranks",
        f"dp{ranks}, or a table of your own (docs/how-to/tables.md)",
    )


# --- the table of a run ---------------------------------------------------------------------------


def table_or_derived(
    table: Table | Mapping[str, str] | None,
    plan: Plan,
    model: Callable[[], nn.Module],
    batch: Callable[[], Any],
    loss: Loss,
) -> Table | Mapping[str, str] | None:
    """The given table; a derived one if needed; or None. Raises InputError if none can be."""
    ranks = plan.tensor_degrees[-1]
    if ranks == 1 or table is not None:
        return table
    made = model()
    return None if own_table(made) else derive_table(made, batch(), ranks, loss, sp=plan.sp).table
