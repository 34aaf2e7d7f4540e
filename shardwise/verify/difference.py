"""The errors of a rank's tensors against the oracle's, tensor by tensor; records of both.

    fp64, fp32    max |a - b| / max |b|, of the whole tensor b: every element counts
    bf16, fp16    sums of squares, which rounding.py compares with a bound

In fp64 and fp32 the error of a tensor below a thousandth of the largest of its kind (the bias of
attention keys, whose gradient is zero except for rounding) is divided by that thousandth, or its
square for squared gradients: noise relative to noise would be 1.

Computation in fp32 has a second oracle, whose initial weights differ by their last bit. The change
of a tensor between the two is its noise: no run can be nearer to another. An error of ten times the
noise counts as at most 1e-5, the bound of fp32.

`shardwise verify` compares records right after each step. The table of plans (tests/plan_runs.py)
compares records of a whole run, which other processes have made.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.engine.engine import Engine
from shardwise.engine.state.box import Box, block
from shardwise.engine.step_end import Metrics
from shardwise.techniques.expert.apply import experts_in
from shardwise.verify.finding import NEVER, BoxPlace, Errors, Part, Parts
from shardwise.verify.oracles.async_oracle import AsyncOracle
from shardwise.verify.oracles.oracle import Oracle

LEAST = 1e-3
#: The least size of a tensor, in units of its noise.
OF_NOISE = 10 / 1e-5

#: Whole tensors of one process by name.
Wholes = Mapping[str, Tensor]


@torch.no_grad()
def compared(
    kind: str,
    boxes: Sequence[Box],
    oracles: Sequence[Wholes],
    unit: float = 0.0,
    start: Wholes | None = None,
) -> Errors | Parts:
    """The errors of `boxes`, named "word/name of an oracle's". In 16 bits of unit roundoff `unit`,
    the oracles are in fp64 and in 16 bits; with a `start` the change since then is compared.
    """
    if not unit:
        return _relative(kind, boxes, oracles[0], oracles[-1])
    return Parts(kind, tuple(_part(box, oracles, unit, start) for box in boxes))


def _relative(kind: str, boxes: Sequence[Box], exact: Wholes, perturbed: Wholes) -> Errors:
    sizes = {name: _largest(whole) for name, whole in exact.items()}
    largest: dict[str, float] = {}
    for name, size in sizes.items():
        largest[_key(name)] = max(largest.get(_key(name), 0.0), size)
    found: dict[str, float] = {}
    for box in boxes:
        name = _name(box)
        least = largest[_key(name)] * LEAST ** (2 if _key(name).endswith("_sq") else 1)
        error = _largest(_beside(box, exact[name]) - _within(exact[name], box).double())
        noise = OF_NOISE * _largest(exact[name] - perturbed[name])
        found[name] = max(found.get(name, 0.0), ratio(error, max(sizes[name], least, noise)))
    return Errors(kind, tuple(found), tuple(found.values()))


def _part(box: Box, oracles: Sequence[Wholes], unit: float, start: Wholes | None) -> Part:
    name = _name(box)
    exact, alone = (_within(wholes[name], box).double() for wholes in oracles)
    parallel, alone = _beside(box, exact) - exact, alone - exact
    if start is not None:
        exact = exact - _within(start[name], box).double()
    twice = 2 if _key(name).endswith("_sq") else 1  # a square has twice the error
    products = alone * exact  # those of a row or a column may agree
    sums = [products.sum(dim) for dim in range(products.dim()) if products.dim() > 1]
    return Part(
        name,
        exact.numel(),
        parallel=_squares(parallel),
        alone=_squares(alone),
        exact=_squares(exact),
        along=_number(float((parallel * exact).sum())),
        rounds=unit * twice,
        replica=box.replica,
        independent=min(independent(alone), independent(exact)) / twice,
        drift=_number(float(products.sum())),
        drift_varies=max(_squares(x) for x in (products, *sums)),
    )


def independent(errors: Tensor) -> float:
    """About how many independent roundings determine the norm of these errors.

    Of n normal numbers the square of the sum of squares, over the sum of fourth powers, is n / 3. A
    matrix [m, n] of rank 1 has m + n roundings, and one of independent numbers has
    m n / (m + n) as its (sum of s^2)^2 / sum of s^4, of the singular values s.
    """
    squares = errors.square()
    total = float(squares.sum())
    if total == 0 or not math.isfinite(total):
        return 1.0
    found = min(3 * total**2 / float(squares.square().sum()), errors.numel())
    if errors.dim() > 1:
        matrices = errors.flatten(0, -3) if errors.dim() > 2 else errors.unsqueeze(0)
        gram = matrices @ matrices.mT
        found = min(found, total**2 / float(gram.square().sum()) * sum(errors.shape[-2:]))
    return max(1.0, found)


def scalar(
    kind: str, name: str, found: float, oracles: Sequence[float], unit: float = 0.0
) -> Errors | Parts:
    of_found, *of_oracles = (torch.tensor(x, dtype=torch.float64) for x in (found, *oracles))
    wholes = [{name: number} for number in of_oracles]
    return compared(kind, [Box.full(f"number/{name}", of_found)], wholes, unit)


def ratio(difference: float, scale: float) -> float:
    """`difference` over `scale`: 0 if the difference is 0, NEVER if it is not a number."""
    if difference == 0.0:
        return 0.0
    found = difference / scale if scale else NEVER
    return NEVER if math.isnan(found) else min(found, NEVER)


def _name(box: Box) -> str:
    return box.name.partition("/")[2]


def _key(name: str) -> str:
    return name.rpartition("/")[0]


def _beside(box: Box, expected: Tensor) -> Tensor:
    """On the device of `expected`, since a box may be in host memory."""
    return box.tensor.to(expected.device).double()


def _within(whole: Tensor, box: Box) -> Tensor:
    return block(whole, box.offsets, box.sizes)


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _squares(x: Tensor) -> float:
    return _number(float(x.square().sum()))


def _number(x: float) -> float:
    return x if math.isfinite(x) else NEVER


# --- records --------------------------------------------------------------------------------------

#: What the names of boxes begin with, by the kind of their errors.
KINDS: Final = {"gradients": "grad/", "weights": "model/", "optimizer": "optim/"}


@dataclass(frozen=True)
class EngineStep:
    """A step and the gradients that it used; `norm` is None without clipping."""

    loss: float
    tokens: float
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
    tokens: float
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
