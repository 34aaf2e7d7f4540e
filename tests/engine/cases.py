"""Small models, batches that do not divide, and the oracle: the same training in plain PyTorch."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.errors import InputError
from shardwise.core.plan.plan import Plan
from shardwise.engine.batch import rows
from shardwise.engine.engine import Engine
from shardwise.engine.options import EngineOptions
from shardwise.models import gpt
from shardwise.models.trainable import fill
from shardwise.observe.work import Kernels
from shardwise.verify.oracles.batches import Choices, Loads
from shardwise.verify.oracles.oracles import microbatches_of

ROWS = ["ddp", "zero1", "zero2", "zero3"]
HYBRID = [f"dp_replicate2 dp_shard2 {row}" for row in ROWS[1:]]
PLANS = [*(f"dp{n} {row}" for n in (2, 4) for row in ROWS), *HYBRID]

CONFIG = gpt.GPTConfig(
    vocabulary=37,
    layers=2,
    hidden_size=20,
    heads=2,
    kv_heads=1,
    intermediate_size=27,
    sequence=9,
    tied=False,
)


def small_gpt(tied: bool = False) -> nn.Module:
    """A GPT whose sizes divide by nothing convenient."""
    model = gpt.GPT(gpt.GPTConfig(**{**CONFIG.__dict__, "tied": tied}))
    fill(model, seed=3)
    return model


def settled(model: nn.Module) -> nn.Module:
    """The model with weights that follow from their names, whichever thread makes it."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0, 0.4, generator=torch.Generator().manual_seed(crc32(name.encode())))
    return model


def tied_gpt() -> nn.Module:
    return small_gpt(tied=True)


def text(step: int, rows: int = 7) -> dict[str, Tensor]:
    """A global batch of `rows` sequences, with targets that do not count here and there."""
    own = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, CONFIG.vocabulary, (rows, CONFIG.sequence + 1), generator=own)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=own) < 0.3] = -100
    return {"inputs": tokens[:, :-1], "targets": targets}


def regression(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return mean_square(model(batch[0]), batch[1])


def mean_square(x: Tensor, y: Tensor) -> Tensor:
    """Of x - y, whose dtypes may differ: torch 2.11 has no gradient of such an `mse_loss`."""
    return (x - y).square().mean()


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def vectors(step: int, rows: int = 7, width: int = 6) -> tuple[Tensor, Tensor]:
    own = torch.Generator().manual_seed(2000 + step)
    x = torch.randn(rows, width, generator=own, dtype=torch.float64)
    return x, x.cumsum(1).sin()


@dataclass(frozen=True)
class Task:
    """What to train: made by `make`, on `batch(step)`, with the loss and the count of `batch`."""

    make: Callable[[], nn.Module] = small_gpt
    batch: Callable[[int], Any] = text
    loss: Callable[[nn.Module, Any], Tensor] = gpt.loss
    tokens: Callable[[Any], Any] | None = gpt.tokens


def rows_task(make: Callable[[], nn.Module], batch: Callable[[int], Any] = vectors) -> Task:
    """A task whose rows weigh the same."""
    return Task(make, batch, regression, None)


@dataclass(frozen=True)
class Case:
    """A way to train a task: the plan's text, the optimizer, the rest."""

    plan: str
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.01})
    clip: float | None = None
    steps: int = 3
    units: Any = 1  # bytes: every module that owns parameters is a unit
    prefetch: int = 1
    seeds: bool = False  # whether ranks begin with different weights


@dataclass
class Run:
    """What a training gave: losses, norms, gradients of every step by name, weights at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    loads: list[tuple[Loads, ...]] = field(default_factory=list)  # of experts, in every step


def share(batch: Any, rank: int, ranks: int) -> Any:
    """A rank's rows of the global batch; none where there are more ranks than rows."""
    return tree_map(lambda x: x.tensor_split(ranks)[rank], batch)


def ranks_of(plan: str) -> int:
    return Plan.parse(plan).size


def build(world: World, task: Task, case: Case) -> Engine:
    model = task.make()
    if case.seeds:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(world.rank)
    return sw.parallelize(
        model,
        case.plan,
        world,
        optimizer=sw.Optim(case.kind, **case.options),
        loss=task.loss,
        tokens=task.tokens,
        clip=case.clip,
        units=case.units,
        prefetch=case.prefetch,
        offload_folder=tempfile.gettempdir(),
    )


def options_of(task: Task, case: Case, kernels: Kernels = "cpu") -> EngineOptions:
    """The options of the case's engine that a prediction has too."""
    return EngineOptions(
        optimizer=sw.Optim(case.kind, **case.options),
        loss=task.loss,
        tokens=task.tokens,
        clip=case.clip,
        units=case.units,
        kernels=kernels,
    )


def oracle(task: Task, case: Case, dtype: torch.dtype | None = torch.float64) -> Run:
    """The same in one process and plain PyTorch, the global batch in one piece. A model with layers
    of experts, whose losses are those of a microbatch, in the plan's pieces.
    """
    model, run, plan = task.make().to(dtype), Run(), Plan.parse(case.plan).completed(None)
    model.train()
    microbatches, count = microbatches_of(model, plan), task.tokens or rows
    optimizers, choices = optimizers_of(model, case), Choices(model)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for step in range(case.steps):
        batch = tree_map(
            lambda x: x.to(dtype) if x.is_floating_point() and dtype else x, task.batch(step)
        )
        model.zero_grad()
        tokens, parts, summed = count(batch), microbatches.count(batch), 0.0
        for part in microbatches.of(batch):
            loss = task.loss(model, part)
            # times `parts`, as in the run: other factors would round what is fp32 inside
            (loss * (count(part) * parts / tokens)).backward()
            summed += loss.item() * count(part)
        run.loads.append(choices.loads(batch, plan))
        for p in model.parameters():  # torch does not clip sparse gradients
            p.grad = None if p.grad is None else p.grad.to_dense() / parts
        norm = None
        if case.clip is not None:
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), case.clip))
        grads = {n: p.grad for n, p in trained.items()}
        run.grads.append({n: None if g is None else g.clone() for n, g in grads.items()})
        for optimizer in optimizers:
            optimizer.step()
        run.losses.append(summed / tokens)
        run.norms.append(norm)
    run.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return run


def optimizers_of(model: nn.Module, case: Case) -> list[torch.optim.Optimizer]:
    """Torch's own optimizers of a case; with `rest`, one of all parameters that are no matrices."""
    options = {k: v for k, v in case.options.items() if k not in ("rest", "elementwise")}
    rest, params = case.options.get("rest"), list(model.parameters())
    if rest is None:
        return [case.kind(params, **options)]
    matrices, others = ([p for p in params if (p.dim() == 2) is two] for two in (True, False))
    return [case.kind(matrices, **options), rest.kind(others, **rest.options)]


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        act()
    return str(caught.value)


def fails(code: int) -> Callable[..., Any]:
    """A call that the system refuses."""

    def call(*_: object, **__: object) -> Any:
        raise OSError(code, os.strerror(code))

    return call


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference relative to the largest element."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) if a.numel() else 0.0


def expected_near(values: list[Any], tolerance: float) -> list[Any]:
    """The values as pytest compares numbers; None stays None."""
    return [v if v is None else pytest.approx(v, rel=tolerance) for v in values]
