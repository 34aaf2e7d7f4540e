"""Sabotages of data parallelism, precision and updates."""

from typing import Any

import torch

from shardwise.comm.transport import Pending
from shardwise.core.layouts.layout import P, R
from shardwise.engine import engine as engine_file
from shardwise.engine import step_end
from shardwise.engine.batch import filled
from shardwise.engine.checks.guard import Guard
from shardwise.engine.engine import Engine
from shardwise.engine.optimizer.norm import LossScale, LossWeights
from shardwise.engine.optimizer.optimizer import Factor, ShardedOptimizer
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from shardwise.techniques.data.buffers import Buffers
from shardwise.techniques.data.flat import flat_gradient, flat_parameter
from shardwise.techniques.data.flat.flat_gradient import FlatGradient
from shardwise.techniques.data.flat.flat_parameter import Flat, State
from shardwise.techniques.data.rerun import Rerun
from shardwise.techniques.pipeline.passes import Passes
from shardwise.verify.oracles.oracles import LOSS_SCALE
from tests.verify.mutations import mutation as by
from tests.verify.mutations.mutation import Rows

ROWS = Rows()
HYBRID = "dp_replicate2 dp_shard2"


def counted_again(optimizer: ShardedOptimizer, *_: Any) -> None:
    """The optimizer's own count of steps is one more."""
    for state in optimizer.torch.state.values():
        state["step"] += 1


def options(**values: Any) -> by.Change:
    def set_in(made: Any, *_: Any) -> Any:
        for group in made.param_groups:
            group.update(values)
        return made

    return by.result(OptimizerSpec, "build", set_in)


def after_sums(act: by.Act, first: by.Act = by.nothing) -> by.Change:
    """`act(axis, x, out)` once a sum of gradients is there, `first(x)` before it begins."""

    def start(real: by.Act, x: Any, axis: Any, src: Any, dst: Any, out: Any, **how: Any) -> Any:
        if src != P:
            return real(x, axis, src, dst, out, **how)
        first(x)
        pending = real(x, axis, src, dst, out, **how)
        return Pending([pending.wait, lambda: act(axis, x, out)])

    return by.around(flat_gradient, "start", start)


def counting(act: by.Act) -> by.Change:
    """`act(count, engine)` for what a rank counts of a batch."""
    return by.around(Engine, "_count", lambda real, engine, *of: act(real(engine, *of), engine))


def after_gathers(act: by.Act) -> by.Change:
    """`act(blocks)` once the blocks of all ranks are there."""

    def start(real: by.Act, x: Any, axis: Any, src: Any, dst: Any, out: Any, **how: Any) -> Any:
        pending = real(x, axis, src, dst, out, **how)
        if dst != R or src == P:
            return pending
        return Pending([pending.wait, lambda: act(out.view(axis.size, -1))])

    return by.around(flat_parameter, "start", start)


def truncated(master: Any) -> Any:
    """A master without the digits that bf16 does not have."""
    return (master.view(torch.int32) & -(2**16)).view(torch.float32)


ROWS |= {
    # --- the optimizer ----------------------------------------------------------------------------
    "gradients 1.0001 times as large [dp2 zero1]": by.arguments(
        ShardedOptimizer, "begin", lambda o, flats, f: (o, flats, times(f, 1.0001))
    ),
    "weight decay dropped [dp2]": options(weight_decay=0.0),
    "other betas [dp2 zero2]": options(betas=(0.9, 0.999)),
    "another epsilon [dp2 zero3]": options(eps=1e-8),
    "clipping at half [dp2 zero2]": by.arguments(
        step_end, "shrink", lambda clip, norm: (clip and clip / 2, norm)
    ),
    "an update made twice [dp2 zero3]": by.around(
        ShardedOptimizer,
        "begin",
        lambda real, o, f, *of, **how: [real(o, f, *of, **how)(), real(o, f, Factor(1.0))][1],
    ),
    "steps are counted double [dp2 zero1]": by.after(ShardedOptimizer, "publish", counted_again),
    "a frozen parameter trained [dp2] error": by.before(
        Flat, "__init__", lambda _, params, *__: [p.requires_grad_(True) for _, p in params]
    ),
    # --- gradients and their sums -----------------------------------------------------------------
    "a mean of ranks for a sum [dp2]": after_sums(lambda axis, _, out: out.div_(axis.size)),
    "gradients summed in fp32 [dp2 zero3]": after_sums(
        by.nothing, lambda x: x.copy_(x.float().double())
    ),
    f"replicas not summed [{HYBRID} zero2]": by.drop(FlatGradient, "begin_further"),
    f"replicas summed over the shard axis [{HYBRID} zero3]": by.arguments(
        FlatGradient,
        "_sum_over",
        lambda grads, axes: (grads, axes and [grads.local.axis(grads.moves.sums[0])]),
    ),
    "an earlier microbatch's sum lost [dp2 zero2 accumulate:2]": by.before(
        FlatGradient, "_arrived", lambda g, *_: setattr(g, "valid", [False] * len(g.valid))
    ),
    "gradients that are not finite used [dp2 zero1]": by.drop(Guard, "see"),
    "gradients of a rerun kept [dp2 zero2] tests": by.beside(Rerun, "_collected", counts=True),
    # --- tokens -----------------------------------------------------------------------------------
    "ranks weigh the same [dp2 zero1]": counting(lambda count, _: min(1, count)),
    "a token too many on a rank [dp2 zero2]": counting(lambda n, engine: n + engine.data_rank % 2),
    "a rank without rows counts one [dp2 zero2]": counting(lambda count, _: max(1, count)),
    "not divided by the tokens [dp2 zero3]": by.arguments(
        ShardedOptimizer, "update", lambda o, _, arriving: (o, Factor(1.0), arriving)
    ),
    "every microbatch weighs the same [dp2]": by.instead(
        LossWeights, "of", lambda weights, *_: weights.totals.new_ones(())
    ),
    "an empty microbatch leaves its rank out [dp2 accumulate:2] error": by.arguments(
        Passes,
        "run",
        lambda one, parts, counts, *of: (one, parts, [n * all(counts) for n in counts], *of),
    ),
    "stand-ins count in an evaluation [dp2 zero2]": by.arguments(
        Engine, "evaluate", lambda engine, batch: (engine, filled(batch))
    ),
    # --- parameters -------------------------------------------------------------------------------
    "a lost block of weights [dp2 zero3]": after_gathers(lambda blocks: blocks[-1].zero_()),
    "blocks in another order [dp2 zero1]": after_gathers(lambda b: b.copy_(b.flip(0))),
    "a buffer not sent [dp2 zero1] bytes": by.drop(Buffers, "refresh"),
    # --- precision --------------------------------------------------------------------------------
    "the loss scale left in [dp2 zero1 fp16 of gpt]": by.result(
        step_end, "shrink", lambda found, *_: found * LOSS_SCALE
    ),
    "unscaled in 16 bits [dp2 zero1 fp16 of gpt]": by.arguments(
        ShardedOptimizer,
        "_attach",
        lambda o, k, of, scale=1.0: (o, k, (None if of[0] is None else of[0] * scale, of[1])),
    ),
    # --- the loss scale ---------------------------------------------------------------------------
    "the loss scale never rises [dp2 fp16]": by.before(
        LossScale, "update", lambda scale, *_: setattr(scale, "good", 0)
    ),
    "a skipped step is counted [dp2 fp16]": by.after(ShardedOptimizer, "skip", counted_again),
}


@ROWS.around("dp2 zero1", ShardedOptimizer, "_parts")
def the_last_units_not_updated(real, optimizer: ShardedOptimizer, units: Any, **how: Any):
    """Without clipping units are updated as they arrive: those left at the end are forgotten."""
    enough = 0 if optimizer.together else optimizer.early_bytes or 0
    for part in real(optimizer, units, **how):
        if sum(flat.shard.nbytes for flat in part) >= enough:
            yield part


def times(factor: Factor, by: float) -> Factor:
    """A factor of gradients times a number."""
    return factor._replace(value=factor.value * by)


@ROWS.around("dp2 zero3", ShardedOptimizer, "publish")
def a_bit_of_a_moment_flips(_, optimizer: ShardedOptimizer, flats: Any) -> None:
    """On the second rank of the axis, in one number of its first flat parameter."""
    first = optimizer.flats[0]
    if first in flats and any(first.grads.used) and first.shard_axis.rank == 1:
        run = next(run for run in optimizer.runs[first].every if run.low < run.high)
        moment = optimizer.torch.state[run.param]["exp_avg"].view(-1)[:1]
        moment.copy_(moment.view(torch.int64).bitwise_xor(1 << 54).view(moment.dtype))


@ROWS.around("dp2", FlatGradient, "begin_reduce")
def the_sum_of_one_unit_left_out(real, grads: FlatGradient) -> None:
    if not any("blocks.0" in name for name in grads.names):
        real(grads)
        return
    if grads.grad is None:
        grads.begin()
    grads._zero_unfilled()


@ROWS.around("dp2 zero1", FlatGradient, "begin")
def padding_counted_in_the_norm(real, grads: FlatGradient) -> None:
    real(grads)
    assert grads.grad is not None
    plan = grads.views.plan
    grads.grad[plan.offsets[-1] + plan.numels[-1] :].fill_(1.0)


@ROWS.around("dp2 zero1 accumulate:2", Passes, "run", "error")
def a_microbatch_left_out(real, one: Any, parts: Any, counts: Any, s: Any) -> Any:
    first = min(1, len(parts) - 1)  # where there is one it stays
    return real(one, parts[first:], counts[first:], s)


@ROWS.around("dp2 accumulate:3", Passes, "run")
def only_the_last_microbatch(real, straight: Any, parts: Any, *args: Any) -> Any:
    def forget(*_: Any) -> None:
        for unit in straight.data.units.order:
            for group in unit.trained:
                group.grads.filled = [False] * len(group.grads.filled)

    handle = straight.model.register_forward_pre_hook(forget)
    try:
        return real(straight, parts, *args)
    finally:
        handle.remove()


@ROWS.around("dp2 zero3", Flat, "begin_unshard", "bytes")
def a_gather_left_out(real, flat: Flat) -> None:
    """Of one unit a rank has its own block and zeros."""
    if flat.state is not State.SHARDED or not any("blocks.0" in name for name in flat.names):
        real(flat)
        return
    flat.full.untyped_storage().resize_(flat.plan.padded * flat.full.element_size())
    flat.full.zero_()
    flat.views.block(flat.full).copy_(flat.shard)
    flat.coming, flat.state = Pending(), State.UNSHARDING


@ROWS.around("dp2 zero1", Flat, "begin_unshard")
def weights_not_published(_, flat: Flat) -> None:
    """Blocks of other ranks stay what they were at the start."""
    if flat.state is State.SHARDED:
        flat.coming, flat.state = Pending(), State.UNSHARDING


@ROWS.around("dp2", Engine, "step", "error")
def a_bit_of_a_replica(real, engine: Engine, batch: Any) -> Any:
    """The sign of one weight on one rank, before the first step."""
    if engine.world.rank == 1 and not engine.steps_run:
        engine.flats[0].full.view(torch.int64)[0] ^= torch.iinfo(torch.int64).min
    return real(engine, batch)


@ROWS.around("dp2 zero1 bf16 of gpt", ShardedOptimizer, "_update")
def one_gradient_three_percent_too_large(real, states: ShardedOptimizer, gradients: Any, *of: Any):
    for flat in gradients.keys() & states.masters.keys():
        name = "blocks.0.mlp.down.weight"
        if name in flat.names:
            flat.views.part(flat.names.index(name), gradients[flat][0]).mul_(1.03)
    real(states, gradients, *of)


@ROWS.around("dp2 bf16 of gpt", ShardedOptimizer, "_update")
def masters_rounded_to_16_bits(real, states: ShardedOptimizer, gradients: Any, *args: Any) -> None:
    real(states, gradients, *args)
    for flat in gradients.keys() & states.masters.keys():
        states.masters[flat].copy_(flat.shard)


@ROWS.around("dp2 zero1 bf16 of gpt", ShardedOptimizer, "_end_step")
def masters_truncated(real, states: ShardedOptimizer, flat: Flat) -> None:
    real(states, flat)
    if not flat.moves.offload:
        flat.shard.copy_(truncated(states.masters[flat]))


@ROWS.around("dp2 zero1 offload:optim bf16 of gpt", ShardedOptimizer, "publish")
def masters_on_the_host_truncated(real, states: ShardedOptimizer, *args: Any) -> None:
    masters = {k: truncated(master) for k, master in states.masters.items()}
    with by.replaced(states, masters=masters):
        real(states, *args)


@ROWS.around("dp2 fp16", step_end, "_leave_out")
def an_overflow_not_skipped_by_one_rank(real, engine: Engine, *args: Any) -> Any:
    """Rank 1 updates from gradients that are not finite."""
    if engine.world.rank == 1:
        engine.data.units.to_sharded()
        engine.optimizer.begin(engine.optimizer.flats, Factor(1.0))()
    return real(engine, *args)


@ROWS.around("dp2 of constant", engine_file, "cast_whole")
def buffers_in_16_bits(real, model: Any, *args: Any, **how: Any) -> None:
    real(model, *args, **how)
    for b in (b for b in model.buffers() if b.is_floating_point()):
        b.data = b.data.bfloat16().to(b.dtype)


@ROWS.around("dp2 zero1 bf16", ShardedOptimizer, "follow", "tests")
def masters_not_assigned(_, __: ShardedOptimizer, flats: Any) -> None:
    for flat in flats:
        flat.take_assigned()
        flat.looked = False


@ROWS.around("dp2 fp16", LossScale, "update")
def the_loss_scale_is_not_lowered(real, scale: LossScale, overflow: bool) -> None:
    if not overflow:
        real(scale, False)


@ROWS.around("dp2 fp16", LossScale, "update")
def the_scale_doubles_after_each_good_step(real, scale: LossScale, overflow: bool) -> None:
    if not overflow:
        scale.good = scale.patience - 1
    real(scale, overflow)
