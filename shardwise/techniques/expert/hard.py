"""Hard gates, which give each token one expert with weight 1; and gates that change with passes.

    N  tokens of this rank      E  experts

    random number = hash(seed, name of the layer, number of the pass, place in the global batch)

A pass is a microbatch, and a buffer, saved with the model, numbers the passes. So one process, any
number of data ranks and the stages of a pipeline draw the same numbers, whatever the states of
torch's generators are. A recomputation must repeat its first forward pass, though others have run
since (`PassRecords`).
"""

import hashlib
import math

import torch
from torch import Tensor

from shardwise.core.errors import RunError, bad
from shardwise.techniques.expert.gates import Choice
from shardwise.techniques.expert.routing import GlobalBatch


def assigned(assignment: Tensor, experts: int) -> Choice:
    """The expert of each token from outside: `assignment` [N], from 0 to experts - 1."""
    chosen = assignment.long().clamp(0, experts - 1)
    valid = (chosen == assignment).all() & (not assignment.is_floating_point())
    weights = torch.ones(len(chosen), 1, dtype=torch.float64, device=chosen.device)
    zeros = weights.new_zeros(len(chosen), experts)
    probabilities = zeros.scatter(1, chosen.view(-1, 1), 1.0)
    return Choice(chosen.view(-1, 1), weights, probabilities, valid=valid)


def require_experts(
    assignment: Tensor, experts: int, valid: tuple[bool, ...], batch: GlobalBatch, layer: str
) -> None:
    """Raise InputError, on all data ranks, if the assignment [N] of any is not `valid`."""
    if all(valid):
        return
    found = torch.zeros(3, dtype=torch.float64, device=assignment.device)
    if len(assignment):
        found[0], found[1] = assignment.aminmax()
    found[2] = assignment.is_floating_point()
    every = batch.gather(found).tolist()
    of = [
        f"{low:g} to {high:g}{' (floating point)' if floating else ''} on data rank {rank}"
        for rank, (low, high, floating) in enumerate(every)
        if not valid[rank]
    ]
    highest = max(high if math.isfinite(high) else 0.0 for _, high, _ in every)
    instead = "target.long()" if any(row[2] for row in every) else "ids of experts from 0 up"
    if highest >= experts:
        instead = f"Gate(..., experts={int(highest) + 1}), or another assignment"
    raise bad(
        f"for {layer}, an assignment of tokens to the experts {' and '.join(of)}",
        f"integers from 0 to {experts - 1}, for {experts} experts",
        instead,
    )


def hashed(ids: Tensor, experts: int, seed: int = 0) -> Tensor:
    """The expert of each token id [N], by a fixed random hash of it.

    Hash layers (Roller et al., arXiv 2106.04426), section 3.1. The hash is the finalizer of
    splitmix64 (Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014), a
    signed number of 64 bits, which is halved and rounded down.
    """
    return (mix_bits(ids, seed) >> 1).remainder(experts)


def mix_bits(x: Tensor, seed: int) -> Tensor:
    """64 random-looking bits for each integer of `x`, the same on every machine."""
    z = x.long() + _to_int64(seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15)
    z = (z ^ _shift_right(z, 30)) * _to_int64(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _to_int64(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros: torch's own copies the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _to_int64(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


# --- passes -------------------------------------------------------------------------------------


class PassRecords:
    """What determined the passes of a step: for each its number, or its bias of the experts [E].

    The plan word `recompute` calls the methods of a torch.Generator before the first forward and
    around its repetition. `position` is how many passes of the layer have run, and `values` are by
    the position before the pass. They are kept while `recording`, and not beyond a training step.
    """

    def __init__(self) -> None:
        self.position, self.values, self.recording = 0, dict[int, Tensor](), False

    def get_state(self) -> Tensor:
        """How many passes have run. Later passes may be repeated."""
        self.recording = True
        return torch.tensor(self.position, dtype=torch.int64, device="cpu")

    def set_state(self, state: Tensor) -> Tensor:
        self.position = int(state)
        return state

    def record(self, value: Tensor) -> None:
        if self.recording:
            self.values[self.position] = value.clone()
        self.position += 1

    def end(self) -> None:
        self.values.clear()
        self.recording = False

    def replay(self, layer: str) -> Tensor:
        """The value that was recorded for the pass that is recomputed now."""
        if self.position not in self.values:
            raise RunError(
                f"The activations of {layer} are recomputed by something that does not know the "
                "random numbers or the bias of its gate, such as torch.utils.checkpoint. Write the "
                'plan word recompute instead, or a gate that has neither, such as "topk".'
            )
        self.position += 1
        return self.values[self.position - 1]


def key_of(seed: int, layer: str) -> int:
    digest = hashlib.sha256(f"{seed}/{layer}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def uniform(numbers: Tensor, key: int, number: int) -> Tensor:
    """A number strictly between 0 and 1 for each integer, in a pass: 52 bits of its hash."""
    bits = (mix_bits(numbers, key + number) >> 12) & ((1 << 52) - 1)
    return (bits.double() + 0.5) / (1 << 52)
