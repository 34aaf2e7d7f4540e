"""Sabotages of data parallelism, precision and the optimizer."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.transport import Pending
from shardwise.core.layouts.layout import P, R
from shardwise.engine.engine import Engine
from shardwise.engine.one_stage import OneStage
from shardwise.engine.optimizer.memory_states import MemoryStates
from shardwise.engine.optimizer.optimizer import ShardedOptimizer
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from shardwise.engine.optimizer.scale import LossWeights
from shardwise.engine.optimizer.updating import Updates
from shardwise.techniques.data.buffers import Buffers
from shardwise.techniques.data.flat import flat_gradient, flat_parameter
from shardwise.techniques.data.flat.flat_gradient import FlatGradient
from shardwise.techniques.data.flat.flat_parameter import Flat, State
from tests.verify.mutations.mutation import Mutation, Patch, around, nothing

# --- the optimizer ----------------------------------------------------------------------------


def larger_gradients(patch: Patch) -> None:
    around(
        patch, ShardedOptimizer, "step", lambda real, o, flats, f=1.0: real(o, flats, f * 1.0001)
    )


def _group_options(patch: Patch, **options: Any) -> None:
    def build(real: Any, *args: Any) -> Any:
        made = real(*args)
        for group in made.param_groups:
            group.update(options)
        return made

    around(patch, OptimizerSpec, "build", build)


def no_weight_decay(patch: Patch) -> None:
    _group_options(patch, weight_decay=0.0)


def other_betas(patch: Patch) -> None:
    _group_options(patch, betas=(0.9, 0.999))


def other_epsilon(patch: Patch) -> None:
    _group_options(patch, eps=1e-8)


def half_the_clip(patch: Patch) -> None:
    def by_norm(real: Any, updates: Updates, *of: float) -> None:
        assert updates.clip is not None
        real(replace(updates, clip=updates.clip / 2), *of)

    around(patch, Updates, "by_norm", by_norm)


def updated_twice(patch: Patch) -> None:
    def step(real: Any, optimizer: Any, flats: Any, factor: float = 1.0) -> None:
        real(optimizer, flats, factor)
        real(optimizer, flats, 1.0)

    around(patch, ShardedOptimizer, "step", step)


def a_step_ahead(patch: Patch) -> None:
    def step(real: Any, optimizer: Any, *args: Any) -> None:
        real(optimizer, *args)
        for state in optimizer.torch.state.values():
            state["step"] += 1

    around(patch, ShardedOptimizer, "step", step)


def frozen_is_trained(patch: Patch) -> None:
    def init(real: Any, flat: Flat, params: Any, *args: Any) -> None:
        for _, p in params:
            p.requires_grad_(True)
        real(flat, params, *args)

    around(patch, Flat, "__init__", init)


# --- gradients and their sums -----------------------------------------------------------------


def _after_sums(patch: Patch, act: Any, before: Any = nothing) -> None:
    """`act(axis, x, out)` once a sum of gradients is there."""

    def start(real: Any, x: Tensor, axis: Any, src: Any, dst: Any, out: Tensor, **how: Any) -> Any:
        if src != P:
            return real(x, axis, src, dst, out, **how)
        before(x)
        pending = real(x, axis, src, dst, out, **how)
        return Pending([pending.wait, lambda: act(axis, x, out)])

    around(patch, flat_gradient, "start", start)


def a_mean_of_ranks(patch: Patch) -> None:
    _after_sums(patch, lambda axis, _, out: out.div_(axis.size))


def summed_in_fp32(patch: Patch) -> None:
    _after_sums(patch, nothing, lambda x: x.copy_(x.float().double()))


def sum_left_out(patch: Patch) -> None:
    def reduce(real: Any, grads: FlatGradient) -> None:
        if not any("blocks.0" in name for name in grads.names):
            real(grads)
            return
        if grads.grad is None:
            grads.begin()
        grads._zero_unfilled()

    around(patch, FlatGradient, "begin_reduce", reduce)


def padding_is_not_zero(patch: Patch) -> None:
    def begin(real: Any, grads: FlatGradient) -> None:
        real(grads)
        assert grads.grad is not None
        plan = grads.views.plan
        grads.grad[plan.offsets[-1] + plan.numels[-1] :].fill_(1.0)

    around(patch, FlatGradient, "begin", begin)


def replicas_not_summed(patch: Patch) -> None:
    patch.setattr(FlatGradient, "begin_further", nothing)


def summed_over_the_wrong_axis(patch: Patch) -> None:
    def wrong(real: Any, grads: FlatGradient, axes: Any) -> Any:
        return real(grads, axes and [grads.local.axis(grads.moves.sums[0])])

    around(patch, FlatGradient, "_sum_over", wrong)


def an_earlier_microbatch_lost(patch: Patch) -> None:
    def arrived(real: Any, grads: FlatGradient, out: Tensor, sent: Tensor) -> None:
        grads.valid = [False] * len(grads.valid)
        real(grads, out, sent)

    around(patch, FlatGradient, "_arrived", arrived)


def a_microbatch_left_out(patch: Patch) -> None:
    def run(real: Any, one: Any, parts: Any, counts: Any, s: Any) -> Tensor:
        first = min(1, len(parts) - 1)  # where there is one it stays
        return real(one, parts[first:], counts[first:], s)

    around(patch, OneStage, "run", run)


def only_the_last_microbatch(patch: Patch) -> None:
    def run(real: Any, straight: Any, parts: Any, *args: Any) -> Tensor:
        def forget(*_: Any) -> None:
            for unit in straight.data.units.order:
                for group in unit.trained:
                    group.grads.filled = [False] * len(group.grads.filled)

        handle = straight.model.register_forward_pre_hook(forget)
        try:
            return real(straight, parts, *args)
        finally:
            handle.remove()

    around(patch, OneStage, "run", run)


# --- tokens -----------------------------------------------------------------------------------


def ranks_weigh_the_same(patch: Patch) -> None:
    around(patch, Engine, "_count", lambda real, engine, *of: min(1, real(engine, *of)))


def a_token_too_many(patch: Patch) -> None:
    around(patch, Engine, "_count", lambda real, e, *of: real(e, *of) + (e.data_rank == 1))


def not_divided_by_tokens(patch: Patch) -> None:
    def update(real: Any, updates: Updates, norm: float, _: float) -> None:
        real(updates, norm, 1.0)

    around(patch, Updates, "by_norm", update)


def every_microbatch_weighs_the_same(patch: Patch) -> None:
    patch.setattr(LossWeights, "of", lambda weights, *_: weights.totals.new_ones(()))


# --- parameters -------------------------------------------------------------------------------


def _after_gathers(patch: Patch, act: Any) -> None:
    def start(real: Any, x: Tensor, axis: Any, src: Any, dst: Any, out: Tensor, **how: Any) -> Any:
        pending = real(x, axis, src, dst, out, **how)
        if dst != R or src == P:
            return pending
        return Pending([pending.wait, lambda: act(out.view(axis.size, -1))])

    around(patch, flat_parameter, "start", start)


def a_lost_block(patch: Patch) -> None:
    _after_gathers(patch, lambda blocks: blocks[-1].zero_())


def blocks_in_another_order(patch: Patch) -> None:
    _after_gathers(patch, lambda blocks: blocks.copy_(blocks.flip(0)))


def a_gather_left_out(patch: Patch) -> None:
    """Of one unit a rank has its own block and zeros."""

    def begin(real: Any, flat: Flat) -> None:
        if flat.state is not State.SHARDED or not any("blocks.0" in name for name in flat.names):
            real(flat)
            return
        flat.full.untyped_storage().resize_(flat.plan.padded * flat.full.element_size())
        flat.full.zero_()
        flat.views.block(flat.full).copy_(flat.shard)
        flat.coming, flat.state = Pending(), State.UNSHARDING

    around(patch, Flat, "begin_unshard", begin)


def weights_not_published(patch: Patch) -> None:
    """Blocks of other ranks stay what they were at the start."""

    def begin(real: Any, flat: Flat) -> None:
        if flat.state is State.SHARDED:
            flat.coming, flat.state = Pending(), State.UNSHARDING

    around(patch, Flat, "begin_unshard", begin)


def buffers_not_sent(patch: Patch) -> None:
    patch.setattr(Buffers, "refresh", nothing)


# --- precision --------------------------------------------------------------------------------


def _before_masters(patch: Patch, act: Any) -> None:
    def step(real: Any, states: MemoryStates, gradients: Any, *args: Any) -> None:
        for k in gradients.keys() & states.masters.keys():
            act(states.flats[k])
        real(states, gradients, *args)

    around(patch, MemoryStates, "_update", step)


def three_percent(patch: Patch) -> None:
    def enlarge(flat: Flat) -> None:
        for name, p in zip(flat.names, flat.params, strict=True):
            if name == "blocks.0.mlp.down.weight":
                assert p.grad is not None
                p.grad.mul_(1.03)

    _before_masters(patch, enlarge)


def masters_in_16_bits(patch: Patch) -> None:
    def step(real: Any, states: MemoryStates, gradients: Any, *args: Any) -> None:
        real(states, gradients, *args)
        for k in gradients.keys() & states.masters.keys():
            states.masters[k].copy_(states.flats[k].shard)

    around(patch, MemoryStates, "_update", step)


def loss_scale_left_in(patch: Patch) -> None:
    def by_norm(real: Any, updates: Updates, norm: float, correction: float) -> None:
        real(updates, norm, correction * updates.scale.value)

    around(patch, Updates, "by_norm", by_norm)


def overflow_not_skipped_by_one(patch: Patch) -> None:
    """Rank 1 updates from gradients that are not finite."""

    def leave_out(real: Any, updates: Updates, *args: Any) -> Any:
        if updates.guard.world.rank == 1:
            updates.data.units.attach_grads()
            updates.optimizer.step(updates.optimizer.flats, 1.0)
        return real(updates, *args)

    around(patch, Updates, "leave_out", leave_out)


def a_bit_of_a_replica(patch: Patch) -> None:
    """The sign of one weight on one rank, before the first step."""

    def step(real: Any, engine: Engine, batch: Any) -> Any:
        if engine.world.rank == 1 and not engine.steps_run:
            engine.flats[0].full.view(torch.int64)[0] ^= torch.iinfo(torch.int64).min
        return real(engine, batch)

    around(patch, Engine, "step", step)


MUTATIONS = (
    Mutation("gradients 1.0001 times as large", "dp2 zero1", "parity", larger_gradients),
    Mutation("weight decay dropped", "dp2", "parity", no_weight_decay),
    Mutation("other betas", "dp2 zero2", "parity", other_betas),
    Mutation("another epsilon", "dp2 zero3", "parity", other_epsilon),
    Mutation("clipping at half", "dp2 zero2", "parity", half_the_clip),
    Mutation("an update made twice", "dp2 zero3", "parity", updated_twice),
    Mutation("the optimizer counts steps double", "dp2 zero1", "parity", a_step_ahead),
    Mutation("a frozen parameter trained", "dp2", "error", frozen_is_trained),
    Mutation("a mean of ranks for a sum", "dp2", "parity", a_mean_of_ranks),
    Mutation("gradients summed in fp32", "dp2 zero3", "parity", summed_in_fp32),
    Mutation("the sum of one unit left out", "dp2", "parity", sum_left_out),
    Mutation("padding counted in the norm", "dp2 zero1", "parity", padding_is_not_zero),
    Mutation("replicas not summed", "dp_replicate2 dp_shard2 zero2", "parity", replicas_not_summed),
    Mutation(
        "replicas summed over the shard axis",
        "dp_replicate2 dp_shard2 zero3",
        "parity",
        summed_over_the_wrong_axis,
    ),
    Mutation(
        "an earlier microbatch's sum lost",
        "dp2 zero2 accumulate:2",
        "parity",
        an_earlier_microbatch_lost,
    ),
    Mutation("a microbatch left out", "dp2 zero1 accumulate:2", "parity", a_microbatch_left_out),
    Mutation("only the last microbatch", "dp2 accumulate:3", "parity", only_the_last_microbatch),
    Mutation("ranks weigh the same", "dp2 zero1", "parity", ranks_weigh_the_same),
    Mutation("a token too many on a rank", "dp2 zero2", "parity", a_token_too_many),
    Mutation("not divided by the tokens", "dp2 zero3", "parity", not_divided_by_tokens),
    Mutation("every microbatch weighs the same", "dp2", "parity", every_microbatch_weighs_the_same),
    Mutation("a lost block of weights", "dp2 zero3", "parity", a_lost_block),
    Mutation("blocks in another order", "dp2 zero1", "parity", blocks_in_another_order),
    Mutation("a gather left out", "dp2 zero3", "bytes", a_gather_left_out),
    Mutation("weights not published", "dp2 zero1", "error", weights_not_published),
    Mutation("a bit of a replica", "dp2", "error", a_bit_of_a_replica),
    Mutation("a buffer not sent", "dp2 zero1", "bytes", buffers_not_sent),
    Mutation("one gradient 3 % too large", "dp2 zero1 bf16", "parity", three_percent, "gpt"),
    Mutation("masters rounded to 16 bits", "dp2 bf16", "parity", masters_in_16_bits, "gpt"),
    Mutation(
        "an overflow not skipped by one rank", "dp2 fp16", "parity", overflow_not_skipped_by_one
    ),
    Mutation("the loss scale left in", "dp2 zero1 fp16", "parity", loss_scale_left_in, "gpt"),
)
