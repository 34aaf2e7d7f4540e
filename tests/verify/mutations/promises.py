"""Sabotages that change the run and its prediction alike, or show under some batches and plans."""

import math
from dataclasses import replace
from typing import Any

from shardwise.core import zero
from shardwise.core.plan import plan_schedule
from shardwise.core.plan.plan import Plan
from shardwise.core.schedule import library
from shardwise.engine import engine as engine_file
from shardwise.engine.batch import filled
from shardwise.engine.engine import Engine
from shardwise.engine.one_stage import OneStage
from shardwise.engine.optimizer.updating import Updates
from shardwise.kernels import cross_entropy
from shardwise.techniques.expert.moe_layer import MoE
from shardwise.techniques.offload.disk_states import DiskStates
from shardwise.techniques.offload.updater import NextStep
from shardwise.techniques.offload.word import Offload
from shardwise.techniques.recompute import choice
from shardwise.techniques.tile import apply as tiling
from shardwise.techniques.tile.tiled_layer import TiledForward
from tests.verify.mutations.mutation import Mutation, Patch, around

# --- what the words of a plan say -------------------------------------------------------------


def zero2_as_zero1(patch: Patch) -> None:
    patch.setitem(zero.ROWS, "zero2", zero.ROWS["zero1"])


def one_f_one_b_as_gpipe(patch: Patch) -> None:
    patch.setitem(
        library.LIBRARY,
        "1f1b",
        replace(library.LIBRARY["1f1b"], build=library.LIBRARY["gpipe"].build),
    )
    patch.setattr(plan_schedule, "_lowered", plan_schedule._lowered.__wrapped__)  # without a cache


def all_states_offloaded(patch: Patch) -> None:
    patch.setattr(Offload, "tiers", lambda _, numels: ["host"] * len(numels))


def every_block_recomputed(patch: Patch) -> None:
    around(
        patch,
        choice,
        "chosen",
        lambda real, model, what, blocks: real(model, what and "full", blocks),
    )


def each_extent_twice(patch: Patch) -> None:
    def allocate(real: Any, states: DiskStates, key: str, flat: Any, dtype: Any) -> Any:
        real(states, f"second {key}", flat, dtype)
        return real(states, key, flat, dtype)

    around(patch, DiskStates, "_allocate", allocate)


def plans_of_layers_ignored(patch: Patch) -> None:
    around(patch, Plan, "of_layers", lambda real, plan, _: real(plan, 0))


def logits_of_tiles_joined(patch: Patch) -> None:
    def init(real: Any, layer: TiledForward, tiles: Any, **_: Any) -> None:
        real(layer, tiles, logits=False)

    around(patch, TiledForward, "__init__", init)


def two_tiles_a_unit(patch: Patch) -> None:
    around(
        patch,
        tiling,
        "even",
        lambda real, first, last, ranks: real(first, last, max(1, ranks // 2)),
    )


# --- updates ----------------------------------------------------------------------------------


def the_last_units_not_updated(patch: Patch) -> None:
    """Without clipping units are updated as they arrive: those left at the end are forgotten."""

    def parts(real: Any, updates: Updates, units: Any, least_bytes: float) -> Any:
        enough = 0 if math.isinf(least_bytes) else updates.early_bytes or 0
        for part in real(updates, units, least_bytes):
            if updates.optimizer.size_bytes(part) >= enough:
                yield part

    around(patch, Updates, "_parts", parts)


def delayed_updates_shown_too_early(patch: Patch) -> None:
    """What the device gets are the masters of before the update."""

    def finish(_: Any, later: NextStep) -> None:
        running, later._running = later._running, []
        later._asked.set()
        for update, piece in running:
            later.optimizer.publish(piece)
            update.result()

    around(patch, NextStep, "finish", finish)


# --- rows, tokens and numbers -----------------------------------------------------------------


def an_empty_microbatch_leaves_its_rank_out(patch: Patch) -> None:
    def run(real: Any, one: Any, parts: Any, counts: list[int], *args: Any) -> Any:
        return real(one, parts, counts if all(counts) else [0] * len(counts), *args)

    around(patch, OneStage, "run", run)


def stand_ins_count_in_an_evaluation(patch: Patch) -> None:
    around(patch, Engine, "evaluate", lambda real, engine, batch: real(engine, filled(batch)))


def a_z_loss_twice_as_large(patch: Patch) -> None:
    around(
        patch,
        cross_entropy._Losses,
        "apply",
        lambda real, *args: real(*args[:-1], replace(args[-1], z=2 * args[-1].z)),
    )


def choices_of_own_tokens(patch: Patch) -> None:
    """The bias of the experts follows what the tokens of one rank have chosen."""

    def remember(real: Any, layer: MoE, routing: Any, bias: Any) -> None:
        own = routing.loads[layer.place.batch.rank]
        real(layer, replace(routing, wanted=own) if layer.training else routing, bias)

    around(patch, MoE, "_remember", remember)


def buffers_in_16_bits(patch: Patch) -> None:
    def cast(real: Any, model: Any, *args: Any, **how: Any) -> None:
        real(model, *args, **how)
        for b in (b for b in model.buffers() if b.is_floating_point()):
            b.data = b.data.bfloat16().to(b.dtype)

    around(patch, engine_file, "cast_whole", cast)


def the_loss_scale_not_loaded(patch: Patch) -> None:
    def load(real: Any, engine: Engine, saved: Any) -> None:
        kept = engine.scale.value
        real(engine, saved)
        engine.scale.value = kept

    around(patch, Engine, "load_scalars", load)


def the_number_of_steps_not_loaded(patch: Patch) -> None:
    def load(real: Any, engine: Engine, saved: Any) -> None:
        real(engine, saved)
        engine.steps = 0

    around(patch, Engine, "load_scalars", load)


MUTATIONS = (
    Mutation("zero2 as zero1", "dp2 zero2", "memory", zero2_as_zero1),
    Mutation("1f1b as gpipe", "pp2 1f1b:4", "memory", one_f_one_b_as_gpipe),
    Mutation("all states offloaded", "dp2 zero1 offload:optim=0.5", "memory", all_states_offloaded),
    Mutation("each extent twice", "dp2 offload:optim@disk", "memory", each_extent_twice, "wide"),
    Mutation(
        "plans of layers ignored",
        "dp2 zero1 | blocks.0: zero3",
        "memory",
        plans_of_layers_ignored,
        "gpt",
    ),
    Mutation("every block recomputed", "recompute:every2", "memory", every_block_recomputed, "gpt"),
    Mutation(
        "logits of tiles joined",
        *("dp2 zero3 tile:4=head", "moments", logits_of_tiles_joined, "words"),
    ),
    Mutation(
        "two tiles in one",
        *("dp2 zero3 tile:4=blocks.*.mlp.*", "memory", two_tiles_a_unit, "words"),
    ),
    Mutation("the last units not updated", "dp2 zero1", "parity", the_last_units_not_updated),
    Mutation(
        "delayed updates shown too early",
        "dp2 zero1 offload:optim-delayed",
        "parity",
        delayed_updates_shown_too_early,
    ),
    Mutation(
        "an empty microbatch leaves its rank out",
        "dp2 accumulate:2",
        "parity",
        an_empty_microbatch_leaves_its_rank_out,
    ),
    Mutation(
        "stand-ins count in an evaluation", "dp2 zero2", "parity", stand_ins_count_in_an_evaluation
    ),
    Mutation("a z-loss twice as large", "tp2", "parity", a_z_loss_twice_as_large, "squared"),
    Mutation("choices of own tokens", "dp2", "parity", choices_of_own_tokens, "sigmoid"),
    Mutation("buffers in 16 bits", "dp2", "parity", buffers_in_16_bits, "constant"),
    Mutation("the loss scale not loaded", "dp2 fp16", "parity", the_loss_scale_not_loaded),
    Mutation("the steps not loaded", "dp2 zero3", "parity", the_number_of_steps_not_loaded),
)
