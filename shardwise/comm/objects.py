"""All-gather of any Python object that can be pickled."""

import pickle
from typing import Any

import torch

from shardwise.comm.move import all_gather
from shardwise.comm.world import World


def all_gather_object(value: Any, world: World) -> list[Any]:
    """Every rank's value, by rank, on every rank. Called by all ranks of the world."""
    packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    packed = packed.to(world.device)
    own = torch.tensor([len(packed)], dtype=torch.int64, device=world.device)
    lengths = torch.cat(all_gather(own, world.everyone)).tolist()
    padded = packed.new_zeros(max(lengths))
    padded[: len(packed)] = packed
    parts = zip(all_gather(padded, world.everyone), lengths, strict=True)
    # pickles come only from the ranks of this command
    return [pickle.loads(bytes(part[:n].tolist())) for part, n in parts]  # noqa: S301
