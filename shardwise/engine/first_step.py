"""The first step under a derived table: the sharded model is compared with the plain one.

    plain     a copy of the model with all weights                 loss, gradients
    sharded   the same copy, sharded on the tensor axis alone      loss, gradients: must be equal

A table is derived from shapes, so code that computes with a length (`h / h.shape[-1]` of a sharded
dim) runs under it and is wrong.  Before its first update each rank computes the loss of its first
microbatch twice.  Dropout draws nothing: modules are in eval mode, apart from recurrent layers.

While it compares, a rank holds up to four times the plain model's parameters (two copies and their
gradients), and rank 0 the parameters once more in host memory.  A model for which a rank has too
little memory is not compared, and a line says so.
"""

import copy
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwise.comm import host_memory
from shardwise.comm.host import host_number
from shardwise.comm.move import all_gather, begin_sum, broadcast, part
from shardwise.comm.parameter import parameter_like
from shardwise.comm.world import World
from shardwise.core.errors import bad
from shardwise.core.tensor_plan import Table
from shardwise.engine import hint
from shardwise.engine.batch import is_empty, split, widened
from shardwise.engine.consistency import TOLERANCE, TOLERANCE_16_BIT
from shardwise.engine.engine import Engine
from shardwise.engine.full import full_state_dict
from shardwise.engine.meta_buffers import materialise
from shardwise.engine.meta_pass import meta_copy
from shardwise.engine.precision import HALF
from shardwise.engine.rng import seeded
from shardwise.engine.shard import cast_whole
from shardwise.engine.tensor_layout import Tensors, nowhere
from shardwise.engine.tensor_parallel import lay_out
from shardwise.engine.training import Build, Training
from shardwise.parallel.data.initial_weights import Fill

#: The parameters' bytes that a rank needs: two copies and their gradients.
COPIES: Final = 4
#: A gradient whose norm is below this fraction of all gradients' counts as rounding.
NEGLIGIBLE: Final = 1e-3


@dataclass(frozen=True)
class Difference:
    """How far a sharded pass is from the plain one: relative errors, and the worst parameter."""

    losses: tuple[float, float]
    loss: float
    gradient: float
    name: str


@dataclass(frozen=True)
class Plain:
    """The plain model without weights, its table, and what fills buffers that are on meta."""

    twin: nn.Module
    table: Table
    fill: Fill


def engine_of(model: nn.Module, build: Build, training: Training) -> Engine:
    """The engine of `model`; under a derived table its first step is compared."""
    table = build.table
    if table is None or not table.derived:
        return Engine(model, build, training)
    plain = Plain(meta_copy(model), table, build.fill)
    engine = Engine(model, build, training)
    engine.consistency.before_first = partial(compare, engine, plain)
    return engine


def compare(engine: Engine, given: Plain, batch: Any) -> None:
    """Compare the loss and the gradients of the first microbatch.  All ranks call it.

    Raises:
        InputError: on every rank, if they differ on one.
    """
    world = engine.world
    needed = COPIES * sum(p.numel() * p.element_size() for p in given.twin.parameters())
    with world.ledger.phase("compare"):
        if not _fits(needed, world):
            _not_compared(world, f"it needs {needed:,} bytes on each rank")
            return
        dtype = torch.float32 if engine.dtype in HALF else engine.dtype
        plain = _with_weights(engine, given, dtype)
        sharded = copy.deepcopy(plain)
        found = None
        with seeded(world.device, 0):
            tensors = lay_out(sharded, world, engine.plan.sp, given.table)
            share = split(batch, engine.microbatches, count=engine.rows.count)[0]
            if not is_empty(share, engine.rows.count):
                share = tree_map_only(Tensor, lambda x: x.to(world.device), share)
                share = widened(share, dtype)
                losses = (
                    _loss(engine, plain, nowhere(), share),
                    _loss(engine, sharded, tensors, share),
                )
                found = _difference(losses, plain, sharded, tensors)
        _require(found, plain, engine)


def _not_compared(world: World, why: str) -> None:
    if world.rank == 0:
        print(
            "shardwise: the derived table is not compared with the plain model in the first step: "
            f"{why}. 'shardwise verify' proves it on a small model of the same code.",
            file=sys.stderr,
        )


def _fits(needed: int, world: World) -> bool:
    """Whether every rank has `needed` bytes free; ranks of one host share its memory."""
    host, free = free_bytes(world)
    own = torch.tensor([host, free], dtype=torch.float64, device=world.device)
    everyone = [tuple(x.tolist()) for x in all_gather(own, world.everyone)]
    hosts = [host for host, _ in everyone]
    return all(free >= needed * hosts.count(host) for host, free in everyone)


def free_bytes(world: World) -> tuple[int, float]:
    """The number of the memory that this rank shares with others, and its free bytes."""
    if world.device.type == "cuda":
        return world.rank, float(torch.cuda.mem_get_info(world.device)[0])
    return host_number(), host_memory.free_bytes()


def _with_weights(engine: Engine, given: Plain, dtype: torch.dtype | None) -> nn.Module:
    """The plain model with the engine's weights and buffers, on every rank."""
    state, world, twin = full_state_dict(engine), engine.world, copy.deepcopy(given.twin)
    materialise(twin, world.device, given.fill)
    made = [torch.empty(p.shape, dtype=p.dtype, device=world.device) for p in twin.parameters()]
    memo: dict[int, Any] = {
        id(p): parameter_like(p, empty) for p, empty in zip(twin.parameters(), made, strict=True)
    }
    plain = copy.deepcopy(twin, memo)
    cast_whole(plain, dtype, world.device)
    persistent = plain.state_dict()
    tensors = dict(plain.named_parameters()) | {
        name: b for name, b in plain.named_buffers() if name in persistent
    }
    for name, held in ((name, t.data) for name, t in tensors.items() if t.numel()):
        value = held.contiguous() if world.rank else state[name].to(held).contiguous()
        held.copy_(broadcast(value, world.everyone))
    return plain


def _loss(engine: Engine, model: nn.Module, tensors: Tensors, share: Any) -> float:
    """The loss of a microbatch; its gradients are in the parameters."""
    for module in model.modules():
        recurrent = isinstance(module, nn.RNNBase) and not module.dropout
        module.training = recurrent  # cuDNN has no backward of them in eval mode
    torch.manual_seed(0)
    with torch.enable_grad(), tensors.random.during(engine.world.device):
        tensors.begin()
        with hint.shapes(tensors):
            loss = engine.training.loss(model, share)
        if loss.requires_grad:
            loss.backward()
        tensors.end()
    return float(loss.detach())


@torch.no_grad()
def _difference(
    losses: tuple[float, float], plain: nn.Module, sharded: nn.Module, tensors: Tensors
) -> Difference:
    """The largest difference of this rank; gradients are summed over ranks as in a step."""
    wanted = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    norms = {name: _norm(p.grad) for name, p in wanted.items()}
    total = math.hypot(*norms.values())
    worst, named = 0.0, ""
    for name, p in sharded.named_parameters():
        if name not in wanted:
            continue
        found = torch.zeros_like(p) if p.grad is None else p.grad
        if name in tensors.sums:
            found = begin_sum(found.contiguous(), tensors.sums[name]).wait()
        expected, cut = wanted[name].grad, tensors.of(name).cut
        if expected is None:
            expected = torch.zeros_like(wanted[name])
        if cut is not None:
            expected = part(expected, cut, tensors.axis.rank)
        error = _ratio(_norm(found - expected), norms[name] + NEGLIGIBLE * total)
        if error > worst:
            worst, named = error, name
    first, second = losses
    return Difference(losses, _ratio(abs(second - first), abs(first)), worst, named)


def _norm(x: Tensor | None) -> float:
    return 0.0 if x is None else float(x.double().norm())


def _ratio(error: float, size: float) -> float:
    """The relative error; infinity for one that is not finite.  A size of zero has none."""
    if not math.isfinite(error):
        return math.inf
    return error / size if size else float(error > 0)


def _require(found: Difference | None, plain: nn.Module, engine: Engine) -> None:
    """Raise InputError on every rank if the passes of one rank differ."""
    world, names = engine.world, [name for name, _ in plain.named_parameters()]
    none = Difference((0.0, 0.0), 0.0, 0.0, "")
    own = found or none
    if not math.isfinite(own.losses[0]):
        own = none  # the step itself reports a loss that is not finite
    place = names.index(own.name) if own.name else 0
    numbers = torch.tensor(
        [*own.losses, own.loss, own.gradient, place], dtype=torch.float64, device=world.device
    )
    everyone = torch.stack(all_gather(numbers, world.everyone)).tolist()
    short = any(p.dtype in HALF for p in plain.parameters())
    close = TOLERANCE_16_BIT if short else TOLERANCE
    for row in everyone:
        if max(row[2:4]) > close:
            raise _differs(row, names, engine)


def _differs(row: Sequence[float], names: Sequence[str], engine: Engine) -> Exception:
    plain, sharded, loss, gradient, place = row
    shown = f"the loss is {sharded:.6g} instead of {plain:.6g}" if loss > gradient else ""
    name = names[int(place)]
    shown = shown or f"the gradient of {name} is {gradient:.1%} off"
    near = f", most of all in the gradient of {name}" if loss > gradient else ""
    return bad(
        f"a derived table under '{engine.plan}', by which the model does not compute what it "
        f"computes on one rank: in the first step {shown}{near}",
        "a forward that computes with shapes only to reshape: `h / h.shape[-1]` divides by a "
        "rank's own features",
        f"the whole length as a number in the code near {name}, or a table of your own without "
        "these layers (print(table); docs/derived-tables.md)",
    )
