"""What ranks are to have alike: each fault is told on every rank, by name, before it trains."""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.agreement import checksum
from shardwise.agreement.checksum import WEIGHTS, bits_sum, weighted
from shardwise.agreement.same_on_ranks import SameOnRanks
from shardwise.comm.world import Axis, World, alone
from shardwise.core.errors import InputError
from shardwise.core.layouts.param_layout import AxisLayout, Layout
from shardwise.core.mesh import Mesh
from shardwise.engine.checks import consistency
from shardwise.engine.options import EngineOptions
from shardwise.observe.dry_twin import DryTwin
from tests.engine.cases import ranks_of, refusal
from tests.engine.tensors import step_as_predicted
from tests.pool import run_gloo, run_threads

WORDS = 50


class Block(nn.Module):
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
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS // 2, (2, rows, length), generator=draw)
    return {"x": ids[0], "y": ids[1]}


def engine_of(world: World, model: nn.Module, plan: str = "tp2", **options: Any) -> sw.Engine:
    return sw.parallelize(
        model, plan, world, **{"optimizer": sw.AdamW(lr=0.01), "loss": loss} | options
    )


def dry_run(engine: sw.Engine, model: nn.Module, **options: Any) -> DryTwin:
    chosen: dict[str, Any] = {"loss": engine.loss} | options
    return DryTwin(model, engine.plan, EngineOptions(**chosen), engine.world.rank)


def told(world: World, act: Any) -> str:
    return refusal(lambda: act(world))


def twice(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return 2 * loss(model, batch)


def engine_with(world: World, plan: str = "tp2", depth: int = 1, **options: Any) -> sw.Engine:
    table = FIXED if plan == "tp2" else None
    return engine_of(world, Small(depth), plan, **({"table": table} | options))


def saved(world: World, folder: str = "folder", **options: Any) -> None:
    sw.save(engine_with(world, "dp2"), folder, **options)


def times(factor: Any) -> Any:
    if isinstance(factor, float):
        return lambda model, batch: factor * loss(model, batch)
    return lambda model, batch: factor.p * loss(model, batch)


def with_attributes(**own: Any) -> nn.Module:
    model = Small()
    vars(model).update(own)
    return model


#: What differs, and a call in which it does by the rank.
GIVEN = [
    ("model", lambda w: engine_with(w, depth=1 + w.rank)),
    ("table", lambda w: engine_with(w, table=[TABLE, FIXED][w.rank])),
    ("option clip", lambda w: engine_with(w, clip=1.0 + w.rank)),
    ("strategy", lambda w: sw.FSDP(Small(), ["FULL_SHARD", "NO_SHARD"][w.rank], world=w)),
    ("plan", lambda w: engine_with(w, ["dp2", "dp2 zero1"][w.rank])),
    ("optimizer", lambda w: engine_with(w, optimizer=sw.SGD(lr=1 + w.rank))),
    ("option loss", lambda w: engine_with(w, "dp2", loss=[loss, twice][w.rank])),
    ("option loss", lambda w: engine_with(w, "dp2", loss=times(1.0 + w.rank))),
    ("option loss", lambda w: engine_with(w, "dp2", loss=times(nn.Dropout(w.rank / 4)))),
    ("option loss", lambda w: engine_with(w, "dp2", loss=times(nn.HuberLoss(delta=1.0 + w.rank)))),
    ("option tokens", lambda w: engine_with(w, "dp2", tokens=[None, len][w.rank])),
    ("module", lambda w: sw.DDP(nn.Sequential(Small(), nn.Dropout(0.5 + 0.1 * w.rank)), w)),
    ("module", lambda w: sw.DDP(Small().train(w.rank == 0), w)),
    ("module", lambda w: sw.FSDP(Small(1 + w.rank), world=w)),
    ("module", lambda w: sw.FSDP(with_attributes(forward=[loss, twice][w.rank]), world=w)),
    ("module", lambda w: sw.DDP(with_attributes(config=SimpleNamespace(scale=1.0 * w.rank)), w)),
    ("module", lambda w: sw.DDP(with_attributes(scales=[0.5 * w.rank]), w)),
    ("module", lambda w: sw.FSDP(with_attributes(scale=torch.ones(2) * w.rank), world=w)),
    ("module", lambda w: sw.Pipe(Small(2 + w.rank), 2, ["blocks.1"], world=w)),
    ("argument folder of sw.save", lambda w: saved(w, f"folder{w.rank}")),
    ("argument extra of sw.save", lambda w: saved(w, extra={"at": w.rank})),
    (
        "argument missing_ok of sw.load",
        lambda w: sw.load(engine_with(w, "dp2"), "folder", missing_ok=w.rank == 0),
    ),
]


@pytest.mark.parametrize(("what", "act"), GIVEN)
def test_what_ranks_are_given_is_compared_before_anything_is_changed(what: str, act: Any):
    """One paragraph, the same on both ranks."""
    first, second = run_threads(2, told, act)
    assert first == second
    assert f"the {what} of rank 1, which differs from that of rank 0" in first


def step(world: World, model: Any, plan: str, batch: Any, **options: Any) -> None:
    engine_of(world, model(), plan, **options).step(batch(world.rank))


def masked(rank: int, seed: int = 0) -> dict[str, Any]:
    """Text, and beside it what has no sum, is no number or stands elsewhere, on each rank."""
    nothing = torch.full((4, 8), -torch.inf)
    extra = {"mask": nothing, "scale": torch.ones(3, dtype=torch.float8_e4m3fn), "name": str(rank)}
    batch = text(seed) | extra | {"z": torch.ones(4, dtype=torch.complex64).conj()}
    return dict(sorted(batch.items(), reverse=rank == 1))


def test_batches_are_compared_by_what_can_be():
    """The order of keys is no difference, nor is what is no tensor; what is beside a mask is. Of
    numbers that are not whole the last digits are no difference; a single value is.
    """
    sums = partial(checksum.batch_values, device=torch.device("cpu"))
    same = lambda *values: not checksum.other_batches(values)  # noqa: E731
    zero, one, other = (sums(masked(*of)) for of in [(0,), (1,), (1, 5)])
    assert same(zero, one) and not same(one, other)
    x = torch.randn(40, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    far, rounded = x.clone(), x * (1 + 1e-15 * x.cos())
    far[3, 4] += 1.0
    assert same(sums(x), sums(rounded)) and not same(sums(x), sums(far))
    ids = torch.randint(50_000, (40, 500), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[7, 8] += 1
    assert not same(sums(ids), sums(changed))
    assert not same(sums([ids, 1.0]), sums([ids, 2.0]))
    hashed = partial(checksum.batch_hash, hashes=2**20, device=torch.device("cpu"), floats=True)
    assert hashed(ids) != hashed(ids.flip(0))


def differ(rank: int) -> dict[str, Tensor]:
    """As many words, in other shapes."""
    return text(rows=4 + 4 * (rank % 2), length=8 - 4 * (rank % 2))


BATCH = r"that differs from that on rank 0.*engine\.data_rank"
FAULTS = [
    *(
        (plan, Small, options | {"batch": batch}, BATCH)
        for plan, options in (
            ("tp2", {"table": FIXED}),
            ("pp2 1f1b:2", {"table": FIXED, "stages": ["blocks.0"]}),
            ("tp2 pp2 1f1b:2", {"table": FIXED, "stages": ["blocks.0"]}),
        )
        for batch in (text, differ)
    ),
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
def test_what_ranks_take_or_compute_alike_is_compared(
    plan: str, model: Any, options: dict[str, Any], match: str
):
    """Another batch, a gradient that nobody sums, a cut weight that is read: told, on all ranks."""
    act = partial(step, model=model, plan=plan, **({"batch": lambda _: text()} | options))
    for said in run_threads(ranks_of(plan), told, act):
        assert re.search(match, said)


def resumed(world: World, table: dict[str, str]) -> None:
    """Three steps of an engine that goes on send what is predicted."""
    before = engine_of(world, Small(), table=FIXED)
    before.step(text())
    saved = before.scalars()
    engine = engine_of(world, Small(), table=table)
    engine.load_scalars(saved)
    dry = dry_run(engine, Small(), table=table)
    for _ in range(3):
        step_as_predicted(engine, dry, text())


@pytest.mark.full
def test_ranks_that_go_on_from_a_checkpoint_compare_in_their_first_step():
    """The run may have been another plan's, or this table's first."""
    run_threads(2, resumed, FIXED)
    for said in run_threads(2, told, partial(resumed, table=TABLE)):
        assert "the gradient of blocks.0.act.weight" in said


class Late(Small):
    """What it adds is zero at first, and so is the gradient of what is before that."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            assert isinstance(block, Block)
            nn.init.zeros_(block.down.weight)


def steps(world: World, table: dict[str, str], plan: str, weight: float) -> None:
    """Steps whose losses weigh so much send what is predicted."""
    engine = engine_of(
        world, Late(), plan, table=table, loss=lambda model, batch: weight * loss(model, batch)
    )
    dry = dry_run(engine, Late(), table=table)
    for k in range(8):
        skipped = step_as_predicted(engine, dry, text(k)).skipped
        assert skipped == (weight > 1 and k < 2)


@pytest.mark.parametrize(("plan", "weight"), [("tp2", 1.0), ("dp2 tp2", 1.0), ("tp2 fp16", 3.0)])
def test_a_gradient_that_says_nothing_is_compared_again(plan: str, weight: float):
    """Zeros in the first step, or an overflow of fp16: the fault is told when it can be seen."""
    ranks = ranks_of(plan)
    run_threads(ranks, steps, FIXED, plan, weight)
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
        comparing.compares = True
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_bit_counts(dtype: torch.dtype):
    """Whichever bit of whichever element turns over, the number that ranks compare changes."""
    hashes = engine_of(alone(), Small(), "fp32").consensus.same.hashes
    x = torch.randn(2 * WEIGHTS + 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    before = bits_sum(x).remainder(hashes)
    for index in (0, 1, 2, 3, WEIGHTS - 1, WEIGHTS, 2 * WEIGHTS + 2):
        for bit in range(8 * x.element_size()):
            other = x.clone()
            other.view(whole)[index] ^= torch.ones((), dtype=whole) << bit
            assert bits_sum(other).remainder(hashes) != before, f"bit {bit} of element {index}"


def other_batch_at_3(world: World) -> None:
    """Steps, the last on another batch for rank 1, send what is predicted."""
    options: dict[str, Any] = {"table": FIXED, "check_every": 0}
    engine = engine_of(world, Small(), **options)
    dry = dry_run(engine, Small(), **options)
    for step in range(4):
        step_as_predicted(engine, dry, text(7 + step + world.rank * (step == 3)))


def test_ranks_that_are_not_to_be_compared_later_are_not():
    """With `check_every=0` only an engine's first three steps compare."""
    run_threads(2, other_batch_at_3)


def reads_of_its_own(world: World) -> None:
    """Compare a loss that reads a teacher, a tensor, and a number in a dict."""
    prior, factors, teacher = torch.ones(2) * world.rank, {"tail": world.rank}, nn.Linear(2, 2)
    nn.init.constant_(teacher.weight, world.rank)

    def loss(x: Tensor) -> Tensor:
        return (teacher(x) - prior * factors["tail"]).sum()

    said = r"read by loss on rank 1 are .*factors\['tail'\]\": 1, 'prior': .*'teacher.weight': "
    with pytest.warns(UserWarning, match=said):
        consistency.require_same(world, {"loss": loss})


@pytest.mark.parametrize("name", ["step", "evaluate"])
def test_a_loss_that_calls_its_engine_is_refused(name: str):
    """It gets one clear error, not a RecursionError."""

    def loss(_: nn.Module, x: Tensor) -> Tensor:
        return getattr(engine, name)(x)

    engine = sw.parallelize(nn.Linear(4, 4), "", loss=loss, optimizer=sw.SGD(lr=0.1))
    with pytest.raises(InputError, match="that its own loss function calls"):
        engine.step(torch.ones(2, 4))


def test_parameters_of_a_loss_alone_are_named(recwarn: pytest.WarningsRecorder):
    """The warning names a criterion's parameters, not those of a teacher under no_grad."""
    criterion, teacher = nn.Linear(4, 1), nn.Linear(4, 4)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            told = teacher(x)
        return criterion(model(x) - told).square().mean()

    engine = sw.parallelize(nn.Linear(4, 4), "", loss=loss, optimizer=sw.SGD(lr=0.1))
    for _ in range(2):
        engine.step(torch.ones(2, 4))
    (said,) = [str(each.message) for each in recwarn if "The loss computes" in str(each.message)]
    assert "gradients of criterion.weight, criterion.bias, which the model" in said


def test_what_functions_read_is_compared():
    """Of tensors, and of modules that are not trained, the bits: ranks are warned."""
    run_gloo(2, reads_of_its_own)
