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

from shardwise.checkpoint.plans import PIECE_BYTES, BoxSavePlanner
from shardwise.checkpoint.storage import Publisher
from shardwise.core.boxes import boxes as flat_boxes
from shardwise.engine.box import Box

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
    """What torch.distributed.checkpoint does with one planner and writer a rank, one by one.

    Gives the number of pieces that each rank wrote.
    """
    planners = [BoxSavePlanner(held, piece_bytes) for held in boxes]
    writers = [Publisher(folder, scalars["step"], scalars) for _ in boxes]
    local = []
    for rank, (planner, writer) in enumerate(zip(planners, writers, strict=True)):
        planner.set_up_planner({}, writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        local.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(local)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).value()
        for planner, writer, plan in zip(planners, writers, plans, strict=True)
    ]
    writers[0].finish(metadata, results)
    return [len(plan.items) for plan in plans]


def sample(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random content of any dtype, exact in it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, tuple(shape), generator=generator).to(dtype)
