"""Tensors cut into boxes for a number of ranks, and a save by ranks that share one process.

Each cut gives, for rank r of n, the boxes that it holds of a tensor:

    flat      block r of the row-major elements, padded to n equal ones: ragged boxes, some empty
    dim       block r of the longest dim, as even as it goes
    copies    all of it on every rank
    hybrid    the flat cut for n/2 ranks, twice
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.folder import clear
from shardwise.checkpoint.save_plans import PIECE_BYTES, BoxSavePlanner
from shardwise.checkpoint.storage import Publisher
from shardwise.core.layouts.boxes import boxes as flat_boxes
from shardwise.engine.state.box import Box

Block = tuple[tuple[int, ...], tuple[int, ...]]
Cut = Callable[[Sequence[int], int, int], list[Block]]


def flat(shape: Sequence[int], rank: int, ranks: int) -> list[Block]:
    numel = math.prod(shape)
    length = -(-numel // ranks)
    start, stop = (min(numel, length * r) for r in (rank, rank + 1))
    if numel == 0:
        return copies(shape, rank, ranks) if rank == 0 else []
    return [(box.offsets, box.sizes) for box in flat_boxes(shape, start, stop)]


def dim(shape: Sequence[int], rank: int, ranks: int) -> list[Block]:
    if not shape:
        return copies(shape, rank, ranks) if rank == 0 else []
    longest = max(range(len(shape)), key=lambda d: shape[d])
    start, stop = (shape[longest] * r // ranks for r in (rank, rank + 1))
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[longest], sizes[longest] = start, stop - start
    return [(tuple(offsets), tuple(sizes))]


def copies(shape: Sequence[int], rank: int, ranks: int) -> list[Block]:
    return [((0,) * len(shape), tuple(shape))]


def hybrid(shape: Sequence[int], rank: int, ranks: int) -> list[Block]:
    half = max(1, ranks // 2)
    return flat(shape, rank % half, half)


CUTS: dict[str, Cut] = {"flat": flat, "dim": dim, "copies": copies, "hybrid": hybrid}


def replica(cut: str, rank: int, ranks: int) -> int:
    return {"copies": rank, "hybrid": rank // max(1, ranks // 2)}.get(cut, 0)


def boxes_of(tensors: Mapping[str, Tensor], cut: str, rank: int, ranks: int) -> list[Box]:
    """Copies of what rank `rank` holds of the tensors under a cut."""
    found = []
    for name, whole in tensors.items():
        for offsets, sizes in CUTS[cut](tuple(whole.shape), rank, ranks):
            block = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            held = whole[block].clone().view(sizes)
            shape = tuple(whole.shape)
            found.append(Box(name, shape, offsets, sizes, held, replica(cut, rank, ranks)))
    return found


def emptied(boxes: Sequence[Box]) -> list[Box]:
    """The same boxes with other content."""
    for box in boxes:
        box.tensor.fill_(7)
    return list(boxes)


def save_by_all(
    folder: Path,
    boxes: Sequence[Sequence[Box]],
    scalars: dict[str, Any],
    piece_bytes: int = PIECE_BYTES,
) -> list[int]:
    """What the ranks of a save do, one by one.

    Gives the number of pieces that each rank wrote.
    """
    planners = [BoxSavePlanner(held, piece_bytes) for held in boxes]
    writers = [Publisher(folder, scalars["step"], scalars) for _ in boxes]
    local = [planner.create_local_plan() for planner in planners]
    plans, metadata = planners[0].create_global_plan(local)
    clear(writers[0].path)
    plans = writers[0].files.prepare_global_plan(plans)
    every = zip(writers, plans, planners, strict=True)
    written = [writer.write(plan, planner) for writer, plan, planner in every]
    writers[0].publish(metadata, written)
    return [len(plan.items) for plan in plans]


def sample(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random content of any dtype, exact in it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, tuple(shape), generator=generator).to(dtype)
