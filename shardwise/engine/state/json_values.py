"""Python values of a checkpoint as JSON, with the tensors in them apart.

    4, 0.5, True, None, "text"     themselves
    [1, 2]                         [1, 2]
    (1, 2)                         {"tuple": [1, 2]}
    {"a": 1, 2: 3}                 {"dict": [["a", 1], [2, 3]]}
    a tensor                       {"tensor": "past.0"}, and {"past.0": the tensor}

The name of a tensor is the path to it: keys and indices with a dot between them.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shardwise.core.errors import bad
from shardwise.core.tools.arguments import short_repr

_PLAIN = (bool, int, float, str, type(None))


def pack(value: Any, what: str, path: str, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON; its tensors go to `tensors`.

    Raises InputError for a value that is none of the above; the error names `what`.
    """
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, _PLAIN):
        return value
    if type(value) in (list, tuple):
        items = [pack(x, what, f"{path}.{k}", tensors) for k, x in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if isinstance(value, dict):
        named = [(pack(k, what, path, {}), k, x) for k, x in value.items()]
        return {"dict": [[key, pack(x, what, f"{path}.{k}", tensors)] for key, k, x in named]}
    raise bad(
        f"{what}, in which '{path}' is a {type(value).__name__} ({short_repr(value)})",
        "numbers, texts, None, tensors, and lists, tuples and dicts of them",
        "a number or a tensor in its place, from which the program makes the object again",
    )


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `pack` took, with these tensors."""
    if isinstance(packed, list):
        return [unpack(x, tensors) for x in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, inside),) = packed.items()
    if kind == "tensor":
        return tensors[inside]
    if kind == "tuple":
        return tuple(unpack(x, tensors) for x in inside)
    return {unpack(key, tensors): unpack(x, tensors) for key, x in inside}
