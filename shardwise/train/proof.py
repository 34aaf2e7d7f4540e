"""What one rank finds when a plan is proved: its own pieces beside the same model trained whole.

Every rank trains the model twice, on the same global batches: once as the plan says, on its share
of them, and once in a world of one, on all of them. It compares what it holds itself: the loss, its
pieces of every gradient, its pieces of every weight after the last step.  In 16 bits gradients are
those of the first update; where the schedule updates by itself those of the first step's last one,
and alone is a simulation, stale.py.

A tensor's error is taken against the whole tensor of the world of one, b:

    fp64, fp32    max |a - b| / max |b|        every element counts
    bf16, fp16    norm(a - b) / norm(b)        a single element is rounded by half an eps or, where
                                               terms cancel, by as much as its terms were

where the tensor is smaller than a thousandth of the largest one (bias of attention keys, whose
gradient is zero but for rounding), that thousandth stands for it: relative to noise, noise is 1.
The optimizer is AdamW with an epsilon of 1e-4, which makes the update a smooth function of the
gradient: with the usual 1e-8 the sign of such a zero would be a whole step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.comm.world import World, alone
from shardwise.core.plan import Plan
from shardwise.core.schedule.library import updates
from shardwise.engine.box import Box
from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.engine.recipe import AdamW
from shardwise.engine.training import Metrics
from shardwise.models.registry import find
from shardwise.models.trainable import Trainable
from shardwise.predict.traffic import Line, by_kind
from shardwise.train.stale import Simulation

SEED = 20260
RECIPE = AdamW(lr=1e-3, eps=1e-4)
#: Small enough that no gradient of these models overflows in fp16 and the update is skipped.
LOSS_SCALE = 2.0**8
LEAST = 1e-3
NEVER = 1e300  # the error of what is not a number


@dataclass(frozen=True)
class Errors:
    """The relative error of each tensor of a kind ("loss", "gradients", "weights"), in order."""

    kind: str
    names: tuple[str, ...]
    errors: tuple[float, ...]

    @property
    def largest(self) -> float:
        """The largest of them."""
        return max(self.errors, default=0.0)


@dataclass(frozen=True)
class Finding:
    """What one rank found: errors by kind; bytes of the last step and memory after it, both ways.

    Gradients have their errors for each step; `bytes_hold` is of every step, phases apart.
    """

    rank: int
    errors: tuple[Errors, ...]
    bytes_hold: bool
    bytes_measured: dict[str, int]
    bytes_predicted: dict[str, int]
    memory_measured: dict[str, int]
    memory_predicted: dict[str, int]


def prove(world: World, plan: Plan, model: str, steps: int) -> Finding:
    """Train the model named `model` by `plan` and alone, and compare. Called by all ranks."""
    trainable = find(model)
    ours = engine_of(trainable, plan, world)
    oracle = alone_of(trainable, plan, world.device)
    return compare(ours, oracle, trainable.batch, steps)


def engine_of(trainable: Trainable, plan: Plan, world: World) -> Engine:
    """The engine that a proof trains with."""
    engine = parallelize(
        trainable.build(),
        plan,
        world,
        optimizer=RECIPE,
        loss=trainable.loss,
        tokens=trainable.tokens,
        clip=None if _by_itself(plan) else 1.0,
    )
    engine.load_scalars(engine.scalars() | {"loss_scale": LOSS_SCALE})
    return engine


def alone_of(trainable: Trainable, plan: Plan, device: torch.device) -> "Oracle":
    """The same training in a world of one; where the schedule updates by itself, a simulation."""
    if _by_itself(plan):
        model = trainable.build(device)
        return Simulation(model, plan, RECIPE, trainable.loss, trainable.tokens)
    return engine_of(trainable, Plan(precision=plan.precision), alone(device))


def _by_itself(plan: Plan) -> bool:
    return updates(plan.pipeline, plan.mesh.size_of("pp")) > 0


class Oracle(Protocol):
    """What a run is compared with."""

    def step(self, batch: Any) -> Metrics: ...
    def gradients(self) -> list[Box]: ...
    def boxes(self) -> list[Box]: ...


def compare(
    ours: Engine, oracle: Oracle, batch: Callable[[int, int, torch.device], Any], steps: int
) -> Finding:
    """Train both on `batch(rows, seed, device)`, a new one each step, and compare.

    In every second step, the first among them, ranks hold unequal numbers of rows.
    """
    by_norm = ours.plan.precision in ("bf16", "fp16")
    once = by_norm or _by_itself(ours.plan)  # later gradients are of weights that are rounded
    losses: list[float] = []
    gradients: list[Errors] = []
    bytes_hold = True
    for step in range(steps):
        rows = 2 * ours.data_ranks * ours.microbatches - (step % 2 == 0)
        whole = batch(rows, SEED + step, ours.world.device)
        share = _share(whole, ours)
        mine, theirs = _drawn(step, ours, share), _drawn(step, oracle, whole)
        losses.append(_ratio(abs(mine.loss - theirs.loss), abs(theirs.loss)))
        if not (gradients and once) and not (mine.skipped or theirs.skipped):
            gradients += [_errors("gradients", ours.gradients(), oracle.gradients(), by_norm)]
        bytes_hold &= _sent(ours) == ours.step_bytes(first=step == 0)
    weights = _errors("weights", _weights(ours), _weights(oracle), by_norm)
    gradients = gradients or [Errors("gradients", ("none: every update was skipped",), (NEVER,))]
    named = tuple(f"loss of step {step}" for step in range(1, steps + 1))
    return Finding(
        ours.world.rank,
        (Errors("loss", named, tuple(losses)), *gradients, weights),
        bytes_hold,
        ours.measured_bytes(),
        by_kind(ours.step_bytes(first=steps == 1)),
        ours.memory(),
        ours.predicted_memory(),
    )


def _drawn(step: int, engine: Oracle, batch: Any) -> Metrics:
    """A step in which dropout draws what it draws in the other engine's."""
    torch.manual_seed(SEED + step)
    return engine.step(batch)


def _share(whole: Any, engine: Engine) -> Any:
    """This rank's rows: the first ranks have one more where there are not enough for all."""
    n, rank = engine.data_ranks, engine.data_rank
    return pytree.tree_map_only(Tensor, lambda x: x.tensor_split(n)[rank], whole)


def _sent(engine: Engine) -> dict[Line, int]:
    return {Line(*key): t.sent_bytes for key, t in engine.last.items() if t.sent_bytes}


def _weights(engine: Oracle) -> list[Box]:
    return [box for box in engine.boxes() if box.name.startswith("model/")]


@torch.no_grad()
def _errors(kind: str, ours: Sequence[Box], oracle: Sequence[Box], by_norm: bool) -> Errors:
    """The error of each tensor that this rank holds something of, in the order of the model."""
    wholes = {box.name: box.tensor.double() for box in oracle}
    size = _norm if by_norm else _largest
    least = LEAST * max((_typical(whole, by_norm) for whole in wholes.values()), default=0.0)
    found: dict[str, float] = {}
    for box in ours:
        whole = wholes[box.name]
        part = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        scale = max(size(whole), least * (whole.numel() ** 0.5 if by_norm else 1.0))
        error = _ratio(size(box.tensor.double() - part), scale)
        found[box.name] = max(found.get(box.name, 0.0), error)
    names = tuple(name.partition("/")[2] for name in found)
    return Errors(kind, names, tuple(found.values()))


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x))


def _typical(x: Tensor, by_norm: bool) -> float:
    """The size of an element: the root of the mean square, or the largest."""
    return _norm(x) / max(1, x.numel()) ** 0.5 if by_norm else _largest(x)


def _ratio(difference: float, scale: float) -> float:
    if difference == 0.0:
        return 0.0
    ratio = difference / scale if scale else NEVER
    return NEVER if math.isnan(ratio) else min(ratio, NEVER)
