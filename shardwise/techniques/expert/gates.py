"""Sparse gates: from the logits of a router to a choice of experts per token; and their losses.

    N  tokens of this rank      E  experts      K  choices per token

Capacity, places and losses are the same for all gates (gate.py). The auxiliary losses:

    balance      E * sum_e f_e P_e: f_e is the share of the choices that go to expert e, P_e the
                 expert's mean probability; 1 under an even load
                 (Switch Transformers, arXiv 2101.03961, eq. 4-6)
    importance   the squared coefficient of variation of the weights summed by expert
                 (Shazeer et al., arXiv 1701.06538, eq. 6-7)
    z            the mean of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5)

Each is a function of sums over all tokens of the global batch. One message moves the sums P -> R on
the data axes, so every data rank computes the same loss and its exact gradient.

    random number = hash(seed, name of the layer, number of the pass, place in the global batch)

A pass is a microbatch, and a buffer, saved with the model, numbers the passes. So one process, any
number of data ranks and the stages of a pipeline draw the same numbers, whatever the states of
torch's generators are. A recomputation must repeat its first forward pass, though others have run
since (`PassRecords`).
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.core.errors import RunError, bad
from shardwise.techniques.expert.routing import GlobalBatch


@dataclass(frozen=True)
class Choice:
    """The experts that each token asks for.

    experts          [N, K] by descending score
    weights          [N, K], differentiable
    probabilities    [N, E], differentiable, for the auxiliary losses
    wanted           [N, K]; None: all choices
    balance_choices  how many of the K choices the balance loss counts
    valid            without dims, whether every expert assigned to a hard gate exists; others are
                     replaced in `experts`. None: no experts were assigned
    """

    experts: Tensor
    weights: Tensor
    probabilities: Tensor
    wanted: Tensor | None = None
    balance_choices: int | None = None
    valid: Tensor | None = None


def switch(logits: Tensor) -> Choice:
    """Top-1, weighted by the probability: Switch Transformers (arXiv 2101.03961), eq. 1-2."""
    probabilities = logits.softmax(-1)
    weights, experts = probabilities.max(-1, keepdim=True)
    return Choice(experts, weights, probabilities)


def gshard(logits: Tensor, uniform: Tensor | None = None) -> Choice:
    """Top-2, with weights that add up to 1: GShard (arXiv 2006.16668), algorithm 1.

    The second expert is used with probability 2 w_2: where its weight is above a uniform random
    number [N] halved. Without `uniform` (in evaluation) it is always used. The balance loss counts
    first choices.
    """
    probabilities = logits.softmax(-1)
    top, experts = probabilities.topk(2, dim=-1)
    weights = top / top.sum(-1, keepdim=True)
    wanted = None
    if uniform is not None:
        wanted = torch.ones_like(experts, dtype=torch.bool)
        wanted[:, 1] = 2 * weights[:, 1] > uniform
    return Choice(experts, weights, probabilities, wanted, balance_choices=1)


def topk_softmax_before(logits: Tensor, k: int, *, normalised: bool = False) -> Choice:
    """Top-k of a softmax over all E (arXiv 2101.03961, eq. 1-2); `normalised`: weights of sum 1."""
    probabilities = logits.softmax(-1)
    weights, experts = probabilities.topk(k, dim=-1)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return Choice(experts, weights, probabilities)


def topk_softmax_after(logits: Tensor, k: int) -> Choice:
    """A softmax over the k largest logits (arXiv 1701.06538, eq. 3 and 5; Mixtral, 2401.04088)."""
    top, experts = logits.topk(k, dim=-1)
    return Choice(experts, top.softmax(-1), logits.softmax(-1))


def noisy_topk(
    logits: Tensor, k: int, spread: Tensor | None = None, normal: Tensor | None = None
) -> Choice:
    """Top-k of logits + normal * softplus(spread), all [N, E] (arXiv 1701.06538, eq. 3-5)."""
    if spread is not None and normal is not None:
        logits = logits + normal.to(logits) * functional.softplus(spread)
    return topk_softmax_after(logits, k)


def sigmoid(logits: Tensor, k: int, bias: Tensor) -> Choice:
    """Top-k of sigmoid(logits) + bias [E]; the weights are the sigmoids alone, with sum 1.
    DeepSeek-V3 (arXiv 2412.19437), section 2.1.2, eq. 13-16.
    """
    scores = logits.sigmoid()
    experts = (scores + bias.to(scores)).topk(k, dim=-1).indices
    top = scores.gather(-1, experts)
    weights = top / top.sum(-1, keepdim=True)
    return Choice(experts, weights, scores / scores.sum(-1, keepdim=True))


def balanced_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """The bias [E] after experts had `counts` [E] choices: it rises by `rate` below the mean, else
    falls. DeepSeek-V3, section 2.1.2; Wang et al., arXiv 2408.15664, algorithm 1.
    """
    counts = counts.to(bias)
    return bias + rate * torch.sign(counts.mean() - counts)


def expert_choice(scores: Tensor, capacity: int) -> Tensor:
    """The tokens that each expert takes: places [N, E] from 0 to capacity - 1, or -1 if not taken.

    scores: [N, E] of the global batch, the softmax of the logits over the experts. Each expert
    takes the tokens with its `capacity` largest scores, the earlier of two that are equal. Zhou et
    al., arXiv 2202.09368, section 3.2, eq. 1-2. A token's experts depend on later tokens, so such a
    model cannot be sampled token by token as it was trained.
    """
    # in fp32: equal tokens, whose fp64 scores may be rounded differently, are ties
    order = scores.float().argsort(dim=0, descending=True, stable=True)[:capacity]
    places = torch.full(scores.shape, -1, dtype=torch.int64, device=scores.device)
    return places.scatter(0, order, torch.ones_like(order).cumsum(0) - 1)


# --- auxiliary losses ---------------------------------------------------------------------------


def losses_of(
    names: tuple[str, ...],
    batch: GlobalBatch,
    logits: Tensor,
    probabilities: Tensor,
    weights: Tensor,
    counts: Tensor,
    tokens: int,
) -> dict[str, Tensor]:
    """The losses `names` without dims; all data ranks call it: one all-reduce of 2E + 1 numbers.

    Of this rank's N tokens: logits [N, E], probabilities [N, E] with sum 1 per token, weights
    [N, E] of the choices, 0 where there is none. Of the global batch: counts [E] of choices by
    expert, without a gradient, and the number of tokens.
    """
    if not names:
        return {}
    experts = logits.shape[-1]
    z = torch.logsumexp(logits, -1).square().sum()
    own = torch.cat([probabilities.sum(0), weights.sum(0), z.view(1)])
    probability, importance, z = batch.sum(own).split([experts, experts, 1])
    every = {
        "balance": balance(probability / max(1, tokens), counts),
        "importance": squared_variation(importance),
        "z": z.squeeze(0) / max(1, tokens),
    }
    return {name: every[name] for name in names}


def balance(probability: Tensor, counts: Tensor) -> Tensor:
    share = counts.to(probability) / counts.sum().clamp(min=1)
    return len(probability) * (share * probability).sum()


def squared_variation(importance: Tensor) -> Tensor:
    """The variance over the squared mean; 0 if all of `importance` is 0."""
    mean = importance.mean()
    variance = (importance - mean).square().mean()
    return variance / torch.where(mean == 0, 1.0, mean).square()


# --- hard gates -----------------------------------------------------------------------------------


def assigned(assignment: Tensor, experts: int) -> Choice:
    """The expert of each token from outside: `assignment` [N], from 0 to experts - 1."""
    chosen = assignment.long().clamp(0, experts - 1)
    valid = (chosen == assignment).all() & (not assignment.is_floating_point())
    weights = torch.ones(len(chosen), 1, dtype=torch.float64, device=chosen.device)
    zeros = weights.new_zeros(len(chosen), experts)
    probabilities = zeros.scatter(1, chosen.view(-1, 1), 1.0)
    return Choice(chosen.view(-1, 1), weights, probabilities, valid=valid)


def require_experts(experts: int, valid: tuple[bool, ...], layer: str) -> None:
    """Raise InputError, on all data ranks, if the assignment of any is not `valid`."""
    wrong = " and ".join(str(rank) for rank, each in enumerate(valid) if not each)
    if wrong:
        raise bad(
            f"for {layer}, a target of experts that do not exist, on data rank {wrong}",
            f"integers from 0 to {experts - 1}, for {experts} experts",
            "target.long(), with ids of experts from 0 up; or a gate with more experts",
        )


def hashed(ids: Tensor, experts: int) -> Tensor:
    """The expert of each token id [N], by a fixed random hash of it.

    Hash layers (Roller et al., arXiv 2106.04426), section 3.1. The hash is the finalizer of
    splitmix64 (Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014), a
    signed number of 64 bits, which is halved and rounded down.
    """
    return (mix_bits(ids, 0) >> 1).remainder(experts)


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
