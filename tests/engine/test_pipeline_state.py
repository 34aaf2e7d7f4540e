"""On a pipeline: what a step sends and holds, what stages keep, what is refused, what breaks."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.errors import InputError, RankError, RunError
from shardwise.models import gpt
from shardwise.models.initial import fill
from shardwise.observe.meter import Meter
from tests.engine.cases import (
    CONFIG,
    Case,
    Task,
    build,
    oracle,
    ranks_of,
    regression,
    rows_task,
    settled,
    text,
    vectors,
)
from tests.engine.pipelines import ADAMW, WIDTH, Normed, break_in, chain, deep, fragile, task
from tests.engine.tensors import Held, equals_one, gpt_task, train
from tests.engine.test_state import assembled, saved
from tests.engine.zoo import Stack
from tests.pool import run_threads

# --- bytes -----------------------------------------------------------------------------------

ROWS = 6
#: A vocabulary whose weight fills its flat group.
FOUR = replace(CONFIG, layers=4, vocabulary=40)


def four(tied: bool) -> nn.Module:
    model = gpt.GPT(replace(FOUR, tied=tied))
    fill(model, seed=3)
    return model


def along(held: Held) -> dict[tuple[str, str], int]:
    """What the last step sent on the pipeline axis, by kind and phase."""
    return {(k.kind, k.phase): t.sent_bytes for k, t in held.lines.items() if k.axis == "pp"}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "plan", ["pp2 1f1b:3", "pp4 gpipe:2", "pp2 zb-h1:6", "pp2 interleaved:2x2"]
)
def test_bytes_are_those_of_the_stream(plan: str, tied: bool):
    """[B, T, D] forward over each cut and back, whatever the microbatches; a loss; a tied weight.

    A sum of two ranks' gradients sends as many bytes as the weight has.
    """
    work = Task(partial(four, tied), partial(text, rows=ROWS))
    ranks = run_threads(ranks_of(plan), train, work, Case(f"{plan} fp32"))
    last, size = len(ranks) - 1, 4
    stream = ROWS * FOUR.sequence * FOUR.width * size
    for rank, held in enumerate(ranks):
        forward, back = int(rank < last), int(rank > 0)
        if "x2" in plan:  # rank 0 has stages 0 and 2, rank 1 has 1 and 3: three cuts
            forward, back = (2, 1) if rank == 0 else (1, 2)
        holds = tied and rank in (0, last)
        wanted = {
            ("send", "forward"): forward * stream,
            ("send", "backward"): back * stream,
            ("all_reduce", "backward"): holds * FOUR.vocabulary * FOUR.width * size,
            # the loss, and whether options agree; whether the weight was used
            ("all_gather", "check"): (2 * last + holds) * 8,
        }
        assert along(held) == {line: count for line, count in wanted.items() if count}


# --- memory ----------------------------------------------------------------------------------

DEPTH, WIDE, EACH = 16, 64, 4


class Heavy(nn.Module):
    """A block that keeps DEPTH tensors of WIDE for its backward pass, and hands on a narrow one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for _ in range(DEPTH):
            x = torch.tanh(x)
        return self.down(x)


def heavy() -> nn.Module:
    return settled(Stack(*[Heavy() for _ in range(4)]))


def peak(world: World, plan: str, microbatches: int) -> int:
    """The most bytes of activations that were live in a step."""
    engine = build(world, rows_task(heavy), Case(f"{plan} fp64"))
    engine.step(vectors(0, rows=microbatches * EACH))
    with Meter(engine) as meter:
        engine.step(vectors(1, rows=microbatches * EACH))
    return meter.peak["activations"]


@pytest.mark.parametrize(
    ("word", "m", "held"),
    [
        ("1f1b:8", 8, (4, 3, 2, 1)),
        ("1f1b:3", 3, (3, 3, 2, 1)),
        ("dapple:8", 8, (4, 3, 2, 1)),
        ("gpipe:8", 8, (8, 8, 8, 8)),
    ],
)
def test_a_rank_holds_as_many_microbatches_as_the_schedule_says(
    word: str, m: int, held: tuple[int, ...]
):
    """Under 1F1B min(p - r, m) on rank r, all m under GPipe: of what a block keeps, no more."""
    kept_bytes = DEPTH * EACH * WIDE * 8
    peaks = run_threads(4, peak, f"pp4 {word}", m)
    assert [found // kept_bytes for found in peaks] == list(held)


# --- what stages keep --------------------------------------------------------------------------

NORMED = rows_task(chain(Stack, Normed), partial(vectors, rows=10))


@pytest.mark.parametrize("word", ["gpipe:4", "1f1b:3", "zb-h1:4", "interleaved:4x2"])
def test_batch_norm_is_of_the_microbatch(word: str):
    """Weights, moments and running statistics are those of one process that accumulates."""
    m = word.partition(":")[2].partition("x")[0]
    wanted, found = (
        assembled(run_threads(ranks, saved, NORMED, Case(f"{plan} fp64", **ADAMW), 3))
        for ranks, plan in ((1, f"accumulate:{m}"), (2, f"pp2 {word}"))
    )
    assert found.keys() == wanted.keys()
    assert {name for name in found if "running_var" in name}
    for name, array in wanted.items():
        assert np.allclose(found[name], array, rtol=1e-10, atol=1e-12), name


ENDS = [(task("used first"), "first.weight"), (task("used last"), "first.weight")]
TIED = [
    *((plan, *of) for plan in ("pp2 1f1b:3 bf16", "pp4 dp2 zero3 gpipe:2 fp32") for of in ENDS),
    ("pp2 1f1b:4 fp32", gpt_task("tied", rows=9), "embed.weight"),
    ("pp2 dp2 zero3 gpipe:2 fp32", gpt_task("tied", rows=9), "embed.weight"),
]


@pytest.mark.cases(3)
@pytest.mark.parametrize(("plan", "work", "weight"), TIED)
def test_tied_weights_never_diverge(plan: str, work: Task, weight: str):
    """After five steps of AdamW all copies are equal to the bit, moments and step counts too."""
    case = Case(plan, clip=0.5, options={"lr": 0.01, "weight_decay": 0.1})
    copies: dict[tuple[Any, ...], list[np.ndarray]] = {}
    for boxes, _ in run_threads(ranks_of(plan), saved, work, case, 5):
        for name, _, offsets, sizes, _, array in boxes:
            if name.endswith(weight):
                copies.setdefault((name, offsets, sizes), []).append(array)
    assert {key[0].rpartition("/")[0] for key in copies} >= {"model", "optim/exp_avg", "optim/step"}
    assert all(len(alike) > 1 for alike in copies.values())
    assert all(np.array_equal(x, alike[0]) for alike in copies.values() for x in alike)


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
    assert one == two == pytest.approx(oracle(rows_task(deep), case).losses, rel=1e-10)


# --- what is refused -------------------------------------------------------------------------


def too_few(world: World, plan: str) -> tuple[str, bool, float]:
    """What is said of three rows, whether anything was sent for it, and the loss of a step then."""
    engine = build(world, task(), Case(f"{plan} fp64", options={"lr": 0.0}))
    before, said = engine.sent(), ""
    try:
        engine.step(vectors(0, rows=3))
    except InputError as error:
        said = str(error)
    return said, engine.sent() == before, engine.step(vectors(1, rows=8)).loss


@pytest.mark.parametrize("plan", ["pp2 1f1b:4", "pp2 accumulate:2 gpipe:2"])
def test_a_share_of_fewer_rows_than_microbatches_is_refused(plan: str):
    """Before anything is sent; the next step is as if it had not been."""
    expected = regression(deep().double(), vectors(1, rows=8)).item()
    for said, nothing, loss in run_threads(2, too_few, plan):
        assert "a share of 3 rows for 4 microbatches" in said
        assert "Write instead: a batch of 4 rows for each data rank" in said
        assert nothing
        assert loss == pytest.approx(expected, rel=1e-10)


class Asking(Stack):
    """Between its layers it asks for a number, or goes back to a layer of before."""

    def __init__(self, how: str) -> None:
        super().__init__(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if self.how == "number" and x.sum() > 0:
                x = -x
        return self.blocks[0](x) if self.how == "back" else x


CANNOT = {
    "number": r"__bool__ of an activation in test_pipeline_state\.py:\d+, which gives \w+, and",
}


@pytest.mark.parametrize("how", CANNOT)
def test_a_model_that_cannot_be_cut_is_named(how: str):
    """By the tensor or the module that is in the way, on the first step."""
    made: Callable[[], nn.Module] = partial(Asking, how)
    work = rows_task(lambda: settled(made()), partial(vectors, rows=8))
    with pytest.raises(RankError, match=CANNOT[how]):
        run_threads(2, train, work, Case("pp2 1f1b:4 fp64"))


def test_a_layer_that_is_called_again_is_in_the_stage_of_its_calls():
    """The order of calls decides: losses, gradients and weights are one process's."""
    work = rows_task(lambda: settled(Asking("back")), partial(vectors, rows=8))
    equals_one(run_threads, work, Case("pp2 1f1b:4 fp64"), 1e-10)


# --- what breaks -----------------------------------------------------------------------------


def stumbling(world: World) -> list[str]:
    """What each of four calls came to, where in the second step both stages raise."""
    engine, said = build(world, rows_task(fragile), Case("pp2 1f1b:3 fp64")), list[str]()
    break_in(engine, "blocks.1", 5)  # when the other rank has begun with what was sent before
    break_in(engine, "blocks.3", 4)
    for call in (engine.step, engine.step, engine.step, engine.evaluate):
        try:
            call(vectors(0))
            said.append("good")
        except (ValueError, RunError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_nothing_runs_after_a_run_that_broke_off():
    """What is under way to another rank would be taken for the next step's: it is refused."""
    for first, second, *later in run_threads(2, stumbling):
        assert first == "good"
        assert second == "ValueError: in the middle of a stage"
        assert len(later) == 2
        assert all("RunError: The previous run of the schedule was interrupted" in x for x in later)
