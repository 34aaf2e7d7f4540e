"""Auxiliary losses of a gate, over the global batch.

    balance      E * sum_e f_e P_e: f_e is the share of the choices that go to expert e, P_e the
                 expert's mean probability; 1 under an even load
                 (Switch Transformers, arXiv 2101.03961, eq. 4-6)
    importance   the squared coefficient of variation of the weights summed by expert
                 (Shazeer et al., arXiv 1701.06538, eq. 6-7)
    z            the mean of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5)

Each is a function of sums over all tokens. The sums are moved P -> R on the data axes, in one
message, so every data rank computes the loss of the global batch and its exact gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.techniques.expert.global_batch import GlobalBatch


@dataclass(frozen=True)
class GateOutput:
    """What the losses are computed from; N tokens of this rank, K choices, E experts.

    logits         [N, E] as the router made them
    probabilities  [N, E] with sum 1 per token
    weights        [N, E] of the choices, 0 where there is none
    counts         [E] choices by expert over the global batch (`balance` reads no gradient of them)
    tokens         of the global batch
    """

    logits: Tensor
    probabilities: Tensor
    weights: Tensor
    counts: Tensor
    tokens: int


def losses_of(found: GateOutput, names: tuple[str, ...], batch: GlobalBatch) -> dict[str, Tensor]:
    """The losses called `names`, without dims. One all-reduce of 2E + 1 numbers, if there is any.

    Called by all data ranks. A global batch without tokens has losses of 0.
    """
    if not names:
        return {}
    experts = found.logits.shape[-1]
    z = torch.logsumexp(found.logits, -1).square().sum()
    own = torch.cat([found.probabilities.sum(0), found.weights.sum(0), z.view(1)])
    probability, importance, z = batch.sum(own).split([experts, experts, 1])
    every = {
        "balance": balance(probability / max(1, found.tokens), found.counts),
        "importance": squared_variation(importance),
        "z": z.squeeze(0) / max(1, found.tokens),
    }
    return {name: every[name] for name in names}


def balance(probability: Tensor, counts: Tensor) -> Tensor:
    """E * sum_e f_e P_e, from the mean probability [E] and the number of choices [E]."""
    share = counts.to(probability) / counts.sum().clamp(min=1)
    return len(probability) * (share * probability).sum()


def squared_variation(importance: Tensor) -> Tensor:
    """The variance over the squared mean; 0 if all of `importance` is 0."""
    mean = importance.mean()
    variance = (importance - mean).square().mean()
    return variance / torch.where(mean == 0, 1.0, mean).square()
