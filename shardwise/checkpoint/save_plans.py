"""Planners for torch.distributed.checkpoint: which rank writes and reads which part of a tensor.

save   every rank offers its boxes, split into pieces of at most PIECE_BYTES. A piece that
several ranks hold is written by the one with the least to write so far. Buffers
may differ between ranks: rank 0 writes its own, with which the next step begins.
"""

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from shardwise.core.errors import RunError
from shardwise.engine.state.box import Box, block

#: The size of a piece: the extra memory of a rank that writes or reads.
PIECE_BYTES = 32 * 2**20
#: Pages of mapped files are given back each time that so many bytes have been read or written.
EVERY_BYTES = 2**27

Block = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes in the full tensor


@dataclass
class Pages:
    """Calls `release` after each EVERY_BYTES of mapped tensors that were `seen` in memory."""

    release: Callable[[], None] = lambda: None
    since_bytes: int = 0

    def seen(self, tensor: Tensor) -> None:
        self.since_bytes += tensor.nbytes
        if self.since_bytes >= EVERY_BYTES:
            self.since_bytes = 0
            self.release()


def split_block(offsets: tuple[int, ...], sizes: tuple[int, ...], numel: int) -> Iterator[Block]:
    """Split a block into blocks of at most `numel` elements, along its first dim above one."""
    dim = next((d for d, size in enumerate(sizes) if size > 1), None)
    if math.prod(sizes) <= numel or dim is None:
        yield offsets, sizes
        return
    length = max(1, numel // math.prod(sizes[dim + 1 :]))
    for start in range(0, sizes[dim], length):
        begin = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
        size = (*sizes[:dim], min(length, sizes[dim] - start), *sizes[dim + 1 :])
        yield from split_block(begin, size, numel)


def overlap(a: Block, b: Block) -> Block | None:
    offsets = tuple(map(max, a[0], b[0]))
    ends = tuple(min(x + m, y + n) for x, m, y, n in zip(a[0], a[1], b[0], b[1], strict=True))
    sizes = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
    return (offsets, sizes) if all(size > 0 for size in sizes) else None


class BoxSavePlanner(SavePlanner):
    """Offers this rank's boxes; `checked` has the errors for tensors that must be finite."""

    def __init__(
        self,
        boxes: Sequence[Box],
        piece_bytes: int = PIECE_BYTES,
        checked: Mapping[str, str] | None = None,
        pages: Pages | None = None,
    ) -> None:
        self.boxes, self.checked, self.pages = boxes, checked or {}, pages or Pages()
        self.piece_bytes = piece_bytes
        self.tensors: dict[MetadataIndex, Tensor] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Reset; torch's state dict is empty, since the boxes hold everything."""
        self.tensors = {}

    def create_local_plan(self) -> SavePlan:
        """Every piece of every box, with its replica number."""
        items: list[WriteItem] = []
        replicas: list[int] = []
        places: dict[tuple[str, Block], int] = {}
        for box in self.boxes:
            if 0 in box.sizes and 0 not in box.shape:
                continue  # this rank has no part of the tensor
            limit = max(1, self.piece_bytes // box.tensor.element_size())
            for offsets, sizes in split_block(box.offsets, box.sizes, limit):
                begin = tuple(o - b for o, b in zip(offsets, box.offsets, strict=True))
                item = _write_item(box, offsets, sizes)
                place = len(items) if box.shape else places.setdefault(_key(item), len(items))
                if place < len(items):  # a 0-d step count, which the tiles of a parameter share
                    replicas[place] = min(replicas[place], box.replica)
                    continue
                items.append(item)
                replicas.append(box.replica)
                self.tensors[items[-1].index] = block(box.tensor.detach(), begin, sizes)
        return SavePlan(items, planner_data=replicas)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Assign each piece to one rank; the pieces must cover their tensors once."""
        holders: dict[tuple[str, Block], list[int]] = {}
        first: dict[tuple[str, Block], WriteItem] = {}
        for rank, plan in enumerate(all_plans):
            for item, replica in zip(plan.items, plan.planner_data, strict=True):
                if replica and item.index.fqn.startswith("buffer/"):
                    continue
                holders.setdefault(_key(item), []).append(rank)
                if replica == 0:
                    first.setdefault(_key(item), item)
        writer = _spread({key: holders[key] for key in first}, first)
        plans = [
            replace(
                plan,
                items=[item for item in plan.items if writer.get(_key(item)) == rank],
                planner_data=None,
            )
            for rank, plan in enumerate(all_plans)
        ]
        items = [item for plan in plans for item in plan.items]
        return plans, Metadata(_tensors(items, [i for plan in all_plans for i in plan.items]))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def keep(self, plan: SavePlan) -> None:
        """Forget all tensors but the pieces of `plan`, which this rank writes."""
        self.boxes = ()
        self.tensors = {item.index: self.tensors[item.index] for item in plan.items}

    @torch.no_grad()
    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """A piece, which is then forgotten. Raises RunError if it must be finite and is not."""
        piece, refusal = self.tensors.pop(write_item.index), self.checked.get(write_item.index.fqn)
        self.pages.seen(piece)
        if refusal and not piece.isfinite().all():
            raise RunError(refusal)
        return _alone(piece)


def _alone(piece: Tensor) -> Tensor:
    """The piece with a storage of its own size over the same memory, if it has no gaps.
    torch.distributed.checkpoint copies a tensor that is a part of a storage, and keeps the copies
    until it has written all: as much memory again as is saved.
    """
    if not (piece.is_cpu and piece.is_contiguous() and piece.numel()):
        return piece
    raw = piece.detach().view(-1).view(torch.uint8)
    return torch.from_numpy(raw.numpy()).view(piece.dtype).view(piece.shape)


def _write_item(box: Box, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> WriteItem:
    return WriteItem(
        MetadataIndex(box.name, offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
            TensorProperties(dtype=box.tensor.dtype),
            torch.Size(box.shape),
        ),
    )


def _data(item: WriteItem) -> TensorWriteData:
    if item.tensor_data is None:
        raise ValueError(f"'{item.index.fqn}' is no tensor")
    return item.tensor_data


def _key(item: WriteItem) -> tuple[str, Block]:
    chunk = _data(item).chunk
    return item.index.fqn, (tuple(chunk.offsets), tuple(chunk.sizes))


def _spread(
    holders: dict[tuple[str, Block], list[int]], first: dict[tuple[str, Block], WriteItem]
) -> dict[tuple[str, Block], int]:
    """The rank that writes each piece: the largest pieces first, each to the least loaded rank."""

    def weight(key: tuple[str, Block]) -> int:
        return math.prod(key[1][1]) * _data(first[key]).properties.dtype.itemsize

    load: dict[int, int] = {}
    writer: dict[tuple[str, Block], int] = {}
    # Pieces that only one rank holds leave no choice, so they are assigned first.
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -weight(key), key)):
        rank = min(holders[key], key=lambda rank: (load.get(rank, 0), rank))
        writer[key] = rank
        load[rank] = load.get(rank, 0) + weight(key)
    return writer


def _tensors(written: Sequence[WriteItem], offered: Sequence[WriteItem]) -> dict[str, Any]:
    """The tensors of the written pieces, checked; `offered` are the pieces of all replicas."""
    found: dict[str, TensorStorageMetadata] = {}
    for item in offered:
        data = _data(item)
        known = found.setdefault(
            item.index.fqn, TensorStorageMetadata(data.properties, data.size, [])
        )
        if (known.size, known.properties.dtype) != (data.size, data.properties.dtype):
            raise ValueError(
                f"ranks disagree on '{item.index.fqn}': {_said(known)} and {_said(data)}"
            )
    for item in written:
        found[item.index.fqn].chunks.append(_data(item).chunk)
    for name, tensor in found.items():
        check_whole(name, tensor)
    return found


def check_whole(name: str, tensor: TensorStorageMetadata) -> None:
    """Raise ValueError unless the pieces cover each element of the tensor exactly once."""
    blocks = sorted((tuple(c.offsets), tuple(c.sizes)) for c in tensor.chunks)
    held = sum(math.prod(sizes) for _, sizes in blocks)
    near: list[Block] = []  # previous blocks that reach the current row
    for piece in blocks if tensor.size else ():
        near = [b for b in near if b[0][0] + b[1][0] > piece[0][0]]
        if any(overlap(b, piece) for b in near):
            raise ValueError(
                f"'{name}': two boxes hold the element at {piece[0]} of {_said(tensor)}"
            )
        near.append(piece)
    if held != math.prod(tensor.size):
        raise ValueError(f"'{name}': boxes hold {held} elements of {_said(tensor)}")


def _said(tensor: TensorStorageMetadata | TensorWriteData) -> str:
    return f"{tuple(tensor.size)} {str(tensor.properties.dtype).removeprefix('torch.')}"
