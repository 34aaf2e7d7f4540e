"""All-gather and broadcast of any Python object that can be pickled, and what one rank does."""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from shardwise.comm.move import all_gather, broadcast
from shardwise.comm.world import Axis, World
from shardwise.core.errors import InputError, RunError

T = TypeVar("T")


def on_rank_zero(act: Callable[[], T], world: World) -> T:
    """The result of `act` on rank 0, or its InputError or RunError, on every rank. All call it."""
    found: tuple[InputError | RunError | None, Any] = None, None
    if world.rank == 0:
        try:
            found = None, act()
        except (InputError, RunError) as error:
            found = error, None
    error, result = broadcast_object(found, world.everyone, 0, world.device)
    if error is not None:
        raise error
    return result


def on_all_ranks(act: Callable[[], object], world: World) -> None:
    """Call `act` on every rank; the lowest rank's InputError or RunError is raised on all."""
    found: InputError | RunError | None = None
    try:
        act()
    except (InputError, RunError) as error:
        found = error
    for error in all_gather_object(found, world):
        if error is not None:
            raise error


def all_gather_object(value: Any, world: World) -> list[Any]:
    return gather_object(value, world.everyone, world.device)


def gather_object(value: Any, axis: Axis, device: torch.device) -> list[Any]:
    """The values of all ranks of the axis, on each of them. Called by all of them."""
    packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    own = torch.tensor([len(packed)], dtype=torch.int64, device=device)
    lengths = torch.cat(all_gather(own, axis)).tolist()
    padded = packed.new_zeros(max(lengths))
    padded[: len(packed)] = packed
    parts = zip(all_gather(padded, axis), lengths, strict=True)
    # pickles come only from the ranks of this command
    return [pickle.loads(part[:n].cpu().numpy().tobytes()) for part, n in parts]  # noqa: S301


def broadcast_object(value: Any, axis: Axis, root: int, device: torch.device) -> Any:
    """The value of rank `root` of the axis, on every rank of it. Called by all of them."""
    packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    size = broadcast(torch.tensor([len(packed)], dtype=torch.int64, device=device), axis, root)
    packed = packed if axis.rank == root else packed.new_empty(int(size.item()))
    return pickle.loads(broadcast(packed, axis, root).cpu().numpy().tobytes())  # noqa: S301
