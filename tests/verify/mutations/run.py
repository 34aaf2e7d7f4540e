"""Sabotages of what a run does over its steps: overflows, rates, groups, ranks without rows,
recomputation with dropout, chunks of a disk, and what an evaluation sends.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.move import begin_sum
from shardwise.core.layouts.layout import R
from shardwise.engine.engine import Engine
from shardwise.engine.optimizer.optimizer import ShardedOptimizer
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from shardwise.engine.optimizer.scale import LossScale, LossWeights
from shardwise.engine.optimizer.updating import Updates
from shardwise.techniques.data.flat import flat_parameter
from shardwise.techniques.data.flat.flat_gradient import FlatGradient
from shardwise.techniques.expert.apply import ExpertLayout
from shardwise.techniques.offload import disk_states
from shardwise.techniques.offload.disk_states import DiskStates
from shardwise.techniques.recompute.generators import Generators
from tests.verify.mutations.mutation import Mutation, Patch, around, nothing
from tests.verify.mutations.pipeline import replaced

# --- a skipped step ---------------------------------------------------------------------------


def gradients_of_a_skipped_step_stay(patch: Patch) -> None:
    def leave_out(real: Any, updates: Updates, *args: Any) -> Any:
        own.skips = True
        try:
            return real(updates, *args)
        finally:
            own.skips = False

    def clear(real: Any, gradient: FlatGradient) -> None:
        if not getattr(own, "skips", False):
            real(gradient)

    own = threading.local()  # ranks are threads
    around(patch, FlatGradient, "clear", clear)
    around(patch, Updates, "leave_out", leave_out)


def scale_is_not_lowered(patch: Patch) -> None:
    around(
        patch, LossScale, "update", lambda real, s, overflow: None if overflow else real(s, False)
    )


def scale_never_rises(patch: Patch) -> None:
    def update(real: Any, scale: LossScale, overflow: bool) -> None:
        scale.good = 0
        real(scale, overflow)

    around(patch, LossScale, "update", update)


def a_skipped_step_is_counted(patch: Patch) -> None:
    """The optimizer's own count rises, so that its corrections of bias are those of a step more."""

    def skip(real: Any, optimizer: ShardedOptimizer) -> None:
        real(optimizer)
        for state in optimizer.torch.state.values():
            state["step"] += 1

    around(patch, ShardedOptimizer, "skip", skip)


# --- rates and groups -------------------------------------------------------------------------


def _options_of_the_second_group(patch: Patch, *names: str) -> None:
    def build(real: Any, spec: OptimizerSpec, *args: Any) -> Any:
        made = real(spec, *args)
        for group in made.param_groups[1:]:
            group.update({name: spec.options[name] for name in names})
        return made

    around(patch, OptimizerSpec, "build", build)


def one_rate_for_all_groups(patch: Patch) -> None:
    _options_of_the_second_group(patch, "lr")


def one_decay_for_all_groups(patch: Patch) -> None:
    _options_of_the_second_group(patch, "weight_decay")


def new_rate_of_the_first_group_alone(patch: Patch) -> None:
    def set_lr(_: Any, optimizer: ShardedOptimizer, lr: float) -> None:
        optimizer.param_groups[0]["lr"] = lr

    around(patch, ShardedOptimizer, "set_lr", set_lr)


def a_new_rate_a_step_late(patch: Patch) -> None:
    def set_lr(real: Any, optimizer: ShardedOptimizer, lr: float) -> None:
        before = optimizer.__dict__.setdefault("asked", lr)
        optimizer.__dict__["asked"] = lr
        real(optimizer, before)

    around(patch, ShardedOptimizer, "set_lr", set_lr)


def rates_not_loaded(patch: Patch) -> None:
    patch.setattr(ShardedOptimizer, "load_changed", nothing)


def a_delayed_update_reads_the_next_rate(patch: Patch) -> None:
    def later(real: Any, optimizer: ShardedOptimizer, *args: Any) -> Any:
        update = real(optimizer, *args)
        optimizer.torch.param_groups = optimizer.param_groups
        return update

    around(patch, ShardedOptimizer, "later", later)


def a_delayed_update_has_no_gradients_of_its_own(patch: Patch) -> None:
    patch.setattr(FlatGradient, "swap", nothing)


# --- ranks without rows -----------------------------------------------------------------------


def a_rank_without_rows_counts_one(patch: Patch) -> None:
    around(patch, Engine, "_count", lambda real, engine, *of: max(1, real(engine, *of)))


def the_mean_of_all_ranks(patch: Patch) -> None:
    """A rank without rows counts tokens all the same."""

    def begin(real: Any, weights: LossWeights, counts: Sequence[float], *args: Any) -> None:
        real(weights, [n or 9 for n in counts], *args)

    around(patch, LossWeights, "__init__", begin)


# --- recomputation ----------------------------------------------------------------------------


def other_masks_in_a_recomputation(patch: Patch) -> None:
    def set_to(real: Any, generators: Generators, states: Any) -> None:
        real(generators, states)
        torch.rand(1)

    around(patch, Generators, "set", set_to)


def generators_move_on_in_a_recomputation(patch: Patch) -> None:
    """What is drawn in a recomputation changes what is drawn after it."""
    patch.setattr(Generators, "set", nothing)


# --- chunks of a disk -------------------------------------------------------------------------


def a_step_for_each_chunk(patch: Patch) -> None:
    """The pieces of one parameter share its count of steps, and each adds to it."""
    patch.setattr(disk_states, "_copied", lambda value: value)


def each_chunk_published_first(patch: Patch) -> None:
    def publish(real: Any, states: DiskStates, job: Any, *buffers: Any) -> None:
        real(states, replace_chunk(job) if job.chunk == 1 else job, *buffers)

    def replace_chunk(job: Any) -> Any:
        return type(job)(job.key, 0, job.extents)

    around(patch, DiskStates, "_publish_chunk", publish)


def pieces_from_the_first_chunk(patch: Patch) -> None:
    """Of every chunk the parameters of the first one are updated."""

    def inside(real: Any, states: DiskStates, flat: Any, first: int, last: int) -> Any:
        return real(states, flat, 0, last - first)

    around(patch, DiskStates, "_inside", inside)


def the_last_chunk_not_updated(patch: Patch) -> None:
    def update(real: Any, states: DiskStates, job: Any, *args: Any) -> None:
        if job.chunk == 0 or job.chunk < states.masters[job.key].chunks - 1:
            real(states, job, *args)

    around(patch, DiskStates, "_update_chunk", update)


# --- evaluation -------------------------------------------------------------------------------


def one_more_sum_in_an_evaluation(patch: Patch) -> None:
    def evaluate(real: Any, engine: Engine, batch: Any) -> Any:
        begin_sum(torch.zeros(2, dtype=torch.float64), engine.axes[-1]).wait()
        return real(engine, batch)

    around(patch, Engine, "evaluate", evaluate)


def gathers_twice_in_an_evaluation(patch: Patch) -> None:
    def start(real: Any, x: Tensor, axis: Any, src: Any, dst: Any, out: Tensor, **how: Any) -> Any:
        if dst == R and not torch.is_grad_enabled():
            real(x, axis, src, dst, torch.empty_like(out), **how).wait()
        return real(x, axis, src, dst, out, **how)

    around(patch, flat_parameter, "start", start)


def evaluation_in_training_mode(patch: Patch) -> None:
    around(
        patch, Engine, "_made", lambda real, engine, call: real(engine, lambda m: call(m.train()))
    )


def evaluation_without_a_flush(patch: Patch) -> None:
    """An update that is made beside the next step is not finished before."""

    def made(real: Any, engine: Engine, call: Any) -> Any:
        with replaced(engine, "flush", nothing):
            return real(engine, call)

    around(patch, Engine, "_made", made)


def modes_not_restored(patch: Patch) -> None:
    def made(real: Any, engine: Engine, call: Any) -> Any:
        found = real(engine, call)
        engine.model.eval()
        return found

    around(patch, Engine, "_made", made)


def tokens_of_own_rows(patch: Patch) -> None:
    def evaluate(real: Any, engine: Engine, batch: Any) -> tuple[float, int]:
        loss, _ = real(engine, batch)
        return loss, engine._count(batch)

    around(patch, Engine, "evaluate", evaluate)


def outputs_of_stand_ins(patch: Patch) -> None:
    """Tokens reach no expert on a rank whose last batch had no rows."""
    around(
        patch,
        Engine,
        "outputs",
        lambda real, engine, *args: (
            setattr(engine.sharded.of(ExpertLayout), "absent", engine.data_rank == 1),
            real(engine, *args),
        )[1],
    )


def buffers_not_loaded(patch: Patch) -> None:
    def loading(real: Any, engine: Engine, *args: Any) -> Any:
        return [
            replace(box, tensor=box.tensor.clone()) if box.name.startswith("buffer/") else box
            for box in real(engine, *args)
        ]

    around(patch, Engine, "loading", loading)


def numbers_after_a_recomputation(patch: Patch) -> None:
    """The generators go on from where the recomputation has left them."""

    @contextmanager
    def replay(generators: Generators, states: Any) -> Iterator[None]:
        generators.set(states)
        yield

    patch.setattr(Generators, "replay", replay)


MUTATIONS = (
    Mutation(
        "gradients of a skipped step stay",
        "dp2 zero1 fp16",
        "parity",
        gradients_of_a_skipped_step_stay,
    ),
    Mutation("the loss scale is not lowered", "dp2 fp16", "parity", scale_is_not_lowered),
    Mutation("the loss scale never rises", "dp2 fp16", "parity", scale_never_rises),
    Mutation("a skipped step is counted", "dp2 fp16", "parity", a_skipped_step_is_counted),
    Mutation("one rate for all groups", "dp2 zero1", "parity", one_rate_for_all_groups),
    Mutation("one weight decay for all groups", "dp2 zero2", "parity", one_decay_for_all_groups),
    Mutation("a new rate of one group alone", "dp2", "parity", new_rate_of_the_first_group_alone),
    Mutation("a new rate a step late", "dp2 zero3", "parity", a_new_rate_a_step_late),
    Mutation("rates that are not loaded", "dp2", "parity", rates_not_loaded),
    Mutation(
        "a delayed update with the next rate",
        "dp2 zero1 offload:optim-delayed=0",
        "parity",
        a_delayed_update_reads_the_next_rate,
    ),
    Mutation(
        "a delayed update without buffers of its own",
        "dp2 zero1 offload:optim-delayed=0",
        "parity",
        a_delayed_update_has_no_gradients_of_its_own,
    ),
    Mutation(
        "a rank without rows counts one", "dp2 zero2", "parity", a_rank_without_rows_counts_one
    ),
    Mutation("the mean over idle ranks too", "dp2 zero3", "parity", the_mean_of_all_ranks),
    Mutation(
        "other masks in a recomputation",
        "recompute:full",
        "masks",
        other_masks_in_a_recomputation,
        "gpt",
    ),
    Mutation(
        "masks not drawn again",
        "recompute:selective",
        "masks",
        generators_move_on_in_a_recomputation,
        "gpt",
    ),
    Mutation(
        "a step for each chunk",
        "dp2 zero1 offload:optim@disk",
        "parity",
        a_step_for_each_chunk,
        "wide",
    ),
    Mutation(
        "a chunk published in the place of another",
        "dp2 zero3 offload:optim@disk",
        "parity",
        each_chunk_published_first,
        "wide",
    ),
    Mutation(
        "pieces of the first chunk",
        "dp2 zero1 offload:optim@disk",
        "parity",
        pieces_from_the_first_chunk,
        "wide",
    ),
    Mutation(
        "the last chunk not updated",
        "dp2 zero3 offload:optim@disk",
        "parity",
        the_last_chunk_not_updated,
        "wide",
    ),
    Mutation(
        "an evaluation without a flush",
        "dp2 zero2 offload:optim-delayed=0",
        "parity",
        evaluation_without_a_flush,
    ),
    Mutation("modes not restored", "dp2 zero3", "parity", modes_not_restored, "training"),
    Mutation("tokens of a rank's own rows", "dp2 zero1", "parity", tokens_of_own_rows),
    Mutation("outputs of stand-ins", "dp2 ep2", "parity", outputs_of_stand_ins, "moe"),
    Mutation("buffers not loaded", "dp2", "parity", buffers_not_loaded, "sigmoid"),
    Mutation(
        "numbers after a recomputation",
        "recompute:full",
        "masks",
        numbers_after_a_recomputation,
        "gpt",
    ),
    Mutation("one more sum in an evaluation", "dp2", "bytes", one_more_sum_in_an_evaluation),
    Mutation(
        "gathers twice in an evaluation", "dp2 zero3", "bytes", gathers_twice_in_an_evaluation
    ),
    Mutation(
        "an evaluation in training mode",
        "dp2 zero1",
        "parity",
        evaluation_in_training_mode,
        "training",
    ),
)
