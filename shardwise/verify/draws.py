"""Dropout on several ranks: which of them draw the same masks.

    tensor ranks, equal activations             the same masks
    tensor ranks, each a part of activations    different masks
    stages, microbatches and data ranks         different masks, under a schedule

One process draws other masks (not_comparable.py), so that no step of it is compared. But which
masks are equal follows from the activations alone (arXiv 1909.08053, appendix B.2). After its other
steps the engine takes one in which numbers are drawn and not used, from which it learns that some
are, and one with dropout after each layer that has parameters. In that one each rank records its
masks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.comm.objects import all_gather_object
from shardwise.core.plan.plan import Plan
from shardwise.engine.engine import Engine
from shardwise.techniques.expert.apply import stacks_of
from shardwise.verify.finding import NEVER, Errors
from shardwise.verify.masks import RATE
from shardwise.verify.oracles.batches import SEED

#: Masks of fewer elements may be equal by chance.
ENOUGH: Final = 64
#: The relative difference of activations that counts as none.
CLOSE: Final = 1e-9


@dataclass(frozen=True)
class Draw:
    """A mask, and of what it was drawn: the layer, and two numbers that tell its output.

    `whole` is true if the output has as many features as in the plain model.
    """

    layer: str
    mask: int
    output: tuple[float, float]
    whole: bool

    def same_output(self, other: "Draw") -> bool:
        """Whether another rank has the same activations here."""
        pairs = zip(self.output, other.output, strict=True)
        return all(abs(a - b) <= CLOSE * max(abs(a), abs(b)) for a, b in pairs)


def draws_on_ranks(engine: Engine) -> bool:
    """Whether the plan says which ranks draw the same; ranks in threads share the generator."""
    plan = engine.plan
    several = plan.mesh.size_of("tp") * plan.mesh.size_of("pp") > 1
    apart = any(each.has_axes for each in plan.layers)
    return several and not apart and not engine.world.links.root.of_threads


def compare_draws(engine: Engine, batch: Any, plain: nn.Module) -> Errors:
    """Whether the masks of all ranks are equal where they should be, and differ elsewhere.

    `plain` is the model before it was divided. Called by all ranks; the engine is of no use after.
    """
    draws: list[Draw] = []
    sizes = {
        name: {size for p in module.parameters(recurse=False) for size in p.shape}
        for name, module in plain.named_modules()
    }
    experts = tuple(stacks_of(plain))
    layers = {
        name: module
        for name, module in engine.model.named_modules()
        if sizes.get(name) and not name.startswith(experts or "\0")
    }
    handles = [module.register_forward_pre_hook(_draw) for module in layers.values()]
    engine.step(batch)
    for handle in handles:
        handle.remove()
    for name, module in layers.items():
        module.register_forward_hook(partial(_drop, draws, name, sizes[name]))
    torch.manual_seed(SEED)
    engine.step(batch)
    every: list[list[Draw]] = all_gather_object(draws, engine.world)
    wrong = _wrong(engine.plan, dict(enumerate(every)))
    return Errors(
        "random numbers", wrong or ("masks",), (NEVER if wrong else 0.0,) * (len(wrong) or 1)
    )


def _draw(*_: Any) -> None:
    torch.rand(())


def _drop(
    draws: list[Draw], name: str, sizes: set[int], module: nn.Module, _inputs: Any, out: Any
) -> Any:
    if type(out) is not Tensor or out.is_meta or not out.is_floating_point() or not module.training:
        return out
    mask = functional.dropout(torch.ones_like(out), RATE)
    if torch._C._current_graph_task_id() == -1:  # not a recomputation
        x, bits = out.detach().double(), (mask.detach() != 0).flatten().tolist()
        number = hash(tuple(bits)) if len(bits) >= ENOUGH else 0
        told = float(x.sum()), float(x.square().sum())
        draws.append(Draw(name, number, told, out.shape[-1] in sizes))
    return out * mask


def _wrong(plan: Plan, draws: Mapping[int, list[Draw]]) -> tuple[str, ...]:
    """The layers whose masks are wrong."""
    places = {rank: plan.coordinate(rank) for rank in draws}
    staged, found = plan.pipeline is not None, list[str]()
    for mine in draws.values():
        seen = [one for one in mine if one.mask]
        masks = [one.mask for one in seen]
        found += [f"{one.layer}, drawn twice" for one in seen if masks.count(one.mask) > 1]
    for a, b in combinations(draws, 2):
        apart = {axis for axis, place in places[a].items() if places[b][axis] != place}
        if apart == {"tp"}:
            pairs = zip(draws[a], draws[b], strict=True)
            found += [f"{x.layer} on ranks {a} and {b}" for x, y in pairs if _differ_wrongly(x, y)]
        elif staged:
            known = {one.mask for one in draws[a] if one.mask}
            found += [f"{one.layer} on ranks {a} and {b}" for one in draws[b] if one.mask in known]
    return tuple(dict.fromkeys(found))


def _differ_wrongly(x: Draw, y: Draw) -> bool:
    if not x.mask:
        return False
    return x.mask == y.mask if not x.same_output(y) else x.whole and x.mask != y.mask
