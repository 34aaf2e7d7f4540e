"""The first step on a tensor axis: the sharded model is compared with the plain one.

    plain     a copy of the model with all weights                 loss, gradients
    sharded   the same copy, sharded on the tensor axis alone      loss, gradients: must be equal

Code may compute with what a rank has only a part of: a length (`h / h.shape[-1]` of a sharded dim),
or a fixed number of heads.  It runs, and is wrong.  Before its first update each rank computes the
loss of its first microbatch twice.  Dropout draws nothing: modules are in eval mode, apart from
recurrent layers.

Gradients are compared under a derived table, which nobody has read.  Under a table that the program
or the model gives, the loss is, more strictly.  A pass that draws random numbers proves nothing
there: ranks draw others for sharded activations.

While it compares, a rank holds up to four times the plain model's parameters (two copies and their
gradients), or twice without gradients, and rank 0 the parameters once more in host memory.  A model
for which a rank has too little memory is not compared, and a line says so.
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.comm import host_memory
from shardwise.comm.host import host_number
from shardwise.comm.move import all_gather, begin_sum, broadcast, part
from shardwise.comm.parameter import parameter_like
from shardwise.comm.world import World
from shardwise.core.errors import bad
from shardwise.core.garbage import collect
from shardwise.core.tensor_plan import Table
from shardwise.engine import hint
from shardwise.engine.batch import is_empty, split, widened
from shardwise.engine.consistency import TOLERANCE, TOLERANCE_16_BIT
from shardwise.engine.engine import Engine
from shardwise.engine.full import full_state_dict
from shardwise.engine.meta_buffers import materialise
from shardwise.engine.meta_pass import meta_copy
from shardwise.engine.precision import HALF
from shardwise.engine.rng import generators_of, seeded
from shardwise.engine.shard import cast_whole
from shardwise.engine.tensor_layout import Tensors, nowhere
from shardwise.engine.tensor_parallel import lay_out
from shardwise.engine.training import Build, Training
from shardwise.parallel.data.initial_weights import Fill

#: The parameters' bytes that a rank needs: two copies, and their gradients under a derived table.
COPIES, COPIES_FORWARD = 4, 2
#: Relative difference of losses in 32 bits and more that counts as rounding, under a given table.
CLOSE: Final = 2e-5
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
    """The engine of `model`, whose first step is compared if it has a tensor axis."""
    table = build.table
    if table is None:
        return Engine(model, build, training)
    plain = Plain(meta_copy(model), table, build.fill)
    engine = Engine(model, build, training)
    engine.consistency.before_first = partial(compare, engine, plain)
    return engine


def compare(engine: Engine, given: Plain, batch: Any) -> None:
    """Compare the loss, and under a derived table the gradients, of the first microbatch.

    All ranks call it.

    Raises:
        InputError: on every rank, if they differ on one.
    """
    world, graded = engine.world, given.table.derived
    needed = (COPIES if graded else COPIES_FORWARD) * sum(
        p.numel() * p.element_size() for p in given.twin.parameters()
    )
    with world.ledger.phase("compare"):
        if not _fits(needed, world):
            _not_compared(world, graded, f"it needs {needed:,} bytes on each rank")
            return
        found, short = _compared(engine, given, batch)
        collect()  # modules and their hooks refer to one another
        names = [name for name, _ in given.twin.named_parameters()]
        _require(found, names, engine, graded=graded, short=short)


def _compared(engine: Engine, given: Plain, batch: Any) -> tuple[Difference | None, bool]:
    """The difference of two copies on this rank's rows, and whether they compute in 16 bits.

    None without rows, and where losses depend on random numbers.
    """
    world, graded = engine.world, given.table.derived
    dtype = torch.float32 if engine.dtype in HALF else engine.dtype
    plain = _with_weights(engine, given, dtype)
    sharded = copy.deepcopy(plain)
    found, rounding = None, _Rounding()
    with seeded(world.device, 0):
        tensors = lay_out(sharded, world, engine.plan.sp, given.table)
        share = split(batch, engine.microbatches, count=engine.rows.count)[0]
        if not is_empty(share, engine.rows.count):
            share = tree_map_only(Tensor, lambda x: x.to(world.device), share)
            share = widened(share, dtype)
            passes = (plain, nowhere()), (sharded, tensors)
            with rounding:
                first, second = (_loss(engine, *one, share, graded=graded) for one in passes)
            if graded:
                found = _difference((first, second), plain, sharded, tensors)
            elif not _drew(world.device):
                error = _ratio(abs(second - first), abs(first))
                found = Difference((first, second), error, 0.0, "")
    return found, rounding.short or any(p.dtype in HALF for p in plain.parameters())


def _not_compared(world: World, derived: bool, why: str) -> None:
    if world.rank == 0:
        table = "derived table" if derived else "table of styles"
        print(
            f"shardwise: the {table} is not compared with the plain model in the first step: "
            f"{why}. 'shardwise verify' proves it on a small model of the same code.",
            file=sys.stderr,
        )


def _drew(device: torch.device) -> bool:
    """Whether random numbers were drawn since the generators were seeded with 0."""
    now = [generator.get_state() for generator in generators_of(device)]
    with seeded(device, 0):
        seeds = [generator.get_state() for generator in generators_of(device)]
    return not all(map(torch.equal, now, seeds))


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
        value = held if world.rank else state[name].to(held.device, held.dtype)
        held.copy_(broadcast(value.contiguous(), world.everyone))
    return plain


def _loss(engine: Engine, model: nn.Module, tensors: Tensors, share: Any, *, graded: bool) -> float:
    """The loss of a microbatch; if `graded`, its gradients are in the parameters."""
    for module in model.modules():
        recurrent = isinstance(module, nn.RNNBase) and not module.dropout
        module.training = recurrent  # cuDNN has no backward of them in eval mode
    torch.manual_seed(0)
    with torch.set_grad_enabled(graded), tensors.random.during(engine.world.device):
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


def _require(
    found: Difference | None, names: Sequence[str], engine: Engine, *, graded: bool, short: bool
) -> None:
    """Raise InputError on every rank if the passes of one rank differ."""
    world = engine.world
    none = Difference((0.0, 0.0), 0.0, 0.0, "")
    own = found or none
    if not math.isfinite(own.losses[0]):
        own = none  # the step itself reports a loss that is not finite
    place = names.index(own.name) if own.name else 0
    numbers = torch.tensor(
        [*own.losses, own.loss, own.gradient, place], dtype=torch.float64, device=world.device
    )
    everyone = torch.stack(all_gather(numbers, world.everyone)).tolist()
    close = TOLERANCE_16_BIT if short else TOLERANCE if graded or _rounds(world.device) else CLOSE
    for row in everyone:
        if max(row[2:4]) > close:
            raise _differs(row, names, engine) if graded else _given_differs(row, engine)


def _rounds(device: torch.device) -> bool:
    """Whether products of 32 bits are rounded to fewer."""
    return device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"


class _Rounding(TorchDispatchMode):
    """Sees whether any operation makes numbers of 16 bits, as under autocast."""

    short = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = tree_leaves(out)
        self.short = self.short or any(isinstance(x, Tensor) and x.dtype in HALF for x in found)
        return out


def _given_differs(row: Sequence[float], engine: Engine) -> Exception:
    plain, sharded = row[:2]
    return bad(
        f"a table of styles under '{engine.plan}', by which the model does not compute what it "
        f"computes on one rank: in the first step the loss is {sharded:.9g} instead of {plain:.9g}",
        "styles under which the code of each module computes its part: where it has a number of "
        "heads, or of features, each rank needs its own",
        'Table.of({...}, heads=8, sets={"*.attn": {"heads": "heads"}}), or sw.derive_table; '
        "'shardwise verify' names the first tensor that differs (docs/how-to/tables.md)",
    )


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
        "these layers (print(table); docs/how-to/tables.md)",
    )
