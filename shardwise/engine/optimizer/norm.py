"""The sum of squares of gradients; each element is counted once over all ranks.

One fp32 sum over ten million elements is wrong by 6e-4 on a processor: late terms vanish beside
the sum.  Rows of 2^16 elements are summed in fp32 and added up in fp64: wrong by 6e-7, as fast.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from shardwise.core.layouts.boxes import boxes
from shardwise.techniques.data.flat.flat_parameter import Flat

ROW = 2**16


def squared_norm(x: Tensor) -> Tensor:
    """The sum of squares of flat `x`, a 0-d double on its device."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    whole = x.numel() - x.numel() % ROW
    rows = torch.linalg.vector_norm(x[:whole].view(-1, ROW), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(x[whole:], dtype=dtype)
    return rows.double().square().sum() + rest.double().square()


def squares(flat: Flat) -> Tensor:
    """The sum of squares of the gradient in this rank's block, without what others count."""
    assert flat.grads.gshard is not None
    total = squared_norm(flat.grads.gshard)
    for part in counted_elsewhere(flat):
        total = total - squared_norm(part.flatten())
    return total


def counts(flat: Flat) -> bool:
    """Whether this rank counts the squares of its block; one of its holders does."""
    return flat.layouts[0].replica(flat.local.coordinates) == 0


def counted_elsewhere(flat: Flat) -> Iterator[Tensor]:
    """The parts of a flat parameter's gradient whose squares another rank counts."""
    assert flat.grads.gshard is not None
    for index, layout in enumerate(flat.layouts):
        elsewhere = [
            shared
            for axis, on in layout.axes
            if (shared := on.shared(flat.local.coordinates.get(axis, 0)))
            and shared.ranks[0] != flat.local.coordinates.get(axis, 0)
        ]
        for dim, spans, _ in elsewhere:
            for first, length in spans:
                yield from _span(flat, index, dim, first, first + length)


def _span(flat: Flat, index: int, dim: int, first: int, last: int) -> Iterator[Tensor]:
    """The elements of this rank's block in [first, last) of a dim of a parameter's gradient."""
    assert flat.grads.gshard is not None
    (low, high), origin = flat.pieces[index], flat.plan.origin(index, flat.rank)
    for box in boxes(tuple(flat.shapes[index]), origin, origin + high - low):
        begin = low + box.start - origin
        values = flat.grads.gshard[begin : begin + box.numel].view(box.sizes)
        start = max(0, first - box.offsets[dim])
        stop = min(box.sizes[dim], last - box.offsets[dim])
        if start < stop:
            yield values.narrow(dim, start, stop - start)
