"""`sw.DDP`, `sw.FSDP`, `sw.no_sync` and `sw.clip_grad_norm`, for a plain PyTorch training loop.

The module is changed in place and returned.  Its class, and the names and identity of its
parameters, stay.  Between backward and forward, sharded parameters hold this rank's k elements in
the shape [k, 1, ..., 1], with as many dims as before.  Gradients are averaged over the ranks.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from shardwise.agreement.checksum import bits_sum
from shardwise.comm.move import all_reduce, begin_sum
from shardwise.comm.transport import Lease
from shardwise.comm.unchanged import normal_mode
from shardwise.comm.world import Axis, World
from shardwise.core.buffer_sizes import usual_pool_bytes
from shardwise.core.errors import bad
from shardwise.core.mesh import Mesh
from shardwise.core.tools.arguments import choice, flag, integer, positive, short_repr
from shardwise.core.zero import ROWS, Row
from shardwise.engine.checks import consistency, validate
from shardwise.engine.checks.reads import guard_shards
from shardwise.engine.default_fill import default_fill
from shardwise.engine.optimizer.norm import power_sum
from shardwise.engine.precision import DTYPES, HALF, cast_inputs, param_dtypes
from shardwise.engine.rank_zero_weights import RankZeroWeights, missing_weights
from shardwise.flat.flat_parameter import Flat, State
from shardwise.techniques.data.apply import (
    Sharding,
    by_row,
    cast_whole,
    driver_of,
    drivers,
    flats_of,
    hooked,
    layable,
    shard,
    units_of,
)
from shardwise.techniques.data.unit_hooks import Data
from shardwise.techniques.data.units import Pace
from shardwise.wrap import plain_optimizer
from shardwise.wrap.unwrap import no_wrapper, wrapper_of
from shardwise.wrap.wrap_policy import Rule

#: FSDP's names for the rows (arXiv 2304.11277).  Hybrid strategies shard inside groups of ranks.
STRATEGIES = {
    "FULL_SHARD": "zero3",
    "SHARD_GRAD_OP": "zero2",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "zero3",
    "_HYBRID_SHARD_ZERO2": "zero2",
}


@normal_mode()
def DDP(  # noqa: N802
    module: nn.Module,
    world: World | None = None,
    bucket_bytes: int = 25 * 2**20,
    broadcast_buffers: bool = True,
    *,
    precision: str | None = None,
) -> nn.Module:
    """Replicate `module` on all ranks, and average gradients during the backward pass.

    Rank 0 broadcasts its parameters and buffers now, and its buffers at the first training forward
    after each reduction (unless `broadcast_buffers` is False).  Gradients are reduced in buckets of
    up to `bucket_bytes` bytes.  `precision` as in `FSDP`.
    (Li et al., "PyTorch Distributed", arXiv 2006.15704.)
    """
    validate.model(module, "sw.DDP")
    integer("bucket_bytes", bucket_bytes, 1, 25 * 2**20)
    flag("broadcast_buffers", broadcast_buffers)
    no_wrapper(module)
    layable(module, "auto")
    _require_precision(module, precision, "DDP")
    world = validate.leased_world(world)
    asked = {"bucket_bytes": bucket_bytes, "broadcast_buffers": broadcast_buffers}
    asked |= {"precision": precision}
    consistency.require_same(world, {"the module": module} | asked)
    validate.no_max_norm(module, world.size)
    world = world.on(Mesh((("dp", world.size),)))
    how = Sharding(ROWS["ddp"], Axis("none"), world.axis("dp"), "auto", bucket_bytes)
    return _wrap(module, replace(how, broadcast_buffers=broadcast_buffers), world, precision)


@normal_mode()
def FSDP(  # noqa: N802
    module: nn.Module,
    sharding_strategy: Any = "FULL_SHARD",
    units: Rule = "auto",
    world: World | None = None,
    shard_size: int | None = None,
    cpu_offload: Any = False,
    *,
    broadcast_buffers: bool = True,
    precision: str | None = None,
) -> nn.Module:
    """Shard `module` over the ranks of `world` (Zhao et al., "PyTorch FSDP", arXiv 2304.11277).

    sharding_strategy: "FULL_SHARD" (zero3), "SHARD_GRAD_OP" (zero2), "NO_SHARD" (ddp), or
    "HYBRID_SHARD" with groups of `shard_size` ranks.  torch's enum is accepted too.
    units: what is gathered together: "auto" (the repeated block), a class or several, a pattern of
    module names, a size in bytes, or f(name, module) -> bool.
    cpu_offload: True, or torch's CPUOffload(offload_params=True): shards of parameters and
    gradients rest in host memory, where the optimizer updates them; a unit is on the device while
    it is used.
    broadcast_buffers: as in `DDP`.
    precision: "bf16" or "fp16": the model computes with weights in 16 bits, and casts the inputs of
    its layers; parameters at rest, gradients, their sums over the ranks, the optimizer and state
    dicts have fp32.  Under "fp16" the loop scales its loss.

    Raises:
        InputError: an unknown strategy; a shard_size that does not divide the world; `cpu_offload`
            with a strategy that keeps full parameters.
    """
    validate.model(module, "sw.FSDP")
    no_wrapper(module)
    layable(module, units)
    name = getattr(sharding_strategy, "name", sharding_strategy)
    choice("sharding_strategy", name, STRATEGIES)
    row = ROWS[STRATEGIES[name]]
    flag("broadcast_buffers", broadcast_buffers)
    _require_precision(module, precision, "FSDP")
    offloads = getattr(cpu_offload, "offload_params", cpu_offload)
    flag("cpu_offload", offloads)
    if offloads:
        _require_offloadable(name, row, precision)
        row = replace(row, param_tier="host", optim_tier="host")
    world = validate.leased_world(world)
    inner = _shard_size(name, shard_size, world.size)
    validate.no_max_norm(module, world.size)
    asked = {"the strategy": name, "shard_size": inner, "units": units}
    asked |= {"cpu_offload": row.param_tier, "precision": precision}
    asked |= {"broadcast_buffers": broadcast_buffers}
    consistency.require_same(world, {"the module": module} | asked)
    world = world.on(Mesh((("dp_replicate", world.size // inner), ("dp_shard", inner))))
    axes = world.axis("dp_shard"), world.axis("dp_replicate")
    how = Sharding(row, *axes, units, broadcast_buffers=broadcast_buffers)
    return _wrap(module, how, world, precision)


def _require_offloadable(name: str, row: Row, precision: str | None) -> None:
    if precision is not None:
        raise bad(
            f"cpu_offload=True with precision={precision!r}",
            "masters in fp32 on the device, or offload in an engine",
            f'sw.parallelize(module, "zero3 offload:param {precision}", world)',
        )
    if not row.moves().reshards:
        raise bad(
            f"cpu_offload=True with {name}, which keeps full parameters on the device",
            "FULL_SHARD or HYBRID_SHARD; on one rank FULL_SHARD keeps all in host memory",
            "sw.FSDP(module, cpu_offload=True)",
        )


def _shard_size(name: str, asked: int | None, ranks: int) -> int:
    """The number of ranks that share one copy of the states: all, unless the strategy is hybrid."""
    if name == "NO_SHARD":
        if asked not in (None, 1):
            given = f"NO_SHARD with shard_size={short_repr(asked)}"
            raise bad(given, "shard_size for strategies that shard parameters", '"HYBRID_SHARD"')
        return 1
    if asked is None and "HYBRID" not in name:
        return ranks
    if not isinstance(asked, int) or asked < 1 or ranks % asked:
        what = "without shard_size" if asked is None else f"with shard_size={short_repr(asked)}"
        raise bad(
            f"{name} {what} in a world of {ranks}",
            "shard_size, the number of ranks that share one copy, a number that divides the number "
            "of ranks",
            f'sw.FSDP(module, "{name}", shard_size={ranks})',
        )
    return asked


def _require_precision(module: nn.Module, precision: Any, caller: str) -> None:
    if precision is None:
        return
    choice("precision", precision, ("bf16", "fp16"))
    narrow = [name for name, p in module.named_parameters() if p.dtype in HALF]
    if narrow:
        raise bad(
            f"precision={precision!r} of a {type(module).__name__} whose {narrow[0]} has 16 bits: "
            "its small updates would be rounded away",
            "parameters in fp32, which are cast for computation only",
            f"sw.{caller}(module.float(), precision={precision!r})",
        )


def _warn_of_16_bits(module: nn.Module, world: World) -> None:
    trained = [p for p in module.parameters() if p.requires_grad]
    if world.rank == 0 and trained and all(p.dtype in HALF for p in trained):
        print(
            f"shardwise: the weights of the {type(module).__name__} have 16 bits, so that small "
            'updates are rounded away. Write precision="bf16" with a module in fp32 for fp32 '
            "masters.",
            file=sys.stderr,
        )


def _wrap(
    module: nn.Module, how: Sharding, world: World, precision: str | None = None
) -> nn.Module:
    weights = RankZeroWeights.take(module, missing_weights(module, world), world)
    cast_whole(module, None, world.device, by_unit=how.row.moves().fetch is not None)
    _warn_of_16_bits(module, world)
    model_bytes, device = sum(p.nbytes for p in module.parameters()), world.device.type
    size_bytes = usual_pool_bytes(world.size, model_bytes, device)
    world.pool.reserve(size_bytes, world.device)
    how = replace(how, fill=default_fill(module, 0), device=world.device)
    how = replace(how, tiers=world.tiers, weights=weights, number=world.number)
    handles: list[Any] = []
    if (dtype := DTYPES[precision]) is not None:
        handles = cast_inputs(module, dtype)
        dtypes = param_dtypes(module, dtype)
        how = replace(how, compute={p: own for p, own in dtypes if own != p.dtype})
    pace = Pace(scale=1 / world.size)
    specs = units_of(module, how)
    sharded_units = shard(how, specs, by_row(how, specs))
    weights.deliver()
    data = hooked(module, how, sharded_units, pace, world)
    handles += keep_keys(module, data, flats_of(sharded_units))
    handles += guard_shards(module, data)
    data.handles += handles
    lookups = (m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    for table in (m.weight for m in lookups if m.sparse):
        _, flat, index = data.places.get(cast("nn.Parameter", table), (None, None, 0))
        if flat is not None and not flat.split:
            rows = torch.zeros(len(table), dtype=torch.int32, device=world.device)
            flat.grads.touched[index] = rows
    assert isinstance(world.links, Lease)
    data.handles.append(world.links)
    if data.split:
        data.units.to_sharded()
    return module


def _by_hand(data: Data, caller: str) -> None:
    if not data.pace.by_hand:
        given = f"{caller} of a module that belongs to an engine"
        allowed = "a module that an engine does not train"
        raise bad(given, allowed, "accumulate:4 in the engine's plan, or clip=1.0 to parallelize")


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate gradients without reducing them; the next backward pass outside reduces all.

    Under `zero2` and `zero3`, whose gradients are sharded, every backward pass still reduces over
    the shard axis; only the reduction between replicas is postponed.

    Raises:
        InputError: the module is not wrapped.
    """
    validate.module(module, "sw.no_sync")
    data = driver_of(module)
    if data is None:
        raise bad(f"a plain {type(module).__name__}", "a wrapped module", "sw.DDP(module) first")
    _by_hand(data, "sw.no_sync")
    data.sync = False
    try:
        yield
    finally:
        data.sync = True


def clip_grad_norm(module: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale the gradients of a wrapped module so that their global norm is at most `max_norm`.

    Call it on all ranks, between backward and the optimizer's step.  `norm_type` is p of the p-norm
    (`inf`: the largest absolute value).  Returns the norm before clipping, a 0-d double.
    `torch.nn.utils.clip_grad_norm_` would compute the norm of this rank's shards only.
    """
    validate.module(module, "sw.clip_grad_norm")
    positive("max_norm", max_norm)
    positive("norm_type", power := float(norm_type))
    data, wrapper = driver_of(module), wrapper_of(module)
    params = list(module.parameters())
    counted = set(params)
    if data is not None:
        _by_hand(data, "sw.clip_grad_norm")
        given = {"max_norm of sw.clip_grad_norm": float(max_norm), "norm_type": power}
        data.consensus.same.facts |= given
        device, axis = flats_of(data.units.order)[0].full.device, data.consensus.axes[0]
    elif wrapper is not None and wrapper.axis is not None:
        device, axis = wrapper.device, wrapper.axis
        counted -= wrapper.counted_elsewhere()
    elif wrapper is None and any(drivers(part) or wrapper_of(part) for part in module.modules()):
        raise bad(
            f"sw.clip_grad_norm of a {type(module).__name__} of which a part is wrapped",
            "the module that was wrapped, or a plain one",
            "sw.DDP or sw.FSDP of the whole model",
        )
    else:
        return torch.nn.utils.clip_grad_norm_(params, max_norm, power)
    grads = [p.grad for p in params if p.grad is not None]
    own = [p.grad.reshape(-1) for p in params if p in counted and p.grad is not None]
    none = torch.zeros((), dtype=torch.float64, device=device)
    parts = [none, *(power_sum(g, power).to(device) for g in own)]  # they may be on the host
    if math.isinf(power):
        norm = all_reduce(torch.stack(parts).amax().view(1), axis, "max")
    else:
        norm = begin_sum(torch.stack(parts).sum().view(1), axis).wait() ** (1 / power)
    factor = (max_norm / (norm[0] + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(factor.to(g))
    return norm[0]


register_optimizer_step_pre_hook(plain_optimizer.before_step)
register_optimizer_step_post_hook(plain_optimizer.after_step)


# --- state_dict and load_state_dict of a sharded module -------------------------------------------


def keep_keys(module: nn.Module, data: Data, flats: Sequence[Flat]) -> list[RemovableHandle]:
    """Make `module.state_dict()` return full tensors and `load_state_dict` accept them; handles
    undo it.

    If parameters are sharded, both are collective: all ranks call them.
    """
    if not any(flat.split for flat in flats):  # p is whole between steps
        return []
    handles = [
        module.register_state_dict_pre_hook(partial(_gather_all, data, flats)),
        module.register_state_dict_post_hook(partial(_copy_whole, data)),
        module.register_load_state_dict_pre_hook(partial(_gather_all, data, flats)),
        module.register_load_state_dict_post_hook(partial(_after_load, data, flats)),
    ]
    places = {id(p): flat for flat in flats if flat.split for p in flat.params}
    for name, part in module.named_modules():
        split = [places[id(p)] for p in part._parameters.values() if id(p) in places]
        if name and split:
            refuse = partial(_require_gathered, name, split)
            handles.append(part.register_state_dict_pre_hook(refuse))
            handles.append(part.register_load_state_dict_pre_hook(refuse))
    return handles


def _require_gathered(name: str, flats: Sequence[Flat], *_: Any) -> None:
    """Raise InputError for the state dict of a part: the hooks of the whole module gather."""
    if any(flat.state is not State.UNSHARDED for flat in flats):
        raise bad(
            f"state_dict or load_state_dict of {name}, a part of a sharded module",
            "that of the whole module, on all ranks; of a part before the wrapping",
            f'{{k: v for k, v in module.state_dict().items() if k.startswith("{name}.")}}, and '
            "module.load_state_dict(state, strict=False)",
        )


def _gather_all(data: Data, flats: Sequence[Flat], *_: Any) -> None:
    data.between_passes()
    data.units.to_sharded()  # also what was open for reads
    for flat in flats:
        flat.unshard_in_own_dtype()


@torch.no_grad()
def _copy_whole(data: Data, _: nn.Module, state: dict[str, Any], *_more: Any) -> None:
    for key, value in list(state.items()):
        if isinstance(value, Tensor):
            state[key] = value.detach().clone()
    data.units.to_sharded()


@torch.no_grad()
def _after_load(data: Data, flats: Sequence[Flat], *_: Any) -> None:
    whole = [f.full if f.full_in_own_dtype is None else f.full_in_own_dtype for f in flats]
    loaded = sum(int(bits_sum(x)) for x in whole) % data.consensus.same.hashes
    data.consensus.same.facts["the checksum of the weights of load_state_dict"] = loaded
    for flat in flats:
        flat.keep_block()
    data.units.to_sharded()
