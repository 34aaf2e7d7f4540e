"""What ranks are to have alike: each fault is told on every rank, by name, before it trains."""

import re
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.comm.world import Axis, World
from shardwise.core.errors import InputError
from shardwise.core.layouts.param_layout import AxisLayout, Layout
from shardwise.core.mesh import Mesh
from shardwise.engine.checks import consistency
from shardwise.engine.options import EngineOptions
from shardwise.engine.predict import Predictor
from shardwise.techniques.data.checksum import weighted
from shardwise.techniques.data.same_on_ranks import SameOnRanks
from tests.engine.cases import refusal
from tests.engine.tensors import sent
from tests.pool import run_threads

WORDS = 50


class Block(nn.Module):
    """A parameter between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.PReLU(), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Small(nn.Module):
    """Words through a block; `normed`, `scaled` by a parameter, `read` with the table read."""

    def __init__(
        self, depth: int = 1, scaled: bool = False, read: bool = False, normed: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(16) if normed else nn.Identity()
        self.gamma, self.read = nn.Parameter(torch.ones(16)) if scaled else None, read

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        x = x if self.gamma is None else x * self.gamma
        for block in self.blocks:
            x = block(x)
        return functional.linear(x, self.embed.weight) if self.read else self.head(x)


TABLE = {"embed": "vocabulary", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
FIXED = TABLE | {"blocks.*.act": "replicated"}
SEQUENCE = {"embed": "vocabulary:sequence", "head": "vocabulary"}
SPLIT = sw.Table.of(FIXED, sequence=SEQUENCE)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over all positions; targets in the first half of the words."""
    return functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def text(seed: int = 0, rows: int = 4, length: int = 8) -> dict[str, Tensor]:
    """Random words."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS // 2, (2, rows, length), generator=draw)
    return {"x": ids[0], "y": ids[1]}


def engine_of(world: World, model: nn.Module, plan: str = "tp2", **options: Any) -> sw.Engine:
    """The model on this world."""
    return sw.parallelize(
        model, plan, world, **{"optimizer": sw.AdamW(lr=0.01), "loss": loss} | options
    )


def predicted(world: World, model: nn.Module, plan: str = "tp2", **options: Any) -> Predictor:
    chosen: dict[str, Any] = {"loss": loss} | options
    return Predictor(model, plan, EngineOptions(**chosen), rank=world.rank)


def told(world: World, act: Any) -> str:
    """What this rank is told when it does this."""
    return refusal(lambda: act(world))


GIVEN = [
    ("model", lambda world: engine_of(world, Small(1 + world.rank), table=FIXED)),
    ("table", lambda world: engine_of(world, Small(), table=[TABLE, FIXED][world.rank])),
    ("option clip", lambda world: engine_of(world, Small(), table=FIXED, clip=1.0 + world.rank)),
    (
        "strategy",
        lambda world: sw.FSDP(Small(), ["FULL_SHARD", "NO_SHARD"][world.rank], world=world),
    ),
    ("plan", lambda world: engine_of(world, Small(), ["dp2", "dp2 zero1"][world.rank])),
    (
        "optimizer",
        lambda world: engine_of(world, Small(), table=FIXED, optimizer=sw.SGD(lr=1 + world.rank)),
    ),
    ("option loss", lambda world: engine_of(world, Small(), "dp2", loss=[loss, twice][world.rank])),
    (
        "option tokens",
        lambda world: engine_of(world, Small(), "dp2", tokens=[None, len][world.rank]),
    ),
    (
        "module",
        lambda world: sw.DDP(nn.Sequential(Small(), nn.Dropout(0.5 + 0.1 * world.rank)), world),
    ),
    ("module", lambda world: sw.DDP(Small().train(world.rank == 0), world)),
    ("argument folder of sw.save", lambda world: saved(world, f"folder{world.rank}")),
    ("argument extra of sw.save", lambda world: saved(world, "folder", extra={"at": world.rank})),
    ("argument missing_ok of sw.load", lambda world: loaded(world, missing_ok=world.rank == 0)),
]


def twice(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return 2 * loss(model, batch)


def saved(world: World, folder: str, **options: Any) -> None:
    sw.save(engine_of(world, Small(), "dp2"), folder, **options)


def loaded(world: World, **options: Any) -> None:
    sw.load(engine_of(world, Small(), "dp2"), "folder", **options)


@pytest.mark.parametrize(("what", "act"), GIVEN)
def test_what_ranks_are_given_is_compared_before_anything_is_changed(what: str, act: Any):
    """One paragraph, the same on both ranks."""
    first, second = run_threads(2, told, act)
    assert first == second
    assert f"the {what} of rank 1, which differs from that of rank 0" in first


def step(world: World, model: Any, plan: str, batch: Any, **options: Any) -> None:
    """A first step."""
    engine_of(world, model(), plan, **options).step(batch(world.rank))


def test_ranks_that_are_given_the_same_train():
    """Functions and what is made anew on each rank are no difference."""
    same = partial(step, plan="tp2", batch=lambda _: text(), table=FIXED, units=Block)
    assert run_threads(2, partial(same, model=Small)) == [None, None]


def masked(rank: int, seed: int = 0) -> dict[str, Any]:
    """Text, and beside it what has no sum, is no number or stands elsewhere, on each rank."""
    nothing = torch.full((4, 8), -torch.inf)
    extra = {"mask": nothing, "scale": torch.ones(3, dtype=torch.float8_e4m3fn), "name": str(rank)}
    batch = text(seed) | extra | {"z": torch.ones(4, dtype=torch.complex64).conj()}
    return dict(sorted(batch.items(), reverse=rank == 1))


def test_batches_are_compared_by_what_can_be():
    """The order of keys is no difference, nor is what is no tensor; what is beside a mask is."""
    zero, one, other = (
        consistency._batch_checksum(masked(*of), torch.device("cpu")) for of in [(0,), (1,), (1, 5)]
    )
    assert consistency._same_batch(zero, one) and not consistency._same_batch(one, other)


def test_a_batch_that_each_rank_makes_may_be_rounded_otherwise():
    """Of numbers that are not whole the last digits are no difference; a single value is."""
    x = torch.randn(40, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[3, 4] += 1.0
    rounded = x * (1 + 1e-15 * x.cos())
    ids = torch.randint(50_000, (40, 500), generator=torch.Generator().manual_seed(0))
    one = ids.clone()
    one[7, 8] += 1
    base, near, far, ids, one = (
        consistency._batch_checksum(x, x.device) for x in (x, rounded, other, ids, one)
    )
    assert (
        consistency._same_batch(base, near)
        and not consistency._same_batch(base, far)
        and not consistency._same_batch(ids, one)
    )


@pytest.mark.parametrize("plan", ["tp2", "pp2 1f1b:2", "tp2 pp2 1f1b:2"])
@pytest.mark.parametrize(
    "batch",
    [
        lambda rank: text(seed=rank),
        lambda rank: text(rows=4 + 4 * (rank % 2), length=8 - 4 * (rank % 2)),
    ],
    ids=["words", "shapes"],
)
def test_ranks_that_compute_a_step_together_have_one_batch(plan: str, batch: Any):
    """Also where the shapes that differ have as many words."""
    stages = ["blocks.0"] if "pp2" in plan else None
    act = partial(step, model=Small, plan=plan, batch=batch, table=FIXED, stages=stages)
    for said in run_threads(4 if "tp2 pp2" in plan else 2, told, act):
        assert "that differs from that on rank 0" in said
        assert "engine.data_rank" in said


def test_data_ranks_have_batches_of_their_own():
    """What is compared is what one data rank has."""
    act = partial(step, model=Small, plan="dp2 tp2", batch=lambda r: text(r // 2), table=FIXED)
    assert run_threads(4, act) == [None] * 4


FAULTS = [
    ("tp2", Small, {"table": TABLE}, r"the gradient of blocks\.0\.act\.weight.*replicated"),
    ("dp2 tp2", Small, {"table": TABLE}, r"the gradient of blocks\.0\.act\.weight"),
    ("tp2 accumulate:2", Small, {"table": TABLE, "clip": 1.0}, r"of blocks\.0\.act\.weight"),
    ("tp2 sp", partial(Small, scaled=True), {"table": SPLIT}, r'of gamma,.*"gamma": "sequence"'),
    ("tp2 sp", partial(Small, normed=True), {"table": SPLIT}, r'of norm\.w.*"norm": "sequence"'),
    (
        "tp2",
        partial(Small, read=True),
        {"table": FIXED},
        r"embed\.weight, of which each tensor rank holds a part",
    ),
]


@pytest.mark.parametrize(("plan", "model", "options", "match"), FAULTS)
def test_what_every_rank_computes_by_itself_is_the_same(
    plan: str, model: Any, options: dict[str, Any], match: str
):
    """A parameter whose gradient nobody sums, or a cut weight that is read: told, on all ranks."""
    ranks = 4 if "dp2" in plan else 2
    act = partial(step, model=model, plan=plan, batch=lambda _: text(), **options)
    for said in run_threads(ranks, told, act):
        assert re.search(match, said)


def resumed(world: World, table: dict[str, str]) -> list[bool]:
    """Whether what is sent is what is predicted, in three steps of an engine that goes on."""
    before = engine_of(world, Small(), table=FIXED)
    before.step(text())
    saved = before.scalars()
    engine = engine_of(world, Small(), table=table)
    engine.load_scalars(saved)
    told = predicted(world, Small(), table=table).of(text())
    found = []
    for step in range(3):
        engine.step(text())
        found.append(sent(engine) == told.in_step(step))
    return found


@pytest.mark.full
def test_ranks_that_go_on_from_a_checkpoint_compare_in_their_first_step():
    """The run may have been another plan's, or this table's first."""
    assert run_threads(2, resumed, FIXED) == [[True] * 3] * 2
    for said in run_threads(2, told, partial(resumed, table=TABLE)):
        assert "the gradient of blocks.0.act.weight" in said


class Late(Small):
    """What it adds is zero at first, and so is the gradient of what is before that."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            assert isinstance(block, Block)
            nn.init.zeros_(block.down.weight)


def steps(world: World, table: dict[str, str], plan: str, weight: float) -> list[bool]:
    """Whether what is sent is what is predicted, in steps whose losses weigh so much."""
    engine = engine_of(
        world, Late(), plan, table=table, loss=lambda model, batch: weight * loss(model, batch)
    )
    theory, skips = predicted(world, Late(), plan, table=table), 0
    found = []
    for k in range(8):
        skipped = engine.step(text(k)).skipped
        assert skipped == (weight > 1 and k < 2)
        found.append(sent(engine) == theory.of(text(k)).in_step(k, skipped=skips))
        skips += skipped
    return found


@pytest.mark.parametrize(("plan", "weight"), [("tp2", 1.0), ("dp2 tp2", 1.0), ("tp2 fp16", 3.0)])
def test_a_gradient_that_says_nothing_is_compared_again(plan: str, weight: float):
    """Zeros in the first step, or an overflow of fp16: the fault is told when it can be seen."""
    ranks = 4 if "dp2" in plan else 2
    assert run_threads(ranks, steps, FIXED, plan, weight) == [[True] * 8] * ranks
    for said in run_threads(ranks, told, partial(steps, table=TABLE, plan=plan, weight=weight)):
        assert "the gradient of blocks.0.act.weight" in said


HELD = Layout(axes=(("tp", AxisLayout(size=2)),))


class Made:
    """Gradients of one flat group: one large, one of nothing but rounding."""

    names, pieces, trained = ["large", "small"], [(0, 1000), (1000, 1010)], True

    def __init__(self, rank: int, off: float, noise: float) -> None:
        draw, self.layouts = torch.Generator().manual_seed(0), [HELD, HELD]
        large = torch.randn(1000, generator=draw) * (1 + off * rank)
        self.grads, self.gshard = self, torch.cat([large, torch.full((10,), noise * (-1) ** rank)])


def compared(world: World, off: float, noise: float) -> bool:
    """Whether the ranks find their gradients alike."""
    axis = world.on(Mesh((("tp", 2),))).axis("tp")
    flats: Any = [Made(world.rank, off, noise)]
    try:
        nowhere = Axis("none")
        same = SameOnRanks((nowhere, nowhere), (), 2**20, world.device)
        comparing = consistency.ConsistencyCheck(same, axis)
        comparing.compared_gradients = "each"
        arrived = comparing.compare_gradients(iter("ab"), torch.ones(()), flats)
        assert list(arrived) == ["a", "b"]
    except InputError:
        return False
    return True


@pytest.mark.parametrize(
    ("off", "noise", "same"),
    [(0.0, 0.0, True), (1e-5, 1e-7, True), (1e-2, 0.0, False), (0.0, 1.0, False)],
)
def test_rounding_is_no_difference(off: float, noise: float, same: bool):
    """A gradient that is zero but for rounding may be of another sign on every rank."""
    assert run_threads(2, compared, off, noise) == [same, same]


@given(numel=st.integers(1, 3000), at=st.integers(0, 2999), seed=st.integers(0, 2**31))
def test_sums_with_weights_tell_tensors_apart(numel: int, at: int, seed: int):
    """One element changed, or two that stand side by side exchanged, is another sum."""
    x = torch.randint(0, 1000, (numel,), generator=torch.Generator().manual_seed(seed))
    at %= numel
    other = x.clone()
    other[at] += 1
    assert weighted(other) != weighted(x)
    if at + 1 < numel and x[at] != x[at + 1]:
        swapped = x.clone()
        swapped[at], swapped[at + 1] = x[at + 1], x[at]
        assert weighted(swapped) != weighted(x)
    assert weighted(x.view(numel, 1)) == weighted(x)


WRAPPED = [
    lambda world: sw.DDP(Small(1 + world.rank), world),
    lambda world: sw.FSDP(Small(1 + world.rank), world=world),
    lambda world: sw.Pipe(Small(2 + world.rank), 2, ["blocks.1"], world=world),
]


@pytest.mark.parametrize("wrap", WRAPPED, ids=["DDP", "FSDP", "Pipe"])
def test_modules_that_are_wrapped_are_the_same_on_all_ranks(wrap: Any):
    """Told before anything is sent of them."""
    for said in run_threads(2, told, wrap):
        assert "the module of rank 1, which differs from that of rank 0" in said


def other_batch(world: World, plan: str, every: int, last: int = 2) -> tuple[list[bool], str]:
    """Steps, the last on another batch for rank 1; whether bytes held, and what was told."""
    model = Small() if plan.startswith("tp") else nn.Sequential(*[nn.Linear(4, 4) for _ in "abcd"])
    options: dict[str, Any] = {"table": FIXED, "check_every": every}
    if plan.startswith("pp"):
        options |= {"table": None, "loss": lambda model, batch: model(batch["x"]).square().mean()}
    theory = predicted(world, deepcopy(model), plan, **options)
    engine, held = engine_of(world, model, plan, **options), list[bool]()
    try:
        for step in range(last + 1):
            seed = 7 + step + (world.rank if step == last else 0)
            batch = text(seed)
            if plan.startswith("pp"):
                batch = {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))}
            engine.step(batch)
            held.append(sent(engine) == theory.of(batch).in_step(step))
    except InputError as error:
        return held, str(error)
    return held, ""


@pytest.mark.parametrize("plan", ["tp2", "pp2 gpipe:2"])
@pytest.mark.parametrize("check_every", [1, 2])
def test_a_rank_that_is_given_another_batch_later_is_found(plan: str, check_every: int):
    """In a step that compares, on every rank; all steps before sent what is predicted."""
    axis = plan[:2]
    for held, said in run_threads(2, other_batch, plan, check_every):
        assert held == [True, True]
        assert f"a batch on rank 1 of the {axis} axis" in said


def test_ranks_that_are_not_to_be_compared_later_are_not():
    """With `check_every=0` only an engine's first three steps compare."""
    assert run_threads(2, other_batch, "tp2", 0, 3) == [([True] * 4, "")] * 2


def other_gradient_at_3(world: World, which: str) -> str:
    """What is told where, in the fourth step, rank 1 has another loss or another gradient."""
    engine = engine_of(world, Small(), table=FIXED, check_every=1)
    bias = engine.model.get_parameter("head.bias")
    for step in range(4):
        if step == 3 and world.rank == 1 and which == "loss":
            engine.training = replace(engine.training, loss=lambda m, b: 1.5 * loss(m, b))
        if step == 3 and world.rank == 1 and which == "gradient":
            bias.register_hook(lambda grad: 3 * grad)
        try:
            engine.step(text(step))
        except InputError as error:
            return f"step {step}: {error}"
    return ""


@pytest.mark.parametrize(
    ("which", "said"), [("loss", "a loss that differs"), ("gradient", "the gradient of")]
)
def test_a_loss_or_gradient_that_differs_later_is_found(which: str, said: str):
    """Three numbers tell that something differs, and then the parameter is looked for."""
    for told_here in run_threads(2, other_gradient_at_3, which):
        assert told_here.startswith(f"step 3: Given: {said}")
        assert which == "loss" or "head.bias" in told_here
