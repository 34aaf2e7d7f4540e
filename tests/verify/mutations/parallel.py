"""Sabotages of tensor, sequence and context parallelism, of pipelines and of experts."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.transport import Pending
from shardwise.comm.world import Axis
from shardwise.engine import default_fill as layout_file
from shardwise.engine import parallelize, step_end
from shardwise.engine.optimizer import optimizer as optimizer_file
from shardwise.engine.optimizer.norm import LossWeights
from shardwise.kernels import cross_entropy as loss_file
from shardwise.techniques.context import attention, block, cut_batch
from shardwise.techniques.context.apply import PositionShards
from shardwise.techniques.context.attention import Ring
from shardwise.techniques.context.cut_batch import Sequences
from shardwise.techniques.data.flat.flat_gradient import FlatGradient
from shardwise.techniques.data.flat.flat_parameter import Flat
from shardwise.techniques.data.unit_hooks import Data
from shardwise.techniques.expert import gates, routing
from shardwise.techniques.expert.gate import Gate
from shardwise.techniques.expert.gates import Choice
from shardwise.techniques.expert.moe_layer import MoE
from shardwise.techniques.pipeline import stage_module
from shardwise.techniques.pipeline.runtime import _Post
from shardwise.techniques.pipeline.stage_work import StageWork
from shardwise.techniques.pipeline.weight_stashing import Stale
from shardwise.techniques.tensor import apply as tensor_parallel
from shardwise.techniques.tensor import linear as tensor_file
from shardwise.techniques.tensor.linear import InputGradient, Stream, _Leave
from tests.verify.mutations import mutation as by
from tests.verify.mutations.mutation import Rows

ROWS = Rows()


def cut_of_words(act: by.Act) -> by.Change:
    """`act(first, last)` for the words that a rank has."""

    def embed(module: Any, axis: Any, cut: Any, finish: Any) -> Any:
        return module, axis, replace(cut, ranges=tuple((act(*r),) for (r,) in cut.ranges)), finish

    return by.arguments(tensor_parallel.sequence, "embed", embed)


def begin(entry: InputGradient) -> None:
    """A sum in place of which the own share stands."""
    grad = entry.grad
    assert grad is not None
    entry.pending = Pending([lambda: grad])


always_counted = by.instead(optimizer_file, "counts", lambda _: True)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """The results of two blocks are added as if their sums of exponentials were equal."""
    first = lse.isneginf().all()
    out.copy_(more if first else (out + more) / 2)
    lse.copy_(torch.logaddexp(lse, more_lse))


def twice(_: Data, p: torch.nn.Parameter) -> None:
    p.grad = None if p.grad is None else 2 * p.grad


def balanced(model: Any, plan: Any, *of: Any, real: by.Act = stage_module.stage_starts) -> Any:
    return real(model, replace(plan, stages=None), *of)


def another_stages_input(patch: Any) -> None:
    """Every stage of a rank but the first gets what the rank's first stage got."""
    got: dict[tuple[StageWork, int], list[Tensor]] = {}  # no other object gets a key's id

    def first(real: Any, work: StageWork, stage: int, i: int, given: Any) -> Any:
        place = work, i
        earlier = got.setdefault(place, [x.detach().clone() for x in given]) if given else given
        like = [tuple(x.shape) for x in earlier] == [tuple(x.shape) for x in given]
        return real(work, stage, i, [x.clone() for x in earlier] if stage >= 2 and like else given)

    by.around(StageWork, "forward", first)(patch)


def chosen(act: by.Act) -> by.Change:
    """`act(choice, gate)` for what a gate chooses."""
    return by.result(Gate, "choose", lambda choice, gate, *_: act(choice, gate))


def in_the_weights(found: Choice, logits: Tensor, k: int, bias: Tensor) -> Choice:
    top = (logits.sigmoid() + bias.to(logits)).gather(-1, found.experts)
    return replace(found, weights=top / top.sum(-1, keepdim=True))


def first_to_the_next(choice: Choice, gate: Gate) -> Choice:
    experts = choice.experts.clone()
    experts[:1] = (experts[:1] + 1) % gate.experts
    return replace(choice, experts=experts)


without_a_gradient = chosen(lambda choice, _: replace(choice, weights=choice.weights.detach()))
one_more = by.result(routing, "capacity_of", lambda n, factor, *_: n if factor is None else n + 1)
next_expert = chosen(lambda c, gate: replace(c, experts=(c.experts + 1) % gate.experts))


ROWS |= {
    # --- tensor and sequence parallelism ----------------------------------------------------------
    "rows not summed [tp2 of gpt] error": by.instead(Stream, "sum", lambda _, y, *__: y),
    "columns not summed backward [tp2 of gpt] error": by.instead(InputGradient, "begin", begin),
    "a bias added by every rank [tp2]": by.drop(tensor_parallel.sequence, "_without_bias"),
    "the vocabulary off by one [tp2 of gpt]": cut_of_words(lambda a, b: (a + 1, b + 1)),
    "a row of the embedding missing [tp2 of gpt]": cut_of_words(lambda a, b: (a, b - 1)),
    "rows of words that are elsewhere [tp2 of gpt]": by.around(
        Tensor,
        "masked_fill_",
        lambda real, x, mask, value: x if mask.shape[-1:] == (1,) else real(x, mask, value),
    ),
    "softmax over a rank's own words [tp2 of gpt] error": by.around(
        loss_file,
        "all_reduce",
        lambda real, x, axis, op="sum": x if op == "sum" else real(x, axis, op),
    ),
    "targets off by one [tp2 of gpt]": by.result(
        loss_file, "known_classes", lambda found, *args: (found + 1) % args[2]
    ),
    "a z-loss twice as large [tp2 of squared]": by.arguments(
        loss_file._Losses, "apply", lambda *args: (*args[:-1], 2 * args[-1])
    ),
    "a sequence not gathered backward [tp2 sp of gpt]": by.instead(
        _Leave,
        "backward",
        lambda ctx, grad: (torch.cat([grad] * ctx.axis.size, grad.dim() - 2), None, None),
    ),
    "norms not summed over shards [tp2 sp of gpt] error": by.drop(FlatGradient, "begin_further"),
    "shards in another order [tp2 sp of gpt]": by.result(
        tensor_file,
        "all_gather_along",
        lambda found, _, axis, dim: torch.cat(found.chunk(axis.size, dim)[::-1], dim),
    ),
    "equal copies in the norm twice [tp2 of gpt]": always_counted,
    # --- context parallelism ----------------------------------------------------------------------
    # every rank rotates as if it had the first positions
    "the first positions on every rank [cp2 of gpt]": by.instead(
        Sequences,
        "positions",
        lambda of, device: torch.arange(of.numel, dtype=torch.int64, device=device),
    ),
    # queries do not see the keys of the next rank
    "a block of the ring left out [cp2 of gpt]": by.skip(
        Ring, "part", lambda ring, *of: of[-1] == (ring.axis.rank + 1) % ring.axis.size
    ),
    "blocks without weights [cp2 of gpt]": by.instead(block, "merge", merge),
    "ranks with more positions weigh the same [cp2 of gpt]": by.instead(
        PositionShards, "weight", lambda _, count, *__: count
    ),
    # ranks have each other's positions of the batch, and not of the rotation
    "another rank's positions [cp2 of gpt] error": by.arguments(
        cut_batch, "shard", lambda x, cut, rank, dim: (x, cut, (rank + 1) % cut.ranks, dim)
    ),
    "heads in another order [cp2:ulysses of gpt]": by.result(
        attention, "_to_positions", lambda found, *_: found.flip(1)
    ),
    # --- pipelines: what crosses, in which order, with which weights ------------------------------
    "zeros sent back [pp2 zb-v:4]": by.result(
        StageWork, "_grads_back", lambda sent, *_: [torch.zeros_like(x) for x in sent]
    ),
    "a weight's gradient never made [pp2 zb-h1:4]": by.skip(
        StageWork, "weights", lambda *of: not of[2]
    ),
    "gradients doubled [pp2 naive]": by.before(Data, "collected", twice),
    "a stage not reduced [pp2 dp2 dapple:2]": by.all_of(
        by.skip(Data, "reduce_stage", lambda _, stage: not stage), by.drop(Data, "reduce_last")
    ),
    "tied weights not summed [pp2 1f1b:2 of tied]": by.drop(FlatGradient, "begin_further"),
    "the norm of a rank's own stages [pp2 bfs:4x2]": by.beside(
        step_end, "squares", stages=Axis("none")
    ),
    "the newest weights in place of the stashed [pp2 pipedream:4 of gpt]": by.arguments(
        Stale, "_show", lambda stale, stage, _: (stale, stage, stale._newest(stage))
    ),
    "a version off by one [pp2 pipedream:4]": by.arguments(
        Stale,
        "_show",
        lambda stale, stage, version: (
            *(stale, stage),
            max((v for v in stale.kept[stage] if v < version), default=version),
        ),
    ),
    "versions in one place in memory [pp2 pipedream:4]": by.instead(
        Flat, "renew", lambda flat: flat.point_at(flat.full)
    ),
    # the stages whose blocks the plan counts are balanced
    "counted blocks ignored [pp2 gpipe:2 stages:3,1 of deep] tests": by.instead(
        parallelize,
        "stage_module",
        SimpleNamespace(**{**vars(stage_module), "stage_starts": balanced}),
    ),
    "stages in reverse [pp2 gpipe:2 stages:3,1 of deep] tests": by.arguments(
        stage_module,
        "stage_starts",
        lambda model, plan, *of: (model, replace(plan, stages=plan.stages[::-1]), *of),
    ),
    "another stage's input [pp2 interleaved:2x2]": another_stages_input,
    # --- mixtures of experts, in the layer that one process has too -------------------------------
    "the next expert [dp2 ep2 of moe]": next_expert,
    "the next expert of one [dp2 ep2 of moe]": chosen(first_to_the_next),
    "a router without a gradient [dp2 ep2 of moe]": without_a_gradient,
    "a capacity of one more [dp2 ep2 of moe]": one_more,
    # the k weights are divided by the sum of all E probabilities, which is 1
    "weights not normalised over k [dp2 ep2 of moe]": by.around(
        gates, "topk_softmax_before", lambda real, logits, k, **_: real(logits, k, normalised=False)
    ),
    "the scale of experts forgotten [dp2 of moe]": by.arguments(
        Gate, "route", lambda gate, *args: (replace(gate, scale=1.0), *args)
    ),
    "a balance of first choices [dp2 of moe]": chosen(
        lambda choice, _: replace(choice, balance_choices=1)
    ),
    "a variation not squared [dp2 of moe]": by.result(
        gates, "squared_variation", lambda found, _: found.sqrt()
    ),
    "a bias in the weights [dp2 ep2 of sigmoid]": by.result(gates, "sigmoid", in_the_weights),
    "a bias the wrong way [dp2 of sigmoid]": by.before(
        MoE, "forward", lambda layer, *_: setattr(layer, "bias_rate", -abs(layer.bias_rate))
    ),
    "experts that choose too few [dp2 of choice]": by.arguments(
        gates, "expert_choice", lambda scores, capacity: (scores, max(1, capacity - 1))
    ),
}


@ROWS.around("tp2 of gpt", InputGradient, "add")
def one_readers_gradient_forgotten(real, entry: InputGradient, grad: Tensor, weight: Tensor) -> Any:
    """Queries, keys and values read one input: of their gradients the last one is dropped."""
    last = entry.grad is not None and entry.waiting == 1
    return real(entry, grad * 0.0 if last else grad, weight)


@ROWS.around("tp2 of gpt", layout_file, "part")
def the_heads_of_the_next_rank(real, whole: Tensor, cut: Any, rank: int) -> Tensor:
    """Each rank begins with the part of the weights that the next one should have."""
    equal = len({cut.size(each) for each in range(cut.ranks)}) == 1
    return real(whole, cut, (rank + 1) % cut.ranks if equal else rank)


@ROWS.around("cp2 of gpt", block, "backward")
def gradients_of_keys_dropped(real, *args: Any, **how: Any) -> Any:
    """What other ranks add to the gradients of keys and values does not arrive."""
    dq, dk, dv = real(*args, **how)
    return dq, dk * how["causal"], dv


@ROWS.around("pp2 1f1b:4", StageWork, "forward")
def another_microbatchs_targets(real, work: StageWork, stage: int, i: int, given: Any) -> Any:
    own = work.microbatches
    if stage < work.stages.count - 1 or i > 1 or len(own) < 3:
        return real(work, stage, i, given)
    swapped = [replace(each, part=own[each.index ^ 1].part) for each in own]
    with by.replaced(work, microbatches=swapped):
        return real(work, stage, i, given)


@ROWS.around("pp2 gpipe:4", _Post, "receive")
def the_message_before(real, post: Any, transfer: Any) -> list[Tensor]:
    """A rank takes each bundle a message late."""
    bundle = real(post, transfer)
    kept = post.__dict__.setdefault("kept", {})
    key = transfer.token.kind, transfer.token.stage
    earlier, kept[key] = kept.get(key, bundle), [x.clone() for x in bundle]
    return earlier if [x.shape for x in earlier] == [x.shape for x in bundle] else bundle


@ROWS.around("pp2 dualpipe-v:4", _Post, "send", "error")
def a_message_sent_twice(real, post: Any, transfer: Any, bundle: list[Tensor]) -> None:
    real(post, transfer, bundle)
    first = post.outbox[transfer.token]
    real(post, transfer, bundle)
    post.outbox[transfer.token] += first


@ROWS.around("pp2 pipedream:4", LossWeights, "of")
def updates_divided_by_all_tokens(real, weights: LossWeights, tokens: float, update: int):
    """Each update divides by the tokens of the whole step, not by those of its microbatches."""
    total = weights.totals[0]
    return real(weights, tokens, update) * total[update] / total.sum()


@ROWS.around("dp2 of sigmoid", MoE, "_remember")
def choices_of_own_tokens(real, layer: MoE, routing: Any, bias: Any) -> None:
    """The bias of the experts follows what the tokens of one rank have chosen."""
    own = routing.loads[layer.place.batch.rank]
    real(layer, replace(routing, wanted=own) if layer.training else routing, bias)
