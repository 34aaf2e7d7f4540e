"""Sabotages of updates made later, in parts or in 16 bits, of the loss scale, of gradients that are
not finite, and of what an evaluation or a copy on the host holds.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.core.reduce_order import Act
from shardwise.core.unit_order import UnitOrder
from shardwise.engine.checks.guard import Guard
from shardwise.engine.engine import Engine
from shardwise.engine.optimizer import memory_states
from shardwise.engine.optimizer.memory_states import MemoryStates
from shardwise.engine.optimizer.optimizer import ShardedOptimizer
from shardwise.engine.optimizer.scale import LossScale
from shardwise.techniques.offload import updater
from shardwise.techniques.offload.updater import NextStep
from shardwise.techniques.offload.word import Offload
from shardwise.techniques.recompute.host_activations import Kept
from tests.verify.mutations.mutation import Mutation, Patch, around, nothing


def unscaled_in_16_bits(patch: Patch) -> None:
    def in_16_bits(gradients: Sequence[Tensor | None], factor: float) -> list[Tensor | None]:
        return [None if g is None else (g * factor).float() for g in gradients]

    patch.setattr(memory_states, "_in_32_bits", in_16_bits)


def _truncated(master: Tensor) -> Tensor:
    """A master without the digits that bf16 does not have."""
    return (master.view(torch.int32) & -(2**16)).view(torch.float32)


def masters_truncated(patch: Patch) -> None:
    def end(real: Any, states: MemoryStates, k: int) -> None:
        real(states, k)
        flat = states.flats[k]
        if not flat.moves.offload:
            flat.shard.copy_(_truncated(states.masters[k]))

    around(patch, MemoryStates, "_end_step", end)


def masters_on_the_host_truncated(patch: Patch) -> None:
    def publish(real: Any, states: MemoryStates, *args: Any) -> None:
        kept = states.masters
        states.masters = {k: _truncated(master) for k, master in kept.items()}
        real(states, *args)
        states.masters = kept

    around(patch, MemoryStates, "publish", publish)


def scale_doubles_after_each_good_step(patch: Patch) -> None:
    def update(real: Any, scale: LossScale, overflow: bool) -> None:
        if not overflow:
            scale.good = scale.patience - 1
        real(scale, overflow)

    around(patch, LossScale, "update", update)


def the_last_of_several_parts_lost(patch: Patch) -> None:
    """With a bound on the norm an update on the host is made in parts of 64 MiB."""

    def pieces(real: Any, *args: Any) -> list[Any]:
        found = list(real(*args))
        return found[:-1] if len(found) > 1 else found

    around(patch, updater, "pieces", pieces)


def a_delayed_update_not_awaited(patch: Patch) -> None:
    """What the device gets are the masters of before the update, or of a part of it."""

    def finish(real: Any, later: NextStep) -> None:
        running, later._running = later._running, []
        real(later)
        for _, piece in running:
            later.optimizer.publish(piece)

    around(patch, NextStep, "finish", finish)


def the_first_delay_a_step_late(patch: Patch) -> None:
    def delays(offload: Offload, step: int) -> bool:
        return offload.undelayed is not None and step > offload.undelayed

    patch.setattr(Offload, "delays", delays)


def a_load_over_a_pending_update(patch: Patch) -> None:
    """The update is finished after the load, on the masters that it has read."""

    def loading(real: Any, engine: Engine, *args: Any) -> Any:
        later = engine.updates.updater
        if not isinstance(later, NextStep):
            return real(engine, *args)
        running, later._running = later._running, []
        found = real(engine, *args)
        later._running = running
        return found

    around(patch, Engine, "loading", loading)


def gradients_that_are_not_finite_are_used(patch: Patch) -> None:
    patch.setattr(Guard, "see", nothing)


def an_evaluation_frees_its_units_at_its_end(patch: Patch) -> None:
    def returned(real: Any, order: UnitOrder, unit: int, **how: Any) -> list[Act]:
        acts = real(order, unit, **how)
        return acts if how.get("recorded", True) or order.in_backward else []

    def end(real: Any, order: UnitOrder) -> list[Act]:
        return [*real(order), *(Act("free", unit) for unit in order.forward)]

    around(patch, UnitOrder, "returned", returned)
    around(patch, UnitOrder, "end_evaluation", end)


def the_offset_of_a_view_lost(patch: Patch) -> None:
    def init(real: Any, kept: Kept, *args: Any) -> None:
        real(kept, *args)
        kept.view = (*kept.view[:2], 0)

    around(patch, Kept, "__init__", init)


def a_bit_of_a_moment_flips(patch: Patch) -> None:
    """On the second rank of the axis, in one number of its first flat parameter."""

    def step(real: Any, optimizer: ShardedOptimizer, *args: Any) -> None:
        real(optimizer, *args)
        pieces = (p for p in optimizer.targets[0] if p.numel())
        if optimizer.flats[0].shard_axis.rank == 1:
            moment = optimizer.state[next(pieces)]["exp_avg"].view(-1)[:1]
            moment.copy_(moment.view(torch.int64).bitwise_xor(1 << 54).view(moment.dtype))

    around(patch, ShardedOptimizer, "step_pieces", step)


MUTATIONS = (
    Mutation("unscaled in 16 bits", "dp2 zero1 fp16", "parity", unscaled_in_16_bits, "gpt"),
    Mutation("masters truncated", "dp2 zero1 bf16", "parity", masters_truncated, "gpt"),
    Mutation(
        "masters on the host truncated",
        *("dp2 zero1 offload:optim bf16", "parity", masters_on_the_host_truncated, "gpt"),
    ),
    Mutation(
        "the scale doubles after each good step",
        *("dp2 fp16", "parity", scale_doubles_after_each_good_step),
    ),
    Mutation(
        "the last of several parts lost",
        *("dp2 zero1 offload:optim", "parity", the_last_of_several_parts_lost),
    ),
    Mutation(
        "a delayed update not awaited",
        *("dp2 zero1 offload:optim-delayed=0", "parity", a_delayed_update_not_awaited),
    ),
    Mutation(
        "the first delay a step late",
        *("dp2 zero1 offload:optim-delayed=0", "parity", the_first_delay_a_step_late),
    ),
    Mutation(
        "the first delay a step late, after 40 steps",
        *("dp2 zero1 offload:optim-delayed", "memory", the_first_delay_a_step_late),
    ),
    Mutation(
        "a load over a pending update",
        *("dp2 zero1 offload:optim-delayed=0", "parity", a_load_over_a_pending_update),
    ),
    Mutation(
        "gradients that are not finite used",
        *("dp2 zero1", "parity", gradients_that_are_not_finite_are_used),
    ),
    Mutation(
        "an evaluation frees its units at its end",
        *("dp2 zero3", "moments", an_evaluation_frees_its_units_at_its_end, "gpt"),
    ),
    Mutation("a bit of a moment flips", "dp2 zero3", "parity", a_bit_of_a_moment_flips),
    Mutation(
        "the offset of a view lost",
        *("dp2 activations:host", "parity", the_offset_of_a_view_lost, "fused"),
    ),
)
