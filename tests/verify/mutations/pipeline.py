"""Sabotages of pipelines: what crosses, in which order, with which weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shardwise.engine import parallelize
from shardwise.engine.optimizer.updating import Updates
from shardwise.techniques.data.flat.flat_gradient import FlatGradient
from shardwise.techniques.data.flat.flat_parameter import Flat
from shardwise.techniques.data.unit_hooks import Data
from shardwise.techniques.pipeline import stage_module
from shardwise.techniques.pipeline.pipelined import ScheduledUnits
from shardwise.techniques.pipeline.runtime import _Post
from shardwise.techniques.pipeline.stage_work import StageWork
from shardwise.techniques.pipeline.weight_stashing import Stale
from tests.verify.mutations.mutation import Mutation, Patch, around, nothing


def another_microbatchs_targets(patch: Patch) -> None:
    def swapped(real: Any, work: StageWork, stage: int, i: int, given: Any) -> Any:
        own = work.microbatches
        if stage < work.stages.count - 1 or i > 1 or len(own) < 3:
            return real(work, stage, i, given)
        work.microbatches = [replace(each, part=own[each.index ^ 1].part) for each in own]
        try:
            return real(work, stage, i, given)
        finally:
            work.microbatches = own

    around(patch, StageWork, "forward", swapped)


def another_stages_input(patch: Patch) -> None:
    """Every stage of a rank but the first gets what the rank's first stage got."""
    got: dict[tuple[int, int], list[Tensor]] = {}

    def first(real: Any, work: StageWork, stage: int, i: int, given: Any) -> Any:
        place = id(work), i
        before = got.setdefault(place, [x.detach().clone() for x in given]) if given else given
        like = [tuple(x.shape) for x in before] == [tuple(x.shape) for x in given]
        return real(work, stage, i, [x.clone() for x in before] if stage >= 2 and like else given)

    around(patch, StageWork, "forward", first)


def the_message_before(patch: Patch) -> None:
    """A rank takes each bundle a message late."""

    def receive(real: Any, post: Any, transfer: Any) -> list[Tensor]:
        bundle = real(post, transfer)
        kept = post.__dict__.setdefault("kept", {})
        key = transfer.token.kind, transfer.token.stage
        before, kept[key] = kept.get(key, bundle), [x.clone() for x in bundle]
        return before if [x.shape for x in before] == [x.shape for x in bundle] else bundle

    around(patch, _Post, "receive", receive)


def nothing_sent_back(patch: Patch) -> None:
    def sent(real: Any, *args: Any) -> list[Tensor]:
        return [torch.zeros_like(x) for x in real(*args)]

    around(patch, StageWork, "_grads_back", sent)


def a_message_sent_twice(patch: Patch) -> None:
    def send(real: Any, post: Any, transfer: Any, bundle: list[Tensor]) -> None:
        real(post, transfer, bundle)
        first = post.outbox[transfer.token]
        real(post, transfer, bundle)
        post.outbox[transfer.token] += first

    around(patch, _Post, "send", send)


def weights_gradient_put_off_for_good(patch: Patch) -> None:
    def weights(real: Any, work: StageWork, stage: int, microbatch: int, rest: Any) -> None:
        if microbatch:
            real(work, stage, microbatch, rest)

    around(patch, StageWork, "weights", weights)


def gradients_doubled(patch: Patch) -> None:
    def collected(real: Any, data: Data, p: torch.nn.Parameter) -> None:
        p.grad = None if p.grad is None else 2 * p.grad
        real(data, p)

    around(patch, Data, "collected", collected)


def a_stage_not_reduced(patch: Patch) -> None:
    def reduce(real: Any, data: Data, stage: int) -> None:
        if stage:
            real(data, stage)

    around(patch, Data, "reduce_stage", reduce)
    patch.setattr(Data, "reduce_last", nothing)


def ties_not_summed(patch: Patch) -> None:
    patch.setattr(FlatGradient, "begin_further", nothing)


def norm_of_own_stages(patch: Patch) -> None:
    def squares(real: Any, updates: Updates, number: Tensor) -> tuple[Tensor, Tensor]:
        return real(replace(updates, over_stages=lambda x: x), number)

    around(patch, Updates, "squares", squares)


@contextmanager
def replaced(instance: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of one object replaced for a while."""
    instance.__dict__[name] = value
    try:
        yield
    finally:
        del instance.__dict__[name]


def newest_version_used(patch: Patch) -> None:
    around(
        patch,
        Stale,
        "_show",
        lambda real, stale, stage, _: real(stale, stage, stale._newest(stage)),
    )


def version_off_by_one(patch: Patch) -> None:
    def show(real: Any, stale: Stale, stage: int, version: int) -> None:
        older = [v for v in stale.kept[stage] if v < version]
        real(stale, stage, max(older, default=version))

    around(patch, Stale, "_show", show)


def versions_share_memory(patch: Patch) -> None:
    patch.setattr(Flat, "renew", lambda flat: flat.point_at(flat.full))


def an_update_of_all_tokens(patch: Patch) -> None:
    """Each update divides by the tokens of the whole step, not by those of its microbatches."""

    def update(real: Any, units: ScheduledUnits, stage: int, microbatches: Any) -> None:
        total = sum(each.tokens for each in microbatches)
        real(units, stage, [replace(each, tokens=total) for each in microbatches])

    around(patch, ScheduledUnits, "update", update)


def counted_blocks_ignored(patch: Patch) -> None:
    """The engine balances the stages whose blocks the plan counts."""
    real = stage_module.stage_starts

    def balanced(model: Any, plan: Any, *given: Any) -> tuple[str, ...]:
        return real(model, replace(plan, stages=None), *given)

    engines = SimpleNamespace(**{**vars(stage_module), "stage_starts": balanced})
    patch.setattr(parallelize, "stage_module", engines)


MUTATIONS = (
    Mutation("another microbatch's targets", "pp2 1f1b:4", "parity", another_microbatchs_targets),
    Mutation(
        "another stage's input", "pp2 interleaved:2x2", "parity", another_stages_input, "layers"
    ),
    Mutation("the message before", "pp2 gpipe:4", "parity", the_message_before),
    Mutation("zeros sent back", "pp2 zb-v:4", "parity", nothing_sent_back),
    Mutation("a message sent twice", "pp2 dualpipe-v:4", "error", a_message_sent_twice),
    Mutation(
        "a weight's gradient never made", "pp2 zb-h1:4", "parity", weights_gradient_put_off_for_good
    ),
    Mutation("gradients doubled", "pp2 naive", "parity", gradients_doubled),
    Mutation("a stage not reduced", "pp2 dp2 dapple:2", "parity", a_stage_not_reduced),
    Mutation("tied weights not summed", "pp2 1f1b:2", "parity", ties_not_summed, "tied"),
    Mutation("the norm of a rank's own stages", "pp2 bfs:4x2", "parity", norm_of_own_stages),
    Mutation(
        "the newest weights in place of the stashed",
        "pp2 pipedream:4",
        "parity",
        newest_version_used,
        "gpt",
    ),
    Mutation("a version off by one", "pp2 pipedream:4", "parity", version_off_by_one),
    Mutation("versions in one place in memory", "pp2 pipedream:4", "parity", versions_share_memory),
    Mutation("updates divided by all tokens", "pp2 2bw:2", "parity", an_update_of_all_tokens),
    Mutation(
        "counted blocks ignored", "pp2 gpipe:2 stages:3,1", "memory", counted_blocks_ignored, "deep"
    ),
)
