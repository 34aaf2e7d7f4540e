"""Makes the oracles of a run in 16 bits send the tokens to the experts that the run chose.

A token with two experts of nearly equal scores may take either after rounding. It then adds to the
gradients of another expert, and no bound on rounding holds. So both oracles take the choices of the
run, and compute everything else themselves. Each choice in which the run differs from the exact
oracle must be nearly a tie there:

    run's scores        0.41 0.40 ..    first expert        error of each at most e
    exact scores        0.40 0.41 ..    second expert       gap 0.01 <= 2 e

The error of one process stands for e (rounding.py). The same holds for mixtures of other libraries,
and for other choices of a model, such as the signs of relu's inputs (ties.py).
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.ledger import Ledger
from shardwise.comm.objects import gather_object
from shardwise.comm.world import Axis, counted_axis
from shardwise.core.layouts.uneven import Counts
from shardwise.engine.engine import Engine
from shardwise.techniques.expert.apply import layers_of
from shardwise.techniques.expert.routing import Routing
from shardwise.verify.finding import Part, Parts
from shardwise.verify.oracles.mixture_oracle import Follow, Mixture
from shardwise.verify.oracles.oracles import Oracles
from shardwise.verify.oracles.ties import Calls, Follower, Sight, joined

#: The numbers of a layer's experts [N, K] of its tokens, and of their places in the queues.
EXPERTS, PLACES = -1, -2


class Routes:
    """The choices of a run since they were last followed, on all ranks."""

    def __init__(self, oracles: Oracles) -> None:
        pair = oracles.all if oracles.alone is not None else ()
        self.mixtures, self.unit = [_mixtures(oracle.model) for oracle in pair], oracles.unit
        self.followers = [Follower(oracle) for oracle in pair]
        self.sight = Sight(tuple(f"{name}." for name in layers_of(oracles.exact.model)))
        self.everyone = Axis("routes")
        self.device = torch.device("cpu")

    @property
    def on(self) -> bool:
        """Whether choices may round differently."""
        return bool(self.followers)

    def run(self, engine: Engine, act: Callable[[], Any]) -> Any:
        with Calls(engine.model, self.sight.call) if self.on else nullcontext():
            return act()

    def watch(self, engine: Engine) -> None:
        """Record the choices of this engine's layers of experts from now on."""
        if self.on:
            world = engine.world
            queue, self.device = world.everyone.transport, world.device
            self.everyone = counted_axis("routes", (queue,), Ledger(), self.device)
            for name, layer in layers_of(engine.model).items():
                see = partial(self._see, name, layer.place.on_routing)
                layer.place = replace(layer.place, on_routing=see)

    def _see(self, name: str, before: Callable[[Routing], None], routing: Routing) -> None:
        before(routing)
        self.sight.note(name, EXPERTS, routing.experts)
        self.sight.note(name, PLACES, routing.positions)

    def follow(self, engine: Engine, rows: Sequence[Counts]) -> None:
        """The oracles' next passes follow the choices of all ranks. Called by all of them."""
        if not self.on:
            return
        at = engine.plan.coordinate(engine.world.rank)
        own = engine.sharded.place, at.get("tp", 0), at.get("pp", 0), self.sight.seen
        every = gather_object(own, self.everyone, self.device)
        self.sight.seen = {}
        for mixtures, follower in zip(self.mixtures, self.followers, strict=True):
            found = joined(every, rows, engine.plan, follower.each)
            for name, mixture in mixtures.items():
                pairs = zip(found.pop((name, EXPERTS)), found.pop((name, PLACES)), strict=True)
                mixture.follow([Follow(x.to(self.device), at.to(self.device)) for x, at in pairs])
            follower.follow(found)

    def errors(self) -> list[Parts]:
        """How near to ties the followed choices were. The oracles then stop following."""
        if not self.on:
            return []
        (exact, alone), (one, other) = self.mixtures, (f.following for f in self.followers)
        pairs = [(name, exact[name].following, alone[name].following) for name in exact]
        pairs += [(name, of, other[name, number]) for (name, number), of in one.items()]
        parts = tuple(_part(*pair, self.unit) for pair in pairs)
        for mixture in (*exact.values(), *alone.values()):
            mixture.follow(())
        for follower in self.followers:
            follower.follow({})
        return [Parts("routing", parts)] if parts else []


def _mixtures(model: nn.Module) -> dict[str, Mixture]:
    layers = layers_of(model).items()
    return {name: layer.forward for name, layer in layers if isinstance(layer.forward, Mixture)}


def _part(name: str, exact: Sequence[Follow], alone: Sequence[Follow], unit: float) -> Part:
    """The largest gap of a layer, beside twice the largest error of a score of one process."""
    calls = len(exact)  # in each pass; `alone` may have made more of them
    of_alone = [[follow.scores for follow in alone[i::calls]] for i in range(calls)]
    scores = [
        (one, torch.cat(others))
        for follow, passes in zip(exact, of_alone, strict=True)
        for one, *others in zip(follow.scores, *passes, strict=True)
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
