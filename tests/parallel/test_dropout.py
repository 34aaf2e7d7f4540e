"""Dropout on the tensor axis: ranks have their parts of what one process draws."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.uneven import part
from shardwise.comm.world import World, alone, traced
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.core.uneven import Cut, even, heads, packed, wide
from shardwise.engine.engine import Engine
from shardwise.models.registry import find
from shardwise.models.trainable import Trainable
from shardwise.parallel.tensor.dropout import Columns, Cutting, Draws, Mark, Shard
from shardwise.verify.finding import Finding
from shardwise.verify.parity import alone_of, compare, engine_of
from tests.pool import run_gloo

CPU = torch.device("cpu")
WORDS, WIDTH, HEADS, HEAD, HIDDEN, POSITIONS = 31, 20, 6, 4, 27, 9


class Attention(nn.Module):
    """Dropout of 0.2 on its weights, by torch's attention or by hand."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * HEAD) for _ in range(3))
        self.out = nn.Linear(HEADS * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """From [B, T, D] to [B, T, D]."""
        made = (p(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k, v = made
        if self.fused:
            p = 0.2 if self.training else 0.0
            y = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        else:
            weights = (q @ k.transpose(2, 3) / HEAD**0.5).softmax(-1)
            y = functional.dropout(weights, 0.2, self.training) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Dropout in the feed-forward layer, and on what both halves add to the stream."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), Attention(fused), nn.LayerNorm(20)
        self.up, self.mid, self.down = (
            nn.Linear(WIDTH, HIDDEN),
            nn.Dropout(0.3),
            nn.Linear(HIDDEN, WIDTH),
        )
        self.rest = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        """From [B, T, D] to [B, T, D]."""
        x = x + self.rest(self.attn(self.norm1(x)))
        return x + self.rest(self.down(self.mid(functional.gelu(self.up(self.norm2(x))))))


class Net(nn.Module):
    """A language model that drops in every place; no size divides by 4."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again
        self.embed, self.drop = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.1)
        self.blocks = nn.ModuleList([Block(fused=True), Block(fused=False)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.tensor_table = sw.Table.of(
            {
                "embed": "vocabulary",
                "head": "vocabulary",
                "*.attn.[qkv]": "colwise:heads",
                "*.attn.out": "rowwise:heads",
                "*.up": "colwise",
                "*.down": "rowwise",
            },
            heads=HEADS,
            sequence={"embed": "vocabulary:sequence", "*norm[12]": "sequence", "norm": "sequence"},
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """From [B, T] to logits [B, T, V]."""
        x = self.drop(self.embed(tokens))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(self.norm(x))


def net(again: bool) -> Trainable:
    """The model as a proof takes it."""

    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return Net(again)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def make_batch(rows: int, seed: int) -> Tensor:
        own = torch.Generator().manual_seed(seed)
        return torch.randint(WORDS, (rows, POSITIONS + 1), generator=own)

    return Trainable("net", make, loss, make_batch)


def trained(world: World, plan: str, model: str) -> tuple[Finding, Tensor, Tensor]:
    """What three steps find, and the generator after one more, both ways."""
    task = net(model == "recomputed") if model in ("net", "recomputed") else find(model)
    torch.manual_seed(world.rank)  # the first rank's is everyone's from here on
    ours = engine_of(task, Plan.parse(f"{plan} fp64"), world)
    agreed = torch.get_rng_state()
    oracle = engine_of(task, Plan.parse("fp64"), alone())
    finding = compare(ours, alone_of(task, Plan.parse("fp64"), world.device), task.batch, 3)
    after = [_after(engine, agreed, task.batch(3, 5)) for engine in (ours, oracle)]
    return finding, after[0], after[1]


def _after(engine: Engine, state: Tensor, batch: Any) -> Tensor:
    torch.set_rng_state(state)
    engine.step(batch)
    return torch.get_rng_state()


CASES = [
    *(("tp2", "net"), ("tp2 sp", "recomputed"), ("tp4", "recomputed"), ("tp4 sp", "net")),
    ("tp2 sp", "hf:gpt2+dropout"),
]


@pytest.mark.parametrize(("plan", "model"), CASES)
def test_parity_with_dropout(plan: str, model: str):
    """Every gradient is one process's to 1e-10, and all generators end where its own does."""
    if model.startswith("hf:"):
        pytest.importorskip("transformers")
    found = run_gloo(Plan.parse(plan).size, trained, plan, model)
    for finding, ours, one in found:
        assert finding.bytes_hold
        assert all(errors.largest <= 1e-10 for errors in finding.errors)
        assert torch.equal(ours, one) and torch.equal(ours, found[0][1])


# --- one rank at a time ----------------------------------------------------------------------

QUERIES, KEYS = heads(6, 2, 4)  # 1, 2, 1, 2 heads; two ranks share a key head
BY_HEADS = Columns((even(0, 24, 4, grain=4),), (QUERIES, KEYS), weight=2)
BY_WIDTH = Columns((packed(0, [even(0, 27, 4)] * 2), even(0, 27, 4)))


def draws(rank: int, ranks: int = 4) -> Draws:
    return Draws(traced(rank, ranks).on(Mesh((("tp", ranks),))).axis("tp"))


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


#: What it is made of, its whole, how it is cut.
PLACES: dict[str, tuple[Mark, Tensor, Cut]] = {
    "features": (Cutting(BY_WIDTH, 10), ones(2, 5, 27), even(2, 27, 4)),
    "packed": (Cutting(BY_WIDTH, 10), ones(2, 5, 54), packed(2, [even(0, 27, 4)] * 2)),
    "flat": (Cutting(BY_WIDTH, 10), ones(10, 27), even(1, 27, 4)),
    "attention": (Cutting(BY_HEADS, 10), ones(2, 6, 5, 5), QUERIES.on(1)),
    "transposed": (Cutting(BY_HEADS, 10), ones(2, 5, 6, 4).transpose(1, 2), QUERIES.on(1)),
    "before": (Cutting(BY_HEADS, 10), ones(2, 5, 6, 4), QUERIES.on(2)),
    "shard": (
        Shard(9, 4, 3),
        ones(2, 9, 8),
        Cut(1, 9, (((0, 3),), ((3, 6),), ((6, 9),), ((9, 9),))),
    ),
}
ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.4),
    "inplace": lambda x: functional.dropout(x, 0.4, inplace=True),
    "layer": nn.Dropout(0.4),
    "rand_like": torch.rand_like,
    "normal_": lambda x: torch.empty_like(x).normal_(1.0, 2.0),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_draws_its_part(place: str, act: str):
    """The parts are those of one process's draw, and the generator ends in the same state."""
    mark, whole, cut = PLACES[place]
    torch.manual_seed(7)
    drawn = ACTS[act](whole.clone())
    after = torch.get_rng_state()
    for rank in range(4):
        mine = part(whole, cut, rank)
        if place == "transposed":
            mine = part(whole.transpose(1, 2), cut.on(2), rank).transpose(1, 2)
        if place == "shard":
            mine = ones(2, 3, 8)
        expected = part(drawn, cut, rank)
        torch.manual_seed(7)
        random = draws(rank)
        with random:
            random.put(mine, mark)
            got = ACTS[act](mine)
        assert torch.equal(got.narrow(cut.dim, 0, cut.size(rank)), expected)
        assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("rank", range(4))
def test_what_is_whole_is_drawn_alike(rank: int):
    """Beside a cut tensor, one of the same shape that was made of nothing cut drops as before."""
    torch.manual_seed(7)
    expected = functional.dropout(ones(2, 5, 7), 0.4)
    random, cut, whole = draws(rank), ones(2, 5, 7), ones(2, 5, 7)
    with random:
        random.put(cut, Cutting(BY_WIDTH, 10))
        torch.manual_seed(7)
        assert torch.equal(functional.dropout(whole * 1, 0.4), expected)
        random.put(cut, None)
        torch.manual_seed(7)
        assert torch.equal(functional.dropout(cut, 0.4), expected)


def test_attention_weights_of_folded_heads_are_drawn_by_head():
    """[B*h, T, S] has the heads of each row of the batch one after the other."""
    mark = Cutting(BY_HEADS, 10)
    torch.manual_seed(7)
    drawn = functional.dropout(ones(12, 5, 5), 0.4).view(2, 6, 5, 5)
    for rank in range(4):
        random, mine = draws(rank), ones(2 * QUERIES.size(rank), 5, 5)
        with random:
            random.put(mine, mark)
            torch.manual_seed(7)
            got = functional.dropout(mine, 0.4)
        assert torch.equal(got, part(drawn, QUERIES.on(1), rank).flatten(0, 1))


@pytest.mark.parametrize("drop", [functional.dropout1d, functional.dropout2d])
def test_whole_channels_are_dropped_whole(drop: Callable[..., Tensor]):
    """A channel that is cut over the ranks is dropped on all of them or on none."""
    shape = (2, 5, 27) if drop is functional.dropout1d else (2, 5, 3, 27)
    torch.manual_seed(7)
    drawn = drop(ones(*shape), 0.4)
    for rank in range(4):
        cut = even(len(shape) - 1, 27, 4)
        random, mine = draws(rank), part(ones(*shape), cut, rank)
        with random:
            random.put(mine, Cutting(BY_WIDTH, 10))
            torch.manual_seed(7)
            assert torch.equal(drop(mine, 0.4), part(drawn, cut, rank))


MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "added": {"attn_mask": torch.linspace(-1, 1, 25, dtype=torch.float64).view(5, 5)},
    "blind": {"attn_mask": torch.eye(5).bool() & (torch.arange(5) != 2)},
    "grouped": {"enable_gqa": True, "is_causal": True},
}


@pytest.mark.parametrize("said", MASKS)
def test_attention_with_dropout_is_one_process_s(said: str):
    """Of every kind of mask, values and gradients by head are those that one process has."""
    q_cut, k_cut = heads(6, 2, 2)
    made = torch.Generator().manual_seed(1)
    keys = 2 if said == "grouped" else 6
    shapes = ((2, 6, 5, 4), (2, keys, 5, 4), (2, keys, 5, 4))
    qkv = [torch.randn(shape, generator=made, dtype=torch.float64) for shape in shapes]
    cuts = [q_cut.on(1), *[(k_cut if keys == 2 else q_cut).on(1)] * 2]

    def attend(*given: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in given]
        for leaf, x in zip(leaves, given, strict=True):
            if x in random.marks:
                random.put(leaf, random.marks[x])
        torch.manual_seed(7)
        y = functional.scaled_dot_product_attention(*leaves, dropout_p=0.3, **MASKS[said])
        return [y, *torch.autograd.grad(y.square().sum(), leaves)]

    random = draws(0, 2)
    expected = attend(*qkv)
    for rank in range(2):
        random = draws(rank, 2)
        mine = [part(x, cut, rank) for x, cut in zip(qkv, cuts, strict=True)]
        with random:
            random.put(mine[0], Cutting(Columns((), (q_cut, k_cut), weight=2), 10))
            got = attend(*mine)
        for one, whole, cut in zip(got, expected, [cuts[0], *cuts], strict=True):
            torch.testing.assert_close(one, part(whole, cut, rank), rtol=1e-12, atol=1e-12)


def test_products_are_by_query_heads_whichever_comes_first():
    """Keys that are put before queries do not make their product's heads key heads."""
    random, q, k = draws(1), ones(2, 2, 5, 4), ones(2, 1, 5, 4)
    with random:
        random.put(q, Cutting(BY_HEADS, 10))
        random.put(k, Cutting(Columns((), (KEYS, QUERIES)), 10))
        for scores in (q @ k.transpose(2, 3), k @ q.transpose(2, 3)):
            assert random.marks[scores.softmax(-1)].columns is BY_HEADS


#: Ways to take [2, 5, heads * 4] apart into (q, k, v), of which there are `h` and `k` heads.
WAYS: dict[str, Callable[[Tensor, int, int], Sequence[Tensor]]] = {
    "split": lambda x, h, k: x.split([4 * h, 4 * k, 4 * k], -1),
    "sliced": lambda x, h, _: (x[..., : 4 * h], *x[..., 4 * h :].chunk(2, -1)),
    "flat": lambda x, h, k: x.flatten(0, 1).split([4 * h, 4 * k, 4 * k], -1),
    "turned": lambda x, h, k: x.transpose(0, 1).split([4 * h, 4 * k, 4 * k], -1),
    "by head": lambda x, h, k: x.unflatten(-1, (-1, 4)).split([h, k, k], 2),
}


def qkv() -> Columns:
    """Queries, keys and values of width 4, end to end."""
    q, kv = (Columns((wide(cut, 0, 4),)) for cut in (QUERIES, KEYS))
    return Columns((packed(0, [q.features[0], *kv.features * 2]),), parts=(q, kv, kv))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_packed_is_known_by_where_it_lies(way: str):
    """Queries, keys and values of one layer, of which a rank may have as many of each."""
    columns = qkv()
    for rank in range(4):
        random, y = draws(rank), ones(2, 5, columns.features[0].size(rank))
        with random:
            random.put(y, Cutting(columns, 10))
            made = WAYS[way](y * 1, QUERIES.size(rank), KEYS.size(rank))
            assert [random.marks[x * 1].columns for x in made] == list(columns.parts)


def test_rows_and_sums_of_what_is_packed_are_no_part():
    """They have as many elements as one: of three parts, a row of three and the sum of all."""
    columns, random, y = qkv(), draws(0), ones(3, 5, 12)
    with random:
        random.put(y, Cutting(columns, 15))
        for x in (y[:1], y.unflatten(-1, (3, 4)).sum(2)):
            assert random.marks[x].columns is columns


def test_the_mode_is_entered_for_models_that_draw_and_left_whatever_happens():
    """The first pass finds out; then a layer with a rate, or the last pass's draws, decide."""
    layer = nn.Dropout(0.0)
    random = Draws(draws(0, 2).axis, [layer])

    def entered(draw: bool = False) -> bool:
        with random.during(CPU):
            if draw:
                torch.rand(1)
            return _get_current_function_mode() is random

    assert [entered(), entered(draw=True), entered(), entered()] == [True, False, True, False]
    layer.p = 0.1
    assert entered()
    with pytest.raises(KeyError), random.during(CPU):
        raise KeyError
    assert _get_current_function_mode() is None and not random.on


@pytest.mark.parametrize("given", [None, torch.tensor([1.0, 3.0])])
def test_what_is_recomputed_in_backward_is_drawn_as_before(given: Tensor | None):
    """The mask of a checkpointed part is the same in both passes, whatever backward begins with."""
    random, x = draws(1, 2), torch.ones(2, 40, requires_grad=True)
    with random.during(CPU):
        cut = x * 1
        random.put(cut, Cutting(Columns((even(0, 80, 2),)), 2))
        y = checkpoint(lambda c: (functional.dropout(c, 0.5) * c).sin(), cut, use_reentrant=False)
        end = y.sum(1) if given is not None else y.sum()
        end.backward(given)
    kept = (y != 0).float() * 2
    slope = kept * 2 * torch.cos(kept)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, slope if given is None else slope * given.unsqueeze(1))


def test_an_axis_of_one_rank_has_no_mode():
    """One process draws as torch does, and nothing is looked at."""
    random = Draws(alone().axis("tp"), [nn.Dropout(0.5)])
    with random.during(CPU):
        assert _get_current_function_mode() is None
