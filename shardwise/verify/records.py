"""Records of an engine on a rank and of an oracle, and the errors of one beside the other.

`shardwise verify` compares records right after each step. The table of plans (tests/plan_runs.py)
compares records of a whole run, which other processes have made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.engine.engine import Engine
from shardwise.engine.state.box import Box
from shardwise.engine.step_end import Metrics
from shardwise.techniques.expert.apply import experts_in
from shardwise.verify.difference import Wholes, compared, scalar
from shardwise.verify.finding import BoxPlace, Errors, Parts
from shardwise.verify.oracles.async_oracle import AsyncOracle
from shardwise.verify.oracles.oracle import Oracle

#: What the names of boxes begin with, by the kind of their errors.
KINDS: Final = {"gradients": "grad/", "weights": "model/", "optimizer": "optim/"}


@dataclass(frozen=True)
class EngineStep:
    """A step and the gradients that it used; `norm` is None without clipping."""

    loss: float
    tokens: int
    norm: float | None
    gradients: Sequence[Box]

    @classmethod
    def last(cls, engine: Engine, found: Metrics) -> "EngineStep":
        gradients = () if found.skipped else engine.gradients()
        return cls(found.loss, found.tokens, found.grad_norm, gradients)


@dataclass(frozen=True)
class OracleStep:
    """The same step in one process; its gradients are whole tensors, by the names of boxes."""

    loss: float
    tokens: int
    norm: float
    gradients: Wholes

    @classmethod
    def of(
        cls, oracle: Oracle | AsyncOracle, batch: Any, clip: float | None, idle: int = 0
    ) -> "OracleStep":
        loss, weights = oracle.step(batch, clip, idle), oracle.weights
        gradients = {f"grad/{name}": x for name, x in weights.used.items()}
        return cls(loss, oracle.task.tokens(batch), weights.norm, gradients)


def oracle_state(oracle: Oracle | AsyncOracle) -> Wholes:
    weights = {f"model/{name}": x for name, x in oracle.weights.values().items()}
    return weights | {f"optim/{name}": x for name, x in oracle.weights.state().items()}


def step_errors(
    number: int, run: EngineStep, oracles: Sequence[OracleStep], unit: float = 0.0
) -> list[Errors | Parts]:
    """The errors of the numbers of a step. `unit` is the unit roundoff of 16 bits, else 0."""
    found = list[Errors | Parts]()
    for name in ("loss", "tokens", "norm"):
        value = getattr(run, name)
        if value is not None:
            wanted = [float(getattr(oracle, name)) for oracle in oracles]
            found.append(scalar("loss", f"{name} of step {number}", float(value), wanted, unit))
    return found


def tensor_errors(
    boxes: Sequence[Box], oracles: Sequence[Wholes], unit: float = 0.0, start: Wholes | None = None
) -> list[tuple[Errors | Parts, frozenset[BoxPlace]]]:
    """The errors of a rank's boxes by kind, with pieces; in 16 bits of the change since `start`."""
    found = list[tuple[Errors | Parts, frozenset[BoxPlace]]]()
    for kind, begin in KINDS.items():
        if not any(name.startswith(begin) for name in oracles[0]):
            continue
        own = [box for box in boxes if box.name.startswith(begin)]
        # a parameter without any gradient has zeros
        none = {b.name: torch.zeros(b.shape) for b in own if kind == "optimizer"}
        wholes = [_named(none | dict(one), begin) for one in oracles]
        errors = compared(kind, own, wholes, unit, start if kind == "weights" else None)
        found.append((errors, BoxPlace.of(own)))
    return found


def _named(wholes: Wholes, begin: str) -> Wholes:
    return {n.removeprefix(begin): x for n, x in wholes.items() if n.startswith(begin)}


# --- the outputs of a model for a few rows --------------------------------------------------------


def expected_outputs(oracle: Oracle | AsyncOracle, batch: Any, ranks: int, rank: int) -> Tensor:
    """The oracle's outputs for the copy of `batch` of data rank `rank`. Every rank has the same
    rows; layers of experts count the tokens of all copies, so one process computes them too.
    """
    if not experts_in(oracle.model):
        return oracle.evaluate(lambda model: returned(oracle, model, batch))

    def copied(x: Tensor) -> Tensor:
        return torch.cat([x] * ranks) if x.dim() else x

    every = pytree.tree_map_only(Tensor, copied, batch)
    found = oracle.evaluate(lambda model: returned(oracle, model, every))
    return found.tensor_split(ranks)[rank].clone() if found.dim() else found


def returned(oracle: Oracle | AsyncOracle, model: nn.Module, batch: Any) -> Tensor:
    """The first tensor that `model` returns in its loss; the loss itself if there is none."""
    seen: list[Tensor] = []

    def note(_module: nn.Module, _args: Any, found: Any) -> None:
        found = getattr(found, "logits", found)
        leaves = pytree.tree_leaves(found)
        seen.extend(x for x in leaves if isinstance(x, Tensor) and x.is_floating_point())

    handle = model.register_forward_hook(note)
    try:
        loss = oracle.task.loss_of(model, batch, oracle.dtype)
    finally:
        handle.remove()
    return seen[0] if seen else loss
