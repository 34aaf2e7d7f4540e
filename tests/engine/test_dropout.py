"""Dropout on the tensor axis: equal masks for whole activations, different ones for sharded.

Ranks are processes: threads would share torch's default generator.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.world import World, alone, traced
from shardwise.core.mesh import Mesh
from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.techniques.tensor.rng import ShardedRandom
from tests.engine.cases import Case, build, ranks_of, refusal, rows_task, vectors
from tests.engine.pipelines import SGD, Dropping, chain, with_dropout
from tests.engine.tensors import mine
from tests.pool import run_gloo

WORDS, WIDTH, HEADS, HEAD, HIDDEN, POSITIONS, ROWS = 31, 20, 6, 4, 27, 9, 8
TABLE = sw.Table.of(
    {
        "embed": "vocabulary",
        "head": "vocabulary",
        "*.attn.[qkv]": "colwise:heads",
        "*.attn.out": "rowwise:heads",
        "*.up": "colwise",
        "*.down": "rowwise",
    },
    heads=HEADS,
    sequence={
        "embed": "vocabulary:sequence",
        "*norm[12]": "sequence",
        "norm": "sequence:join",
        "head": "vocabulary:whole",
    },
)


class Attention(nn.Module):
    """Dropout of 0.2 on its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * HEAD) for _ in range(3))
        self.out = nn.Linear(HEADS * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = (p(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (self.q, self.k, self.v))
        p = 0.2 if self.training else 0.0
        y = functional.scaled_dot_product_attention(*made, dropout_p=p, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Dropout in the feed-forward layer (`mid`), and on what both halves add to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.mid, self.down = nn.Dropout(0.3), nn.Linear(HIDDEN, WIDTH)
        self.stream = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.stream(self.attn(self.norm1(x)))
        return x + self.stream(self.down(self.mid(functional.gelu(self.up(self.norm2(x))))))


class Net(nn.Module):
    """A language model that drops in every place; no size divides by 4."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed, self.first = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.2)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, WORDS)
        self.tensor_table = TABLE

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.embed(tokens))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.last(self.norm(x)))


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def engine_of(world: World, plan: str, recompute: bool = False) -> Engine:
    """The model under `plan`; ranks begin with generators in different states."""
    torch.manual_seed(1)
    model = Net(recompute)
    torch.manual_seed(world.rank)
    return parallelize(model, f"{plan} fp64", world, optimizer=sw.SGD(lr=0.1), loss=loss)


def batch(step: int) -> Tensor:
    own = torch.Generator().manual_seed(step)
    return torch.randint(WORDS, (ROWS, POSITIONS + 1), generator=own)


Masks = dict[str, list[Tensor]]


def note_masks(model: nn.Module) -> Masks:
    """What each dropout layer keeps, by its name, filled as the model runs."""
    found: Masks = {}

    def note(name: str) -> Callable[..., None]:
        return lambda _, __, y: found.setdefault(name, []).append(y.detach() != 0)

    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(note(name))
    return found


def masks_of_steps(world: World, plan: str) -> tuple[Masks, list[float]]:
    """The masks of a rank in two steps and, of the second, once more from the state before it."""
    engine = engine_of(world, plan)
    found, losses = note_masks(engine.model), [engine.step(batch(0)).loss]
    state = torch.get_rng_state()
    losses.append(engine.step(batch(1)).loss)
    torch.set_rng_state(state)
    losses.append(engine.step(batch(1)).loss)
    return found, losses


#: Of the layers of dropout, those whose input is whole on every rank.
WHOLE = {
    "tp2": ("first", "stream", "last"),
    "tp4": ("first", "stream", "last"),
    "tp2 sp": ("last",),
    "tp4 sp": ("last",),
}


@pytest.mark.parametrize("plan", WHOLE)
def test_masks(plan: str):
    """Whole activations have one mask, sharded ones one a rank; a saved state repeats them."""
    ranks = run_gloo(int(plan[2]), masks_of_steps, plan)
    assert all(losses == ranks[0][1] for _, losses in ranks)
    rates = {"first": 0.2, "last": 0.2, "mid": 0.3, "stream": 0.25}
    for name, first in ranks[0][0].items():
        kind, others = name.rpartition(".")[2], [found[name] for found, _ in ranks[1:]]
        for one, *rest in zip(first, *others, strict=True):
            same = [torch.equal(one, other) for other in rest]
            assert same == [kind in WHOLE[plan]] * len(rest), name
        one, two, again = torch.stack(first).chunk(3)  # `again` from the state saved before `two`
        assert torch.equal(two, again) and not torch.equal(one, two)
        every = torch.cat([mask.flatten() for mask in first])
        assert 1 - every.double().mean() == pytest.approx(rates[kind], abs=0.05)


def gradients(world: World, plan: str, recompute: bool) -> dict[str, Tensor]:
    """This rank's gradients of a step, and its loss."""
    engine = engine_of(world, plan, recompute)
    loss = torch.tensor(engine.step(batch(0)).loss)
    return {"loss": loss} | {box.name: box.tensor for box in engine.gradients()}


#: By checkpoints in the model, and by words of the plan.
AGAIN = [
    *((plan, "") for plan in ("tp2", "tp2 sp", "pp2 tp2 1f1b:2", "pp2 tp2 sp zb-v:4")),
    *(
        (f"tp2{sp}", word)
        for sp in (" sp", "")
        for word in ("recompute:selective", "recompute:partitioned-host", "activations:host")
    ),
    *(
        ("pp2 tp2 sp zb-v:4", f"recompute:{how}")
        for how in ("full", "selective", "blocks.*.stream")
    ),
]


@pytest.mark.cases(3)
@pytest.mark.parametrize(("plan", "words"), AGAIN)
def test_recomputation_draws_the_same_masks(plan: str, words: str):
    """Gradients are those of kept activations, also where I recomputes them; one loss."""
    ranks = ranks_of(plan)
    kept = run_gloo(ranks, gradients, plan, False)
    again = run_gloo(ranks, gradients, f"{plan} {words}", not words)
    for one, other in zip(kept, again, strict=True):
        assert one.keys() == other.keys() and torch.equal(one["loss"], kept[0]["loss"])
        for name, gradient in one.items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-12, atol=1e-14, msg=name)


def out_of_step(world: World) -> str:
    """What the first step says where rank 1 has drawn one number more."""
    engine = engine_of(world, "tp2")
    torch.rand(world.rank)
    return refusal(lambda: engine.step(batch(0)))


def test_generators_out_of_step_are_refused():
    """Ranks that drop whole activations differently: the first step's gradients show it."""
    for said in run_gloo(2, out_of_step):
        assert "the gradient of blocks.0.norm1.weight, which differs between the ranks" in said
        assert "with the same random numbers" in said


# --- stages ----------------------------------------------------------------------------------

DROPPING = rows_task(chain(Dropping, with_dropout), partial(vectors, rows=24))


def dropped(world: World, plan: str) -> list[float]:
    """Losses with dropout; ranks come with random states of their own."""
    torch.manual_seed(5 + world.rank)
    engine = build(world, DROPPING, Case(f"{plan} fp64", **SGD))
    return [engine.step(mine(engine, DROPPING.batch(step))).loss for step in range(3)]


def test_dropout_does_not_depend_on_where_a_stage_is():
    """Four stages on four ranks, on two, in a line or a V, or on one: the same losses."""
    wanted = dropped(alone(), "interleaved:4x4")
    for plan in ("pp4 1f1b:4", "pp4 gpipe:4", "pp2 interleaved:4x2", "pp2 bfs:4x2", "pp2 zb-v:4"):
        for losses in run_gloo(ranks_of(plan), dropped, plan):
            assert losses == pytest.approx(wanted, rel=1e-12), plan


def masks(world: World, plan: str) -> list[tuple[bool, ...]]:
    """What each dropout of this rank left in two steps; ranks have one random state."""
    torch.manual_seed(5)
    engine = build(world, DROPPING, Case(f"{plan} fp64", **SGD))
    found = note_masks(engine.model)
    for step in range(2):
        engine.step(mine(engine, DROPPING.batch(step)))
    return [tuple(mask.flatten().tolist()) for masks in found.values() for mask in masks]


def test_no_two_masks_are_alike():
    """Not of two stages, microbatches, turns of the schedule, data ranks, or steps."""
    every = [m for found in run_gloo(4, masks, "pp2 dp2 accumulate:2 1f1b:2") for m in found]
    assert len(every) == 4 * 2 * 4 * 2  # blocks, shares, microbatches, steps
    assert len(set(every)) == len(every)


# --- one rank at a time ----------------------------------------------------------------------


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


def attend(x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, torch.eye(6).double(), dropout_p=0.5)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.4),
    "inplace": lambda x: functional.dropout(x * 1, 0.4, inplace=True),
    "layer": nn.Dropout(0.4),
    "channels": lambda x: functional.dropout1d(x, 0.4),
    "alpha": lambda x: functional.alpha_dropout(x, 0.4, training=True),
    "rrelu": lambda x: functional.rrelu(-x, training=True),
    "attention": attend,
    "rand_like": torch.rand_like,
    "bernoulli": lambda x: torch.bernoulli(x * 0.5),
    "normal_": lambda x: torch.empty_like(x).normal_(1.0, 2.0),
    "made of it": lambda x: functional.dropout(torch.cat([x, x]).view(2, 6, 6)[0], 0.4),
}


def drawn(rank: int, sharded: bool, draw: Callable[[Tensor], Any]) -> tuple[Any, Tensor]:
    """What a rank of four draws for a tensor, and the state of torch's generator after it."""
    random, x = ShardedRandom(traced(rank, 4).on(Mesh((("tp", 4),))).axis("tp")), ones(6, 6)
    random.sharded[x] = sharded
    torch.manual_seed(7)
    with random:
        return draw(x), torch.get_rng_state()


@pytest.mark.parametrize("name", DRAWS)
def test_functions_that_draw(name: str):
    """For a sharded tensor each rank draws its own numbers; the default generators stay equal."""
    (one, state), *others = [drawn(rank, True, DRAWS[name]) for rank in range(4)]
    assert all(torch.equal(state, other) for _, other in others)
    assert not any(torch.equal(one, other) for other, _ in others)
    assert torch.equal(one, drawn(0, True, DRAWS[name])[0])
    whole = [drawn(rank, False, DRAWS[name])[0] for rank in range(4)]
    assert all(torch.equal(whole[0], other) for other in whole)


def quiet(x: Tensor) -> Tensor:
    y = functional.dropout(functional.dropout(x, 0.0), 0.5, training=False)
    return functional.scaled_dot_product_attention(y, y, y)


def test_the_mode_is_entered_only_where_something_draws():
    """In the first pass, after one that drew, and where a layer in training has a rate above 0."""
    assert torch.equal(drawn(1, True, quiet)[1], torch.Generator().manual_seed(7).get_state())
    layer, axis = nn.Dropout(0.0), traced(0, 2).on(Mesh((("tp", 2),))).axis("tp")
    random = ShardedRandom(axis, [layer])

    def entered(draw: bool = False) -> bool:
        with random.during(torch.device("cpu")):
            if draw:
                torch.rand(1)
            return torch.overrides._get_current_function_mode() is random

    assert [entered(), entered()] == [True, False]
    layer.p = 0.1
    assert entered()
    layer.p = 0.0
    # a forward draws, its backward does not, and the next forward draws again
    assert [entered(draw=True), entered(), entered(draw=True)] == [False, True, True]
    with pytest.raises(KeyError), random.during(torch.device("cpu")):
        raise KeyError
    assert torch.overrides._get_current_function_mode() is None
