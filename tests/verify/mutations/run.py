"""Sabotages of what a run does over its steps: overflows, rates, groups, recomputation with
dropout, delayed updates, chunks of a disk, and evaluations.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shardwise.comm.move import begin_sum
from shardwise.core.layouts.layout import R
from shardwise.core.reduce_order import Act as UnitAct
from shardwise.core.unit_order import UnitOrder
from shardwise.engine import step_end
from shardwise.engine.engine import Engine
from shardwise.engine.optimizer.host_thread import HostThread
from shardwise.engine.optimizer.optimizer import ShardedOptimizer
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from shardwise.engine.optimizer.optimizer_state import GroupOptions
from shardwise.techniques.data.flat import flat_parameter
from shardwise.techniques.data.flat.flat_gradient import FlatGradient
from shardwise.techniques.expert.apply import ExpertLayout
from shardwise.techniques.offload import disk_optimizer
from shardwise.techniques.offload.disk_optimizer import StatesOnDisk
from shardwise.techniques.offload.word import Offload
from shardwise.techniques.recompute.kept import Generators
from tests.verify.mutations import mutation as by
from tests.verify.mutations.mutation import Rows

ROWS = Rows()
DELAYED = "dp2 zero1 offload:optim-delayed=0"


def of_the_second_group(*names: str) -> by.Change:
    """Options that all groups take from the spec."""

    def build(real: Any, spec: OptimizerSpec, *args: Any) -> Any:
        made = real(spec, *args)
        for group in made.param_groups[1:]:
            group.update({name: spec.options[name] for name in names})
        return made

    return by.around(OptimizerSpec, "build", build)


def gradients_of_a_skipped_step_stay(patch: Any) -> None:
    def leave_out(real: Any, *args: Any) -> Any:
        own.skips = True
        try:
            return real(*args)
        finally:
            own.skips = False

    own = threading.local()  # ranks are threads
    by.around(step_end, "_leave_out", leave_out)(patch)
    by.skip(FlatGradient, "clear", lambda _: getattr(own, "skips", False))(patch)


@contextmanager
def drawing(real: Any, generators: Generators, states: Any) -> Iterator[None]:
    """A recomputation begins a number later."""
    with real(generators, states):
        torch.rand(1)
        yield


@contextmanager
def going_on(generators: Generators, states: Any) -> Iterator[None]:
    """The generators go on from where the recomputation has left them."""
    for generator, state in zip(generators.generators, states, strict=True):
        generator.set_state(state)
    yield


late = by.instead(
    Offload, "delays", lambda word, step: word.undelayed is not None and step > word.undelayed
)


def returned(real: Any, order: UnitOrder, unit: int, **how: Any) -> list[UnitAct]:
    """What an evaluation frees, it frees at its end."""
    acts = real(order, unit, **how)
    return acts if how.get("recorded", True) or order.in_backward else []


in_training = by.arguments(
    Engine, "_made", lambda engine, call: (engine, lambda m: call(m.train()))
)


ROWS |= {
    # --- rates and groups -------------------------------------------------------------------------
    "one rate for all groups [dp2 zero1]": of_the_second_group("lr"),
    "one weight decay for all groups [dp2 zero2]": of_the_second_group("weight_decay"),
    "a new rate of one group alone [dp2]": by.instead(
        GroupOptions, "set_lr", lambda o, lr: o.groups[0].update(lr=lr)
    ),
    "rates that are not loaded [dp2]": by.drop(GroupOptions, "load_changed"),
    # --- a skipped step, ranks without rows -------------------------------------------------------
    "gradients of a skipped step stay [dp2 zero1 fp16]": gradients_of_a_skipped_step_stay,
    # --- recomputation ----------------------------------------------------------------------------
    "other masks in a recomputation [recompute:full of gpt] masks": by.around(
        Generators, "replay", drawing
    ),
    "masks not drawn again [recompute:selective of gpt] masks": by.instead(
        Generators, "replay", lambda *_: nullcontext()
    ),
    "numbers after a recomputation [recompute:full of gpt] masks": by.instead(
        Generators, "replay", going_on
    ),
    # --- delayed updates --------------------------------------------------------------------------
    f"the first delay a step late [{DELAYED}]": late,
    "the first delay late after 40 steps [dp2 zero1 offload:optim-delayed] memory": late,
    f"a delayed update without buffers of its own [{DELAYED}]": by.drop(FlatGradient, "swap"),
    "the last of several parts lost [dp2 zero1 offload:optim]": by.result(
        ShardedOptimizer, "_parts", lambda found, *_: (x := [*found])[: max(1, len(x) - 1)]
    ),
    "evaluated before the update [dp2 offload:optim-delayed=0] tests": by.beside(
        Engine, "_made", flush=by.nothing
    ),
    # --- chunks of a disk -------------------------------------------------------------------------
    # the pieces of one parameter share its count of steps, and each adds to it
    "a step for each chunk [dp2 zero1 offload:optim@disk of wide]": by.instead(
        disk_optimizer, "_copied", lambda value: value
    ),
    "a chunk published in another's place [dp2 zero3 offload:optim@disk of wide]": by.arguments(
        StatesOnDisk,
        "_publish_chunk",
        lambda s, job, *of: (s, job._replace(number=job.number - (job.number == 1)), *of),
    ),
    # of every chunk the parameters of the first one are updated
    "pieces of the first chunk [dp2 zero1 offload:optim@disk of wide] error": by.arguments(
        disk_optimizer, "_inside", lambda runs, first, last: (runs, 0, last - first)
    ),
    "the last chunk not updated [dp2 zero3 offload:optim@disk of wide] error": by.skip(
        StatesOnDisk,
        "_update_chunk",
        lambda _, job, *__: 0 < job.number == job.of.master.chunks - 1,
    ),
    # --- evaluation, outputs ----------------------------------------------------------------------
    "an evaluation in training mode [dp2 zero1 of training]": in_training,
    "outputs in training mode [tp2 of training]": in_training,
    "modes not restored [dp2 zero3 of training]": by.after(
        Engine, "_made", lambda engine, _: engine.model.eval()
    ),
    "an evaluation without a flush [dp2 zero2 offload:optim-delayed=0]": by.beside(
        Engine, "_made", flush=by.nothing
    ),
    "evaluation as a mean of means [dp2]": by.beside(Engine, "evaluate", _count=lambda *_: 1),
    "tokens of a rank's own rows [dp2 zero1]": by.result(
        Engine, "evaluate", lambda found, engine, batch: (found[0], engine._count(batch))
    ),
    "one more sum in an evaluation [dp2] bytes": by.before(
        Engine,
        "evaluate",
        lambda e, _: begin_sum(torch.zeros(2, dtype=torch.float64), e.axes[-1]).wait(),
    ),
    "an evaluation frees its units at its end [dp2 zero3 of gpt] moments": by.all_of(
        by.around(UnitOrder, "returned", returned),
        by.result(
            UnitOrder,
            "end_evaluation",
            lambda found, order: [*found, *(UnitAct("free", unit) for unit in order.forward)],
        ),
    ),
    "outputs of a rank's own stages [pp2 1f1b:2]": by.beside(
        Engine, "outputs", _over_stages=lambda x: x
    ),
    # tokens reach no expert on a rank whose last batch had no rows
    "outputs of stand-ins [dp2 ep2 of moe]": by.before(
        Engine,
        "outputs",
        lambda e, *_: setattr(e.sharded.of(ExpertLayout), "absent", e.data_rank == 1),
    ),
    # --- what is loaded ---------------------------------------------------------------------------
    "the steps not loaded [dp2 zero3]": by.after(
        Engine, "load_scalars", lambda engine, _: setattr(engine, "steps", 0)
    ),
}


@ROWS.around("dp2 zero3", GroupOptions, "set_lr")
def a_new_rate_a_step_late(real, options: GroupOptions, lr: float) -> None:
    earlier = getattr(options, "asked", lr)
    setattr(options, "asked", lr)  # noqa: B010
    real(options, earlier)


@ROWS.around(DELAYED, ShardedOptimizer, "begin")
def a_delayed_update_with_the_next_rate(real, optimizer: ShardedOptimizer, *of: Any, **how) -> Any:
    update = real(optimizer, *of, **how)
    return partial(update.func, *update.args[:2], optimizer.param_groups)


@ROWS.around(DELAYED, HostThread, "finish")
def a_delayed_update_not_awaited(real, host: HostThread) -> None:
    """What the device gets are the masters of before the update, or of a part of it."""
    running, host.running = host.running, deque()
    real(host)
    for _, piece in running:
        host.publish(piece)


@ROWS.around("dp2 zero1 offload:optim-delayed", HostThread, "finish")
def delayed_updates_shown_too_early(_, host: HostThread) -> None:
    """What the device gets are the masters of before the update."""
    running, host.running = host.running, deque()
    host.asked.set()
    for update, piece in running:
        host.publish(piece)
        update.result()


@ROWS.around(DELAYED, Engine, "loading")
def a_load_over_a_pending_update(real, engine: Engine, *args: Any) -> Any:
    """The update is finished after the load, on the masters that it has read."""
    with by.replaced(engine.optimizer.host, running=deque()):
        return real(engine, *args)


@ROWS.around("dp2 zero3", flat_parameter, "start", "bytes")
def gathers_twice_in_an_evaluation(real, x: Any, axis: Any, src: Any, dst: Any, out: Any, **how):
    if dst == R and not torch.is_grad_enabled():
        real(x, axis, src, dst, torch.empty_like(out), **how).wait()
    return real(x, axis, src, dst, out, **how)


@ROWS.around("dp2 zero1", Engine, "evaluate")
def evaluation_of_own_rows(real, engine: Engine, batch: Any) -> Any:
    with by.replaced(engine.consensus, agree=lambda x: torch.cat([x[:2], 2 * x[2:]])):
        return real(engine, batch)


@ROWS.around("dp2 fp16", Engine, "load_scalars")
def the_loss_scale_not_loaded(real, engine: Engine, saved: Any) -> None:
    kept = engine.scale.value
    real(engine, saved)
    engine.scale.value = kept


@ROWS.around("dp2 of sigmoid", Engine, "loading")
def buffers_not_loaded(real, engine: Engine, *args: Any) -> Any:
    return [
        replace(box, tensor=box.tensor.clone()) if box.name.startswith("buffer/") else box
        for box in real(engine, *args)
    ]
