"""Parts of a proof: batches, the oracle of mixtures, pieces that cover tensors; and tables that say
too little or are derived wrong: what is found, and what mends it.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.errors import RankError
from shardwise.core.plan.plan import Plan
from shardwise.models import gpt, moe
from shardwise.models.registry import find
from shardwise.models.trainable import Loss, Trainable
from shardwise.techniques.expert.apply import layers_of
from shardwise.techniques.expert.gate import GATES
from shardwise.techniques.expert.moe_layer import ExpertPlace, name_layers
from shardwise.techniques.tensor import first_step
from shardwise.verify.finding import NEVER, BoxPlace, Costs, Errors, Finding
from shardwise.verify.oracles.batches import Division, ragged, rows_of_step
from shardwise.verify.oracles.mixture_oracle import Mixture
from shardwise.verify.oracles.rounding import MOST
from shardwise.verify.parity import with_early_delays
from shardwise.verify.report import over_batches, uncovered
from tests.engine.cases import settled
from tests.pool import run_gloo, run_threads
from tests.verify import micro
from tests.verify.test_command import shortly

ROWS = 6


@pytest.mark.parametrize(
    ("errors", "holds"),
    [
        ((2.5, 1.1, 0.9, 1.1), True),
        ((1.6, 1.6, 1.6, 1.6), False),
        ((NEVER, 0.0, 0.0, 0.0), False),
        ((1.0, math.nan, 1.0, 1.0), False),
    ],
)
def test_batches_in_16_bits_are_judged_together(errors: tuple[float, ...], holds: bool):
    """One batch may be above the bound by chance; what recurs or is no number is refused."""
    kinds = (("gradients", "w"), ("update", "b"))
    batches = [
        [Finding(0, tuple(Errors(kind, (name,), (x,)) for kind, name in kinds), Costs(), {}, {})]
        for x in errors
    ]
    (found,) = over_batches(batches)
    judged = [each for each in found.errors if isinstance(each, Errors)]
    assert [each.names for each in judged] == [("w",), ("b",)]
    assert [each.errors[0] <= MOST for each in judged] == [holds, holds]


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


class Block(nn.Module):
    """A pair of layers; the one before them mixes positions where there is `before`."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.before, self.after, self.norm = nn.Identity(), nn.Identity(), nn.LayerNorm(6)
        self.up, self.down, self.mixes = nn.Linear(6, 10), nn.Linear(10, 6), mixes

    def forward(self, x: Tensor) -> Tensor:
        y = x
        if self.mixes:
            before = functional.pad(self.before(x), (0, 0, 1, 0))[:, :-1]
            y = x + self.after(before)
        self.hidden = functional.gelu(self.up(self.norm(y)))
        return x + self.down(self.hidden)


class Model(nn.Module):
    """An embedding, a block, a norm and a head, with the entries of a table beside the usual."""

    def __init__(self, table: dict[str, str], sequence: dict[str, str], *, mixes: bool) -> None:
        super().__init__()
        self.embed, self.block, self.seen = nn.Embedding(11, 6), Block(mixes=mixes), nn.Identity()
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11)
        styles = {"embed": "vocabulary", "block.up": "colwise", "block.down": "rowwise"}
        known = {"embed": "vocabulary:sequence", "*norm": "sequence"}
        self.tensor_table = sw.Table.of(styles | table, sequence=sequence | known)

    def forward(self, x: Tensor) -> Tensor:
        self.stream = self.block(self.embed(x))
        return self.head(self.norm(self.stream))


def each(model: nn.Module, x: Tensor) -> Tensor:
    logits = model(x[:, :-1]).flatten(0, 1)
    return functional.cross_entropy(logits, x[:, 1:].flatten())


def last(model: nn.Module, x: Tensor) -> Tensor:
    return functional.cross_entropy(model(x)[:, 8], x[:, 0])


def stream(model: nn.Module, x: Tensor) -> Tensor:
    """With a penalty on the stream, of which each rank has a part."""
    lost = each(model, x)
    assert isinstance(model, Model)
    return lost + model.seen(model.stream).square().mean()


def hidden(model: nn.Module, x: Tensor) -> Tensor:
    """With a penalty on features of which each rank has a part."""
    lost = each(model, x)
    assert isinstance(model, Model)
    return lost + model.block.hidden.square().mean()


def batch(rows: int, seed: int) -> Tensor:
    return torch.randint(11, (rows, 9), generator=torch.Generator().manual_seed(seed))


CUT, WHOLE = {"head": "vocabulary"}, {"head": "whole"}
AROUND = {"block.before": "sequence:join", "block.after": "split"}
BOTH = {"block.up": "colwise_gather_output", "block.down": "rowwise_split_input"}
DIFFERS = "a loss that differs between the ranks of the tp axis"
SHAPES = "index 8 is out of bounds for dimension 1"
Entries = tuple[dict[str, str], dict[str, str]]
#: Losses, the error of ranks if there is one, the entries of tables without and with what mends it.
MENDED: dict[str, tuple[Loss, str, Entries, Entries]] = {
    "mixes positions": (each, "", (CUT, {}), (CUT, AROUND)),
    "mean of the stream": (stream, DIFFERS, (CUT, {}), (CUT, {"seen": "sequence:join"})),
    "mean of features": (hidden, DIFFERS, (CUT, {}), (CUT | BOTH, {})),
    "last position": (
        *(last, SHAPES, (WHOLE, {"head": "sequence"})),
        (WHOLE, {"norm": "sequence:join", "head": "whole"}),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("code", MENDED)
def test_what_a_table_lacks_is_found_and_its_entries_mend_it(code: str):
    """Ranks go on from wrong numbers, have a mean of their own part, or shapes that do not fit."""
    loss, said, *tables = MENDED[code]

    def holds(entries: Entries) -> bool:
        make = lambda: settled(Model(*entries, mixes=loss is each))  # noqa: E731
        return shortly("tp2 sp fp64", Trainable(code, make, loss, batch)).holds

    if said:
        with pytest.raises(RankError) as error:
            holds(tables[0])
        assert said in error.value.text
    else:
        assert not holds(tables[0])
    assert holds(tables[1])


WIDTH, HIDDEN = 6, 8


class Pair(nn.Module):
    """Two layers; `length`: the code divides by the number of features between them."""

    def __init__(self, length: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.drop, self.length = nn.Dropout(0.5), length

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        return self.drop(self.down(h / h.shape[-1] if self.length else h))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x).square().mean()


X = torch.arange(4.0 * WIDTH).view(4, WIDTH).sin()


def engine_of(
    world: World, plan: str, length: bool, derived: bool = True, device: str = "cpu"
) -> sw.Engine:
    """An engine with a derived table; `derived` False: taken as the user's own."""
    with torch.device(device):
        model = Pair(length)
    table = sw.derive_table(model, X, 2, loss).table
    assert table.derived
    table = replace(table, derived=derived)
    engine = sw.parallelize(model, plan, world, optimizer=sw.SGD(lr=0.1), loss=loss, table=table)
    engine.model.eval()  # threads share the generator that dropout draws from
    return engine


def trained(*of) -> list[float]:
    """The losses of two steps."""
    engine = engine_of(*of)
    return [engine.step(X).loss for _ in range(2)]


@pytest.mark.parametrize("derived", [True, False])
@pytest.mark.parametrize("plan", ["tp2", "tp2 dp2 zero3 accumulate:2", "tp2 pp2 1f1b:2"])
def test_a_length_of_sharded_features_is_found(plan: str, derived: bool):
    """`h / h.shape[-1]` divides by a rank's features: no update is made, and the error says why."""
    ranks = 4 if plan != "tp2" else 2
    said = f"a {'derived table' if derived else 'table of styles'} under"
    with pytest.raises(RankError, match=said) as error:
        run_threads(ranks, trained, plan, True, derived)
    assert "in the first step" in error.value.text


def stays_sharded(world: World) -> None:
    """A step of a whole layer after a colwise."""
    table = {"up": "colwise"}
    sw.parallelize(Pair(False), "tp2", world, loss=loss, table=table).step(X)


def test_a_result_that_stays_sharded_is_refused():
    """Shapes that do not fit, and what the table may lack."""
    said = "(?s)shapes cannot be multiplied.*a colwise without the rowwise that takes its result"
    with pytest.raises(RankError, match=said):
        run_threads(2, stays_sharded)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("plan", ["tp2", "tp2 dp2 zero3 bf16", "tp2 pp2 1f1b:2"])
def test_a_table_that_is_right_trains_on(plan: str, device: str):
    """In every precision and composition, with weights made on the meta device, and dropout."""
    run = run_threads if device == "cpu" else run_gloo  # threads share the generator of weights
    losses = run(2 if plan == "tp2" else 4, trained, plan, False, True, device)
    assert all(own == losses[0] for own in losses)
    alone = run_threads(1, trained, "bf16" if "bf16" in plan else "dp1", False, True, device)
    if device == "meta":
        assert losses[0] == pytest.approx(alone[0], rel=2e-2 if "bf16" in plan else 1e-5)


def test_too_little_memory_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Two ranks of a host with too little for both compare nothing, and one line says so."""
    monkeypatch.setattr(first_step, "free_bytes", lambda _: (7, 2 * 880 - 1))
    run_threads(2, trained, "tp2", True)
    said = capsys.readouterr().err
    assert said.count("is not compared") == 1
    assert "needs 880 bytes" in said  # 2 copies of 2 x 6 x 8 + 6 + 8 numbers


def test_the_comparison_costs_nothing_in_later_steps():
    """Its bytes are those of the first step, and its copies are gone after it."""

    def steps(world: World) -> tuple[list[int], bool]:
        engine, sent = engine_of(world, "tp2", False), list[int]()
        for _ in range(3):
            engine.step(X)
            compared = (t.sent_bytes for k, t in engine.sent().items() if k.phase == "compare")
            sent.append(sum(compared) - sum(sent))
            assert not any(k.phase == "compare" for k in engine.last)
        return sent, engine.consistency.before_first is None

    for sent, done in run_threads(2, steps):
        assert done
        assert sent[0] > 0
        assert sent[1:] == [0, 0]
