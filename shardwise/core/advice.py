"""What to write in a table so that the sequence can be split: entries that follow from modules.

    computes each position by itself    "sequence"          a linear layer, a norm over features
    uses several positions              never "sequence"    a convolution, batch norm, recurrence
    anything else                       both entries, each with its condition: the user knows

A table without entries gets a whole set at once: `sequence` builds one, and
core/tensor_plan_check.py offers it together with every module that it leaves open.
"""

from shardwise.core.styles import ModuleShape, general, last, parent
from shardwise.core.tensor_plan_match import Laid

__all__ = ["entry", "sequence"]

#: How the names of types end or begin that compute each position, or several, at once.
_BY_POSITION = ("LayerNorm", "RMSNorm")
_MIXES = (
    *("Conv", "LazyConv", "BatchNorm", "SyncBatchNorm", "InstanceNorm", "GroupNorm"),
    *("RNN", "LSTM", "GRU", "MultiheadAttention", "Transformer"),
)

_AROUND = (
    'an nn.Identity before it as "sequence:join", another after it as "split", and '
    'sequence={"{name}": "whole"}'
)


def by_position(shape: ModuleShape) -> bool:
    """Whether the module certainly computes each position by itself."""
    norm = shape.type_name.endswith(_BY_POSITION) and shape.in_features > 0  # over one dim
    return shape.kind == "linear" or norm


def mixes(shape: ModuleShape) -> bool:
    """Whether the module certainly uses several positions at once."""
    return shape.kind == "other" and shape.type_name.startswith(_MIXES)


def entry(laid: Laid, name: str) -> str:
    """The line to write for a module without an entry, {name} standing for its pattern."""
    shape = laid.modules[name]
    if mixes(shape):
        return _AROUND
    if name == _final(laid):
        logits = '"vocabulary" among the styles if it makes the logits of a cross-entropy, or '
        join = 'sequence={"{name}": "sequence:join"}, which gives the whole sequence'
        return logits * (shape.kind == "linear") + join
    line = 'sequence={"{name}": "sequence"}'
    if by_position(shape):
        return f'{line}, or "whole" if its input is'
    return f"{line} if it computes each position by itself; otherwise {_AROUND}"


def sequence(laid: Laid) -> dict[str, str]:
    """Entries for a table that has none: shards from the first block that has styles in it.

    Modules that are open (see the top) have no entry; nor has any where no block repeats.
    """
    first = next((n for n in laid.modules if last(n) == "0" and any(laid.inside(n))), None)
    if first is None:
        return {}
    found = {general(block): "gather" for block in _by_heads(laid)}
    names, final = list(laid.modules), _final(laid)
    for name in names[names.index(first) + 1 :]:
        shape = laid.modules[name]
        inside = any(general(name).startswith(f"{block}.") for block in found)
        if name in laid.styles or inside or not shape.parameters or not by_position(shape):
            continue
        found.setdefault(general(name), "sequence:join" if name == final else "sequence")
    before = (n for n in names[: names.index(first)] if laid.modules[n].parameters)
    whole = {n: "whole" for n in before if laid.modules[n].kind != "embedding"}
    untouched = {n: style for n, style in whole.items() if n not in laid.styles}
    return untouched | found | {first: "split"}


def _by_heads(laid: Laid) -> list[str]:
    """Modules of a block that are cut by heads: attention, which reads the number of positions."""
    blocks = [parent(name) for name, style in laid.styles.items() if style.by_heads]
    return list(dict.fromkeys(block for block in blocks if block and not last(block).isdigit()))


def _final(laid: Laid) -> str:
    """The last module with parameters, if it is outside of all repeated blocks and has no style."""
    name = next((n for n in reversed(list(laid.modules)) if laid.modules[n].parameters), "")
    return name if general(name) == name and name not in laid.styles else ""
