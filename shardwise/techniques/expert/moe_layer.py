"""A mixture of experts as a layer: router, gate, experts, and the experts that all tokens share.

N  tokens of this rank      D  width      F  hidden width of an expert      E  experts
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.comm.world import Axis
from shardwise.core.errors import NonFiniteError, bad
from shardwise.core.tools.arguments import MOST_SEED, integer
from shardwise.techniques.expert.dispatch import Exchange, feed_forward
from shardwise.techniques.expert.gate import FIXED, Extra, Gate
from shardwise.techniques.expert.gates import PassRecords, balanced_bias, hashed, key_of, uniform
from shardwise.techniques.expert.routing import GlobalBatch, Routing, phase


def identity(x: Tensor) -> Tensor:
    return x


#: The default of `bias_rate`.
BIAS_RATE = 1e-3


@dataclass(frozen=True)
class ExpertPlace:
    """Where a layer is: the data ranks, the axis of its experts, and the layer's name.

    peers are the data ranks along `ep`. has_no_rows() says that the tokens of this forward pass
    stand in for a batch without rows: the layer takes part without a token. on_routing() is called
    with the routing of each forward pass. skips() says that a training step goes on although logits
    are not finite: its loss will not be, and it is skipped.

    With `parts` above 1 as many ranks compute the same tokens, each with a part of the hidden
    features of every expert: `enter` takes the layer's input to these ranks, and `leave` sums their
    outputs.
    """

    batch: GlobalBatch = field(default_factory=GlobalBatch)
    ep: Axis = field(default_factory=lambda: Axis("ep"))
    peers: tuple[int, ...] = (0,)
    name: str = ""
    has_no_rows: Callable[[], bool] = lambda: False
    on_routing: Callable[[Routing], None] = lambda _: None
    skips: Callable[[], bool] = lambda: False
    enter: Callable[[Tensor], Tensor] = identity
    leave: Callable[[Tensor], Tensor] = identity
    parts: int = 1


class Load(NamedTuple):
    """The load of a layer's experts in a forward pass over the global batch, or in several.
    computed and wanted are choices by expert; dropped is the number beyond the capacity. entropy is
    that of the softmax of a token's logits, in nats: the mean over the tokens.
    """

    computed: tuple[int, ...]
    wanted: tuple[int, ...]
    dropped: int
    tokens: int = 0
    entropy: float = 0.0

    @classmethod
    def of(cls, routing: Routing) -> "Load":
        computed = tuple(routing.loads.sum(0).tolist())
        wanted = tuple(routing.wanted.tolist())
        facts = routing.facts
        return cls(computed, wanted, routing.dropped, facts.tokens, facts.entropy)

    def plus(self, other: "Load") -> "Load":
        """The load of both."""
        tokens = self.tokens + other.tokens
        entropies = self.entropy * self.tokens + other.entropy * other.tokens
        return Load(
            tuple(map(int.__add__, self.computed, other.computed)),
            tuple(map(int.__add__, self.wanted, other.wanted)),
            self.dropped + other.dropped,
            tokens,
            entropies / max(1, tokens),
        )


class Experts(nn.Module):
    """E SwiGLU networks, D to F and back. Weights: gate and up [E, F, D], down [E, D, F]."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, hidden, width))
        self.up = nn.Parameter(torch.empty(experts, hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for p in self.parameters():
            nn.init.normal_(p, std=p.shape[-1] ** -0.5)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Rows [sum(counts), D] by expert; an expert without rows has a gradient of zeros."""
        return feed_forward(rows, counts, (self.gate, self.up, self.down))


class MoE(nn.Module):
    """x [..., D] -> (y [..., D], the weighted sum of the auxiliary losses, without dims).

    shared: a module from D to D that every token goes through as well; None: none.
    bias_rate: for the gate `sigmoid`, by how much its bias changes after a training step.
    seed: of the random numbers of `gshard` and `noisy-topk`; layers of one model draw different
        ones if they have names (`name_layers`) or different seeds.

    `load` has the last forward pass's load; None before the first.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        gate: Gate,
        shared: nn.Module | None = None,
        bias_rate: float = BIAS_RATE,
        seed: int = 0,
    ) -> None:
        super().__init__()
        integer("width", width, least=1, example=64)
        integer("hidden", hidden, least=1, example=256)
        if not isinstance(gate, Gate):
            raise bad(f"the gate {gate!r}", "a sw.Gate", 'sw.Gate("topk", experts=8, k=2)')
        if bias_rate != BIAS_RATE and gate.name != "sigmoid":
            given = f"bias_rate = {bias_rate!r} under the gate {gate.name}, which has no bias"
            raise bad(given, "bias_rate for the gate sigmoid", "sw.MoE(width, hidden, gate)")
        integer("seed", seed, least=0, example=0, most=MOST_SEED)
        self.gate, self.bias_rate, self.width = gate, bias_rate, width
        routed, noisy = gate.name not in FIXED, gate.name == "noisy-topk"
        self.router = nn.Linear(width, gate.experts, bias=False) if routed else None
        self.spread = nn.Linear(width, gate.experts, bias=False) if noisy else None
        self.experts = Experts(gate.experts, width, hidden)
        self.shared = shared
        self.place = ExpertPlace()
        self.load: Load | None = None
        self.seed, self.pass_records = seed, PassRecords()
        if gate.name in ("gshard", "noisy-topk"):
            self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        for name in ("bias", "choices") if gate.name == "sigmoid" else ():
            self.register_buffer(name, torch.zeros(gate.experts))

    def reset_buffers(self) -> None:
        for b in self.buffers(recurse=False):
            b.fill_(0)

    def forward(self, x: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The layer's output and its auxiliary loss. Called by all data ranks.

        target: [...] for `hash` the token ids; for `assigned` the expert of each token, from 0 up.

        Raises:
            InputError: `target` has another shape; a hard gate without `target`; on all data ranks,
                if the `target` of a rank has an expert that does not exist.
            NonFiniteError: on all data ranks, if a rank's logits are infinite or NaN.
        """
        if target is not None and target.shape != x.shape[:-1]:
            given = f"a call of a sw.MoE with x of shape {tuple(x.shape)} and target of shape "
            given += str(tuple(target.shape))
            raise bad(given, "a target for each token", f"target of shape {tuple(x.shape[:-1])}")
        every_ND = self.place.enter(x).flatten(0, -2)
        x_ND = every_ND[:0] if self.place.has_no_rows() else every_ND
        dtype = torch.promote_types(x.dtype, torch.float32)
        logits = x_ND.new_zeros(len(x_ND), self.gate.experts, dtype=dtype)
        if self.router is not None:
            logits = self.router(x_ND).to(dtype)
        extra = self._extra(x_ND, None if target is None else target.flatten()[: len(x_ND)])
        routing = self.gate.route(
            logits, self.place.batch, extra, losses=self.training, layer=self._name
        )
        place = self.place
        goes_on = self.training and place.skips() and not all(routing.facts.finite)
        if not goes_on:
            require_finite(self._name, routing.facts.finite, "data rank")
        self._remember(routing, extra.bias)
        exchange = Exchange.of(routing, place.batch, place.ep, place.peers)
        token = exchange.choices // routing.experts.shape[1]
        arrive = exchange.begin_dispatch(x_ND.index_select(0, token))
        of_shared = None if self.shared is None else self.shared(x)  # while rows are under way
        made = exchange.combine(self.experts(arrive(), exchange.rows_by_expert))
        weights = routing.weights.flatten()[exchange.choices].unsqueeze(-1)
        y_ND = torch.zeros_like(every_ND).index_add(0, token, made * weights.to(made))
        y = place.leave(y_ND.view_as(x))
        if of_shared is not None:
            y = y + of_shared
        y = y * math.nan if goes_on else y
        return y, self._loss(routing, logits)

    def _extra(self, x_ND: Tensor, target_N: Tensor | None) -> Extra:
        match self.gate.name:
            case "hash" if target_N is not None:
                return Extra(target=hashed(target_N, self.gate.experts))
            case "sigmoid":
                return Extra(bias=self._bias_of_pass())
            case "gshard" | "noisy-topk" if self.training:
                return self._random_numbers(x_ND)
            case _:
                return Extra(target=target_N)

    def _bias_of_pass(self) -> Tensor:
        """The bias; in a training pass it follows the choices of the previous training pass."""
        bias, choices = self.get_buffer("bias"), self.get_buffer("choices")
        if not self.training or bias.is_meta:
            return bias
        if phase() == "backward":
            return self.pass_records.replay(self._name)
        followed = balanced_bias(bias, choices, self.bias_rate)
        self.pass_records.record(followed)
        return followed

    def _random_numbers(self, x_ND: Tensor) -> Extra:
        batch, experts = self.place.batch, self.gate.experts
        own = torch.tensor([len(x_ND)], dtype=torch.int64, device="cpu")
        sizes = batch.gather(own if x_ND.is_meta else own.to(x_ND.device)).flatten().tolist()
        number = self._pass_number(counts=sum(sizes) > 0)
        first, key = sum(sizes[: batch.rank]), key_of(self.seed, self.place.name)
        device, last = x_ND.device, first + len(x_ND)
        rows = torch.arange(first, last, dtype=torch.int64, device=device)
        if self.spread is None:
            return Extra(random=uniform(rows, key, number))
        expert = torch.arange(experts, dtype=torch.int64, device=device)
        numbers = rows.unsqueeze(1) * experts + expert
        normal = torch.special.ndtri(uniform(numbers, key, number))
        return Extra(random=normal, spread=self.spread(x_ND))

    def _pass_number(self, *, counts: bool) -> int:
        """The number of this training pass; a pass without any token on any rank does not count."""
        passes = self.get_buffer("passes")
        if passes.is_meta:
            return 0
        if phase() == "backward":
            return int(self.pass_records.replay(self._name))
        number = int(passes)
        self.pass_records.record(passes)
        passes.data.add_(int(counts))
        return number

    @property
    def _name(self) -> str:
        return self.place.name or "a mixture of experts"

    def _remember(self, routing: Routing, bias: Tensor | None) -> None:
        if phase() == "backward":  # activations are recomputed
            return
        self.place.on_routing(routing)
        self.load = Load.of(routing)
        if self.training and bias is not None:
            counts = (routing.wanted.sum() > 0).to(bias.device)
            for name, now in (("bias", bias), ("choices", routing.wanted)):
                before = self.get_buffer(name)
                before.data.copy_(torch.where(counts, now.to(before), before))

    def _loss(self, routing: Routing, logits: Tensor) -> Tensor:
        """The weighted auxiliary losses. `parts` ranks sum the gradients, so each has its share."""
        total = logits.new_zeros(())
        for name, value in routing.losses.items():
            total = total + self.gate.losses.get(name, 1.0) * value
        share = total / self.place.parts
        return share + (total - share).detach() if self.place.parts > 1 else total


def require_finite(layer: str, finite: Sequence[float], rank: str) -> None:
    """Raise NonFiniteError, on all ranks, if the logits or weights of one are not finite."""
    ranks = " and ".join(str(place) for place, each in enumerate(finite) if not each)
    if ranks:
        raise NonFiniteError(
            f"The router of {layer} gave infinite numbers or NaN on {rank} {ranks}. The learning "
            'rate may be too high: lower it, or add losses={"z": 1e-3} to a sw.Gate, which keeps '
            "logits small."
        )


def name_layers(model: nn.Module) -> None:
    """Give every layer of experts its name in `model`, on which its random numbers depend."""
    for name, layer in model.named_modules():
        if isinstance(layer, MoE):
            layer.place = replace(layer.place, name=name)
