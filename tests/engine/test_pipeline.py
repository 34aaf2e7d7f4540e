"""Models that only a pipeline meets, what stages share and keep, what breaks."""

import itertools
import random
from collections.abc import Callable
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.errors import InputError, RunError
from shardwise.core.reduce_order import Act, UnitState
from shardwise.core.unit_order import CallPlace, UnitOrder
from shardwise.engine.checks.as_before import as_before
from shardwise.engine.engine import Engine
from shardwise.engine.state.box import Box
from tests.engine.cases import Case, Task, build, ranks_of, rows_task, settled, text, vectors
from tests.engine.loops import rows as own_rows
from tests.engine.pipelines import MODELS, SGD, WIDTH, chain, deep, normed, plain, task
from tests.engine.tensors import ADAMW, assert_pieces, equals_one, gpt_task, holds, mine, pieces
from tests.engine.zoo import Buffered, Stack
from tests.parallel.between import LateNorm, rows
from tests.pool import run_gloo, run_threads


def untold(step: int) -> dict[str, Tensor]:
    """Text of which the first and the last rows have no target that counts."""
    batch = text(step, rows=8)
    batch["targets"][:2] = -100
    batch["targets"][-1] = -100
    return batch


CASES = [
    *((f"pp4 {word}:8", "deep", ADAMW) for word in ("zb-h1", "dualpipe-v", "zb-v", "dapple")),
    *((f"pp4 {word}:8x2", "deep", ADAMW) for word in ("interleaved", "bfs")),
    *(
        (plan, name, SGD)
        for plan in ("pp2 1f1b:3", "pp2 dp2 zero3 zb-h1:4")
        for name in ("half frozen", "idle")
    ),
    *(("pp2 1f1b:3", f"used {end}", ADAMW) for end in ("first", "last")),
    *((plan, "writes to the batch", SGD) for plan in ("pp2 gpipe:1", "pp2 interleaved:2x2")),
    *((plan, "no tokens", ADAMW) for plan in ("pp2 zb-h1:8", "pp2 dp2 zero2 gpipe:4")),
]


@pytest.mark.cases(6)
@pytest.mark.parametrize(("plan", "name", "options"), CASES)
def test_models(plan: str, name: str, options: dict[str, Any]):
    """Three steps in fp64 are one process's to 1e-10, of rows that microbatches do not divide."""
    work = task(name) if name in MODELS else Task(gpt_task("tied").make, untold)
    holds(run_threads, work, Case(f"{plan} fp64", clip=0.5, **options))


# --- modules that are called in another order than they are defined in ----------------------------


class Towers(nn.Module):
    """Two encoders, called by the loss, the last one first, and what joins them, defined first."""

    def __init__(self) -> None:
        super().__init__()
        self.joins = nn.Linear(6, 6)
        self.image, self.text = LateNorm(), LateNorm()


def by_towers(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Their outputs meet in the loss; towards those of a pass without a gradient. A penalty."""
    texts = model.get_submodule("joins")(model.get_submodule("text")(batch[0]))
    with torch.no_grad():
        target = model.get_submodule("image")(batch[1]).tanh()
    loss = (texts * model.get_submodule("image")(batch[0].flip(1)) - target).square().mean()
    return loss + model.state_dict(keep_vars=True)["joins.weight"].square().mean()


@pytest.mark.cases(2)
@pytest.mark.parametrize("plan", ["pp2 1f1b:2", "pp2 interleaved:2x2"])
def test_a_pipeline_is_cut_in_the_order_of_calls(plan: str):
    """The order in which the loss calls modules decides, not that of their definition."""
    work = Task(lambda: settled(Towers()), partial(rows, 4), by_towers, None)
    equals_one(run_threads, work, Case(f"{plan} fp64", **SGD))


class Counts(nn.Linear):
    """A layer that counts in an object of all layers, and divides by the number."""

    def __init__(self, shared: SimpleNamespace) -> None:
        super().__init__(WIDTH, WIDTH)
        self.shared, self.own = shared, SimpleNamespace(calls=0)

    def forward(self, x: Tensor) -> Tensor:
        self.own.calls += 1
        self.shared.depth += 1
        return super().forward(x) / self.shared.depth


def counts(world: World) -> None:
    shared = SimpleNamespace(depth=0)
    work = rows_task(lambda: settled(nn.Sequential(*(Counts(shared) for _ in range(4)))))
    engine = build(world, work, Case("pp2 1f1b:2 fp64"))
    with pytest.warns(UserWarning, match="SimpleNamespace.depth is changed by") as told:
        engine.step(vectors(0))
    assert all("depth" in str(each.message) for each in told)  # not what a layer counts by itself


def test_a_number_that_layers_of_several_stages_change_is_a_warning():
    """Each rank sees only the changes that its own layers make."""
    run_gloo(2, counts)


# --- what stages keep -----------------------------------------------------------------------------


def states_of(world: World, work: Task, case: Case) -> list[Box]:
    """The weights and states of the optimizer after the steps of a case."""
    engine = build(world, work, case)
    for step in range(case.steps):
        engine.step(mine(engine, work.batch(step)))
    return pieces(engine.boxes(), "")


@pytest.mark.parametrize(
    ("word", "make"),
    [("zb-h1:4", lambda: settled(Buffered())), ("interleaved:4x2", chain(Stack, normed))],
)
def test_statistics_are_of_the_microbatch(word: str, make: Callable[[], nn.Module]):
    """Weights, moments and running statistics are those of one process that accumulates."""
    normed = rows_task(make, partial(vectors, rows=10))
    [wanted], found = (
        run_threads(ranks, states_of, normed, Case(f"{plan} fp64", **ADAMW))
        for ranks, plan in ((1, "accumulate:4"), (2, f"pp2 {word}"))
    )
    assert any("running_var" in piece.name for piece in wanted)
    assert_pieces(found, {piece.name: piece.tensor for piece in wanted}, 1e-10)


# --- what breaks ----------------------------------------------------------------------------------


def losses_around(world: World, plan: str, bad: Callable[[Engine], None]) -> list[float]:
    """The losses of two steps, between which `bad` is done."""
    engine = build(world, rows_task(deep), Case(f"{plan} fp64"))
    first = engine.step(vectors(0, rows=8)).loss
    bad(engine)
    return [first, engine.step(vectors(1, rows=8)).loss]


def nothing(engine: Engine) -> None:
    """Nothing happens."""


def too_few(engine: Engine) -> None:
    before = engine.sent()
    with pytest.raises(InputError, match=r"a share of 3 rows for 4 .*a batch of 4 rows for each"):
        engine.step(vectors(0, rows=3))
    assert engine.sent() == before


def breaking(engine: Engine) -> None:
    """The loss of the first microbatch raises; parameters are the newest version after it."""

    def failing(model: nn.Module, part: Any) -> Tensor:
        raise ZeroDivisionError

    before = [p.detach().clone() for p in engine.model.parameters()]
    objective, engine.passes.objective = engine.passes.objective, failing
    with pytest.raises(ZeroDivisionError):
        engine.step(vectors(2, rows=8))
    engine.passes.objective = objective
    assert all(map(torch.equal, before, engine.model.parameters()))


@pytest.mark.parametrize(
    ("plan", "bad"),
    [("pipedream:4", breaking), ("pp2 1f1b:4", too_few), ("pp2 accumulate:2 gpipe:2", too_few)],
)
def test_a_step_that_is_refused_or_breaks_off(plan: str, bad: Callable[[Engine], None]):
    """The next step is as if it had not been; of a refused one nothing is sent."""
    expected = run_threads(ranks_of(plan), losses_around, plan, nothing)
    assert run_threads(ranks_of(plan), losses_around, plan, bad) == expected


def stumbling(world: World) -> list[str]:
    """What each of three calls came to, where in the first of them both stages raise."""
    engine = build(world, rows_task(chain(Stack, plain)), Case("pp2 1f1b:3 fp64"))
    engine.step(vectors(0))
    said, calls = list[str](), itertools.count(world.rank)

    def fail(*_: object) -> None:
        if next(calls) == 1:  # on rank 0 when the other one has begun with what was sent before
            raise ValueError("in the middle of a stage")

    engine.model.get_submodule(f"blocks.{1 + 2 * world.rank}").register_forward_pre_hook(fail)
    for call in (engine.step, engine.step, engine.evaluate):
        try:
            call(vectors(0))
        except (ValueError, RunError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_nothing_runs_after_a_run_that_broke_off():
    """What is under way to another rank would be taken for the next step's: it is refused."""
    for first, *later in run_threads(2, stumbling):
        assert first == "ValueError: in the middle of a stage"
        assert len(later) == 2
        assert all("RunError: The previous run of the schedule was interrupted" in x for x in later)


def test_an_output_that_a_later_call_returns_too_gathers_nothing():
    """Its gradient is complete after the nodes of the later call: their unit has been freed."""
    order = UnitOrder([UnitState(True), UnitState(True)], stages={0: [0, 1]})
    order.enter(0, "F", graded=True)
    places = list[CallPlace]()
    for unit in range(2):
        order.call(unit)
        order.returned(unit, ends=True)
        places.append(order.place)
    order.leave()
    order.enter(0, "B", graded=True)
    assert Act("wait", 1) in order.reached(1, places[1])
    assert Act("free_early", 1) in order.reached(0, places[0])
    assert order.reached(1, places[1]) == []


# --- what a loss keeps ----------------------------------------------------------------------------

COUNTED: dict[str, int] = {"calls": 0}


@lru_cache
def weights_of(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.linspace(1, 2, numel, dtype=dtype)


class Remembering:
    """A loss that draws random numbers, counts its calls, and keeps what it has seen."""

    calls = 0

    def __init__(self) -> None:
        self.seen, self.table = list[int](), dict[str, Tensor]()
        self.args, self._private = object(), 0  # no arguments of a partial
        self.drawn = random.Random(1), np.random.default_rng(2), torch.Generator().manual_seed(3)
        self.average = torch.zeros(6, dtype=torch.float64)

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        self.calls += 1
        self._private += 1
        self.seen.append(self._private)
        COUNTED["calls"] += 1
        out = model(x)
        if "rows" not in self.table:
            self.table["rows"] = weights_of(len(x), x.dtype)
            self.average.add_(out.detach().mean(0))
        python, numpy, own = self.drawn
        scale = python.random() + numpy.random() + float(torch.rand((), generator=own))
        scale += self.calls / len(self.seen) ** 2
        return scale * ((out - self.average).square().mean(1) * self.table["rows"]).mean()


def remembered(world: World, plan: str) -> tuple[list[float], int]:
    loss, styles = Remembering(), {"0": "colwise", "2": "rowwise"}
    model = settled(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
    table = {"table": styles} if "tp" in plan else {}
    how: Any = {"loss": loss, "optimizer": sw.SGD(lr=0.1), "least_unit_bytes": 0} | table
    engine = sw.parallelize(model, f"{plan} fp64", world, **how)
    return [engine.step(own_rows(step, 0)).loss for step in range(3)], loss.calls


@pytest.mark.parametrize("plan", ["pp2 naive", "tp2"])
def test_traces_and_comparisons_leave_a_loss_as_it_was(plan: str):
    """A loss draws, counts and keeps in each step the same as in one process."""
    ((losses, calls),) = run_threads(1, remembered, "dp1")
    for found, called in run_threads(2, remembered, plan):
        assert found == pytest.approx(losses, rel=1e-10) and called == calls == 3


def test_what_a_call_leaves_is_undone():
    """Variables, caches, and the random states of Python and NumPy are restored."""
    draw: Any = np.random.random_sample
    loss, python, numpy = Remembering(), random.getstate(), draw.__self__.get_state()[2]
    before, calls = loss.average.clone(), COUNTED["calls"]

    def all_of_it(model: nn.Module, x: Tensor, weights_of: int = 3) -> Tensor:
        """A default has the name of a function of this module, which stays what it is."""
        return loss(model, x) * random.random() * draw() * weights_of

    with as_before([all_of_it], model := nn.Linear(6, 6)):
        all_of_it(model, torch.ones(2, 6))
    assert (python, numpy) == (random.getstate(), draw.__self__.get_state()[2])
    assert (loss.calls, loss.seen, loss.table, COUNTED["calls"]) == (0, [], {}, calls)
    assert torch.equal(loss.average, before) and "calls" not in vars(loss) and not loss._private
    assert weights_of.cache_info().currsize == 0
