"""On a pipeline: what a step sends, holds and leaves behind, what is refused, what breaks."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.launch import spawn
from shardwise.comm.world import World, alone, init, traced
from shardwise.core.errors import InputError, RankError, RunError
from shardwise.engine.engine import Engine
from shardwise.engine.meter import Meter
from shardwise.models import gpt
from shardwise.models.initial import fill
from tests.engine.cases import (
    CONFIG,
    Case,
    Task,
    build,
    ranks_of,
    regression,
    rows_task,
    settled,
    text,
    vectors,
)
from tests.engine.pipelines import WIDTH, deep, task
from tests.engine.tensors import Held, train
from tests.engine.test_failure import is_alive
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


# --- what is refused -------------------------------------------------------------------------

REFUSED = [
    ("pp16 1f1b:4", {}, r"16 stages for a Sequential of 8 layers.*pp8"),
    ("pp2 interleaved:3x2", {}, r"interleaved.*multiples of 2.*interleaved:"),
    ("pp4 dualpipe-v:4", {}, r"twice the ranks or more: from 8 up.*dualpipe-v:8"),
    ("pp2 naive:4", {}, r"naive"),
    ("pp2 1f1b:4", {"stages": ["9.x"]}, r'"9\.x", which is no module of the Sequential'),
    ("pp2 1f1b:4", {"stages": ["4", "8"]}, r"2 starts \(4, 8\) for 2 stages.*Write instead: \d"),
    ("pp4 1f1b:4", {"stages": []}, r"0 starts \(none\) for 4 stages"),
    ("pp2 1f1b:4", {"stages": "8"}, r"stages='8'.*a list of the names"),
    ("pp2 1f1b:4", {"stages": [8]}, r"stages=\[8\].*a list of the names"),
    ("pp2 1f1b:4", {"stages": 8}, r"stages=8.*a list of the names"),
]


@pytest.mark.parametrize(("plan", "options", "phrase"), REFUSED)
def test_what_cannot_be_cut_is_refused_and_left_as_it_was(
    plan: str, options: dict[str, Any], phrase: str
):
    """Too many stages, microbatches that the schedule forbids, wrong names, none, too many."""
    model = deep()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    ranks = int(plan[2:].partition(" ")[0])
    with pytest.raises(InputError, match=phrase):
        sw.parallelize(model, plan, traced(0, ranks), loss=regression, **options)
    after = dict(model.named_parameters())
    assert all(torch.equal(before[n], after[n]) for n in before)
    sw.parallelize(model, "fp64", alone(), loss=regression).step(vectors(0))


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
    "back": r"blocks\.0, a layer of stage 0, called in stage 1",
}


@pytest.mark.parametrize("how", CANNOT)
def test_a_model_that_cannot_be_cut_is_named(how: str):
    """By the tensor or the module that is in the way, on the first step."""
    made: Callable[[], nn.Module] = partial(Asking, how)
    work = rows_task(lambda: settled(made()), partial(vectors, rows=8))
    with pytest.raises(RankError, match=CANNOT[how]):
        run_threads(2, train, work, Case("pp2 1f1b:4 fp64"))


# --- what breaks -----------------------------------------------------------------------------


class Fragile(nn.Module):
    """A layer that breaks in one of its forwards, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.breaks, self.forwards = nn.Linear(WIDTH, WIDTH), -1, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += not x.is_meta  # the engine follows it on meta
        if self.forwards == self.breaks:
            raise ValueError("in the middle of a stage")
        return torch.tanh(self.up(x))


def fragile() -> nn.Module:
    return settled(Stack(*[Fragile() for _ in range(4)]))


def break_in(engine: Engine, name: str, forward: int) -> None:
    """Have that layer raise in that forward, on the rank that has it."""
    layer = engine.model.get_submodule(name)
    if isinstance(layer, Fragile):
        layer.breaks = forward


def breaking(folder: Path) -> None:
    """Stage 1 of 4 raises at its fourth forward, the first of the second step."""
    world = init("cpu")
    (folder / f"{world.rank}.pid").write_text(str(os.getpid()))
    engine = build(world, rows_task(fragile), Case("pp4 1f1b:3 fp64"))
    break_in(engine, "blocks.1", 4)
    for step in range(50):
        engine.step(vectors(step))


@pytest.mark.full
def test_a_stage_that_raises_ends_the_others(tmp_path: Path):
    """Those that wait for it are ended; the error is its own, with the place in its row marked."""
    with pytest.raises(RankError, match="in the middle of a stage") as caught:
        spawn(partial(breaking, tmp_path), 4)
    assert caught.value.rank == 1
    assert ">>F1.0<<" in str(caught.value)
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 4
    assert not any(is_alive(pid) for pid in pids)


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
