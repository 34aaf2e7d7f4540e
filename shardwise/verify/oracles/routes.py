"""The tokens of a run in 16 bits go to the same experts in its oracles.

A token with two experts of nearly equal scores may take either after rounding. It then adds to the
gradients of another expert, which is no rounding error: no bound on rounding holds. So both oracles
take the choices of the run, and compute everything else themselves. Each choice of the run that is
not that of the exact oracle must be nearly a tie there:

    run's scores        0.41 0.40 ..    first expert        error of each at most e
    exact scores        0.40 0.41 ..    second expert       gap 0.01 <= 2 e

A choice among rounded scores is at most 2 e away, in exact ones, from the choice that is best
there. For e stands that of one process (rounding.py).
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from shardwise.comm.ledger import Ledger
from shardwise.comm.objects import gather_object
from shardwise.comm.world import Axis, counted_axis
from shardwise.engine.engine import Engine
from shardwise.techniques.expert.apply import layers_of
from shardwise.techniques.expert.routing import Routing
from shardwise.verify.finding import Part, Parts
from shardwise.verify.oracles.mixture_oracle import Follow, Mixture
from shardwise.verify.oracles.oracles import Oracles

#: Experts [N, K] of the tokens of a data rank, and the places in the queues of these.
Choices = tuple[Tensor, Tensor]


class Routes:
    """The choices of a run since they were last followed, on all ranks."""

    def __init__(self, oracles: Oracles) -> None:
        models = [oracle.model for oracle in oracles.all if oracles.alone is not None]
        self.mixtures, self.unit = [_mixtures(model) for model in models], oracles.unit
        self.seen: dict[tuple[str, int], list[Choices]] = {}  # by layer and data rank
        self.everyone = Axis("routes")
        self.device = torch.device("cpu")

    @property
    def on(self) -> bool:
        """Whether there are choices that may round differently."""
        return any(self.mixtures)

    def watch(self, engine: Engine) -> None:
        """See the choices of this engine from now on."""
        if self.on:
            world = engine.world
            queue, self.device = world.everyone.transport, world.device
            self.everyone = counted_axis("routes", (queue,), Ledger(), self.device)
            for name, layer in layers_of(engine.model).items():
                see = partial(self._see, name, layer.place.batch.rank, layer.place.on_routing)
                layer.place = replace(layer.place, on_routing=see)

    def _see(
        self, name: str, rank: int, before: Callable[[Routing], None], routing: Routing
    ) -> None:
        before(routing)
        choices = routing.experts.detach(), routing.positions.detach()
        self.seen.setdefault((name, rank), []).append(choices)

    def follow(self) -> None:
        """The oracles' next passes follow the choices of all ranks. Called by all of them."""
        if not self.on:
            return
        every = gather_object(
            {key: [(e.cpu(), p.cpu()) for e, p in each] for key, each in self.seen.items()},
            self.everyone,
            self.device,
        )
        self.seen.clear()
        by_layer: dict[str, dict[int, list[Choices]]] = defaultdict(dict)
        for seen in every:
            for (name, rank), choices in seen.items():
                by_layer[name][rank] = choices
        for mixtures in self.mixtures:
            for name, mixture in mixtures.items():
                mixture.follow(_passes(by_layer[name], self.device))

    def errors(self) -> list[Parts]:
        """How near to ties the choices were that the oracles followed, and follow no more."""
        if not self.on:
            return []
        exact, alone = self.mixtures
        parts = tuple(
            _part(name, exact[name].following, alone[name].following, self.unit) for name in exact
        )
        for mixture in (*exact.values(), *alone.values()):
            mixture.follow(())
        return [Parts("routing", parts)]


def _mixtures(model: nn.Module) -> dict[str, Mixture]:
    layers = layers_of(model).items()
    return {name: layer.forward for name, layer in layers if isinstance(layer.forward, Mixture)}


def _passes(by_rank: dict[int, list[Choices]], device: torch.device) -> list[Follow]:
    """The choices of all data ranks, those of the first first, of each pass that has tokens."""
    found: list[Follow] = []
    for of_pass in zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True):
        experts, positions = (torch.cat(each).to(device) for each in zip(*of_pass, strict=True))
        if len(experts):
            found.append(Follow(experts, positions))
    return found


def _part(name: str, exact: Sequence[Follow], alone: Sequence[Follow], unit: float) -> Part:
    """The largest gap of a layer, beside twice the largest error of a score of one process."""
    scores = [
        (one, other)
        for passes in zip(exact, alone, strict=True)
        for one, other in zip(passes[0].scores, passes[1].scores, strict=True)
    ]
    error = max((_largest(other.double() - one.double()) for one, other in scores), default=0.0)
    size = max((_largest(one.double()) for one, _ in scores), default=0.0)
    return Part(
        name,
        1,
        parallel=max((follow.gap for follow in exact), default=0.0) ** 2,
        alone=(2 * error) ** 2,
        exact=size**2,
        along=0.0,
        rounds=2 * unit,
        independent=max(1.0, sum(one.numel() for one, _ in scores)),
    )


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0
