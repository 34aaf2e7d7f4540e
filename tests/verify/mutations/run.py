"""Sabotages of what a run does over its steps: overflows, rates, groups, ranks without rows."""

from typing import Any

from shardwise.engine.engine import Engine
from shardwise.engine.optimizer import ShardedOptimizer
from shardwise.engine.optimizer_spec import OptimizerSpec
from shardwise.engine.scale import LossScale
from shardwise.engine.updating import Updates
from shardwise.parallel.data.flat_gradient import FlatGradient
from tests.verify.mutations.mutation import Mutation, Patch, around, nothing

# --- a skipped step ---------------------------------------------------------------------------


def gradients_of_a_skipped_step_stay(patch: Patch) -> None:
    def leave_out(real: Any, updates: Updates, *args: Any) -> Any:
        with patch.context() as kept:
            kept.setattr(FlatGradient, "clear", nothing)
            return real(updates, *args)

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
    around(
        patch,
        ShardedOptimizer,
        "_step_masters",
        lambda real, optimizer, gradients, factor, options=None: real(
            optimizer, gradients, factor, options and optimizer.param_groups
        ),
    )


def a_delayed_update_has_no_gradients_of_its_own(patch: Patch) -> None:
    patch.setattr(FlatGradient, "swap", nothing)


# --- ranks without rows -----------------------------------------------------------------------


def a_rank_without_rows_counts_one(patch: Patch) -> None:
    around(patch, Engine, "_count", lambda real, engine, *of: max(1, real(engine, *of)))


def the_mean_of_all_ranks(patch: Patch) -> None:
    """The loss is divided by the tokens that each rank would have, also those without rows."""

    def settle(real: Any, engine: Engine, summed: Any, count: int, *args: Any) -> Any:
        count = count or round(engine.expected / engine.data_ranks)
        return real(engine, summed, count, *args)

    around(patch, Engine, "_settle", settle)


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
)
