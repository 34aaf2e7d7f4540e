"""this file is whether a table fits a model: what is cut can be, and no result is left in parts.

    kinds      a style is for a kind of module            colwise of a norm
    heads      every rank has a head                      tp8 for 4 heads
    sizes      every rank has a feature                   a vocabulary of 3 on 4 ranks
    blocks     a colwise's result is a rowwise's input    colwise alone: its result stays cut
    ties       one weight has one cut                     the embedding cut, its head whole
    sequence   under sp, what works on shards says so     a norm whose gradient nobody sums
    sets       attributes that count heads are there      "num_head", or 8 where heads=4

Each line is looked at when those before it hold. What only running can tell (two layers that were
given each other's style, and no norm is beside them) torch tells by the shapes, and `shardwise
verify` by the numbers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches

from shardwise.core import advice, tensor_plan_blocks
from shardwise.core.errors import Problem
from shardwise.core.styles import ModuleShape, Style, general, last, parent
from shardwise.core.tensor_plan import Table, counted, matches, unmatched
from shardwise.core.tensor_plan_match import Fault, Laid, told

__all__ = ["check"]

#: Styles that are said of all that is in a module.
_INSIDE = ("gather", "sequence", "replicated", "whole")
_LINEAR = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input")


def check(table: Table, modules: Mapping[str, ModuleShape], sp: bool, ranks: int) -> list[Problem]:
    """All that keeps a model of these modules, in their order, from running by `table`.

    The empty list where it can, on `ranks` ranks of the tensor axis, with the sequence cut too
    under `sp`. Layers that have the same problem have it once, under the name of the first.
    """
    missing = unmatched(table, list(modules), sp)
    if missing:
        return missing
    laid = Laid(table, modules, sp, ranks, matches(table, list(modules), sp))
    if sp and not table.sequence:
        return _advised(laid)
    if found := list(told(_kinds(laid))):
        return found
    if found := list(_heads(laid)):
        return found
    if found := list(told(_sizes(laid))):
        return found
    faults = [*tensor_plan_blocks.faults(laid), *_ties(laid), *_sequence(laid), *_sets(laid)]
    return [*_no_shards(laid), *told(faults)]


def _advised(laid: Laid) -> list[Problem]:
    """A table without entries for the sequence: a set that was checked, and what it leaves open."""
    entries = advice.sequence(laid)
    given = "sp with a table that has no entries for the sequence"
    allowed = "a table whose sequence says what works on shards of it; docs/tensor-tables.md"
    if not entries:
        instead = "a plan without sp, or entries of your own: no repeated block has a style"
        return [Problem(given, allowed, instead)]
    table = replace(laid.table, sequence=tuple(entries.items()))
    rest = check(table, laid.modules, True, laid.ranks)
    line = f"sw.Table.of({{...}}, sequence={entries!r})"
    more = f", and what follows for {len(rest)} more" if rest else ""
    return [Problem(given, allowed, f"{line}{more}; `shardwise verify` proves it"), *rest]


def _kinds(laid: Laid) -> Iterator[Fault]:
    """Styles that cannot be of the kind of module that they stand at."""
    for name, style in laid.styles.items():
        shape = laid.modules[name]
        what = f'of type {shape.type_name or shape.kind}, as "{style}"'
        if style.name in _LINEAR and shape.kind != "linear":
            below = [key for key in laid.modules if key.startswith(f"{name}.")]
            linear = [general(key) for key in below if laid.modules[key].kind == "linear"]
            near = f'"{linear[0]}": "{style}"' if linear else '"{name}": "whole"'
            yield Fault(
                name,
                what,
                f"{style} for a linear layer that is called, with a weight of its own",
                near,
            )
        elif str(style) == "vocabulary:sequence" and shape.kind != "embedding":
            instead = '"{name}": "whole"' if shape.kind == "other" else '"{name}": "vocabulary"'
            yield Fault(name, what, f"{style} for an nn.Embedding", instead)
        elif str(style) == "vocabulary:whole" and shape.kind != "linear":
            instead = '"{name}": "whole"' if shape.kind == "other" else '"{name}": "vocabulary"'
            yield Fault(name, what, f"{style} for the nn.Linear that makes the logits", instead)
        elif style.name == "vocabulary" and shape.kind == "other":
            allowed = f"{style} for an nn.Embedding, or the nn.Linear that makes the logits"
            yield Fault(name, what, allowed, '"{name}": "whole"')
        elif style.name in ("gather", "split") and shape.kind != "other":
            instead = '"{name}": "colwise"' if shape.kind == "linear" else '"{name}": "whole"'
            yield Fault(name, what, f"{style} for a block, not for one layer in it", instead)
        elif style.name in ("replicated", "sequence") and name in laid.blocks:
            inside = next(key for key in laid.styles if key.startswith(f"{name}."))
            inner = inside.removeprefix(f"{name}.")
            given = f'{what}, of all that is in it, and {inner} in it is "{laid.style(inside)}"'
            allowed = f"{style} for a module that no other entry looks into"
            yield Fault(name, given, allowed, _each(laid, name, style))
        elif style.name == "whole" and (inside := next(laid.inside(name), None)):
            given = f'{what}, and {inside.removeprefix(f"{name}.")} in it is "{laid.style(inside)}"'
            allowed = "whole for one layer, not for all that is in a block"
            instead = f'"{inside}": "whole", and each other in it, above the patterns they match'
            yield Fault(name, given, allowed, instead)


def _each(laid: Laid, block: str, style: Style) -> str:
    """What to write where `style` was said of a module that others with entries are in."""
    if style.name == "replicated":  # which says that it is used on what is cut: nobody knows that
        return 'no entry for "{name}", and one for each in it that is used on cut values'
    bare = (key for key in laid.modules if key.startswith(f"{block}.") and key not in laid.styles)
    inner = next((general(key) for key in bare if laid.modules[key].parameters), "")
    if inner:
        return f'"{inner}": "{style}", each module by its name'
    own = laid.modules[block].own
    return _apart(own[0], general(f"{block}.{own[0]}"), style) if own else 'no entry for "{name}"'


def _apart(own: str, pattern: str, style: Style) -> str:
    """How a parameter that a block uses itself gets an entry."""
    made = f"self.{own} = LayerScale(...), a module whose forward uses the parameter"
    return f'{made}, and "{pattern}": "{style}"'


def _heads(laid: Laid) -> Iterator[Problem]:
    """Numbers of heads that are missing, do not go together, or are too few for the ranks."""
    table, counting = laid.table, [name for name, s in laid.styles.items() if s.by_heads]
    counting += [pattern for pattern, _ in table.sets]
    if not counting:
        return
    if table.heads is None:
        given = f'"{general(counting[0])}", cut by heads, in a table without a number of heads'
        allowed = "the model's own number of query heads, and of key and value heads where fewer"
        yield Problem(given, allowed, "sw.Table.of({...}, heads=8, kv_heads=2)")
        return
    keys = table.keys or table.heads
    if table.heads % keys:
        near = max(k for k in range(1, min(keys, table.heads) + 1) if table.heads % k == 0)
        given = f"a table with heads={table.heads}, kv_heads={keys}"
        yield Problem(given, "kv_heads that divide heads", f"kv_heads={near}")
        return
    try:
        table.head_cuts(laid.ranks)
    except ValueError as error:
        given = f"tp{laid.ranks} for a model of {table.heads} query heads ({error})"
        allowed = f"the degrees 1 to {table.heads}, so that every rank has a head"
        yield Problem(given, allowed, f"tp{table.heads}")


def _sizes(laid: Laid) -> Iterator[Fault]:
    """Features that heads or parts do not divide, and fewer features than ranks."""
    for name, style in laid.styles.items():
        shape = laid.modules[name]
        rows = style.name == "vocabulary" and shape.kind == "embedding"
        by_inputs = rows or style.name.startswith("rowwise")
        size = shape.in_features if by_inputs else shape.out_features
        what = "rows" if rows else "input features" if by_inputs else "output features"
        try:
            cut = laid.cut(name)
        except ValueError:
            given = f'which has {size} {what}, as "{style}"{_counted(laid.table, style)}'
            allowed = f"a multiple of what {style} counts"
            instead = f'"{{name}}": "{style.name}"'
            if style.by_heads:
                instead = "heads= and kv_heads= of the model, in sw.Table.of({...}, heads=..., ...)"
            yield Fault(name, given, allowed, instead)
            continue
        smallest = 1 if cut is None else min(map(cut.size, range(laid.ranks)))
        if smallest == 0:
            given = f"which has {size} {what}, on {laid.ranks} ranks"
            instead = f'tp{size // style.parts}, or "{{name}}": "whole"'
            yield Fault(name, given, f"one or more {what} for each rank", instead)


def _counted(table: Table, style: Style) -> str:
    return {
        "heads": f" with heads={table.heads}",
        "kv_heads": f" with kv_heads={table.keys}",
        "qkv": f" with heads={table.heads}, kv_heads={table.keys}",
    }.get(style.by, "")


def _ties(laid: Laid) -> Iterator[Fault]:
    """Modules that share a weight and cut it in two ways: one would use a part as the whole."""
    for name, shape in laid.modules.items():
        if shape.tied and laid.cut(name) != laid.cut(shape.tied):
            mine, other = laid.style(name), laid.style(shape.tied)
            what = f'which is "{mine}" and shares its weight with {shape.tied}, "{other}"'
            instead = f'"{general(shape.tied)}": "vocabulary", "{{name}}": "vocabulary"'
            yield Fault(name, what, "one cut for one weight", instead)


def _no_shards(laid: Laid) -> Iterator[Problem]:
    """Under sp, a table in which nothing makes shards of the sequence."""
    styles = map(str, laid.styles.values())
    if laid.sp and not {"split", "vocabulary:sequence"} & set(styles):
        names = [name for name in laid.modules if last(name) == "0"]
        first = names[0] if names else "blocks.0"
        given = "sp with a table in which nothing makes shards of the sequence"
        allowed = "an embedding that does, or a block that takes its shard of what it is given"
        instead = f'sequence={{"embed": "vocabulary:sequence"}}, or {{"{first}": "split"}}'
        yield Problem(given, allowed, instead)


def _sequence(laid: Laid) -> Iterator[Fault]:
    """Under sp, parameters that are used on shards while no entry says so; gathers for good."""
    if not laid.sp:
        return
    gathers = dict.fromkeys(laid.named("gather"), False)
    for name, shape in laid.modules.items():
        around = [key for key in _around(name) if key in laid.styles]
        if laid.style(name).name.startswith("rowwise"):
            gathers |= {key: True for key in around if key in gathers}
        told = any(laid.style(key).name in _INSIDE for key in around)
        if name in laid.styles or shape.kind == "embedding" or not shape.parameters or told:
            continue
        if name in laid.blocks:
            yield from _used_by_block(name, shape)
            continue
        what = "without an entry under sp, so that nothing sums its gradient over the shards"
        if advice.mixes(shape):
            what = f"a {shape.type_name}, which uses several positions and has only a shard of them"
        allowed = "an entry for all that has parameters and is not below a gather"
        yield Fault(name, what, allowed, advice.entry(laid, name))
    for name in (name for name, shards in gathers.items() if not shards):
        what = 'as "gather", and no rowwise in it makes shards of the sequence again'
        allowed = "gather for a block that ends with a rowwise, as attention does"
        yield Fault(name, what, allowed, 'sequence={"{name}": "sequence"} if it works by token')


def _used_by_block(name: str, shape: ModuleShape) -> Iterator[Fault]:
    """Parameters of a module that can have no entry, since modules in it have theirs."""
    for own in shape.own:
        what = f"a parameter that a {shape.type_name} uses itself, beside modules with entries: "
        what += "nothing sums its gradient over the shards of the sequence"
        allowed = "parameters in a module of their own, whose entry says what they are used on"
        yield Fault(f"{name}.{own}", what, allowed, _apart(own, "{name}", Style("sequence")))


def _around(name: str) -> Iterator[str]:
    """The modules that `name` is in, from the nearest."""
    while name:
        name = parent(name)
        yield name


def _sets(laid: Laid) -> Iterator[Fault]:
    """Attributes of `sets` that a module has not, or that count something else."""
    queries, keys = (c.whole for c in laid.table.head_cuts(1)) if laid.table.sets else (1, 1)
    right = {"heads": queries, "kv_heads": keys, "groups": queries // keys}
    for name, attribute, number in counted(laid.table, laid.modules):
        there = dict(laid.modules[name].numbers)
        if attribute not in there:
            near = get_close_matches(attribute, there, n=1, cutoff=0.0) or ["num_heads"]
            has = ", ".join(there) or "none that it has"
            what = f"which has no attribute {attribute} that is a whole number"
            yield Fault(
                name, what, f"whole numbers of the module: {has}", f'{{"{near[0]}": "{number}"}}'
            )
        elif there[attribute] != right.get(number, there[attribute]):
            what = f"whose {attribute} is {there[attribute]}, and the table's {number} are"
            what = f"{what} {right[number]}"
            allowed = "numbers of heads that are those of the model"
            yield Fault(name, what, allowed, f"sw.Table.of({{...}}, heads={there[attribute]})")
        elif number == "queries" and there[attribute] % queries:
            what = f"whose {attribute} is {there[attribute]}, no multiple of {queries} heads"
            yield Fault(name, what, "the features of all queries", f'{{"{attribute}": "heads"}}')
