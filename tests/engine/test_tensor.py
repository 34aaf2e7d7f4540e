"""Tensor parallelism of models with tables of their own, sequences of several lengths, tiles; and
layers with a plan of their own.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from shardwise.models import gpt
from shardwise.models.trainable import fill
from tests.derive.models import HEADS, WIDTH, WORDS, Attention
from tests.engine.cases import (
    Case,
    Task,
    build,
    oracle,
    regression,
    rows_task,
    settled,
    small_gpt,
    text,
    tied_gpt,
)
from tests.engine.pipelines import SGD
from tests.engine.tensors import (
    ADAMW,
    assert_counted,
    assert_parity,
    equals_one,
    holds,
    mine,
    train,
)
from tests.parallel.layers import KINDS, sequences, task
from tests.pool import run_gloo, run_threads
from tests.verify import micro

OWN = [
    *((f"{plan} accumulate:2", name) for plan in ("tp2", "tp2 sp") for name in KINDS),
    *(("dp2 tp2 sp zero3", name) for name in ("frozen columns", "recomputed")),
    ("tp4 sp", "6 heads, 2 for keys"),
    *((f"dp2 tp2 {row}", "packed qkv, 6 heads, 2 for keys") for row in ("ddp", "zero1", "zero2")),
    *((plan, "packed qkv, 6 heads, 1 for keys") for plan in ("tp3", "pp2 tp2 zero1 zb-h1:3")),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("plan", "name"), OWN)
def test_tables_of_ones_own_train(plan: str, name: str):
    """As one process, with bytes and memory as predicted; what ranks share is counted once."""
    holds(run_threads, task(name), Case(f"{plan} fp64", clip=0.5, **SGD))


def in_two_dtypes() -> nn.Module:
    """A stack whose inner layers are fp32, in a stream of fp64."""
    model = KINDS["biases, norm and residual inside"].model()
    for block in model.get_submodule("blocks").children():
        for layer in map(block.get_submodule, ("up", "down")):
            layer.float()
            layer.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    return model


@pytest.mark.parametrize("plan", ["tp2 sp", "dp2", "dp2 zero2", "dp2 zero3"])
def test_parameters_of_several_dtypes(plan: str):
    """Each keeps its dtype, in which its moves are counted; units hold a group for each dtype."""
    work = Task(in_two_dtypes, sequences, regression, None)
    case = Case(plan, clip=0.5, units="blocks.*", **SGD)
    ranks = run_threads(2, train, work, case)
    assert_parity(ranks, oracle(work, case, None), 1e-5)
    assert_counted(ranks)
    assert {p.tensor.dtype for p in ranks[0].weights} == {torch.float32, torch.float64}


# --- sequences of several lengths under `sp`: pairs, encoder and decoder --------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention()

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        if memory is None:
            return x + self.attn(self.norm(x))
        return x + self.attn(self.norm(x), seen=memory)


class Translator(nn.Module):
    """Two sequences side by side; with `cross`, the second reads the first."""

    def __init__(self, cross: bool, again: bool = False) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(WORDS, WIDTH), Block(), Block()
        self.join, self.cross = (nn.LayerNorm(WIDTH), Block()) if cross else (None, None)
        self.last, self.head, self.again = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS), again
        fill(self.double(), seed=3)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.embed(a), self.embed(b)
        x, y = self._run(self.first, x), self._run(self.first, y)
        x, y = self._run(self.second, x), self._run(self.second, y)
        if self.cross is not None and self.join is not None:
            y = self.cross(y, self.join(x))
        return self.head(self.last(x)), self.head(self.last(y))

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False) if self.again else block(x)

    @property
    def tensor_table(self) -> sw.Table:
        styles = {"embed": "vocabulary", "*.attn.[qkv]": "colwise:heads"}
        styles |= {"*.attn.out": "rowwise:heads", "head": "vocabulary"}
        sequence = {"embed": "vocabulary:sequence", "*.norm": "sequence", "last": "sequence"}
        sequence |= {"join?": "sequence:join", "*.attn": "gather"}
        sets = {"*.attn": {"heads": "heads", "keys": "heads"}}
        return sw.Table.of(styles, heads=HEADS, sequence=sequence, sets=sets)


def translation(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Of both sequences, each word from itself."""
    first, second = (
        functional.cross_entropy(x.flatten(0, 1), y.flatten())
        for x, y in zip(model(*batch), batch, strict=True)
    )
    return first + second


def pair(lengths: tuple[int, int], turn: bool, step: int) -> tuple[Tensor, Tensor]:
    """Two sequences a row, of these lengths; in every other step the other way round."""
    own = torch.Generator().manual_seed(step)
    turned = lengths[::-1] if turn and step % 2 else lengths
    a, b = (torch.randint(WORDS, (4, length), generator=own) for length in turned)
    return a, b


@pytest.mark.crossed
@pytest.mark.parametrize("lengths", [(8, 7), (7, 8), (9, 5), (4, 4), (1, 3)])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("plan", ["tp2 sp", "dp2 tp2 sp zero2 accumulate:2"])
def test_two_sequences_in_one_forward(plan: str, cross: bool, lengths: tuple[int, int]):
    """Also where both would be padded alike, and where one is whole for the other to read."""
    work = Task(partial(Translator, cross), partial(pair, lengths, False), translation, None)
    holds(run_threads, work, Case(f"{plan} fp64", clip=0.5, **ADAMW))


@pytest.mark.parametrize("plan", ["tp2 sp", "pp2 tp2 sp 1f1b:2"])
@pytest.mark.parametrize("again", [True, False])
def test_lengths_that_change_from_step_to_step(plan: str, again: bool):
    """What is computed again, and what another stage has split, has the length it had."""
    work = Task(partial(Translator, True, again), partial(pair, (8, 7), True), translation, None)
    equals_one(run_threads, work, Case(f"{plan} fp64", clip=0.5, **ADAMW))


# --- tiles ----------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 0.7))
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(self.up(x).tanh())


@pytest.mark.parametrize("plan", ["dp2 zero3 tile:3=*.up,2 recompute:full", "dp2 zero3 tile:2"])
def test_biases_and_parameters_around_tiles(plan: str):
    """Biases are in tiles too; a layer's output that no cross-entropy takes is computed whole."""
    work = rows_task(lambda: settled(nn.Sequential(Scaled(), Scaled(), nn.Linear(6, 6))))
    holds(run_threads, work, Case(f"{plan} fp64", clip=0.5))


def test_tiled_layers_by_default():
    """Layers with half the weights of the largest, in as many tiles; no tied head. Keys stay."""
    for make, wanted in ((small_gpt, ["head", "gate", "up", "down"]), (tied_gpt, ["gate"])):
        plain = make()
        before = {name: id(p) for name, p in plain.named_parameters()}
        engine = build(alone(), Task(lambda model=plain: model), Case("offload:param tile:2 fp32"))
        tiled = {unit.name.split(".tiles")[0] for unit in engine.data.units.order}
        tiled = {n for n in tiled if hasattr(engine.model.get_submodule(n), "tiles")}
        assert all(any(n.endswith(end) for n in tiled) for end in wanted)
        tiles = [engine.model.get_submodule(f"{n}.tiles") for n in tiled]
        assert all(len([*each.children()]) == 2 for each in tiles)
        assert ("head" in tiled) == (make is small_gpt)
        assert {name: id(p) for name, p in engine.model.named_parameters()} == before
        assert list(sw.full_state_dict(engine)) == list(make().state_dict())


# --- layers with a plan of their own: rows, bytes by hand, dropout --------------------------------


@pytest.mark.parametrize("rows", [1, 3, 7])
@pytest.mark.parametrize(
    "plan",
    [
        "dp4 zero3 fp64 | blocks.1: tp2 dp2 | head: tp4",
        "dp2 tp2 fp64 | blocks.0: dp4 | embed,head: tp4",
    ],
)
def test_ranks_with_different_rows(plan: str, rows: int):
    """Also with one row, and with none, on some ranks."""
    equals_one(run_threads, Task(batch=lambda step: text(step, rows)), Case(plan, clip=0.5))


def sent(world: World, plan: str) -> dict[str, int]:
    """The bytes of a step of 4 rows on each of 2 ranks."""
    options: dict[str, Any] = {"loss": gpt.loss, "tokens": gpt.tokens}
    engine = sw.parallelize(small_gpt(), plan, world, optimizer=sw.SGD(lr=0.1), **options)
    engine.step(tree_map(lambda x: x.chunk(2)[world.rank], text(0, 8)))
    return engine.measured_bytes()


def test_bytes_by_hand():
    """A head on 2 tensor ranks: inputs and targets are gathered forward, losses' gradients back."""
    found = run_threads(2, sent, "dp2 fp32 | head: tp2")[0]
    positions, width, vocabulary = 8 * 9, 20, 37
    forward = positions * (4 * width + 8)  # fp32 activations, int64 targets
    backward = positions * 4  # of the loss of each position
    assert found["rows1-2 all_gather"] == (forward + backward) // 2
    # head.weight is not reduced over data ranks: each has all rows, and its half of the words
    whole = run_threads(2, sent, "dp2 fp32")[0]
    saved = 2 * 4 * width * vocabulary // 2  # an all-reduce, of which each rank sends half twice
    assert whole["dp all_reduce"] - found["dp all_reduce"] == pytest.approx(saved, abs=64)


def test_neighbours_of_one_mesh_send_nothing_between_them():
    """Rows are gathered before the first layer; the second takes what the first gave."""
    one, two = (
        run_threads(2, sent, f"dp2 fp32 | blocks.{layers}: tp2")[0]["rows1-2 all_gather"]
        for layers in ("0", "0-1")
    )
    # blocks.0 alone also gathers the gradient of its output; so does blocks.1 of two
    assert one == two == 2 * 8 * 9 * 20 * 4 // 2


class Dropping(nn.Module):
    """Blocks with dropout on activations that all ranks of a tensor axis have."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(micro.Block(1.0) for _ in range(2))
        self.drop = nn.ModuleList(nn.Dropout(0.5) for _ in range(2))
        self.tensor_table = sw.Table.of({"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})

    def forward(self, x: Tensor) -> Tensor:
        for block, drop in zip(self.blocks, self.drop, strict=True):
            x = drop(block(x))
        return x


def dropped(world: World) -> Tensor:
    """The biases that ranks of a mesh compute redundantly, after three steps with dropout."""
    torch.manual_seed(world.rank)
    work = rows_task(lambda: settled(Dropping()))
    engine = build(world, work, Case("dp2 fp64 | blocks.*,drop.*: tp2"))
    for step in range(3):
        engine.step(mine(engine, work.batch(step)))
    return engine.model.get_parameter("blocks.0.down.bias").detach().clone()


def test_dropout_is_equal_on_the_ranks_of_a_mesh():
    """Ranks whose own random numbers differ draw the same masks for rows that they share."""
    first, second = run_gloo(2, dropped)
    assert torch.equal(first, second)


# --- models and layers that do not fit their plans, each refused with a remedy -------------------


class Using(nn.Module):
    """Layers of a table, and what a forward makes with them."""

    def __init__(self, use: Any, styles: dict[str, str], **layers: nn.Module) -> None:
        super().__init__()
        self.use, self.tensor_table = use, sw.Table.of(styles)
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Tensor) -> Tensor:
        return self.use(self, *args)


PAIR = {"a.up": "colwise", "a.down": "rowwise"}


def of_pair(use: Any) -> nn.Module:
    return Using(use, PAIR, a=micro.Block(1.0))


def read(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    assert h.shape == x.shape
    with torch.no_grad():
        size = h.norm(dim=1, keepdim=True)
    return m.a(h.mul_(2)) / size


def test_other_code_sees_own_rows():
    """It may read a layer's output under no_grad first, which does not cut its gradient, and change
    it in place, which the next layer of the mesh gets too.
    """
    work = rows_task(lambda: settled(of_pair(read)))
    equals_one(run_threads, work, Case("dp2 fp64 | a: tp2"))


def weighted() -> nn.Module:
    model = of_pair(lambda m, x: read(m, x) * m.scale)
    model.scale = nn.Parameter(torch.ones(6))
    return model


def flattened() -> nn.Module:
    """An embedding of all words of a batch, in one dim."""
    use = lambda m, x: m.a((x > 0).long().flatten()).view(*x.shape, 6).sum(1)  # noqa: E731
    return Using(use, {"a": "vocabulary"}, a=nn.Embedding(7, 6))


def shifted() -> nn.Module:
    """A layer of an input and a shift, a tensor with a gradient and without rows."""
    styles = {"linear": "colwise_gather_output"}
    layer = Using(lambda m, x, y: m.linear(x + y.sum(0)), styles, linear=nn.Linear(6, 6))
    shift = nn.Linear(3, 6, bias=False)
    use = lambda m, x: m.a(x, m.shift(torch.ones(3, 3, dtype=x.dtype)))  # noqa: E731
    return Using(use, {f"a.{name}": style for name, style in styles.items()}, shift=shift, a=layer)


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: of_pair(lambda m, x: m.a.down(m.a.up(x))), "without a call of a"),
        (weighted, "which has parameters of its own"),
        (flattened, "no dim 0 counts the rows"),
        (shifted, "does not count the rows of the batch"),
    ],
)
def test_layers_that_cannot_have_a_mesh_of_their_own(make: Any, said: str):
    """A part that is called alone, a layer in another's unit, inputs whose rows cannot be seen."""
    with pytest.raises(InputError, match=said):
        sw.predict(make().double(), "dp2 | a: tp2", micro.vectors(4, 0), loss=micro.error)


# --- plans that name no data axis, on the worlds that their other axes divide ---------------------


def ranks_of_data(world: World) -> tuple[str, int, int]:
    """The plan that the engine runs, and which of how many data ranks this is."""
    engine = sw.parallelize(small_gpt(), "tp2 zero1", world, optimizer=sw.SGD(), loss=regression)
    return str(engine.plan), engine.data_rank, engine.data_ranks


def test_an_open_plan_is_completed_for_its_world_and_printed_once(
    capsys: pytest.CaptureFixture[str],
):
    """The ranks that other axes leave over are data ranks; rank 0 prints the completed plan."""
    completed = "dp2 tp2 zero1"
    assert run_threads(4, ranks_of_data) == [(completed, rank // 2, 2) for rank in range(4)]
    assert capsys.readouterr().err.count(f"'tp2 zero1' on 4 ranks is '{completed}'") == 1
