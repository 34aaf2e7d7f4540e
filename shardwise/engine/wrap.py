"""this file is one technique on its own, in a plain PyTorch loop, under the names people know.

    model = sw.FSDP(model)
    optim = torch.optim.Adam(model.parameters(), lr=1e-4)      # before or after the wrapping
    model(x).sum().backward()
    optim.step()

The module is changed in place and returned: its class, its parameters, their names and identity
stay.  Between backward and forward the parameters are at rest: pieces of k elements where the row
shards, of the shape [k, 1, ..., 1], with as many dimensions as before.
Gradients are the mean over the ranks of what each rank's loss gave.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.comm.move import begin_sum
from shardwise.comm.world import Axis, World, init
from shardwise.core.errors import bad
from shardwise.core.mesh import Mesh
from shardwise.core.zero import ROWS
from shardwise.engine import consistency, validate
from shardwise.engine.norm import squared_norm
from shardwise.engine.shard import (
    Sharding,
    default_fill,
    driver_of,
    flats_of,
    hooked,
    layable,
    materialise,
    shard,
    sizes,
    units_of,
)
from shardwise.engine.state_dict import keep_keys
from shardwise.engine.unwrap import no_pipe
from shardwise.kernels.fused_linear import take_over
from shardwise.kernels.matmul import fastest
from shardwise.kernels.rms_norm import fused
from shardwise.parallel.data.hooks import Pace
from shardwise.parallel.data.wrap_policy import Rule

#: FSDP's names for rows (arXiv 2304.11277); the hybrid ones shard inside a group of ranks only.
STRATEGIES = {
    "FULL_SHARD": "zero3",
    "SHARD_GRAD_OP": "zero2",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "zero3",
    "_HYBRID_SHARD_ZERO2": "zero2",
}


def DDP(  # noqa: N802
    module: nn.Module,
    world: World | None = None,
    bucket_bytes: int = 25 * 2**20,
    broadcast_buffers: bool = True,
) -> nn.Module:
    """Replicate `module`: every rank holds all of it, gradients are averaged while backward runs.

    Rank 0's parameters and buffers are everyone's at the start, its buffers before every training
    forward (unless `broadcast_buffers` is False).  Gradients are reduced in buckets of up to
    `bucket_bytes`.  (Li et al., "PyTorch Distributed", arXiv 2006.15704.)
    """
    validate.model(module, "sw.DDP")
    validate.whole("bucket_bytes", bucket_bytes, 1, 25 * 2**20)
    no_pipe(module)
    layable(module, "auto")
    world = _world(world)
    asked = {"bucket_bytes": bucket_bytes, "broadcast_buffers": broadcast_buffers}
    consistency.given(world, {"the module": consistency.described(module)} | asked)
    validate.unchanging(module, world.size)
    world = world.on(Mesh((("dp", world.size),)))
    how = Sharding(ROWS["ddp"], Axis("none"), world.axis("dp"), "auto", bucket_bytes)
    return _wrap(module, replace(how, broadcast_buffers=broadcast_buffers), world)


def FSDP(  # noqa: N802
    module: nn.Module,
    sharding_strategy: Any = "FULL_SHARD",
    units: Rule = "auto",
    world: World | None = None,
    shard_size: int | None = None,
) -> nn.Module:
    """Shard `module` over the ranks of `world` (Zhao et al., "PyTorch FSDP", arXiv 2304.11277).

    sharding_strategy: "FULL_SHARD" (zero3), "SHARD_GRAD_OP" (zero2), "NO_SHARD" (ddp), or
    "HYBRID_SHARD" with `shard_size` ranks a group; torch's own enum is understood.
    units: see parallel/data/wrap_policy.py.

    Raises:
        InputError: an unknown strategy; a shard_size that does not divide the world.
    """
    validate.model(module, "sw.FSDP")
    no_pipe(module)
    layable(module, units)
    name = getattr(sharding_strategy, "name", sharding_strategy)
    if not isinstance(name, str) or name not in STRATEGIES:
        what = f"sharding_strategy={validate.shown(name)}"
        raise bad(what, ", ".join(STRATEGIES), 'sharding_strategy="FULL_SHARD"')
    world = _world(world)
    inner = _shard_size(name, shard_size, world.size)
    if name == "NO_SHARD":
        return DDP(module, world)
    validate.unchanging(module, world.size)
    asked = {"the strategy": name, "shard_size": inner, "units": units}
    consistency.given(world, {"the module": consistency.described(module)} | asked)
    world = world.on(Mesh((("dp_replicate", world.size // inner), ("dp_shard", inner))))
    axes = world.axis("dp_shard"), world.axis("dp_replicate")
    return _wrap(module, Sharding(ROWS[STRATEGIES[name]], *axes, units), world)


def _world(world: World | None) -> World:
    if world is None:
        return init()
    validate.world(world)
    return world


def _shard_size(name: str, asked: int | None, ranks: int) -> int:
    """How many ranks share one copy of the states: all, unless there are to be several copies."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    if asked is None and "HYBRID" not in name:
        return ranks
    if not isinstance(asked, int) or asked not in divisors:
        usual = next(
            (n for n in divisors[::-1] if n < ranks), ranks
        )  # the fewest copies, above one
        what = "without shard_size" if asked is None else f"with shard_size={validate.shown(asked)}"
        raise bad(
            f"{name} {what} in a world of {ranks}",
            "shard_size, the number of ranks that share one copy, which divides the number of "
            f"ranks: {', '.join(map(str, divisors))}",
            f'sw.FSDP(module, "{name}", shard_size={usual})',
        )
    return asked


def _wrap(module: nn.Module, how: Sharding, world: World) -> nn.Module:
    materialise(module, world.device)
    for p in module.parameters():
        if not p.is_meta:
            p.data = p.data.to(world.device)
    for b in module.buffers():
        b.data = b.data.to(world.device)
    products, fill = fastest(world.device), default_fill(module, 0)
    how = replace(how, fill=fill, device=world.device, products=products)
    pace = Pace(scale=1 / world.size)
    laid = shard(how, units_of(module, how))
    data = hooked(module, how, laid, pace)
    data.handles += take_over(module, products, fused(world.device), data, sizes(laid))
    data.handles += keep_keys(module, data, flats_of(laid))
    if how.shard.size > 1:
        data.units.rest()
    return module


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Inside, backward passes of a wrapped module only accumulate; the next one outside reduces.

    Under `zero2` and `zero3`, whose gradients rest sharded, each backward still reduces over the
    shard axis: only what replicas exchange is put off.

    Raises:
        InputError: the module is not wrapped.
    """
    validate.module(module, "sw.no_sync")
    data = driver_of(module)
    if data is None:
        raise bad(f"a plain {type(module).__name__}", "a wrapped module", "sw.DDP(module) first")
    data.sums.sync = False
    try:
        yield
    finally:
        data.sums.sync = True


def clip_grad_norm(module: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale the gradients of a wrapped module so that their global norm is at most `max_norm`.

    Call it between backward and the optimizer's step, on all ranks; returns the norm before.
    `torch.nn.utils.clip_grad_norm_` would see this rank's pieces only.
    """
    validate.module(module, "sw.clip_grad_norm")
    validate.positive("max_norm", max_norm)
    data = driver_of(module)
    if data is None:
        return torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    squares = [squared_norm(g.reshape(-1)) for g in grads]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
    norm = begin_sum(total.view(1), data.facts.axes[0]).wait().sqrt()
    factor = (max_norm / (norm[0] + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(factor.to(g.dtype))
    return norm[0]
