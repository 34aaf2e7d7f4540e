"""The extra states of modules (`get_extra_state`) in a checkpoint: tensors as boxes, the rest as
JSON.

extra/PATH/NAME     a tensor in the extra state of module NAME, whole
{NAME: value}       the value in the scalars (json_values.py)
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.tools.structure import plain_key
from shardwise.engine.optimizer.optimizer_state import Catalogue
from shardwise.engine.state.box import Box
from shardwise.engine.state.json_values import pack, unpack

#: Given to the modules when the boxes have been filled.
Give = Callable[[], None]


def outgoing(model: nn.Module, copy: Callable[[str], int]) -> tuple[list[Box], dict[str, Any]]:
    """The boxes, and the values of modules that this rank holds first.
    `copy(name)` is this rank's index among the module's holders.  Raises InputError for a value
    that is neither a tensor nor JSON.
    """
    boxes: list[Box] = []
    values: dict[str, Any] = {}
    for name, module in _with_extra_state(model):
        tensors: dict[str, Tensor] = {}
        what = f"the extra state of {name or 'the model'} ({type(module).__name__})"
        packed = pack(module.get_extra_state(), what, "value", tensors)
        boxes += [_box(name, path, t, copy(name)) for path, t in tensors.items()]
        values |= {name: packed} if copy(name) == 0 else {}
    return boxes, values


def incoming(
    model: nn.Module, saved: Catalogue, values: Mapping[str, Any]
) -> tuple[list[Box], Give]:
    """Boxes to fill, and the function that then gives each module its value."""
    boxes: list[Box] = []
    arriving: list[tuple[nn.Module, Any, dict[str, Tensor]]] = []
    for name, module in _with_extra_state(model):
        if name not in values:
            continue
        tensors = {
            key.split("/", 2)[1]: torch.zeros(shape, dtype=dtype, device="cpu")
            for key, (shape, dtype) in saved.items()
            if key.startswith("extra/") and key.split("/", 2)[2] == name
        }
        boxes += [_box(name, path, t, 0) for path, t in tensors.items()]
        arriving.append((module, values[name], tensors))

    def give() -> None:
        for module, packed, tensors in arriving:
            module.set_extra_state(unpack(packed, tensors))

    return boxes, give


def as_boxes(model: nn.Module, copy: Callable[[str], int]) -> list[Box]:
    """The extra states as boxes alone: the JSON of NAME is the tensor json/NAME, of bytes."""
    boxes, values = outgoing(model, copy)
    for name, packed in values.items():
        text = json.dumps(packed).encode()
        codes = torch.tensor([*text], dtype=torch.uint8, device="cpu")
        boxes.append(Box.full(f"json/{name}", codes))
    return boxes


def from_boxes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The extra state of each module from the tensors of all boxes."""
    states: dict[str, Any] = {}
    paths = [key.split("/", 2)[1:] for key in tensors if key.startswith("extra/")]
    for key, text in tensors.items():
        kind, _, name = key.partition("/")
        if kind == "json":
            inside = {path: tensors[f"extra/{path}/{of}"] for path, of in paths if of == name}
            states[name] = unpack(json.loads(bytes(text.tolist())), inside)
    return states


def _with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield plain_key(name), module


def _box(name: str, path: str, value: Tensor, copy: int) -> Box:
    return Box.full(f"extra/{path}/{name}", value.detach(), copy)
