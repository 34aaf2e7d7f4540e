"""Sabotages of what is sent, kept and shown, of evaluation, outputs and checkpoints."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import transport
from shardwise.core.layouts.layout import P, R
from shardwise.core.tools.tree import leaves
from shardwise.engine.engine import Engine
from shardwise.engine.state import state
from shardwise.prediction import traffic
from shardwise.techniques.data.flat import flat_parameter
from shardwise.techniques.data.flat.flat_gradient import FlatGradient
from shardwise.techniques.data.flat.flat_parameter import Flat
from shardwise.techniques.pipeline.runtime import _Post
from tests.verify.mutations.mutation import Mutation, Patch, around, nothing
from tests.verify.mutations.pipeline import replaced

# --- bytes ------------------------------------------------------------------------------------


def price_of_an_all_reduce_halved(patch: Patch) -> None:
    def price(real: Any, src: Any, dst: Any, numel: int, n: int) -> Any:
        move = real(src, dst, numel, n)
        return replace(move, sent=move.sent / 2) if move.what == "all_reduce" else move

    around(patch, traffic, "price", price)


def volume_of_an_all_reduce_halved(patch: Patch) -> None:
    def halved(real: Any, kind: str, numel: int, *rest: Any) -> tuple[int, int]:
        return real(kind, numel // 2 if kind == "all_reduce" else numel, *rest)

    around(patch, transport, "volume", halved)


def gathers_sent_twice(patch: Patch) -> None:
    def start(real: Any, x: Tensor, axis: Any, src: Any, dst: Any, out: Tensor, **how: Any) -> Any:
        if src != P and dst == R:
            real(x, axis, src, dst, torch.empty_like(out), **how).wait()
        return real(x, axis, src, dst, out, **how)

    around(patch, flat_parameter, "start", start)


def one_more_all_reduce(patch: Patch) -> None:
    def settle(real: Any, engine: Engine, *args: Any) -> Any:
        if engine.axes[0].size > 1:
            engine.axes[0].transport.all_reduce(torch.zeros(2)).wait()
        return real(engine, *args)

    around(patch, Engine, "_settle", settle)


def one_more_between_steps(patch: Patch) -> None:
    def step(real: Any, engine: Engine, batch: Any) -> Any:
        if engine.axes[0].size > 1:
            engine.axes[0].transport.all_reduce(torch.zeros(2)).wait()
        return real(engine, batch)

    around(patch, Engine, "step", step)


def freed_and_gathered_again(patch: Patch) -> None:
    def gather(real: Any, flat: Flat) -> None:
        real(flat)
        if flat.reshards:
            flat.reshard()
            real(flat)

    around(patch, Flat, "unshard", gather)


# --- memory -----------------------------------------------------------------------------------


def _keep(owner: Any, value: Any) -> None:
    owner.__dict__.setdefault("kept_alive", []).append(value)


def a_clone_of_each_unit(patch: Patch) -> None:
    def init(real: Any, flat: Flat, *args: Any) -> None:
        real(flat, *args)
        _keep(flat, flat.shard.clone())

    around(patch, Flat, "__init__", init)


def all_weights_leak(patch: Patch) -> None:
    def step(real: Any, engine: Engine, batch: Any) -> Any:
        _keep(engine, [flat.shard.clone() for flat in engine.flats])
        return real(engine, batch)

    around(patch, Engine, "step", step)


def weights_leak_from_the_sixth_step(patch: Patch) -> None:
    def step(real: Any, engine: Engine, batch: Any) -> Any:
        if engine.steps >= 5:
            _keep(engine, [flat.shard.clone() for flat in engine.flats])
        return real(engine, batch)

    around(patch, Engine, "step", step)


def units_not_freed(patch: Patch) -> None:
    patch.setattr(Flat, "reshard", lambda flat: flat.reshards and flat.to_sharded())


def sent_gradients_kept(patch: Patch) -> None:
    def arrived(real: Any, grads: FlatGradient, out: Tensor, sent: Tensor) -> None:
        real(grads, out, sent)
        grads.__dict__["kept_alive"] = sent

    around(patch, FlatGradient, "_arrived", arrived)


def messages_kept(patch: Patch) -> None:
    def receive(real: Any, post: Any, transfer: Any) -> list[Tensor]:
        bundle = real(post, transfer)
        _keep(post.work.stages, bundle)
        return bundle

    around(patch, _Post, "receive", receive)


# --- coverage ---------------------------------------------------------------------------------


def _shown(patch: Patch, name: str, act: Any) -> None:
    around(patch, Engine, name, lambda real, engine: act(engine, real(engine)))


def a_rank_without_boxes(patch: Patch) -> None:
    _shown(patch, "gradients", lambda engine, boxes: boxes if engine.world.rank == 0 else [])


def gradients_without_one(patch: Patch) -> None:
    _shown(patch, "gradients", lambda _, boxes: boxes[1:])


def a_weight_in_part(patch: Patch) -> None:
    _shown(patch, "boxes", lambda engine, boxes: boxes if engine.world.rank == 0 else boxes[1:])


def every_gradient_the_first_copy(patch: Patch) -> None:
    _shown(patch, "gradients", lambda _, boxes: [replace(box, replica=0) for box in boxes])


def every_copy_is_the_first(patch: Patch) -> None:
    _shown(patch, "boxes", lambda _, boxes: [replace(box, replica=0) for box in boxes])


# --- evaluation, outputs ----------------------------------------------------------------------


def evaluation_of_own_rows(patch: Patch) -> None:
    def evaluate(real: Any, engine: Engine, batch: Any) -> Any:
        # the lengths of lists, behind the loss and the tokens, agree
        with replaced(engine.consensus, "agree", lambda x: torch.cat([x[:2], 2 * x[2:]])):
            return real(engine, batch)

    around(patch, Engine, "evaluate", evaluate)


def evaluation_of_means(patch: Patch) -> None:
    """The mean of the ranks' means, whatever they have."""

    def evaluate(real: Any, engine: Engine, batch: Any) -> Any:
        with replaced(engine, "_count", lambda *_: 1):
            return real(engine, batch)

    around(patch, Engine, "evaluate", evaluate)


def outputs_while_training(patch: Patch) -> None:
    around(patch, Engine, "_made", lambda real, e, call: real(e, lambda m: call(m.train())))


def outputs_of_own_stages(patch: Patch) -> None:
    def outputs(real: Any, engine: Engine, *args: Any) -> Any:
        with replaced(engine, "_over_stages", lambda x: x):
            return real(engine, *args)

    around(patch, Engine, "outputs", outputs)


# --- checkpoints ------------------------------------------------------------------------------


def optimizer_state_forgotten(patch: Patch) -> None:
    """What is loaded over the moments is not kept."""

    def loaded(real: Any, engine: Engine) -> None:
        real(engine)
        for value in leaves([*engine.optimizer.state.values()], Tensor):
            value.mul_(float(value.dim() == 0))

    around(patch, Engine, "loaded", loaded)


def step_count_forgotten(patch: Patch) -> None:
    def loaded(real: Any, engine: Engine) -> None:
        real(engine)
        for value in leaves([*engine.optimizer.state.values()], Tensor):
            value.mul_(float(value.dim() > 0))

    around(patch, Engine, "loaded", loaded)


def copies_not_refreshed(patch: Patch) -> None:
    """Gathered weights stay what they were before the load."""
    patch.setattr(state, "refresh", nothing)


def a_weight_not_saved(patch: Patch) -> None:
    """In place of one weight's values zeros are saved."""

    def boxes(engine: Engine, boxes: Any) -> Any:
        first = next(k for k, box in enumerate(boxes) if box.name.startswith("optim/exp_avg/"))
        return [
            replace(box, tensor=torch.zeros_like(box.tensor)) if k == first else box
            for k, box in enumerate(boxes)
        ]

    _shown(patch, "boxes", boxes)


MUTATIONS = (
    Mutation("an all-reduce at half its price", "dp2", "bytes", price_of_an_all_reduce_halved),
    Mutation("half of an all-reduce counted", "dp2", "bytes", volume_of_an_all_reduce_halved),
    Mutation("each gather sent twice", "dp2 zero3", "bytes", gathers_sent_twice),
    Mutation("one more all-reduce", "dp2 zero1", "bytes", one_more_all_reduce),
    Mutation("an all-reduce between steps", "dp2 zero2", "bytes", one_more_between_steps),
    Mutation("units freed and gathered again", "dp2 zero3", "bytes", freed_and_gathered_again),
    Mutation("a clone of each unit kept", "dp2 zero1", "memory", a_clone_of_each_unit),
    Mutation("all weights leak at each step", "dp2 zero3", "memory", all_weights_leak),
    Mutation("a leak from the sixth step on", "dp2", "memory", weights_leak_from_the_sixth_step),
    Mutation("gradients that were sent kept", "dp2 zero2", "memory", sent_gradients_kept),
    Mutation("messages kept", "pp2 1f1b:4", "memory", messages_kept),
    Mutation("units not freed", "dp2 zero3", "memory", units_not_freed),
    Mutation("a rank that shows no boxes", "dp2 zero1", "coverage", a_rank_without_boxes),
    Mutation("gradients without one of them", "tp2", "coverage", gradients_without_one),
    Mutation("every gradient the first copy", "dp2", "coverage", every_gradient_the_first_copy),
    Mutation("a weight saved in part", "dp2 zero3", "error", a_weight_in_part),
    Mutation("every copy saved as the first", "dp2", "error", every_copy_is_the_first),
    Mutation("evaluation of a rank's own rows", "dp2 zero1", "parity", evaluation_of_own_rows),
    Mutation("evaluation as a mean of means", "dp2", "parity", evaluation_of_means),
    Mutation("outputs in training mode", "tp2", "parity", outputs_while_training, "training"),
    Mutation("outputs of a rank's own stages", "pp2 1f1b:2", "parity", outputs_of_own_stages),
    Mutation("moments forgotten in a load", "dp2 zero2", "parity", optimizer_state_forgotten),
    Mutation("step counts forgotten in a load", "dp2 zero1", "parity", step_count_forgotten),
    Mutation("copies not refreshed after a load", "dp2 zero1", "error", copies_not_refreshed),
    Mutation("a moment saved as zeros", "dp2", "parity", a_weight_not_saved),
)
