"""Passes of a gate that changes with them: random numbers, and a bias that follows the loads.

    random number = hash(seed of the layer, number of the pass, place in the global batch)

A pass is a microbatch, and passes are numbered in a buffer, which is saved with the model. So one
process, any number of data ranks and the stages of a pipeline draw the same numbers, whatever the
states of torch's generators are.

A recomputation must repeat what its first forward pass did, and others have run since. `Passes` has
the methods of a torch.Generator that the plan word `recompute` calls before the first forward and
around its repetition.
"""

from typing import Final

import torch
from torch import Tensor

from shardwise.core.errors import RunError
from shardwise.parallel.expert import hard

#: So many passes may be under way whose activations are recomputed.
MOST_PASSES: Final = 4096
#: What determines a pass: its number, or the bias of the experts.
Pass = tuple[float, ...]


class Passes:
    """What determined the last passes, by how many passes of the layer went before each."""

    def __init__(self) -> None:
        self.before, self.known = 0, dict[int, Pass]()

    def get_state(self) -> Tensor:
        """How many passes have run."""
        return torch.tensor(self.before, device="cpu")

    def set_state(self, state: Tensor) -> Tensor:
        """Return to a state; the next pass repeats the one that ran in it."""
        self.before = int(state)
        return state

    def first(self, found: Pass) -> None:
        """A forward pass is determined by `found`."""
        self.known[self.before] = found
        self.before += 1
        if len(self.known) > MOST_PASSES:
            del self.known[next(iter(self.known))]

    def again(self, layer: str) -> Pass:
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


def uniform(numbers: Tensor, seed: int, number: int) -> Tensor:
    """A number between 0 and 1, neither of them, for each integer: 52 bits of its hash.

    `number` is that of the pass.
    """
    bits = (hard.mixed(numbers, (seed << 40) + number) >> 12) & ((1 << 52) - 1)
    return (bits.double() + 0.5) / (1 << 52)
