"""A training, and the comparison of every rank's pieces with one process's whole."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shardwise.comm.world import World
from shardwise.core.tally import Key, Tally, sent_bytes
from shardwise.engine.engine import Engine
from shardwise.engine.memory import resting
from shardwise.engine.state.box import Box
from shardwise.engine.step_end import Metrics
from shardwise.flat.flat_parameter import Flat
from shardwise.models import gpt
from shardwise.models.trainable import fill
from shardwise.observe.dry_engine import ALONE
from shardwise.observe.dry_twin import DryTwin
from shardwise.techniques.expert.apply import ExpertLayout
from shardwise.verify.finding import Costs
from shardwise.verify.oracles.batches import Division
from shardwise.verify.oracles.textbook import Uses
from tests.engine.cases import (
    CONFIG,
    Case,
    Run,
    Task,
    build,
    expected_near,
    options_of,
    oracle,
    ranks_of,
    share,
    text,
)

#: Half the heads share keys and values; nothing divides by 2 but the heads, nothing by 4.
SMALL = replace(CONFIG, heads=4, kv_heads=2, hidden_size=24)
SHAPES = {"untied": SMALL, "tied": replace(SMALL, tied=True)}
#: An update that is a smooth function of the gradient, so that rounding stays rounding.
ADAMW: dict[str, Any] = {"options": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}}


def made(shape: str) -> nn.Module:
    model = gpt.GPT(SHAPES[shape])
    fill(model, seed=3)
    return model


def gpt_task(shape: str = "untied", rows: int = 7) -> Task:
    return Task(partial(made, shape), partial(text, rows=rows))


@dataclass
class Held:
    """What one rank saw of a training; `memory` is measured, and predicted."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    grads: list[list[Box]] = field(default_factory=list)
    weights: list[Box] = field(default_factory=list)
    costs: Costs = field(default_factory=Costs)
    memory: tuple[dict[str, int], dict[str, int]] = ({}, {})
    lines: dict[Key, Tally] = field(default_factory=dict)

    def step(self, engine: Engine, batch: Any) -> Metrics:
        metrics = engine.step(batch)
        self.note(engine, metrics)
        return metrics

    def note(self, engine: Engine, metrics: Metrics) -> None:
        """What a step gave, and the gradients it used."""
        self.losses.append(metrics.loss)
        self.norms.append(metrics.grad_norm)
        self.grads.append(pieces(engine.gradients(), "grad/"))

    def ended(self, engine: Engine) -> "Held":
        self.lines, self.weights = dict(engine.last), pieces(engine.boxes(), "model/")
        return self


def kept(boxes: Sequence[Box]) -> list[Box]:
    """Copies on the host, which the next step does not change."""
    return [replace(box, tensor=box.tensor.detach().to("cpu", copy=True)) for box in boxes]


def pieces(boxes: list[Box], kind: str) -> list[Box]:
    """Copies of the boxes of a kind, by the names of parameters."""
    found = kept([box for box in boxes if box.name.startswith(kind)])
    return [replace(box, name=box.name.removeprefix(kind)) for box in found]


def sent(engine: Engine) -> dict[Key, int]:
    return sent_bytes(engine.last)


def step_as_predicted(engine: Engine, dry: DryTwin, batch: Any) -> Metrics:
    """A step, which sends what the dry run says; so do its metrics, but for an update beside it."""
    theory, metrics = dry.step(engine, batch), engine.step(batch)
    assert sent(engine) == theory
    assert engine.plan.offload or metrics.bytes == sum(theory.values())
    return metrics


def mine(engine: Engine, batch: Any) -> Any:
    """This rank's share of the global batch, on its device."""
    own = share(batch, engine.data_rank, engine.data_ranks)
    return tree_map(lambda x: x.to(engine.world.device), own)


def run(world: World, task: Task, case: Case, share_of: Callable[..., Any] = mine) -> Held:
    """The case on this world, step by step, on what `share_of` gives this rank of a batch."""
    engine, held = build(world, task, case), Held()
    for step in range(case.steps):
        held.step(engine, share_of(engine, task.batch(step)))
    return held.ended(engine)


def uses_of(task: Task) -> Uses:
    """How a forward of the plain model uses its weights."""
    model, batch = task.make(), task.batch(0)
    if len({p.dtype for p in model.parameters()}) == 1:
        model = model.double()
        batch = tree_map(lambda x: x.double() if x.is_floating_point() else x, batch)
    with Uses(model) as uses:
        task.loss(model, batch)
    return uses


def train(world: World, task: Task, case: Case, share_of: Callable[..., Any] = mine) -> Held:
    """The same, with the predictions of what is sent and held beside it."""
    engine, held = build(world, task, case), Held()
    dry = DryTwin(task.make(), engine.plan, options_of(task, case), world.rank)
    experts = engine.sharded.of(ExpertLayout).mixes
    loads = oracle(task, case).loads if experts else [()] * case.steps
    with ALONE:
        uses = uses_of(task)
    for step in range(case.steps):
        whole = task.batch(step)
        own = share_of(engine, whole)
        theory = dry.step(engine, own, Division.of(engine).counts(whole))
        held.step(engine, own)
        held.costs = held.costs.after(engine, theory, uses, loads[step])
        held.memory = resting(engine), dry.memory()
    return held.ended(engine)


def assert_parity(ranks: list[Held], expected: Run, tolerance: float) -> None:
    """Losses, norms, gradients of every step, weights; each element is some rank's own, once."""
    for held in ranks:
        assert held.losses == expected_near(expected.losses, tolerance)
        assert held.norms == expected_near(expected.norms, tolerance)
    for step, wanted in enumerate(expected.grads):
        wholes = {
            n: torch.zeros_like(expected.weights[n]) if g is None else g for n, g in wanted.items()
        }
        assert_pieces([held.grads[step] for held in ranks], wholes, tolerance)
    assert_pieces([held.weights for held in ranks], expected.weights, tolerance)


def equals_one(
    on_ranks: Callable[..., list[Held]], task: Task, case: Case, tolerance: float = 1e-10
) -> list[Held]:
    """The case on the ranks of its plan is one process's training."""
    ranks = on_ranks(ranks_of(case.plan), run, task, case)
    assert_parity(ranks, oracle(task, case), tolerance)
    return ranks


def holds(
    on_ranks: Callable[..., list[Held]], task: Task, case: Case, tolerance: float = 1e-10
) -> list[Held]:
    """The same, and it sends and holds what is predicted."""
    ranks = on_ranks(ranks_of(case.plan), train, task, case)
    assert_parity(ranks, oracle(task, case), tolerance)
    assert_counted(ranks)
    return ranks


def assert_pieces(ranks: list[list[Box]], wholes: dict[str, Tensor], tolerance: float) -> None:
    """Every rank's pieces are those of the wholes, relative to the largest element. Where that is
    less than a thousandth of the largest of all tensors, to the thousandth: a gradient that is zero
    but for rounding has no digits.
    """
    largest = max(float(w.abs().max()) for w in wholes.values())
    times = {name: torch.zeros(whole.shape) for name, whole in wholes.items()}
    for piece in (piece for rank in ranks for piece in rank):
        whole = wholes[piece.name]
        at = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
        scale = max(float(whole.abs().max()), 1e-3 * largest)
        if piece.tensor.numel():
            worst = float((piece.tensor.double() - whole[at].double()).abs().max())
            assert worst <= tolerance * scale, piece.name
        if piece.replica == 0:
            times[piece.name][at] += 1
    assert all((count == 1).all() for count in times.values())


def assert_counted(ranks: list[Held]) -> None:
    """The ledger has what was predicted, of every step, line by line; and so has memory."""
    for held in ranks:
        assert held.costs.hold, held.costs
        assert held.memory[0] == held.memory[1]


def full_parameters(flats: Sequence[Flat]) -> dict[str, Tensor]:
    """Every full parameter by name, as new tensors; gathers one flat parameter at a time."""
    found: dict[str, Tensor] = {}
    for flat in flats:
        was_sharded = flat.is_sharded
        flat.unshard()
        for name, p in zip(flat.names, flat.params, strict=True):
            tiles = [found[name]] if name in found else []  # of its rows, in their order
            found[name] = torch.cat([*tiles, p.detach()]) if tiles else p.detach().clone()
        if was_sharded:
            flat.reshard()
            flat.to_sharded()
    return found
