"""Tensor parallelism of models with tables of their own, sequences of several lengths, tiles."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.models.trainable import fill
from tests.derive.models import HEADS, WIDTH, WORDS, Attention
from tests.engine.cases import (
    Case,
    Task,
    build,
    oracle,
    ranks_of,
    regression,
    rows_task,
    settled,
    small_gpt,
    tied_gpt,
)
from tests.engine.pipelines import SGD
from tests.engine.tensors import (
    ADAMW,
    Held,
    assert_counted,
    assert_parity,
    equals_one,
    holds,
    train,
)
from tests.parallel.layers import KINDS, sequences, task
from tests.pool import run_threads


def train_kind(world: World, name: str, case: Case) -> Held:
    """The case on a kind of model, made on this side of the process."""
    return train(world, task(name), case)


OWN = [
    *(("dp2 tp2 sp zero3", name) for name in ("frozen columns", "recomputed")),
    ("tp4 sp", "6 heads, 2 for keys"),
    *((f"dp2 tp2 {row}", "packed qkv, 6 heads, 2 for keys") for row in ("ddp", "zero1", "zero2")),
    *((plan, "packed qkv, 6 heads, 1 for keys") for plan in ("tp3", "pp2 tp2 zero1 zb-h1:3")),
    *((f"{plan} accumulate:2", name) for plan in ("tp2", "tp2 sp") for name in KINDS),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("plan", "name"), OWN)
def test_tables_of_ones_own_train(plan: str, name: str):
    """Biases, packed weights, recomputation, frozen parts, keys that ranks share: as one process.
    Bytes and memory are as predicted; what ranks share is summed and counted once.
    """
    case = Case(f"{plan} fp64", clip=0.5, **SGD)
    ranks = run_threads(ranks_of(plan), train_kind, name, case)
    assert_parity(ranks, oracle(task(name), case), 1e-10)
    assert_counted(ranks)


def in_two_dtypes() -> nn.Module:
    """A stack whose inner layers are fp32, in a stream of fp64."""
    model = KINDS["biases, norm and residual inside"].model()
    for block in model.get_submodule("blocks").children():
        for layer in map(block.get_submodule, ("up", "down")):
            layer.float()
            layer.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    return model


def test_parameters_of_several_dtypes():
    """fp32 layers in an fp64 model keep their dtype, and every move is counted in its own."""
    work = Task(in_two_dtypes, sequences, regression, None)
    ranks = run_threads(4, train, work, case := Case("dp2 tp2 sp zero3", clip=0.5, **SGD))
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


def perceptron() -> nn.Module:
    return settled(nn.Sequential(Scaled(), Scaled(), nn.Linear(6, 6)))


@pytest.mark.parametrize("plan", ["dp2 zero3 tile:3=*.up,2 recompute:full", "dp2 zero3 tile:2"])
def test_biases_and_parameters_around_tiles(plan: str):
    """Biases are in tiles too; a layer's output that no cross-entropy takes is computed whole."""
    holds(run_threads, rows_task(perceptron), Case(f"{plan} fp64", clip=0.5))


def test_tiled_layers_by_default():
    """Layers with half the weights of the largest one, in as many tiles; no tied head. Parameters,
    their identity and keys are those of the plain model.
    """
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
