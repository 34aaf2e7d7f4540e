"""Pipelines with what draws, normalises, overflows, is tied or is missing; looks between steps."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.plan import Plan
from shardwise.engine.box import Box
from shardwise.models import gpt
from shardwise.models.initial import initial
from shardwise.models.registry import find
from shardwise.models.trainable import Trainable
from shardwise.verify.comparison import compare
from shardwise.verify.parity import alone_of, engine_of, theory_of
from shardwise.verify.report import largest
from tests.engine.cases import (
    Case,
    Task,
    build,
    foreseen,
    ranks_of,
    regression,
    rows_task,
    settled,
    text,
    vectors,
)
from tests.engine.pipelines import (
    ADAMW,
    SGD,
    WIDTH,
    Dropped,
    Dropping,
    Normed,
    chain,
    deep,
    task,
)
from tests.engine.tensors import (
    SHAPES,
    Held,
    assert_counted,
    assert_parity,
    assert_pieces,
    gpt_task,
    mine,
    pieces,
    sent,
    train,
    whole_run,
)
from tests.engine.test_state import assembled, saved
from tests.engine.zoo import Stack
from tests.pool import run_gloo, run_threads

# --- normalisation ---------------------------------------------------------------------------

NORMED = rows_task(chain(Stack, Normed), partial(vectors, rows=10))


@pytest.mark.parametrize("word", ["gpipe:4", "1f1b:3", "zb-h1:4", "interleaved:4x2"])
def test_batch_norm_is_of_the_microbatch(word: str):
    """Weights, moments and running statistics are those of one process that accumulates."""
    m = word.partition(":")[2].partition("x")[0]
    one = run_threads(1, saved, NORMED, Case(f"accumulate:{m} fp64", **ADAMW), 3)
    two = run_threads(2, saved, NORMED, Case(f"pp2 {word} fp64", **ADAMW), 3)
    wanted, found = assembled(one), assembled(two)
    assert found.keys() == wanted.keys()
    assert {name for name in found if "running_var" in name}
    for name, array in wanted.items():
        assert np.allclose(found[name], array, rtol=1e-10, atol=1e-12), name


# --- random numbers --------------------------------------------------------------------------

DROPPING = rows_task(chain(Dropping, Dropped), partial(vectors, rows=24))


def dropped(world: World, plan: str) -> list[float]:
    """Losses with dropout; ranks come with random states of their own."""
    torch.manual_seed(5 + world.rank)
    engine = build(world, DROPPING, Case(f"{plan} fp64", **SGD))
    return [engine.step(mine(engine, DROPPING.batch(step))).loss for step in range(3)]


def test_dropout_does_not_depend_on_where_a_stage_is():
    """Four stages on four ranks, on two, in a line or a V, or on one: the same losses."""
    wanted = dropped(alone(), "interleaved:4x4")
    for plan in ("pp4 1f1b:4", "pp4 gpipe:4", "pp2 interleaved:4x2", "pp2 bfs:4x2", "pp2 zb-v:4"):
        for losses in run_gloo(ranks_of(plan), dropped, plan):
            assert losses == pytest.approx(wanted, rel=1e-12), plan


def masks(world: World, plan: str) -> list[tuple[bool, ...]]:
    """What each dropout of this rank left in two steps; ranks have one random state."""
    torch.manual_seed(5)
    engine, found = build(world, DROPPING, Case(f"{plan} fp64", **SGD)), list[tuple[bool, ...]]()
    for module in engine.model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(
                lambda _, __, y: found.append(tuple((y != 0).flatten().tolist()))
            )
    for step in range(2):
        engine.step(mine(engine, DROPPING.batch(step)))
    return found


def test_no_two_masks_are_alike():
    """Not of two stages, microbatches, turns of the schedule, data ranks, or steps."""
    every = [m for found in run_gloo(4, masks, "pp2 dp2 accumulate:2 1f1b:2") for m in found]
    assert len(every) == 4 * 2 * 4 * 2  # blocks, shares, microbatches, steps
    assert len(set(every)) == len(every)


def drawn(world: World, plan: str) -> list[float]:
    """Losses of transformers' GPT-2 with dropout."""
    torch.manual_seed(5 + world.rank)
    model = find("hf:gpt2+dropout")
    engine = engine_of(model, Plan.parse(f"{plan} fp64"), world)
    return [engine.step(model.batch(4, step, world.device)).loss for step in range(2)]


@pytest.mark.full
def test_tensor_ranks_of_a_stage_agree_with_dropout():
    """Whole activations have the same masks on them: all report one loss, and none refuses."""
    pytest.importorskip("transformers")
    first, *others = run_gloo(4, drawn, "pp2 tp2 1f1b:2")
    assert all(losses == first for losses in others)


# --- shares ----------------------------------------------------------------------------------


def lopsided(world: World, work: Task, case: Case) -> Held:
    """All rows are the first data rank's."""
    engine, held, theory = build(world, work, case), Held(), foreseen(world, work, case)
    for step in range(case.steps):
        batch = work.batch(step)
        batch = batch if engine.data_rank == 0 else tuple(x[:0] for x in batch)
        metrics = engine.step(batch)
        held.losses.append(metrics.loss)
        held.norms.append(metrics.grad_norm)
        held.grads.append(pieces(engine.gradients(), "grad/"))
        held.bytes.append((sent(engine), theory.of(batch).in_step(step)))
    held.memory = engine.memory(), theory.of(batch).memory
    held.weights = pieces(engine.boxes(), "model/")
    return held


@pytest.mark.parametrize("plan", ["pp2 dp2 zero3 1f1b:3", "pp2 dp2 zb-v:4"])
def test_a_data_rank_without_rows(plan: str):
    """It takes part with weight zero, in every stage."""
    case = Case(f"{plan} fp64", clip=0.5, **ADAMW)
    ranks = run_threads(4, lopsided, task(), case)
    assert_parity(ranks, whole_run(task(), case), 1e-10)
    assert_counted(ranks)


def untold(step: int) -> dict[str, Tensor]:
    """Text of which the first and the last rows have no target that counts."""
    batch = text(step, rows=8)
    batch["targets"][:2] = -100
    batch["targets"][-1] = -100
    return batch


@pytest.mark.parametrize("plan", ["pp2 1f1b:4", "pp2 zb-h1:8", "pp2 dp2 zero2 gpipe:4"])
def test_microbatches_without_tokens(plan: str):
    """The mean over nothing is no number, and neither are its gradients: they count for nothing."""
    work = Task(gpt_task("tied").make, untold)
    case = Case(f"{plan} fp64", clip=0.5, **ADAMW)
    ranks = run_threads(ranks_of(plan), train, work, case)
    assert_parity(ranks, whole_run(work, case), 1e-10)


# --- precisions ------------------------------------------------------------------------------


# --- what several stages hold ----------------------------------------------------------------


def tied_weights(world: World, work: Task, plan: str, name: str) -> list[Box]:
    """This rank's boxes of a weight after five steps."""
    engine = build(world, work, Case(plan, clip=0.5, options={"lr": 0.01, "weight_decay": 0.1}))
    for step in range(5):
        engine.step(mine(engine, work.batch(step)))
    return [box for box in engine.boxes() if box.name.endswith(name)]


class Half(nn.Module):
    """The last layer's weight is the first one's, and one of them has no gradient."""

    def __init__(self, uses: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight, self.uses = self.first.weight, uses

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) if self.uses == "first" else self.first(x).detach()
        for layer in self.inner:
            y = torch.tanh(layer(y))
        z = self.last(y)
        return z if self.uses == "last" else y + z.detach()


def half(uses: str) -> nn.Module:
    return settled(Half(uses))


TIED = {
    "gpt": (gpt_task("tied", rows=9), "embed.weight"),
    "used first": (rows_task(partial(half, "first"), partial(vectors, rows=9)), "first.weight"),
    "used last": (rows_task(partial(half, "last"), partial(vectors, rows=9)), "first.weight"),
}


@pytest.mark.parametrize("name", TIED)
@pytest.mark.parametrize(
    "plan", ["pp2 1f1b:3 bf16", "pp2 1f1b:4 fp32", "pp4 dp2 zero3 gpipe:2 fp32"]
)
def test_tied_weights_never_diverge(plan: str, name: str):
    """After five steps of AdamW all copies are equal to the bit, moments and step counts too."""
    if "pp4" in plan and name == "gpt":
        plan = plan.replace("pp4", "pp2")
    work, weight = TIED[name]
    held = run_threads(ranks_of(plan), tied_weights, work, plan, weight)
    copies: dict[tuple[Any, ...], list[Tensor]] = {}
    for box in (box for boxes in held for box in boxes):
        copies.setdefault((box.name, box.offsets, box.sizes), []).append(box.tensor)
    assert {key[0].rpartition("/")[0] for key in copies} >= {"model", "optim/exp_avg", "optim/step"}
    assert all(len(alike) > 1 for alike in copies.values())
    assert all(torch.equal(x, alike[0]) for alike in copies.values() for x in alike)


@pytest.mark.parametrize("name", ["used first", "used last"])
def test_a_tied_weight_that_one_stage_uses(name: str):
    """Where the other stage has no gradient for it, both have that of the one that has."""
    work, _ = TIED[name]
    case = Case("pp2 1f1b:3 fp64", clip=0.5, **ADAMW)
    ranks = run_threads(2, train, work, case)
    assert_parity(ranks, whole_run(work, case), 1e-10)
    assert_counted(ranks)


# --- how models come -------------------------------------------------------------------------


def born(world: World, plan: str, own: bool, shape: str) -> list[Any]:
    """The weights of a model made on the meta device, by a fill or by its own modules."""
    with torch.device("meta"):
        model = gpt.GPT(SHAPES[shape])
    options: dict[str, Any] = {"seed": 5} if own else {"fill": partial(initial, seed=5)}
    engine = sw.parallelize(
        model, plan, world, loss=gpt.loss, tokens=gpt.tokens, units=1, **options
    )
    found = pieces(engine.boxes(), "model/")
    engine.step(mine(engine, text(0, rows=8)))
    return found


@pytest.mark.parametrize("own", [False, True], ids=["filled", "by its modules"])
@pytest.mark.parametrize("plan", ["pp2 1f1b:4", "pp2 dp2 zero3 zb-v:2", "pp2 tp2 gpipe:4"])
def test_a_meta_model_begins_with_the_weights_of_one_process(plan: str, own: bool):
    """Every stage has what one process would have made for it, to the bit; and trains."""
    shape = "untied" if "tp2" in plan else "tied"
    whole = {piece.name: piece.values for piece in born(alone(), "fp32", own, shape)}
    # modules draw from the state of their process, which threads would share
    run = run_gloo if own else run_threads
    assert_pieces(run(ranks_of(plan), born, f"{plan} fp32", own, shape), whole, 0.0)


def by_hand(world: World, names: list[str]) -> tuple[list[str], list[float]]:
    """The parameters of this rank, and the losses."""
    engine = sw.parallelize(
        deep(), "pp2 1f1b:3 fp64", world, loss=regression, optimizer=sw.SGD(lr=0.1), stages=names
    )
    losses = [engine.step(vectors(step)).loss for step in range(3)]
    return [name for name, _ in engine.model.named_parameters()], losses


def test_stages_by_hand():
    """A stage begins at the module that is named."""
    (first, one), (second, two) = run_threads(2, by_hand, ["12"])
    assert {name.split(".")[0] for name in second} == {"12", "14"}
    assert len(first) == 12
    case = Case("fp64", kind=torch.optim.SGD, options={"lr": 0.1})
    expected = whole_run(rows_task(deep), case)
    assert one == two == pytest.approx(expected.losses, rel=1e-10)


def proved(world: World, plan: str, trainable: Trainable) -> tuple[float, bool, bool]:
    """The largest error of three steps, and whether bytes and memory are as predicted."""
    said = Plan.parse(f"{plan} fp64")
    ours = engine_of(trainable, said, world)
    theory = theory_of(trainable, said, world.rank, None)
    found = compare(ours, alone_of(trainable, said, world.device), theory, trainable.batch, 3)
    return largest(found), found.bytes_hold, found.memory_measured == found.memory_predicted


@pytest.mark.full
@pytest.mark.parametrize("model", ["hf:llama", "hf:gpt2", "hf:t5"])
@pytest.mark.parametrize("plan", ["pp2 1f1b:2", "pp3 zb-h1:3"])
def test_models_of_transformers(plan: str, model: str):
    """Decoders, and an encoder and decoder whose embedding is in three places."""
    pytest.importorskip("transformers")
    made = find(model)
    model_made = made.build()  # once: it draws from the state of the process
    copied = replace(made, make=partial(deepcopy, model_made))
    for worst, bytes_hold, memory_holds in run_threads(ranks_of(plan), proved, plan, copied):
        assert worst < 1e-10
        assert bytes_hold
        assert memory_holds


# --- looks -----------------------------------------------------------------------------------


def looking(world: World, plan: str) -> tuple[list[tuple[float, int]], list[float], bool]:
    """What looks between steps saw, what steps gave, whether looks are not in the steps' bytes."""
    work, case = gpt_task("tied", rows=9), Case(f"{plan} fp64", **ADAMW)
    engine, theory = build(world, work, case), foreseen(world, work, case)
    looks: list[tuple[float, int]] = []
    losses, counted = [], True
    for step in range(3):
        looks.append(engine.evaluate(mine(engine, work.batch(step + 7))))
        losses.append(engine.step(own := mine(engine, work.batch(step))).loss)
        looks.append(engine.evaluate(mine(engine, text(step, rows=1))))
        counted &= sent(engine) == theory.of(own).in_step(step)
    assert engine.model.training
    return looks, losses, counted


@pytest.mark.parametrize(
    "plan",
    ["pp2 1f1b:3", "pp2 zb-v:4", "pp2 dp2 zero3 gpipe:2", "pp2 tp2 sp 1f1b:2"],
)
def test_looks_between_steps_are_one_process_s(plan: str):
    """A look at few rows or many gives one process's mean and tokens, and steps go on the same."""
    wanted, losses, _ = looking(alone(), "ddp")
    for looks, own, counted in run_threads(ranks_of(plan), looking, plan):
        assert own == pytest.approx(losses, rel=1e-10)
        assert [loss for loss, _ in looks] == pytest.approx([x for x, _ in wanted], rel=1e-10)
        assert [tokens for _, tokens in looks] == [tokens for _, tokens in wanted]
        assert counted
