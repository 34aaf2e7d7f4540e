"""Passes of a gate that changes with them: random numbers, and a bias that follows the loads.

    random number = hash(seed, name of the layer, number of the pass, place in the global batch)

A pass is a microbatch, and passes are numbered in a buffer, which is saved with the model. So one
process, any number of data ranks and the stages of a pipeline draw the same numbers, whatever the
states of torch's generators are.

A recomputation must repeat what its first forward pass did, and others have run since.
`PassRecords` has the methods of a torch.Generator that the plan word `recompute` calls before the
first forward and around its repetition. It keeps nothing if nobody calls them, and nothing beyond a
training step.
"""

import hashlib

import torch
from torch import Tensor

from shardwise.core.errors import RunError
from shardwise.techniques.expert import hard


class PassRecords:
    """What determined the passes of a step: for each its number, or its bias of the experts [E].

    `position` is how many passes of the layer have run, and `values` are by the position before the
    pass. They are kept while `recording`: when passes may be repeated.
    """

    def __init__(self) -> None:
        self.position, self.values, self.recording = 0, dict[int, Tensor](), False

    def get_state(self) -> Tensor:
        """How many passes have run. Those that follow may be repeated."""
        self.recording = True
        return torch.tensor(self.position, dtype=torch.int64, device="cpu")

    def set_state(self, state: Tensor) -> Tensor:
        """Return to a state; the next pass repeats the one that ran in it."""
        self.position = int(state)
        return state

    def record(self, value: Tensor) -> None:
        """Keep the value that determines a forward pass, if the pass may be repeated."""
        if self.recording:
            self.values[self.position] = value.clone()
        self.position += 1

    def end(self) -> None:
        """Forget all: the training step ended, and none of its passes is repeated later."""
        self.values.clear()
        self.recording = False

    def replay(self, layer: str) -> Tensor:
        """The value that was recorded for the pass that is recomputed now.

        Raises RunError if something recomputes that did not return to the state of that pass.
        """
        if self.position not in self.values:
            raise RunError(
                f"The activations of {layer} are recomputed by something that does not know the "
                "random numbers or the bias of its gate, such as torch.utils.checkpoint. Write the "
                'plan word recompute instead, or a gate that has neither, such as "topk".'
            )
        self.position += 1
        return self.values[self.position - 1]


def key_of(seed: int, layer: str) -> int:
    """64 bits of a hash of a seed and a layer's name: the key of its random numbers."""
    digest = hashlib.sha256(f"{seed}/{layer}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def uniform(numbers: Tensor, key: int, number: int) -> Tensor:
    """A number between 0 and 1, neither of them, for each integer: 52 bits of its hash.

    `number` is that of the pass.
    """
    bits = (hard.mix_bits(numbers, key + number) >> 12) & ((1 << 52) - 1)
    return (bits.double() + 0.5) / (1 << 52)
