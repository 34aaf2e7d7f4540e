"""Sabotages of what is sent, kept, shown and saved, of what a step holds between its beginning and
its end, of the words of a plan, and of rules that the run and the prediction share.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.checkpoint import pending
from shardwise.comm import transport
from shardwise.comm.tiers.arena import _Slot
from shardwise.comm.tiers.disk import Disk
from shardwise.core import zero
from shardwise.core.layouts import flatten
from shardwise.core.layouts.layout import P, R
from shardwise.core.plan import plan_check
from shardwise.core.plan.plan import Plan
from shardwise.core.schedule import library
from shardwise.core.tools.tree import leaves
from shardwise.engine import memory
from shardwise.engine.engine import Engine
from shardwise.engine.state import state
from shardwise.engine.state.state import Loading
from shardwise.techniques.data.flat import flat_parameter
from shardwise.techniques.data.flat.flat_gradient import FlatGradient
from shardwise.techniques.data.flat.flat_parameter import Flat
from shardwise.techniques.data.unit_hooks import Data
from shardwise.techniques.layers import layer_plan
from shardwise.techniques.pipeline.runtime import _Post
from shardwise.techniques.recompute import choice
from shardwise.techniques.recompute import word as recompute_word
from shardwise.techniques.recompute.host_activations import (
    HostActivations,
    HostedBlock,
    Kept,
    Stored,
)
from shardwise.techniques.recompute.kept import Inputs
from shardwise.techniques.tile import apply as tiling
from shardwise.techniques.tile.apply import TiledForward
from tests.verify.mutations import mutation as by
from tests.verify.mutations.mutation import Rows

ROWS = Rows()


def a_sum_more(engine: Engine, *_: Any) -> None:
    if engine.axes[0].size > 1:
        engine.axes[0].transport.all_reduce(torch.zeros(2)).wait()


def keep(owner: Any, value: Any) -> None:
    owner.__dict__.setdefault("kept_alive", []).append(value)


def keep_weights(engine: Engine) -> None:
    keep(engine, [flat.shard.clone() for flat in engine.flats])


def shown(name: str, act: by.Act) -> by.Change:
    """`act(boxes, rank)` for what a rank shows."""
    return by.result(Engine, name, lambda boxes, engine: act(boxes, engine.world.rank))


def all_the_first(boxes: list[Any], _: int) -> list[Any]:
    return [replace(box, replica=0) for box in boxes]


def first_moment_zero(boxes: list[Any], _: int) -> list[Any]:
    at = next(k for k, box in enumerate(boxes) if box.name.startswith("optim/exp_avg/"))
    zero_box = replace(boxes[at], tensor=torch.zeros_like(boxes[at].tensor))
    return [*boxes[:at], zero_box, *boxes[at + 1 :]]


def forgotten(which: by.Act) -> by.Change:
    """What is loaded over those of the optimizer's states is not kept."""

    def loaded(engine: Engine) -> None:
        for value in filter(which, leaves([*engine.optimizer.state.values()], Tensor)):
            value.zero_()

    return by.after(Engine, "loaded", loaded)


def second_copy(every: int) -> by.Change:
    """Of what is gathered, until it is freed; of each gather, or of every second one."""

    def gathered(flat: Flat) -> None:
        flat.__dict__["gathers"] = flat.__dict__.get("gathers", 0) + 1
        if flat.reshards and flat.__dict__["gathers"] % every == 0:
            flat.__dict__["second"] = flat.full.clone()

    freed = by.after(Flat, "reshard", lambda flat: flat.__dict__.pop("second", None))
    return by.all_of(by.after(Flat, "unshard", gathered), freed)


def kept_in_a_step(owner: Any, name: str, value: by.Act) -> by.Change:
    """`value(result, *args)` of a function stays alive until the step of any rank ends."""

    def apply(patch: by.Patch) -> None:
        kept: list[Any] = []
        seen = by.result(owner, name, lambda x, *of: (kept.append(value(x, *of)), x)[1])
        by.all_of(seen, by.after(Engine, "_settle", lambda *_: kept.clear()))(patch)

    return apply


def zero2_as_zero1(patch: by.Patch) -> None:
    patch.setitem(zero.ROWS, "zero2", zero.ROWS["zero1"])


def one_f_one_b_as_gpipe(patch: by.Patch) -> None:
    gpipe = replace(library.LIBRARY["1f1b"], build=library.LIBRARY["gpipe"].build)
    patch.setitem(library.LIBRARY, "1f1b", gpipe)
    patch.setattr(plan_check, "_lowered", plan_check._lowered.__wrapped__)  # without a cache


ROWS |= {
    # --- bytes ------------------------------------------------------------------------------------
    "half of an all-reduce counted [dp2] bytes": by.arguments(
        transport, "volume", lambda kind, n, *of: (kind, n // (1 + (kind == "all_reduce")), *of)
    ),
    "one more all-reduce [dp2 zero1] bytes": by.before(Engine, "_settle", a_sum_more),
    "an all-reduce between steps [dp2 zero2] bytes": by.before(Engine, "step", a_sum_more),
    # --- memory -----------------------------------------------------------------------------------
    "a clone of each unit kept [dp2 zero1] memory": by.after(
        Flat, "__init__", lambda flat, *_: keep(flat, flat.shard.clone())
    ),
    "all weights leak at each step [dp2 zero3] memory": by.before(
        Engine, "step", lambda engine, _: keep_weights(engine)
    ),
    "a leak from the sixth step on [dp2] memory": by.before(
        Engine, "step", lambda engine, _: engine.steps >= 5 and keep_weights(engine)
    ),
    "units not freed [dp2 zero3] memory": by.instead(
        Flat, "reshard", lambda flat: flat.reshards and flat.to_sharded()
    ),
    "gradients that were sent kept [dp2 zero2] memory": by.after(
        FlatGradient, "_arrived", lambda g, _, sent: g.__dict__.update(kept_alive=sent)
    ),
    "messages kept [pp2 1f1b:4] memory": by.result(
        _Post, "receive", lambda got, post, _: keep(post.work.stages, got) or got
    ),
    "units are aligned to elements [dp2 zero3 of gpt] memory": by.everywhere(
        flatten, "flatten", lambda real, numels, _, ranks: real(numels, 1, ranks)
    ),
    # the second gradients of delayed updates
    "host memory in no list [dp2 zero1 offload:optim-delayed=0] memory": by.everywhere(
        memory,
        "gradients_of",
        lambda real, flat: [t for t in real(flat) if t is not flat.grads.other_host_grad],
    ),
    # --- coverage, checkpoints --------------------------------------------------------------------
    "a rank that shows no boxes [dp2 zero1] coverage": shown(
        "gradients", lambda boxes, rank: [] if rank else boxes
    ),
    "gradients without one of them [tp2] coverage": shown("gradients", lambda b, _: b[1:]),
    "every gradient the first copy [dp2] coverage": shown("gradients", all_the_first),
    "a weight saved in part [dp2 zero3] coverage": shown("boxes", lambda b, rank: b[rank > 0 :]),
    "every copy saved as the first [dp2] coverage": shown("boxes", all_the_first),
    "a moment saved as zeros [dp2]": shown("boxes", first_moment_zero),
    "moments forgotten in a load [dp2 zero2]": forgotten(lambda value: value.dim() > 0),
    "step counts forgotten in a load [dp2 zero1]": forgotten(lambda value: value.dim() == 0),
    "copies not refreshed after a load [dp2 zero1]": by.drop(state, "refresh"),
    "a snapshot of views [dp1] tests": by.instead(pending, "snapshot", lambda *_: []),
    # --- within a step ----------------------------------------------------------------------------
    "a second copy of what is gathered [dp2 zero3 of gpt] moments": second_copy(1),
    "a second copy in backward [dp2 zero3 of gpt] moments": second_copy(2),
    "inputs kept whole [tp2 recompute:partitioned of gpt] moments": by.before(
        Inputs, "_keep", keep
    ),
    "copies on the host not dropped [dp2 activations:host of gpt] moments": kept_in_a_step(
        HostActivations, "keep", lambda x, *_: getattr(x, "stored", None)
    ),
    "copies on the device not dropped [dp2 activations:host of gpt] moments": kept_in_a_step(
        Stored, "bytes", lambda found, *_: found
    ),
    "sent gradients freed at the step's end [dp2 zero2 of gpt] moments": kept_in_a_step(
        FlatGradient, "_arrived", lambda *of: of[-1]
    ),
    "the offset of a view lost [dp2 activations:host of fused]": by.after(
        Kept, "__init__", lambda kept, *_: setattr(kept, "view", (*kept.view[:2], 0))
    ),
    # --- what the words of a plan say -------------------------------------------------------------
    "zero2 as zero1 [dp2 zero2] memory": zero2_as_zero1,
    "1f1b as gpipe [pp2 1f1b:4] memory": one_f_one_b_as_gpipe,
    "each extent twice [dp2 offload:optim@disk of wide] memory": by.around(
        Disk,
        "allocate",
        lambda real, disk, name, *of: [real(disk, f"second {name}", *of), real(disk, name, *of)][1],
    ),
    "plans of layers ignored [dp2 zero1 | blocks.0: zero3 of gpt] memory": by.arguments(
        Plan, "of_layers", lambda plan, _: (plan, 0)
    ),
    "the last of a range left out [dp2 zero1 | blocks.0-2: zero3 of deep] memory": by.arguments(
        layer_plan, "_expanded", lambda pattern: (pattern.replace("0-2", "0-1"),)
    ),
    "every block recomputed [recompute:every2 of gpt] memory": by.arguments(
        choice, "chosen", lambda model, what, blocks: (model, what and "full", blocks)
    ),
    "a budget is doubled [dp2 recompute:24KiB of deep] memory": by.everywhere(
        recompute_word, "recompute_budget", lambda real, what: 2 * real(what)
    ),
    "logits of tiles joined [dp2 zero3 tile:4=head of words] moments": by.around(
        TiledForward, "__init__", lambda real, layer, tiles, **_: real(layer, tiles, logits=False)
    ),
    "two tiles in one [dp2 zero3 tile:4=blocks.*.mlp.* of words] memory": by.arguments(
        tiling, "even", lambda first, last, ranks: (first, last, max(1, ranks // 2))
    ),
}


@ROWS.around("dp2 zero3", flat_parameter, "start", "bytes")
def each_gather_sent_twice(real, x: Any, axis: Any, src: Any, dst: Any, out: Any, **how: Any):
    if src != P and dst == R:
        real(x, axis, src, dst, torch.empty_like(out), **how).wait()
    return real(x, axis, src, dst, out, **how)


@ROWS.around("dp2 zero3", Flat, "unshard", "bytes")
def units_freed_and_gathered_again(real, flat: Flat) -> None:
    real(flat)
    if flat.reshards:
        flat.reshard()
        real(flat)


@ROWS.around("recompute:full arenas of gpt", _Slot, "tensor", "memory")
def a_slot_is_never_free_again(real, slot: Any, *args: Any) -> Any:
    found = real(slot, *args)
    slot.user = StorageWeakRef(slot.memory.untyped_storage())
    return found


@ROWS.around("dp2 zero1", Loading, "__init__")
def frozen_weights_are_not_loaded(real, loading: Any, model: Any, sharded: Any, *of: Any) -> None:
    real(loading, model, sharded, *of)
    frozen = {f"model/{n}" for flat in sharded.flats if not flat.trained for n in flat.names}
    loading.boxes = [box for box in loading.boxes if box.name not in frozen]


@ROWS.around("dp2 activations:host of deep", HostedBlock, "begin_backward", "moments")
def all_blocks_fetched_at_once(real, block: HostedBlock) -> None:
    earlier = block
    while not block.begun and earlier is not None:
        block.kept += [ref for ref in earlier.kept if ref not in block.kept]
        earlier = None if earlier.before is None else earlier.before()
    real(block)


@ROWS.around("dp2 zero3 offload:param of gpt", Data, "__init__", "moments")
def all_units_gathered_ahead(real, data: Data, root: Any, units: Any, pace: Any, *of: Any, **how):
    real(data, root, units, replace(pace, ahead=len(units.order)), *of, **how)
