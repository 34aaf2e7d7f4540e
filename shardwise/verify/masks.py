"""Recomputation draws the same random numbers again: one step with dropout, and one without it.

    with the word       forward: x, mask     backward: x again, mask again     loss, gradients
    without the word    forward: x, mask     backward: of what was kept        must be the same

A proof sets the model's own dropout to 0 (not_comparable.py), because one process draws other
masks. These two runs have one plan except for its recomputation, and draw the same ones: here the
outputs of all layers with parameters, inside the recomputed modules, go through dropout.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.comm.world import World
from shardwise.core.plan.plan import Plan
from shardwise.engine.engine import Engine
from shardwise.models.trainable import Trainable
from shardwise.techniques.data.wrap_policy import Rule
from shardwise.techniques.recompute.apply import recomputed_modules
from shardwise.verify.difference import LEAST, ratio
from shardwise.verify.finding import NEVER, Errors
from shardwise.verify.oracles.batches import SEED

RATE: Final = 0.2
#: Words that say where recomputation keeps its inputs, or for which room it is needed.
BESIDE: Final = ("recompute:", "arenas", "device_memory:")

Make = Callable[[Trainable, Plan], Engine]
Batch = Callable[[Trainable, Engine, int], Any]


def recomputes(plan: Plan, world: World) -> bool:
    """Whether the plan recomputes activations, on ranks that draw random numbers apart.

    Ranks in threads share torch's generator.
    """
    some = any(own.recompute for own in plan.of_all_layers)
    return some and not (world.size > 1 and world.links.root.of_threads)


def compare_masks(
    trainable: Trainable, plan: Plan, units: Rule, make: Make, batch: Batch
) -> Errors:
    """The errors of a step with recomputation, relative to one without; called by all ranks.

    `make(trainable, plan)` builds an engine, and `batch(trainable, engine, step)` this
    rank's share of a batch. In
    16 bits the errors are multiples of the unit roundoff.
    """
    dropping = replace(trainable, make=lambda: _with_dropout(trainable.make(), plan, units))
    found: list[tuple[float, dict[str, Tensor], Tensor]] = []
    for own in (plan, without_recomputation(plan)):
        torch.manual_seed(SEED)  # layers with a mesh of their own take their seeds from it
        engine = make(dropping, own)
        share = batch(trainable, engine, 0)
        torch.manual_seed(SEED)
        loss = engine.step(share).loss
        gradients = {b.name: b.tensor.double().clone() for b in engine.gradients()}
        found.append((loss, gradients, torch.rand(8)))
    (loss, again, drawn), (expected, kept, wanted) = found
    unit = {"bf16": 2.0**-8, "fp16": 2.0**-11}.get(plan.precision or "", 1.0)
    sizes = {name: float(g.abs().max()) if g.numel() else 0.0 for name, g in kept.items()}
    least = LEAST * max(sizes.values(), default=0.0)
    errors = {"loss": ratio(abs(loss - expected), abs(expected))}
    errors["random numbers after it"] = 0.0 if torch.equal(drawn, wanted) else NEVER
    for name, g in kept.items():
        error = float((again[name] - g).abs().max()) if g.numel() else 0.0
        errors[name.removeprefix("grad/")] = ratio(error, max(sizes[name], least))
    return Errors("recomputation", tuple(errors), tuple(e / unit for e in errors.values()))


def without_recomputation(plan: Plan) -> Plan:
    """The plan that keeps all activations on the device, as its words say otherwise."""
    kept: list[str] = []
    for part in str(plan).split("|"):
        words = [word for word in part.split() if not word.startswith(BESIDE)]
        if words and not words[-1].endswith(":"):  # the plan of layers had nothing else
            kept.append(" ".join(words))
        elif not kept:
            kept.append("ddp")
    return Plan.parse(" | ".join(kept))


def _with_dropout(model: nn.Module, plan: Plan, units: Rule) -> nn.Module:
    """The model with dropout after each layer that has parameters, in what the plan recomputes."""
    again = recomputed_modules(model, plan, units)
    for name, module in model.named_modules():
        if _inside(name, again) and any(True for _ in module.parameters(recurse=False)):
            module.register_forward_hook(_drop)
    return model


def _inside(name: str, modules: Collection[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _drop(module: nn.Module, _inputs: Any, out: Any) -> Any:
    if not isinstance(out, Tensor) or not out.is_floating_point():
        return out
    return functional.dropout(out, RATE, module.training)
