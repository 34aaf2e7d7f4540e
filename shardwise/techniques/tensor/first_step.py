"""The first step under `tp` and `cp`: the sharded model's loss is compared with the plain one's.

    plain     a copy of the model with all weights                        loss
    sharded   the same copy on the tensor axis, or on some positions      loss: must be equal

Code that computes with a rank's part of a length (`h / h.shape[-1]` of a sharded dim) or a fixed
number of heads runs, and is wrong. Before its first update each rank computes the loss of its first
microbatch twice, forward only; `shardwise verify` proves gradients too. Dropout draws nothing:
modules are in eval mode, apart from recurrent layers. A pass that draws random numbers proves
nothing: ranks draw others for sharded activations. Parameters that begin as zeros have other values
in both copies, so that no layer is hidden.

While it compares, a rank holds two copies of the plain model's parameters. With too little memory
the model is not compared, and a line says so.
"""

import copy
import math
import sys
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.comm.move import all_gather, all_gather_object, begin_sum, broadcast
from shardwise.comm.parameter import become
from shardwise.comm.start.rendezvous import host_number
from shardwise.comm.tiers import host_memory
from shardwise.comm.tiers.host_memory import doubles_on
from shardwise.comm.unchanged import generators_of, kept_values, seeded
from shardwise.comm.world import World
from shardwise.core.applied import Fill, during
from shardwise.core.errors import bad
from shardwise.core.layouts.tensor_table import Table
from shardwise.core.tools.hook import collect, in_place_of
from shardwise.engine.batch import is_empty, on_device, split, widened
from shardwise.engine.checks import validate
from shardwise.engine.checks.as_before import as_before
from shardwise.engine.checks.consistency import TOLERANCE, TOLERANCE_16_BIT
from shardwise.engine.default_fill import materialise
from shardwise.engine.engine import Engine
from shardwise.engine.options import Build
from shardwise.engine.precision import HALF
from shardwise.engine.state.full import full_state_dict
from shardwise.observe.meta_pass import meta_copy
from shardwise.techniques.data.apply import cast_whole
from shardwise.techniques.tensor.apply import lay_out
from shardwise.techniques.tensor.sharded_logits import Tensors, nowhere

#: The copies of the parameters that a rank needs.
COPIES: Final = 2
#: Relative difference of losses in 32 bits and more that counts as rounding.
CLOSE: Final = 2e-5
#: The largest of the values that replace zeros.
_FILL: Final = 0.1


def engine_of(model: nn.Module, build: Build) -> Engine:
    """The engine of `model`, whose first step is compared if it has a tensor axis or `cp`."""
    if build.world.dry or (build.table is None and build.plan.cp == 1):
        return Engine(model, build)
    twin = meta_copy(model)
    engine = Engine(model, build)
    engine.consistency.before_first = partial(compare, engine, twin, build.table, build.fill)
    return engine


def compare(engine: Engine, twin: nn.Module, table: Table | None, fill: Fill, batch: Any) -> None:
    """Compare the first microbatch's loss on all ranks; all raise InputError if one's differs.
    `twin` is the plain model without weights; `fill` fills its buffers that are on meta.
    """
    world = engine.world
    needed = COPIES * sum(p.numel() * p.element_size() for p in twin.parameters())
    with world.ledger.phase("compare"):
        if not _fits(needed, world):
            _not_compared(engine, table, f"it needs {needed:,} bytes on each rank")
            return
        plain = _with_weights(engine, twin, fill)
        losses, short = _losses(engine, plain, table, batch)
        del plain
        collect()  # modules and their hooks refer to one another
        _require(losses, engine, table, short=short)


def _losses(
    engine: Engine, plain: nn.Module, table: Table | None, batch: Any
) -> tuple[tuple[float, float], bool]:
    world = engine.world
    sharded = copy.deepcopy(plain)
    losses, rounding = (0.0, 0.0), _Rounding()
    with seeded(world.device, 0):
        tensors = lay_out(sharded, world, engine.plan.sp, table)
        share = split(batch, engine.microbatches, count=engine.rows)[0]
        if not is_empty(share, engine.rows):
            share = on_device(share, world.device)
            for each in (plain, sharded):
                share = widened(share, _dtype(engine), each)
            alone = partial(_loss, engine, plain, nowhere(), share)
            with rounding, validate.sharded(engine.plan, alone):
                second = _loss_of_all(engine, sharded, tensors, share)
            with rounding:
                first = alone()
            # the step itself reports a loss that is not finite
            if not _drew(world.device) and math.isfinite(first):
                losses = first, second
    return losses, rounding.short or any(p.dtype in HALF for p in plain.parameters())


def _loss_of_all(engine: Engine, model: nn.Module, tensors: Tensors, share: Any) -> float:
    """The loss of a microbatch, of which ranks may compute some positions each."""
    if engine.plan.cp == 1:
        return _loss(engine, model, tensors, share)
    applied, parts, tokens = engine.sharded.applied, [share], engine.options.tokens
    count: float = tokens(share) if tokens else 1.0
    for each in applied:
        parts = each.begin(share, parts, trains=False)
    for each in applied:
        count = each.weight(count, parts[0], tokens)
    before = parts[0]
    for each in reversed(applied):
        before = each.enter(before, model, parts[0])
    with during(applied, engine.world.device):
        loss = _loss(engine, model, tensors, parts[0])
    own = doubles_on([loss * count if count else 0.0, count], engine.world.device)
    for each in applied:
        for axis in each.same_batch():
            own = begin_sum(own, axis).wait()
        each.end(trains=False)
    summed, total = own.tolist()
    return summed / total if total else 0.0


def _not_compared(engine: Engine, table: Table | None, why: str) -> None:
    if engine.world.rank == 0:
        derived = table is not None and table.derived
        what = "derived table" if derived else "table of styles" if table else engine.plan.context
        print(
            f"shardwise: the {what} is not compared with the plain model in the first step: "
            f"{why}. 'shardwise verify' proves it on a small model of the same code.",
            file=sys.stderr,
        )


def _drew(device: torch.device) -> bool:
    now = [generator.get_state() for generator in generators_of(device)]
    with seeded(device, 0):
        seeds = [generator.get_state() for generator in generators_of(device)]
    return not all(map(torch.equal, now, seeds))


def _fits(needed: int, world: World) -> bool:
    everyone = all_gather_object(free_bytes(world), world)
    hosts = [host for host, _ in everyone]
    return all(free >= needed * hosts.count(host) for host, free in everyone)


def free_bytes(world: World) -> tuple[int, float]:
    """A number for the memory that this rank shares with others, and its free bytes."""
    if world.device.type == "cuda":
        return world.rank, float(torch.cuda.mem_get_info(world.device)[0])
    return host_number(), host_memory.free_bytes()


def _dtype(engine: Engine) -> torch.dtype | None:
    return torch.float32 if engine.dtype in HALF else engine.dtype


def _with_weights(engine: Engine, twin: nn.Module, fill: Fill) -> nn.Module:
    state, world, plain = full_state_dict(engine), engine.world, copy.deepcopy(twin)
    materialise(plain, world.device, fill)
    for p in plain.parameters():
        become(p, torch.empty(p.shape, dtype=p.dtype, device=world.device))
    cast_whole(plain, _dtype(engine), world.device)
    persistent = plain.state_dict()
    tensors = dict(plain.named_parameters()) | {
        name: b for name, b in plain.named_buffers() if name in persistent
    }
    for name, held in ((name, t.data) for name, t in tensors.items() if t.numel()):
        value = held if world.rank else state[name].to(held.device, held.dtype)
        held.copy_(broadcast(value.contiguous(), world.everyone))
    _without_zeros(plain)
    return plain


def _without_zeros(model: nn.Module) -> None:
    """Give parameters that are all zero other values: a product with zeros hides its factor."""
    for p in (p.data for p in model.parameters() if p.numel() and not p.any()):
        rows = p.view(p.shape[0] if p.dim() else 1, -1)
        places = (torch.arange(1, n + 1, dtype=torch.float32, device=p.device) for n in rows.shape)
        rows.addr_(*(place.sin().to(p.dtype) for place in places), alpha=_FILL)


def _loss(engine: Engine, model: nn.Module, tensors: Tensors, share: Any) -> float:
    for module in model.modules():
        recurrent = isinstance(module, nn.RNNBase) and not module.dropout
        module.training = recurrent  # as in a step
    try:
        with torch.no_grad():
            return _loss_of(engine, model, tensors, share)
    except RuntimeError as error:  # of a loss that differentiates by its inputs
        if "does not require grad" not in str(error):
            raise
    return _loss_of(engine, model, tensors, share)


def _loss_of(engine: Engine, model: nn.Module, tensors: Tensors, share: Any) -> float:
    unseen = as_before([engine.loss], engine.model, seed=0)
    torch.manual_seed(0)
    with tensors.random.during(engine.world.device), unseen:
        tensors.begin(None, (), trains=True)
        try:
            with in_place_of(engine.model, model), kept_values(share):
                return float(engine.loss(model, share).detach())
        finally:
            tensors.end(trains=True)


def _require(
    losses: tuple[float, float], engine: Engine, table: Table | None, *, short: bool
) -> None:
    world = engine.world
    own = torch.tensor(losses, dtype=torch.float64, device=world.device)
    rounds = world.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    close = TOLERANCE_16_BIT if short else TOLERANCE if rounds else CLOSE
    for plain, sharded in torch.stack(all_gather(own, world.everyone)).tolist():
        if not abs(sharded - plain) <= close * abs(plain):  # also for NaN
            raise _differs(plain, sharded, engine, table)


class _Rounding(TorchDispatchMode):
    """Sees whether any operation makes numbers of 16 bits, as under autocast."""

    short = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = tree_leaves(out)
        self.short = self.short or any(isinstance(x, Tensor) and x.dtype in HALF for x in found)
        return out


def _differs(plain: float, sharded: float, engine: Engine, table: Table | None) -> Exception:
    losses = f"in the first step the loss is {sharded:.9g} instead of {plain:.9g}"
    if engine.plan.cp > 1:
        return bad(
            f"a model or a loss under '{engine.plan}' that does not compute on some positions what "
            f"it computes on all: {losses}",
            "code in which only F.scaled_dot_product_attention reads other positions",
            "labels that are shifted in the batch (docs/explanation/context.md)",
        )
    derived = table is not None and table.derived
    return bad(
        f"a {'derived table' if derived else 'table of styles'} under '{engine.plan}', by which "
        f"the model does not compute what it computes on one rank: {losses}",
        "styles under which the code of each module computes a rank's part",
        'Table.of({...}, heads=8, sets={"*.attn": {"heads": "heads"}}), or a table without these '
        "layers; 'shardwise verify' names the first tensor that differs (docs/how-to/tables.md)",
    )
