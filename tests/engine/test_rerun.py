"""The rerun: what a rank computes wrong is found by another rank, and named."""

import re
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.check_every import CheckEvery
from shardwise.core.errors import InputError
from shardwise.engine.options import EngineOptions
from shardwise.engine.predict import Predictor
from shardwise.techniques.data.flat.flat_gradient import FlatGradient
from tests.engine.cases import ranks_of
from tests.engine.cases import squares as loss
from tests.engine.tensors import sent
from tests.pool import run_gloo, run_threads

PLANS = [
    "dp2 fp64",
    "dp3 zero1 accumulate:2 fp64",
    "dp2 zero2 accumulate:2 bf16",
    "dp2 zero3 fp64",
    "dp_replicate2 dp_shard2 zero3 accumulate:2 fp64",
    "dp2 zero3 recompute:inner fp16",
]
WRONG = 3  # the step, from 1, in which a rank computes something wrong


class Net(nn.Module):
    """Random numbers, buffers that change with each forward, and a parameter without a use."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(rate)
        self.outer = nn.Linear(8, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.drop(self.norm(self.inner(x))))


def model(rate: float = 0.0) -> nn.Module:
    found = Net(rate)
    with torch.no_grad():
        for number, p in enumerate(found.parameters()):
            p.uniform_(-1, 1, generator=torch.Generator().manual_seed(number))
    return found


def rows(step: int, rank: int) -> Tensor:
    """Ranks have different numbers of rows."""
    return torch.randn(6 + rank, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def run(world: World, plan: str, check_every: int | str) -> tuple[list[float], list[Tensor]]:
    """The losses and the values of four steps, whose bytes are those predicted."""
    torch.manual_seed(world.rank)
    options: dict[str, Any] = {"loss": loss, "check_every": check_every}
    theory = Predictor(model(), plan, EngineOptions(**options), rank=world.rank)
    engine, losses = sw.parallelize(model(0.3), plan, world, **options), list[float]()
    for step in range(4):
        batch = rows(step, engine.data_rank)
        losses.append(engine.step(batch).loss)
        assert sent(engine) == theory.of(batch).in_step(step)
    return losses, [box.tensor.clone() for box in engine.boxes()]


@pytest.mark.parametrize("plan", PLANS)
def test_a_rerun_reports_nothing_of_a_right_run_and_changes_no_bit_of_it(plan: str):
    """Though passes draw random numbers and change buffers; its bytes are those of the formula."""
    ranks = ranks_of(plan)
    plain, checked = (run_gloo(ranks, run, plan, every) for every in (0, "0 rerun:2"))
    for (losses, tensors), (others, compared) in zip(plain, checked, strict=True):
        assert losses == others
        assert all(map(torch.equal, tensors, compared))


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """A rank whose `act` is set computes the gradient of `outer.weight` wrong, before any sum."""

    def collect(self: FlatGradient, index: int, scale: float) -> None:
        real(self, index, scale)
        act = getattr(own, "act", None)
        if act is not None and self.names[index] == "outer.weight" and self.filled[index]:
            act(self.grad_views[index])

    own, real = threading.local(), FlatGradient.collect  # ranks are threads
    monkeypatch.setattr(FlatGradient, "collect", collect)
    return own


def until_found(
    world: World, broken: threading.local, plan: str, where: int, passes: set[int], bit: int
) -> str:
    """What is raised, and in which step; `passes` of step WRONG on one rank turn a bit over."""
    engine = sw.parallelize(model(), plan, world, loss=loss, check_every="0 rerun:2")
    for step in range(1, 5):
        count = iter(range(100))

        def act(gradient: Tensor, count: Any = count) -> None:
            if next(count) in passes:
                gradient.view(-1).view(torch.int64)[0] ^= 1 << bit

        broken.act = act if world.rank == where and step == WRONG else None
        try:
            engine.step(rows(step, engine.data_rank))
        except InputError as error:
            return f"{step}: {error}"
    return ""


BOTH = "Write instead: a test of both machines"


@pytest.mark.parametrize(
    ("plan", "passes", "said"),
    [
        ("dp2 fp64", {1}, (r"on data rank 1: .* again on data rank 0", BOTH)),
        ("dp2 zero3 fp64", {0}, (r"on data rank 0: .* again on data rank 1", BOTH)),
        (
            "dp3 zero2 accumulate:2 fp64",
            {0, 1},
            (r"on data rank 0: .* again on data rank 1", "another machine for data rank 1"),
        ),
        (
            "dp_replicate2 dp_shard2 zero1 fp64",
            {1},
            (r"on data rank 1: .* again on data rank 0", BOTH),
        ),
    ],
)
def test_a_wrong_gradient_of_one_rank_is_named(
    broken: threading.local, plan: str, passes: set[int], said: tuple[str, str]
):
    """With its step, before the update, on all ranks; the first pass of a rank is a repetition.

    If a rank computes both passes wrong, the error names it and not one of the two others.
    """
    for text in run_threads(ranks_of(plan), until_found, broken, plan, 1, passes, 60):
        assert text.startswith(f"{WRONG}: Given: the gradient of outer.weight in step {WRONG} ")
        assert all(re.search(part, text) for part in said)


def test_the_last_bit_of_a_gradient_is_a_warning(broken: threading.local):
    """Kernels that add in no fixed order reach that. Tensor, step and ranks are named."""
    name = rf"the gradient of outer.weight in step {WRONG} on data rank 1: .*by rounding"
    with pytest.warns(UserWarning, match=name):
        found = run_threads(2, until_found, broken, "dp2 fp64", 1, {1}, 0)
    assert found == ["", ""]


def test_the_option_is_read():
    """Numbers and texts; the rest is refused."""
    read = {7: (7, 0), "rerun:5": (100, 5), "50 rerun:5": (50, 5)}
    assert {value: CheckEvery.parse(value) for value in read} == {
        value: CheckEvery(*steps) for value, steps in read.items()
    }
    for value in ("", "50", "often", "rerun", "50rerun:5", "rerun:5 50", -1, 1.5, True, None):
        with pytest.raises(InputError, match=r"check_every=.*100 rerun:20"):
            CheckEvery.parse(value)
