"""Passes of a gate that changes with them: random numbers, and a bias that follows the loads.

    random number = hash(seed, name of the layer, number of the pass, place in the global batch)

A pass is a microbatch, and passes are numbered in a buffer, which is saved with the model. So one
process, any number of data ranks and the stages of a pipeline draw the same numbers, whatever the
states of torch's generators are.

A recomputation must repeat what its first forward pass did, and others have run since. `Passes` has
the methods of a torch.Generator that the plan word `recompute` calls before the first forward and
around its repetition. It keeps nothing if nobody calls them, and nothing beyond a training step.
"""

import hashlib

import torch
from torch import Tensor

from shardwise.core.errors import RunError
from shardwise.parallel.expert import hard


class Passes:
    """What determined the passes of a step: each its number, or its bias of the experts [E].

    `known` has them by how many passes of the layer went before; only if they may be repeated.
    """

    def __init__(self) -> None:
        self.before, self.known, self.repeats = 0, dict[int, Tensor](), False

    def get_state(self) -> Tensor:
        """How many passes have run. Those that follow may be repeated."""
        self.repeats = True
        return torch.tensor(self.before, device="cpu")

    def set_state(self, state: Tensor) -> Tensor:
        """Return to a state; the next pass repeats the one that ran in it."""
        self.before = int(state)
        return state

    def first(self, found: Tensor) -> None:
        """A forward pass is determined by the values of `found`."""
        if self.repeats:
            self.known[self.before] = found.clone()
        self.before += 1

    def end(self) -> None:
        """The training step ended: none of its passes is repeated later."""
        self.known.clear()
        self.repeats = False

    def again(self, layer: str) -> Tensor:
        """What determined the forward pass that is recomputed.

        Raises RunError if something recomputes that did not return to the state of that pass.
        """
        if self.before not in self.known:
            raise RunError(
                f"The activations of {layer} are recomputed by something that does not know the "
                "random numbers or the bias of its gate, such as torch.utils.checkpoint. Write the "
                'plan word recompute instead, or a gate that has neither, such as "topk".'
            )
        self.before += 1
        return self.known[self.before - 1]


def key_of(seed: int, layer: str) -> int:
    """64 bits of a hash of a seed and a layer's name: the key of its random numbers."""
    digest = hashlib.sha256(f"{seed}/{layer}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def uniform(numbers: Tensor, key: int, number: int) -> Tensor:
    """A number between 0 and 1, neither of them, for each integer: 52 bits of its hash.

    `number` is that of the pass.
    """
    bits = (hard.mixed(numbers, key + number) >> 12) & ((1 << 52) - 1)
    return (bits.double() + 0.5) / (1 << 52)
