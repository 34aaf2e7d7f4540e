"""A gate with its options: from logits to a routing of the global batch.

docs/explanation/experts.md lists the gates. The hard ones, `assigned` and `hash`, give each token
one expert with weight 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from shardwise.core.errors import bad
from shardwise.core.tools.arguments import integer, is_number, suggest
from shardwise.techniques.expert import gates
from shardwise.techniques.expert.gates import Choice, losses_of
from shardwise.techniques.expert.routing import (
    GlobalBatch,
    Routing,
    capacity_of,
    gather_facts,
    queues,
)

#: The gates, and how many experts a token has where the gate determines it.
GATES: Final[dict[str, int | None]] = {
    "switch": 1,
    "gshard": 2,
    "topk": None,
    "topk-renormalised": None,
    "topk-softmax-after": None,
    "noisy-topk": None,
    "sigmoid": None,
    "expert-choice": None,
    "assigned": 1,
    "hash": 1,
}
#: Gates without a router.
FIXED: Final = ("assigned", "hash")
LOSSES: Final = ("balance", "importance", "z")


@dataclass(frozen=True)
class Extra:
    """What some gates read beside the logits; N tokens, E experts.

    random   noisy-topk: [N, E] standard normal; gshard: [N] uniform; None: without randomness
    spread   noisy-topk: [N, E], the scale of the noise before softplus
    bias     sigmoid: [E]
    target   hard gates: [N] the expert of each token
    """

    random: Tensor | None = None
    spread: Tensor | None = None
    bias: Tensor | None = None
    target: Tensor | None = None


@dataclass(frozen=True)
class Gate:
    """A gate and its options.

    k         experts per token; for expert-choice on average
    capacity  the capacity factor, 1 or more; None: dropless (expert-choice has 1 then)
    scale     the weights are multiplied by it (routed scaling)
    losses    coefficients of the auxiliary losses by name

    Raises InputError for an unknown gate or loss, k beyond the experts, and a capacity below 1.
    """

    name: str
    experts: int
    k: int = 1
    capacity: float | None = None
    scale: float = 1.0
    losses: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.name not in GATES:
            near = suggest(str(self.name), GATES)
            raise bad(f'the gate "{self.name}"', ", ".join(GATES), f'gate = "{near}"')
        integer("experts", self.experts, least=1, example=8)
        own = GATES[self.name]
        if own is not None and self.k not in (1, own):
            raise bad(
                f"k={self.k} under the gate {self.name}, which gives each token {own}",
                "k for gates that take it: " + ", ".join(n for n, k in GATES.items() if k is None),
                f'sw.Gate("{self.name}", experts={self.experts})',
            )
        object.__setattr__(self, "k", own or self.k)
        integer("k", self.k, least=1, example=min(2, self.experts))
        if self.k > self.experts:
            raise bad(
                f"k={self.k} with {self.experts} experts under the gate {self.name}",
                "k from 1 up to the number of experts",
                f"k={self.experts}, or experts={self.k}",
            )
        capacity = 1.0 if self.capacity is None else self.capacity
        if not (is_number(capacity) and 1 <= capacity < math.inf):
            raise bad(
                f"capacity = {self.capacity!r}, in multiples of an expert's share of the tokens",
                "1 or more, or none to drop no token",
                "capacity = 1.25",
            )
        if self.name in FIXED and self.losses:
            given = f"losses = {self.losses!r} under the gate {self.name}, which learns nothing"
            raise bad(given, "losses of gates with a router", f'sw.Gate("{self.name}", experts=8)')
        for name in self.losses:
            if name not in LOSSES:
                raise bad(f'the loss "{name}"', ", ".join(LOSSES), suggest(name, LOSSES))

    def route(
        self,
        logits: Tensor,
        batch: GlobalBatch,
        extra: Extra = Extra(),
        *,
        losses: bool = True,
        layer: str = "a gate",
    ) -> Routing:
        """Route logits [N, E]. All data ranks call it, and raise InputError for a bad target."""
        if self.name == "expert-choice":
            return self._by_experts(logits, batch, losses=losses)
        choice = self.choose(logits, extra)
        wanted = choice.wanted
        if wanted is None:
            wanted = torch.ones_like(choice.experts, dtype=torch.bool)
        chosen = choice.experts, wanted
        lined = queues(chosen, logits, self.capacity, batch, choice.valid)
        gates.require_experts(self.experts, lined.facts.valid, layer)
        weights = choice.weights.to(logits)
        of = torch.zeros_like(logits).scatter(-1, choice.experts, weights * wanted)
        counts = lined.wanted_by_choice[: choice.balance_choices].sum(0).to(logits.device)
        tokens, asked = lined.facts.tokens, self._losses(asked=losses)
        return Routing(
            choice.experts,
            weights * self.scale,
            lined.positions,
            lined.loads,
            lined.wanted_by_choice.sum(0),
            lined.dropped,
            lined.facts,
            losses_of(asked, batch, logits, choice.probabilities, of, counts, tokens),
        )

    def choose(self, logits: Tensor, extra: Extra) -> Choice:
        """What each token asks for."""
        match self.name:
            case "switch":
                return gates.switch(logits)
            case "gshard":
                return gates.gshard(logits, extra.random)
            case "topk" | "topk-renormalised":
                normalised = self.name != "topk"
                return gates.topk_softmax_before(logits, self.k, normalised=normalised)
            case "topk-softmax-after":
                return gates.topk_softmax_after(logits, self.k)
            case "noisy-topk":
                return gates.noisy_topk(logits, self.k, extra.spread, extra.random)
            case "sigmoid":
                bias = logits.new_zeros(self.experts) if extra.bias is None else extra.bias
                return gates.sigmoid(logits, self.k, bias)
            case _:
                if extra.target is None:
                    raise bad(
                        f"the gate {self.name} without the expert of each token",
                        "the experts of the tokens beside the logits",
                        "Extra(target=...)",
                    )
                return gates.assigned(extra.target, self.experts)

    def _losses(self, *, asked: bool) -> tuple[str, ...]:
        if not asked or self.name in FIXED:  # which have no probabilities
            return ()
        return tuple(name for name, coefficient in self.losses.items() if coefficient)

    def _by_experts(self, logits: Tensor, batch: GlobalBatch, *, losses: bool) -> Routing:
        """Each expert takes its share of the tokens of the global batch, which ranks gather."""
        known = gather_facts(logits, batch)
        sizes, tokens = known.sizes, known.tokens
        scores = logits.softmax(-1)
        padded = scores.new_zeros(max(sizes), self.experts)
        padded[: len(scores)] = scores.detach()
        every = [x[:size] for x, size in zip(batch.gather(padded), sizes, strict=True)]
        capacity = capacity_of(self.capacity or 1.0, tokens * self.k, self.experts)
        assert capacity is not None
        taken = min(capacity, tokens)
        places = gates.expert_choice(torch.cat(every), taken)
        mine = places.split(sizes)[batch.rank]
        if logits.is_meta:
            ends = [taken * end // max(1, tokens) for end in accumulate(sizes)]
            own = torch.tensor([0, *ends], dtype=torch.int64, device="cpu").diff()
            loads = own.view(-1, 1).expand(-1, self.experts)
        else:
            loads = torch.stack([(part >= 0).sum(0) for part in places.split(sizes)]).cpu()
        weights = scores * (mine >= 0)
        counts, asked = loads.sum(0).to(logits.device), self._losses(asked=losses)
        return Routing(
            torch.arange(self.experts, dtype=torch.int64, device=logits.device).expand_as(mine),
            weights * self.scale,
            mine,
            loads,
            loads.sum(0),
            0,
            known,
            losses_of(asked, batch, logits, scores, weights, counts, tokens),
        )
