"""Python values of a checkpoint as JSON, with the tensors in them apart.

    4, 0.5, True, None, "text"     themselves
    [1, 2]                         [1, 2]
    (1, 2)                         {"tuple": [1, 2]}           as also set, frozenset, Size
    {"a": 1, 2: 3}                 {"dict": [["a", 1], [2, 3]]}      OrderedDict, Counter
    defaultdict(list)              {"defaultdict": ["list", []]}
    1j, b"ab"                      {"complex": [0.0, 1.0]}, {"bytes": "6162"}
    np.float32(0.5)                {"numpy": ["<f4", "0000003f"]}
    a tensor, a NumPy array        {"tensor": "past.0"}, {"array": "past.0"}, and {"past.0": ...}

The name of a tensor is the path to it: keys and indices with a dot between them.
"""

import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from shardwise.core.errors import bad
from shardwise.core.tools.arguments import short_repr

_PLAIN: Final = (bool, int, float, str, type(None))
_SETS: Final = (set, frozenset)
_ITEMS: Final = {kind.__name__: kind for kind in (tuple, torch.Size, *_SETS)}
_PAIRS: Final = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}
_FACTORIES: Final = {kind.__name__: kind for kind in (*_PLAIN[:-1], list, tuple, *_SETS, dict)}
#: What comes back as it was, for the user.
ALLOWED: Final = (
    "None, numbers, texts, bytes, tensors and arrays of numbers, and lists, tuples, sets and dicts "
    "of them (also OrderedDict, Counter, defaultdict), with keys of any of these"
)


def pack(value: Any, what: str, path: str, tensors: dict[str, Tensor] | None) -> Any:
    """The value as JSON; its tensors go to `tensors` (None: it may have none, as in a key).
    Raises InputError for a value that is none of the above; the error names `what`.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [pack(x, what, f"{path}.{k}", tensors) for k, x in enumerate(value)]
    if kind in _SETS:
        return {kind.__name__: sorted((pack(x, what, path, None) for x in value), key=json.dumps)}
    if kind in _ITEMS.values():
        return {kind.__name__: pack([*value], what, path, tensors)}
    made = value.default_factory if kind is defaultdict else None
    if kind in (*_PAIRS.values(), defaultdict) and made in (None, *_FACTORIES.values()):
        named = [(pack(k, what, path, None), k, x) for k, x in value.items()]
        pairs = [[key, pack(x, what, f"{path}.{k}", tensors)] for key, k, x in named]
        name = None if made is None else made.__name__
        return {kind.__name__: pairs if kind is not defaultdict else [name, pairs]}
    scalar, found = _scalar(value), _tensor(value)
    if scalar is not None:
        return scalar
    if found is None or tensors is None:
        raise bad(
            f"{what}, in which '{path}' is a {type(value).__name__} ({short_repr(value)})",
            ALLOWED,
            "a number, a text or a tensor in its place, from which the program makes it again",
        )
    name = path.replace("/", "|")
    while name in tensors:  # the keys 1 and "1"
        name += "'"
    tensors[name] = found
    return {"tensor" if isinstance(value, Tensor) else "array": name}


def _scalar(value: Any) -> dict[str, Any] | None:
    if type(value) is complex:
        return {"complex": [value.real, value.imag]}
    if type(value) is bytes:
        return {"bytes": value.hex()}
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return {"numpy": [value.dtype.str, value.tobytes().hex()]}
    return None


def _tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value if value.layout is torch.strided else None
    try:
        return torch.from_numpy(np.array(value, order="C")) if type(value) is np.ndarray else None
    except (TypeError, ValueError):  # texts, dates, objects, another order of bytes
        return None


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `pack` took, with these tensors."""
    if isinstance(packed, list):
        return [unpack(x, tensors) for x in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, inside),) = packed.items()
    if kind in _ITEMS:
        return _ITEMS[kind](unpack(inside, tensors))
    if kind in _PAIRS:
        return _PAIRS[kind]({unpack(k, tensors): unpack(x, tensors) for k, x in inside})
    match kind:
        case "defaultdict":
            made, pairs = inside
            return defaultdict(_FACTORIES.get(made), unpack({"dict": pairs}, tensors))
        case "complex":
            return complex(*inside)
        case "bytes":
            return bytes.fromhex(inside)
        case "numpy":
            return np.frombuffer(bytes.fromhex(inside[1]), inside[0])[0]
        case "array":
            return tensors[inside].cpu().numpy()
    return tensors[inside]
