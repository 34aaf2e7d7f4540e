"""The partition of a GPT into pipeline stages, the same for every contender.

    embed  attn mlp | attn mlp | attn mlp | attn mlp  norm head        whole blocks
    embed  attn | mlp | attn | mlp | attn | mlp | attn | mlp  norm head

A block consists of two halves, each of which adds to the residual stream, the only tensor between
them. Blocks are split only if there are more stages than blocks.
"""

from typing import NamedTuple

from torch import nn

from shardwise.core.balance import balanced
from shardwise.core.errors import bad
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.techniques.pipeline.partition import starts


class Half(NamedTuple):
    """Half of a block: attention or the feed-forward layer, with the norm before it."""

    block: int
    attention: bool

    @property
    def start(self) -> str:
        """The name of its first module."""
        return f"blocks.{self.block}" if self.attention else f"blocks.{self.block}.mlp_norm"

    def modules(self, model: GPT) -> tuple[nn.Module, nn.Module]:
        """The norm, and the layer after it."""
        names = ("attn_norm", "attn") if self.attention else ("mlp_norm", "mlp")
        block = model.blocks[self.block]
        return block.get_submodule(names[0]), block.get_submodule(names[1])


def halves(config: GPTConfig) -> list[Half]:
    """All halves in order."""
    return [Half(block, attention) for block in range(config.layers) for attention in (True, False)]


def place(start: str, config: GPTConfig) -> int:
    """The number of the half whose first module is `start`."""
    return next(i for i, half in enumerate(halves(config)) if half.start == start)


def stage_starts(model: GPT, stages: int) -> tuple[str, ...]:
    """The modules that begin stages 1 to `stages` - 1.

    Balanced by parameters at blocks (techniques/pipeline/partition.py), or by number of halves if
    there are more stages than blocks. Raises InputError for more stages than halves.
    """
    config = model.config
    fits(stages, config)
    if stages <= config.layers:
        return starts(model, stages)
    every = halves(config)
    return tuple(every[i].start for i in balanced([1] * len(every), stages))


def fits(stages: int, config: GPTConfig) -> None:
    """Raise InputError for more stages than halves."""
    if stages > 2 * config.layers:
        raise bad(
            f"{stages} stages of a model with {config.layers} layers",
            f"at most {2 * config.layers}, half a layer each",
            "--nproc 2",
        )
