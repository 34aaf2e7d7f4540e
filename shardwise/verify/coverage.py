"""Coverage: the ranks together must compare each element of every tensor once in every replica.

    dp2 zero3       rank 0  [======    ]    rank 1  [      ====]      one replica, in two pieces
    dp2             rank 0  [==========]    rank 1  [==========]      two replicas

A rank that reported nothing would always pass. The number of replicas follows from the plan, or
from a layer's own: data ranks that do not shard have one each. Along the tensor axis a parameter is
either sharded over all ranks or replicated on each. 0-d tensors (an optimizer's step count) are
checked in replica 0 only.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from shardwise.core.plan.plan import Plan
from shardwise.engine.state.box import block
from shardwise.verify.finding import BoxPlace

#: The coordinates of a rank: of its data replica, on the tensor axis, on the pipeline axis.
Place = tuple[tuple[int, ...], int, int]


def uncovered(
    plan: Plan, whole: Mapping[str, tuple[int, ...]], by_rank: Sequence[Iterable[BoxPlace]]
) -> str:
    """The error of the first tensor in `whole` that the pieces do not cover, or ""."""
    plans = plan.of_all_layers
    places = [[_place(own, rank) for rank in range(len(by_rank))] for own in plans]
    found: dict[str, list[tuple[int, BoxPlace]]] = defaultdict(list)
    for rank, pieces in enumerate(by_rank):
        for piece in pieces:
            found[piece.name].append((rank, piece))
    for name, shape in whole.items():
        number = plan.layer_of(name.rpartition("/")[2])
        problem = _problem(shape, found[name], places[number])
        if problem:
            return f"{name}: {problem}"
    return ""


def _place(plan: Plan, rank: int) -> Place:
    here = plan.coordinate(rank)
    if plan.shard_axis is None:  # the ranks of an ep group have the experts of one replica
        here["dp"] = here["edp"]
    data = [axis for axis in ("dp", "dp_replicate", "dp_shard") if axis != plan.shard_axis]
    return tuple(here.get(axis, 0) for axis in data), here.get("tp", 0), here.get("pp", 0)


def _problem(
    shape: tuple[int, ...], shown: Sequence[tuple[int, BoxPlace]], places: Sequence[Place]
) -> str:
    for _, piece in shown:
        ends = [o + s for o, s in zip(piece.offsets, piece.sizes, strict=True)]
        if piece.shape != shape or any(map(int.__gt__, ends, shape)):
            return f"a piece of a tensor of shape {list(piece.shape)}, which has {list(shape)}"
    first = _counted(shape, [piece for _, piece in shown if piece.replica == 0])
    if (first != 1).any():
        return _said(first, "in replica 0")
    if not shape:
        return ""
    # each rank of the shard axis may hold a full tensor (a frozen parameter), as a replica
    replicas: dict[tuple[Place, int], list[BoxPlace]] = defaultdict(list)
    own: dict[int, list[BoxPlace]] = defaultdict(list)
    for rank, piece in shown:
        replicas[places[rank], piece.replica].append(piece)
        own[rank].append(piece)
    counts = [(place, _counted(shape, pieces)) for (place, _), pieces in replicas.items()]
    counts += [(places[rank], _counted(shape, pieces)) for rank, pieces in own.items()]
    masks: dict[Place, Tensor] = {}
    for place, count in counts:
        if (count > 1).any():
            return _said(count, f"on the ranks of {_named(place)}")
        masks[place] = masks.get(place, count > 0) | (count > 0)
    return _unlike(masks, places)


def _unlike(masks: Mapping[Place, Tensor], places: Sequence[Place]) -> str:
    """A data replica that lacks an element, or a tensor rank of an unsharded tensor; "" if none."""
    tensor_ranks = sorted({tp for _, tp, _ in places})
    for data in sorted({data for data, _, _ in places}):
        held = {
            tp: [mask for (d, t, _), mask in masks.items() if (d, t) == (data, tp)]
            for tp in tensor_ranks
        }
        any_of = {tp: torch.stack(of).any(0) for tp, of in held.items() if of}
        if not any_of or not torch.stack(list(any_of.values())).any(0).all():
            return f"data replica {list(data)} does not compare all of it"
        full = [tp for tp in tensor_ranks if tp in any_of and any_of[tp].all()]
        if full and len(full) < len(tensor_ranks):
            lacks = next(tp for tp in tensor_ranks if tp not in full)
            return f"tensor rank {full[0]} compares all of it, and tensor rank {lacks} does not"
    return ""


def _counted(shape: tuple[int, ...], pieces: Iterable[BoxPlace]) -> Tensor:
    count = torch.zeros(shape, dtype=torch.int16)
    for piece in pieces:
        block(count, piece.offsets, piece.sizes).add_(1)
    return count


def _said(count: Tensor, where: str) -> str:
    missing, twice = int((count == 0).sum()), int((count > 1).sum())
    return f"{missing} elements are compared by no rank and {twice} more than once {where}"


def _named(place: Place) -> str:
    data, tp, pp = place
    return f"data replica {list(data)}, tensor rank {tp}, pipeline rank {pp}"
