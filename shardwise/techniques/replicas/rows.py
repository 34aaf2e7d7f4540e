"""Rows of a batch: split over devices, and brought together again.

    scatter({"x": x_7, "k": k}, 3 devices)      {x[0:3], k}  {x[3:5], k}  {x[5:7], k}
    gather([y_3, y_2, y_2], device)              y_7

Both work on any nesting of lists, tuples, dicts and dataclasses, and each is the backward pass of
the other, since they are made of differentiable splits, copies and concatenations.
"""

from typing import Any

import torch
from torch import Tensor

from shardwise.core.errors import bad
from shardwise.core.tools.tree import leaves, mapped
from shardwise.techniques.replicas.devices import Devices, as_devices


def scatter(x: Any, devices: Devices, dim: int = 0) -> list[Any]:
    """Split every tensor in `x` along `dim`, and copy part i to device i.

    With n devices and N rows, the first N mod n devices get one row more.  Tensors with too few
    dims to have `dim` (a number, for example) are copied whole to every device; what is no tensor
    is passed on.  Returns one object of the structure of `x` for each device.

    Raises:
        InputError: tensors with different numbers of rows, none with rows, or fewer than devices.
    """
    targets = as_devices(devices)
    _require_rows(x, dim, len(targets))
    split: dict[int, tuple[Tensor, ...]] = {}
    for tensor in leaves(x, Tensor):
        if tensor.dim() > dim and id(tensor) not in split:
            split[id(tensor)] = tensor.tensor_split(len(targets), dim)

    def part(tensor: Tensor, i: int) -> Tensor:
        own = split[id(tensor)][i] if id(tensor) in split else tensor
        return own.to(targets[i], non_blocking=True)

    return [mapped(lambda t, i=i: part(t, i), x, Tensor) for i in range(len(targets))]


def _require_rows(x: Any, dim: int, devices: int) -> None:
    """Raise InputError unless all tensors in `x` have one number of rows, enough for all."""
    shapes = [tuple(t.shape) for t in leaves(x, Tensor) if t.dim() > dim]
    sizes = {shape[dim]: shape for shape in shapes}
    if not sizes:
        given = f"inputs without a tensor that has dim {dim}"
        raise bad(given, "at least one tensor, whose rows are split", "module.module(...)")
    if len(sizes) > 1:
        one, other = list(sizes.values())[:2]
        raise bad(
            f"inputs of shapes {one} and {other}, which have different sizes in dim {dim}",
            f"tensors with one number of rows in dim {dim}, since every device gets its rows of "
            "each; or numbers, which every device gets",
            "mask.expand(len(x), -1, -1) for a mask that all rows share",
        )
    (count,) = sizes
    if count < devices:
        raise bad(
            f"{count} rows for {devices} devices",
            "at least one row for each device",
            "drop_last=True in the DataLoader, or fewer devices",
        )


def gather(outputs: list[Any], device: str | int | torch.device, dim: int = 0) -> Any:
    """Concatenate the outputs' tensors along `dim` on `device`; returns the structure of each.

    Tensors with too few dims to have `dim` are stacked: n losses become a tensor of shape [n].
    (Their mean is the batch's mean only if all devices had the same number of rows.)  What is no
    tensor must be equal in all outputs.

    Raises:
        InputError: no outputs, or outputs that differ in structure, in dims or in other values.
    """
    if not outputs:
        raise bad("gather of no outputs", "one output for each device", "gather([y0, y1], device)")
    (target,) = as_devices([device])
    forms = [_form(output) for output in outputs]
    other = next((i for i, form in enumerate(forms) if form != forms[0]), None)
    if other is not None:
        raise bad(
            f"output {other}, {forms[other]}, beside output 0, {forms[0]} (tensors are numbered)",
            "outputs that differ in their tensors only",
            "a forward that returns tensors in one structure, whatever the rows are",
        )
    numbered = [leaves(output, Tensor) for output in outputs]
    together = iter([_joined(parts, target, dim) for parts in zip(*numbered, strict=True)])
    return mapped(lambda _: next(together), outputs[0], Tensor)


def _form(output: Any) -> Any:
    """The output with the number of each tensor in its place."""
    numbers = iter(range(len(leaves(output, Tensor))))
    return mapped(lambda _: f"tensor {next(numbers)}", output, Tensor)


def _joined(parts: tuple[Tensor, ...], device: torch.device, dim: int) -> Tensor:
    shapes = [tuple(part.shape) for part in parts]
    alike = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if len({len(shape) for shape in shapes}) > 1 or len(alike) > 1:
        shown = ", ".join(map(str, shapes))
        instead = "a forward that pads to one length on all devices: length as an argument"
        raise bad(f"outputs of shapes {shown}", f"shapes that differ in dim {dim} only", instead)
    moved = [part.to(device, non_blocking=device.type == "cuda") for part in parts]
    return torch.cat(moved, dim) if moved[0].dim() > dim else torch.stack(moved)
