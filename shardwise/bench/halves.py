"""This file is where a GPT is cut for a pipeline: the same places for everyone.

    embed  attn mlp | attn mlp | attn mlp | attn mlp  norm head        whole blocks
    embed  attn | mlp | attn | mlp | attn | mlp | attn | mlp  norm head

A block is two halves, each of which adds to the residual stream: between any two of them nothing
else crosses. Halves are parted only where there are more stages than blocks.
"""

from typing import NamedTuple

from torch import nn

from shardwise.core.balance import balanced
from shardwise.core.errors import bad
from shardwise.engine.partition import starts
from shardwise.models.gpt import GPT, GPTConfig


class Half(NamedTuple):
    """Half of a block: attention or the feed-forward layer, with the norm before it."""

    block: int
    attention: bool

    @property
    def start(self) -> str:
        """The name of the module that it begins with."""
        return f"blocks.{self.block}" if self.attention else f"blocks.{self.block}.mlp_norm"

    def modules(self, model: GPT) -> tuple[nn.Module, nn.Module]:
        """Its norm and what follows the norm."""
        names = ("attn_norm", "attn") if self.attention else ("mlp_norm", "mlp")
        block = model.blocks[self.block]
        return block.get_submodule(names[0]), block.get_submodule(names[1])


def halves(config: GPTConfig) -> list[Half]:
    """All halves along the model."""
    return [Half(block, attention) for block in range(config.layers) for attention in (True, False)]


def place(start: str, config: GPTConfig) -> int:
    """The number of the half that begins with the module of that name."""
    return next(i for i, half in enumerate(halves(config)) if half.start == start)


def cut(model: GPT, stages: int) -> tuple[str, ...]:
    """The modules that begin stages 1 to `stages` - 1.

    By parameters (engine/partition.py) between blocks, and where there are more stages than blocks
    by number between halves. Raises InputError for more stages than halves.
    """
    config = model.config
    fits(stages, config)
    if stages <= config.layers:
        return starts(model, stages)
    every = halves(config)
    return tuple(every[i].start for i in balanced([1] * len(every), stages))


def fits(stages: int, config: GPTConfig) -> None:
    """Raises InputError for more stages than the halves of the blocks."""
    if stages > 2 * config.layers:
        raise bad(
            f"{stages} stages of a model with {config.layers} layers",
            f"at most {2 * config.layers}, half a layer each",
            "--ranks 2",
        )
