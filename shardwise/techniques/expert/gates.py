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
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

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


def sigmoid(logits: Tensor, k: int, bias: Tensor, *, scale: float = 1.0) -> Choice:
    """Top-k of sigmoid(logits) + bias [E]; the weights are the sigmoids alone, with sum `scale`.
    DeepSeek-V3 (arXiv 2412.19437), section 2.1.2, eq. 13-16.
    """
    scores = logits.sigmoid()
    experts = (scores + bias.to(scores)).topk(k, dim=-1).indices
    top = scores.gather(-1, experts)
    weights = scale * top / top.sum(-1, keepdim=True)
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


@dataclass(frozen=True)
class GateOutput:
    """The inputs of the losses; N tokens of this rank, K choices, E experts.

    logits         [N, E] as the router made them
    probabilities  [N, E] with sum 1 per token
    weights        [N, E] of the choices, 0 where there is none
    counts         [E] choices by expert over the global batch, without a gradient
    tokens         of the global batch
    """

    logits: Tensor
    probabilities: Tensor
    weights: Tensor
    counts: Tensor
    tokens: int


def losses_of(found: GateOutput, names: tuple[str, ...], batch: GlobalBatch) -> dict[str, Tensor]:
    """The losses `names` without dims; all data ranks call it: one all-reduce of 2E + 1 numbers."""
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
    share = counts.to(probability) / counts.sum().clamp(min=1)
    return len(probability) * (share * probability).sum()


def squared_variation(importance: Tensor) -> Tensor:
    """The variance over the squared mean; 0 if all of `importance` is 0."""
    mean = importance.mean()
    variance = (importance - mean).square().mean()
    return variance / torch.where(mean == 0, 1.0, mean).square()
