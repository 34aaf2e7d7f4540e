"""The oracle of layers of experts: a mixture in one process, token by token, from the papers.

    for each token      score the experts, choose k of them, and weigh these          `_choose`
    for each expert     keep the first C choices: all first choices before all second ones
    for each expert     y[token] += weight * down(silu(gate x) * up x)
    loss                sums over all tokens of the batch                              `_losses`

Like oracle.py it imports nothing of the package. It reads the parameters, the buffers and the gate
(its name and numbers) of the layer whose forward it replaces, and changes the same buffers.

    N  tokens      E  experts      K  choices of a token      D  width
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Chosen:
    """The choices of the tokens.

    experts        [N, K]
    weights        [N, K], by which the experts' outputs are multiplied
    probabilities  [N, E], for the balance loss
    positions      [N, K] places in the queues of the experts; -1: not computed
    wanted         [N, K] whether a token uses the choice at all
    counted        how many of the choices the balance loss counts
    """

    experts: Tensor
    weights: Tensor
    probabilities: Tensor
    positions: Tensor
    wanted: Tensor
    counted: int


class Mixture:
    """The forward of `layer`, a mixture of experts, in one process."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.gate = layer, layer.gate

    def __call__(self, x: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor]:
        layer = self.layer
        x_ND = x.flatten(0, -2)
        dtype = torch.promote_types(x.dtype, torch.float32)
        logits_NE = x_ND.new_zeros(len(x_ND), self.gate.experts, dtype=dtype)
        if layer.router is not None:
            logits_NE = functional.linear(x_ND, layer.router.weight).to(dtype)
        ids_N = None if target is None else target.flatten()
        found = self._choose(x_ND, logits_NE, ids_N)
        layer.place.on_routing(found)
        y_ND = torch.zeros_like(x_ND)
        for expert in range(self.gate.experts):
            chosen = (found.experts == expert) & (found.positions >= 0)
            token, choice = chosen.nonzero(as_tuple=True)
            gate, up, down = (
                getattr(layer.experts, name)[expert] for name in ("gate", "up", "down")
            )
            own = x_ND[token]
            hidden = functional.silu(functional.linear(own, gate)) * functional.linear(own, up)
            made = functional.linear(hidden, down)
            weight = (found.weights[token, choice] * self.gate.scale).unsqueeze(-1)
            y_ND = y_ND.index_add(0, token, made * weight.to(made))
        y = y_ND.view_as(x)
        if layer.shared is not None:
            y = y + layer.shared(x)
        loss = self._losses(found, logits_NE) if layer.training else logits_NE.new_zeros(())
        return y, loss

    def _choose(self, x_ND: Tensor, logits_NE: Tensor, ids_N: Tensor | None) -> Chosen:
        name, k = self.gate.name, self.gate.k
        if name == "expert-choice":
            return self._chosen_by_experts(logits_NE)
        p_NE = logits_NE.softmax(-1)
        wanted, counted = None, k
        if name in ("assigned", "hash"):
            experts = self._assigned(ids_N).unsqueeze(-1)
            weights = torch.ones_like(experts, dtype=p_NE.dtype)
        elif name == "sigmoid":
            p_NE, experts, weights = self._by_sigmoid(logits_NE)
        elif name in ("topk-softmax-after", "noisy-topk"):
            if name == "noisy-topk" and self.layer.training:
                spread = functional.softplus(functional.linear(x_ND, self.layer.spread.weight))
                draws = self._uniform(range(len(x_ND) * self.gate.experts))
                normal = torch.special.ndtri(torch.tensor(draws, dtype=torch.float64))
                logits_NE = logits_NE + normal.view(len(x_ND), -1).to(logits_NE) * spread
                p_NE = logits_NE.softmax(-1)
            experts = logits_NE.topk(k).indices
            weights = logits_NE.gather(-1, experts).softmax(-1)
        else:
            experts = p_NE.topk(k).indices
            weights = p_NE.gather(-1, experts)
            if name in ("topk-renormalised", "gshard"):
                weights = weights / weights.sum(-1, keepdim=True)
        if name == "gshard":
            counted = 1
            if self.layer.training:
                draws = torch.tensor(self._uniform(range(len(x_ND))), dtype=torch.float64)
                second = 2 * weights[:, 1].detach().double().cpu() > draws
                wanted = torch.stack([torch.ones_like(second), second], 1).to(experts.device)
        wanted = torch.ones_like(experts, dtype=torch.bool) if wanted is None else wanted
        positions = self._queue(experts, wanted)
        return Chosen(experts, weights, p_NE, positions, wanted, counted)

    def _queue(self, experts_NK: Tensor, wanted_NK: Tensor) -> Tensor:
        """The place of each choice in the queue of its expert; -1 beyond the capacity."""
        n, k = experts_NK.shape
        room = self._room(n)
        experts, wanted = experts_NK.tolist(), wanted_NK.tolist()
        lengths, places = [0] * self.gate.experts, [[-1] * k for _ in range(n)]
        for choice in range(k):
            for token in range(n):
                expert = experts[token][choice]
                if wanted[token][choice]:
                    places[token][choice] = lengths[expert] if lengths[expert] < room else -1
                    lengths[expert] += 1
        found = torch.tensor(places, dtype=torch.int64, device=experts_NK.device)
        return found.view(n, k)

    def _room(self, n: int) -> float:
        factor, choices = self.gate.capacity, n * self.gate.k
        return math.inf if factor is None else math.ceil(factor * choices / self.gate.experts)

    def _assigned(self, ids_N: Tensor | None) -> Tensor:
        assert ids_N is not None
        if self.gate.name != "hash":
            return ids_N.long()
        found = [(_signed(_mixed(int(i), 0)) >> 1) % self.gate.experts for i in ids_N.tolist()]
        return torch.tensor(found, dtype=torch.int64, device=ids_N.device)

    def _by_sigmoid(self, logits_NE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """DeepSeek-V3: a bias that follows the choices of the previous training pass takes part."""
        layer, scores = self.layer, logits_NE.sigmoid()
        if layer.training:
            before = layer.choices.to(layer.bias)
            layer.bias += layer.bias_rate * torch.sign(before.mean() - before)
        experts = (scores + layer.bias.to(scores)).topk(self.gate.k).indices
        if layer.training:
            counts = experts.flatten().bincount(minlength=self.gate.experts)
            layer.choices.copy_(counts)
        weights = scores.gather(-1, experts)
        weights = weights / weights.sum(-1, keepdim=True)
        return scores / scores.sum(-1, keepdim=True), experts, weights

    def _chosen_by_experts(self, logits_NE: Tensor) -> Chosen:
        n, experts = logits_NE.shape
        factor = 1.0 if self.gate.capacity is None else self.gate.capacity
        room = min(n, math.ceil(factor * (n * self.gate.k) / experts))
        p_NE, places = logits_NE.softmax(-1), torch.full_like(logits_NE, -1, dtype=torch.int64)
        for expert in range(experts):
            scores = p_NE[:, expert].detach()
            order = scores.float().argsort(descending=True, stable=True)[:room]
            places[order, expert] = torch.arange(len(order), device=places.device)
        all_NE = torch.arange(experts, device=places.device).expand(n, experts)
        return Chosen(all_NE, p_NE * (places >= 0), p_NE, places, places >= 0, experts)

    # --- random numbers -----------------------------------------------------------------------

    def _uniform(self, numbers: range) -> list[float]:
        """Numbers between 0 and 1, others in each training pass."""
        named = f"{self.layer.seed}/{self.layer.place.name}".encode()
        key = int.from_bytes(hashlib.sha256(named).digest()[:8], "big")
        key += int(self.layer.passes)
        self.layer.passes += 1
        return [((_mixed(n, key) >> 12) + 0.5) / (1 << 52) for n in numbers]

    # --- losses -------------------------------------------------------------------------------

    def _losses(self, found: Chosen, logits_NE: Tensor) -> Tensor:
        gate, n = self.gate, max(1, len(logits_NE))
        of = {} if gate.name in ("assigned", "hash") else dict(gate.losses)
        total = logits_NE.new_zeros(())
        if of.get("balance"):
            asked = found.experts[:, : found.counted][found.wanted[:, : found.counted]]
            counts = asked.bincount(minlength=gate.experts).to(logits_NE)
            share, mean = counts / counts.sum().clamp(min=1), found.probabilities.sum(0) / n
            total = total + of["balance"] * gate.experts * (share * mean).sum()
        if of.get("importance"):
            used = found.weights.to(logits_NE) * found.wanted
            own = torch.zeros_like(logits_NE).scatter(-1, found.experts, used).sum(0)
            mean = own.mean()
            variance = (own - mean).square().mean()
            total = total + of["importance"] * variance / mean.square()
        if of.get("z"):
            total = total + of["z"] * logits_NE.logsumexp(-1).square().sum() / n
        return total


def _mixed(number: int, key: int) -> int:
    """64 bits of a hash: splitmix64 (Steele et al., OOPSLA 2014)."""
    z = (number + key * _GOLDEN + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _signed(bits: int) -> int:
    return bits - ((bits >> 63) << 64)
