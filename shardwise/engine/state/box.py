"""Boxes: a rectangle of a whole named tensor, and the live data that fills it."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Box:
    """Elements [offsets, offsets + sizes) of the whole tensor `name` of `shape`.
    `tensor` is the live data viewed with `sizes`: saving reads it, loading writes to it.  Of the
    ranks that hold the same box, the one with `replica` 0 writes it.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: Tensor
    replica: int = 0

    @classmethod
    def full(cls, name: str, tensor: Tensor, replica: int = 0) -> "Box":
        shape = tuple(tensor.shape)
        return cls(name, shape, (0,) * len(shape), shape, tensor, replica)


def block(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
