"""Linear layers in tiles: blocks of rows of the weight, gathered and used one after another.

    W [F, D] = | W0 |     y = | x W0^T | x W1^T | x W2^T |      each tile is a module, and a unit of
               | W1 |                                           its own: it is gathered for its call
               | W2 |                                           and freed before the next but one

    forward     gather 0 | use 0, gather 1 | free 0, use 1, gather 2 | free 1, use 2
    backward    use 2, gather 1 | free and reduce 2, use 1, gather 0 | free and reduce 1, use 0

So the device has two tiles of the weight at once, and the gradients of a few, but never all of
them. A layer of logits computes a cross-entropy tile by tile too (tiled_logits.py). (Memory-centric
tiling: Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857, section 5.1.3.)

The flat parameter of a tile has the name of the user's parameter, and its layout says which rows it
holds: on an axis `tile` of as many ranks as tiles, all of which this rank plays, one after another.
The user's parameter keeps its name and its place in the model, and holds no elements.

F  features of the output    D  features of the input    N  positions
"""

import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.comm.parameter import become, parameter_like
from shardwise.core.errors import bad
from shardwise.core.layouts.uneven import Cut, even
from shardwise.core.mesh import TILE
from shardwise.core.model_spec import TiledParam
from shardwise.core.plan.plan import Plan
from shardwise.kernels.cross_entropy import under_autocast
from shardwise.techniques.tile.tiled_logits import TileSums, tiled_logits
from shardwise.techniques.tile.word import LARGE
from shardwise.wrap.wrap_policy import Rule, UnitSpec, blocks


class Tile(nn.Module):
    """Rows [start, stop) of a linear layer's weight and bias; `own` parameters are unregistered."""

    def __init__(self, linear: nn.Linear, start: int, stop: int) -> None:
        super().__init__()
        self.start, self.stop = start, stop
        self.own: dict[str, nn.Parameter] = {}
        for name, p in linear.named_parameters(recurse=False):
            self.own[name] = parameter_like(p, p.data[start:stop])

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        totals: bool = False,
    ) -> Any:
        """The outputs of these rows for x [..., D]; with targets [N], what their loss needs."""
        weight, bias = self.own["weight"], self.own.get("bias")
        if targets is None:
            return functional.linear(x, weight, bias)
        return TileSums.apply(x, weight, bias, targets - self.start, dtype, totals)


class TiledForward:
    """Replaces the forward of a linear layer; `logits`: its output may be logits of a loss."""

    def __init__(self, tiles: Sequence[Tile], *, logits: bool) -> None:
        self.tiles, self.logits = list(tiles), logits

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002  # as nn.Linear names it
        if self.logits and not under_autocast(input):  # which chooses types where it computes
            return tiled_logits(input, self.tiles)
        return torch.cat([tile(input) for tile in self.tiles], -1)


def into_tiles(linear: nn.Linear, cut: Cut, *, logits: bool) -> list[Tile]:
    found = [Tile(linear, *ranges[0]) for ranges in cut.ranges]
    linear.forward = TiledForward(found, logits=logits)
    linear.add_module("tiles", nn.ModuleList(found))
    return found


@dataclass(frozen=True)
class Tiling:
    """The tiled layers of a model by name. Without any, every method returns what it is given.
    `params` maps the names of the parameters of tiles, "head.tiles.0.weight", to their rows.
    """

    layers: Mapping[str, nn.Linear] = field(default_factory=dict[str, nn.Linear])
    tiles: Mapping[str, Sequence[Tile]] = field(default_factory=dict[str, Sequence[Tile]])
    params: Mapping[str, TiledParam] = field(default_factory=dict[str, TiledParam])

    def divided(self, specs: Sequence[UnitSpec]) -> list[UnitSpec]:
        """The units, with a unit for each tile in place of that of its layer."""
        found: list[UnitSpec] = []
        for spec in specs:
            if spec.name not in self.tiles:
                found.append(spec)
                continue
            for place, tile in enumerate(self.tiles[spec.name]):
                name = f"{spec.name}.tiles.{place}"
                params = [(f"{name}.{key}", p) for key, p in tile.own.items()]
                found.append(UnitSpec(name, [tile], block=True, params=params))
        return found

    def plain(self, name: str) -> str:
        return self.params[name].name if name in self.params else name

    def place(self, name: str) -> dict[str, int]:
        return {TILE: self.params[name].place} if name in self.params else {}

    def release(self, device: torch.device | None) -> None:
        """Free the parameters of the layers, whose values the tiles have."""
        for layer in self.layers.values():
            for p in layer.parameters(recurse=False):
                empty = torch.empty((0, *p.shape[1:]), dtype=p.dtype, device=device or p.device)
                become(p, empty)


def tile(model: nn.Module, plan: Plan, rule: Rule) -> Tiling:
    """Tile the layers of `model` that the plan names, in place; `rule` chooses the blocks."""
    layers = tiled_layers(model, plan)
    if plan.tiled is None:
        return Tiling()
    inside = [f"{name}." for name in blocks(model, rule)]
    found: dict[str, Sequence[Tile]] = {}
    params: dict[str, TiledParam] = {}
    for name, layer in layers.items():
        cut = even(0, layer.out_features, plan.tiled.number)
        keys = [key for key, _ in layer.named_parameters(recurse=False)]
        logits = not any(name.startswith(block) for block in inside)
        found[name] = into_tiles(layer, cut, logits=logits)
        params |= {
            f"{name}.tiles.{place}.{key}": TiledParam(f"{name}.{key}", place, cut)
            for place in range(cut.ranks)
            for key in keys
        }
    return Tiling(layers, found, params)


def tiled_layers(model: nn.Module, plan: Plan) -> dict[str, nn.Linear]:
    """The linear layers that the plan tiles, by name: by default those with at least `LARGE` times
    the weights of the largest. Layers whose parameters another module has too are not tiled.
    """
    asked = plan.tiled
    if asked is None:
        return {}
    uses = Counter(p for m in model.modules() for p in m.parameters(recurse=False))
    every = {name: m for name, m in model.named_modules() if type(m) is nn.Linear and name}
    shared = [n for n, m in every.items() if any(uses[p] > 1 for p in m.parameters())]
    own = {name: layer for name, layer in every.items() if name not in shared}
    if not asked.patterns:
        most = max((layer.weight.numel() for layer in own.values()), default=0)
        chosen = {n: m for n, m in own.items() if m.weight.numel() >= LARGE * most}
    else:
        unmatched = [pattern for pattern in asked.patterns if not fnmatch.filter(every, pattern)]
        if unmatched:
            raise bad(
                f"tile:{asked}, in which {' and '.join(unmatched)} matches no linear layer",
                f"names of nn.Linear modules: {_listed(list(own))}",
                f"tile:{asked.number}={next(reversed(own), 'head')}",
            )
        chosen = {name: layer for name, layer in every.items() if asked.matches(name)}
    for name in chosen.keys() & {*shared}:
        raise bad(
            f"tile:{plan.tile}, which tiles {name}, whose weight another module has too",
            f"layers with a weight of their own: {_listed(list(own))}",
            f"a model in which {name} has its own weight, or a plan without tile",
        )
    if not chosen:
        raise bad(
            f"tile:{plan.tile} and a {type(model).__name__} without a linear layer to tile",
            "a model with an nn.Linear whose weight no other module has",
            "the plan without tile",
        )
    least = min(chosen, key=lambda name: chosen[name].out_features)
    if (features := chosen[least].out_features) < asked.number:
        raise bad(
            f"tile:{plan.tile} and the layer {least} with {features} output features",
            "as many tiles as the layer has output features, or fewer",
            f"tile:{features}, or other layers, as in tile:2=head",
        )
    return chosen


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + ", ..." * (len(names) > 6) if names else "this model has none"
