"""Parts of a proof: batches, the oracle of mixtures, pieces that cover tensors."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwise.core.plan.plan import Plan
from shardwise.models import gpt, moe
from shardwise.models.registry import find
from shardwise.models.trainable import Trainable
from shardwise.techniques.expert.apply import layers_of
from shardwise.techniques.expert.gate import GATES
from shardwise.techniques.expert.moe_layer import ExpertPlace, name_layers
from shardwise.verify.finding import BoxPlace
from shardwise.verify.oracles.batches import Division, ragged, rows_of_step
from shardwise.verify.oracles.mixture_oracle import Mixture
from shardwise.verify.parity import with_early_delays
from shardwise.verify.report import uncovered
from tests.verify import micro
from tests.verify.test_command import shortly

ROWS = 6


def test_batches_are_ragged():
    """Rows have different numbers of tokens and the ends of ranks' words; odd seeds are shorter."""
    model = ragged(find("gpt"), Plan.parse("dp2 zero1 | head: tp4"))
    assert model.tokens is not None
    even, odd, again = (model.batch(ROWS, seed) for seed in (2, 3, 2))
    assert len({int((row != -100).sum()) for row in even["targets"]}) > 1
    assert model.tokens(even) < even["targets"].numel() * 9 // 10
    assert all(odd[key].shape[1] + 1 == x.shape[1] for key, x in even.items())
    assert torch.equal(even["targets"], again["targets"])
    ends = {255, 256, 511, 512, 767, 768, 1023}
    assert all(ends <= {*row.tolist()} for row in (*even["inputs"], *even["targets"]))
    made = model.make_batch
    labels = replace(model, make_batch=lambda *of: {k: x.fmod(5) for k, x in made(*of).items()})
    assert int(ragged(labels, Plan.parse("tp2")).batch(ROWS, 2)["targets"].max()) < 5
    for other in (micro.find("layers"), replace(micro.find("gpt"), tokens=None)):
        assert ragged(other, Plan.parse("tp2")) is other


def test_a_microbatch_without_rows():
    """In the step in which a rank may be idle the others have too few rows for all microbatches."""
    plan = Plan.parse("dp2 accumulate:4")
    assert rows_of_step(plan, Division(2, 4, 1), 1) == 3
    assert rows_of_step(Plan.parse("dp2 accumulate:4 bf16"), Division(2, 4, 1), 1) == 8


def test_delays_begin_early():
    """A proof is shorter than the 40 steps before updates are delayed."""
    for word, proved in (("", "=0"), ("=1", "=1")):
        plan = with_early_delays(Plan.parse(f"dp2 offload:optim-delayed{word}"))
        assert plan.offload == f"optim-delayed{proved}"


SMALL = (
    *("topk:1.25", "gshard:1", "noisy-topk:1:8:3", "expert-choice:1.5", "sigmoid:1:4:3"),
    "hash::6",
)


@pytest.mark.parametrize("gate", [*GATES, *SMALL])
def test_the_oracle_is_the_layer(gate: str):
    """Loss, gradients and buffers of two steps, and the loss of an evaluation."""
    trainable = find(f"moe:{gate}")
    layer, oracle = (trainable.build().double() for _ in range(2))
    for model in (layer, oracle):
        name_layers(model)
    for one in layers_of(oracle).values():
        one.forward = Mixture(one)
    for step in range(2):
        batch = trainable.batch(2, step)
        losses = [trainable.loss(model, batch) for model in (layer, oracle)]
        torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
        found, wanted = (
            torch.autograd.grad(
                loss, [*model.parameters()], materialize_grads=True, allow_unused=True
            )
            for loss, model in zip(losses, (layer, oracle), strict=True)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close([*layer.buffers()], [*oracle.buffers()], rtol=0, atol=0)
    evaluated = [trainable.loss(model.eval(), batch) for model in (layer, oracle)]
    torch.testing.assert_close(*evaluated, rtol=1e-12, atol=0)


@pytest.mark.full
def test_layers_of_a_users_model_hold():
    """The oracle's layers get the names of the run's, and so draw the same random numbers."""

    def unnamed() -> nn.Module:
        made = micro.mixture("noisy-topk", None)
        for layer in layers_of(made).values():
            layer.place = ExpertPlace()
        return made

    own = Trainable("own", unnamed, moe.loss, micro.text, gpt.tokens)
    assert shortly("dp2 ep2 fp64", own, steps=1).holds


#: Ranks' pieces of a tensor of shape [4, 3]: first row, rows, replica.
Rows = tuple[int, int, int]
#: Plans, the pieces that ranks compare, and what is said of them.
PIECES: list[tuple[str, list[list[Rows]], str]] = [
    ("dp2", [[(0, 4, 0)], [(0, 4, 1)]], ""),
    ("dp2 zero3", [[(0, 3, 0)], [(3, 1, 0)]], ""),
    ("dp4 zero1", [[(0, 4, 0)], [], [], []], ""),
    ("dp2 zero1", [[(0, 4, 0)], [(0, 4, 1)]], ""),
    ("dp_replicate2 dp_shard2 zero3", [[(0, 2, 0)], [(2, 2, 0)], [(0, 2, 1)], [(2, 2, 1)]], ""),
    ("tp2", [[(0, 1, 0), (1, 1, 0)], [(2, 2, 0)]], ""),
    ("tp2 sp", [[(0, 4, 0)], [(0, 4, 1)]], ""),
    ("pp2 1f1b:2", [[(0, 4, 0)], []], ""),
    ("pp2 2bw:2", [[(0, 4, 0)], [(0, 4, 1)]], ""),
    ("dp2", [[(0, 4, 0)], []], "data replica [1,"),
    ("dp2 zero3", [[(0, 3, 0)], []], "3 elements are compared by no rank"),
    ("dp2 zero3", [[(0, 3, 0)], [(2, 2, 0)]], "3 more than once in replica 0"),
    ("dp2 zero3", [[(0, 4, 0), (0, 4, 1)], []], "12 more than once on the ranks of"),
    ("tp2", [[(0, 4, 0)], []], "tensor rank 0 compares all of it, and tensor rank 1 does not"),
    ("dp2", [[(0, 4, 1)], [(0, 4, 1)]], "12 elements are compared by no rank"),
    ("dp2 zero1", [[(0, 5, 0)], []], "has [4, 3]"),
]


@pytest.mark.cases(16)
@pytest.mark.parametrize(("plan", "by_rank", "said"), PIECES)
def test_what_lacks_or_doubles_anything_is_named(plan: str, by_rank: list[list[Rows]], said: str):
    """Whole: replicas, padding, frozen, a stage's own, a tie. Not: gaps, overlaps, other shapes."""
    shown = [
        [
            BoxPlace("model/w", (4, 3), (first, 0), (rows, 3), replica)
            for first, rows, replica in pieces
        ]
        for pieces in by_rank
    ]
    found = uncovered(Plan.parse(plan), {"model/w": (4, 3)}, shown)
    assert (found.startswith("model/w: ") and said in found) if said else found == ""
