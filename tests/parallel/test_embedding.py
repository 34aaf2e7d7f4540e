"""An embedding whose rows are cut looks up what the whole one does."""

import copy
import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.comm.move import move, part
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from shardwise.core.layouts.layout import I, P, S
from shardwise.core.layouts.uneven import Cut, even
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.techniques.tensor.embedding import embed
from tests.pool import run_gloo, run_threads

WIDTH = 4


def embedding(vocabulary: int, **words: Any) -> nn.Embedding:
    module = nn.Embedding(vocabulary, WIDTH, dtype=torch.float64, **words)
    seed = torch.Generator().manual_seed(vocabulary)  # threads share torch's own
    module.weight.data.copy_(torch.randn(module.weight.shape, generator=seed, dtype=torch.float64))
    if module.padding_idx is not None:
        module.weight.data[module.padding_idx] = 0
    return module


def cut_rows(module: nn.Embedding | nn.Linear, cut: Cut, rank: int) -> None:
    module.weight.data = part(module.weight.data, cut, rank)


def over(world: World, module: nn.Embedding, cut: Cut) -> nn.Embedding:
    """The same embedding with its rows cut, its results whole."""
    embed(module, world.everyone, cut, lambda out: move(out, world.everyone, P, I))
    cut_rows(module, cut, world.rank)
    return module


def same(world: World, cut: Cut, ids: Tensor, padding: int | None) -> None:
    """What is looked up, and the gradient of this rank's rows, against the whole embedding."""
    whole = embedding(cut.whole, padding_idx=padding)
    module = over(world, embedding(cut.whole, padding_idx=padding), cut)
    expected, out = whole(ids), module(ids)
    assert torch.equal(out, expected)
    expected.cos().sum().backward()
    out.cos().sum().backward()
    assert whole.weight.grad is not None and module.weight.grad is not None
    mine = part(whole.weight.grad, cut, world.rank)
    torch.testing.assert_close(module.weight.grad, mine, rtol=1e-13, atol=0.0)


def parity(world: World) -> None:
    before = world.ledger.copy()
    for vocabulary in (3, 8, 11):  # 3: of four ranks, one has no row
        cut = even(0, vocabulary, world.size)
        ids = torch.arange(12).view(2, 2, 3) % vocabulary
        for padding in (None, 0, vocabulary - 1):
            same(world, cut, ids, padding)
            same(world, cut, ids.flatten().int(), padding)
    assert {key.kind for key in world.ledger.since(before)} == {"all_reduce"}


@pytest.mark.parametrize(("run", "ranks"), [(run_threads, 3), (run_gloo, 4)])
def test_rows_and_gradients_are_those_of_one_process(run, ranks):
    """Bit for bit, with padding and without, also on ranks of unlike parts, or without any."""
    run(ranks, parity)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(data=st.data(), whole=st.integers(1, 9), ranks=st.integers(1, 4))
def test_any_cut_of_any_ids(data, whole, ranks):
    """Ranges of any length; ids of any number, also none."""
    edges = sorted(
        data.draw(st.lists(st.integers(0, whole), min_size=ranks - 1, max_size=ranks - 1))
    )
    bounds = zip([0, *edges], [*edges, whole], strict=True)
    cut = Cut(0, whole, tuple((bound,) for bound in bounds))
    ids = torch.tensor(data.draw(st.lists(st.integers(0, whole - 1), max_size=6))).long()
    padding = data.draw(st.none() | st.integers(0, whole - 1))
    run_threads(ranks, same, cut, ids, padding)


def test_padding_is_a_row_of_the_rank_that_holds_it():
    """Row 5 of 8 is row 1 of the second of two ranks, and no row of the first."""

    def padding(world: World) -> int | None:
        return over(world, embedding(8, padding_idx=5), even(0, 8, world.size)).padding_idx

    assert run_threads(2, padding) == [None, 1]


def test_partial_results_may_become_shards_of_the_sequence():
    """`finish` decides: P -> S(1) gives each rank its positions, for one reduce-scatter."""
    ids = torch.arange(8).view(2, 4)
    expected = embedding(8)(ids)

    def shards(world: World) -> tuple[Tensor, list[str]]:
        module, cut = embedding(8), even(0, 8, world.size)
        embed(module, world.everyone, cut, lambda out: move(out, world.everyone, P, S(1)))
        cut_rows(module, cut, world.rank)
        return module(ids), [key.kind for key in world.ledger.lines]

    for rank, (out, kinds) in enumerate(run_threads(2, shards)):
        assert torch.equal(out, expected.chunk(2, 1)[rank]) and kinds == ["reduce_scatter"]


def test_an_embedding_may_be_used_again_before_it_has_finished():
    """Twice in a forward pass, by keyword, and inside its own `finish`."""
    first, second = torch.tensor([0, 3, 4]), torch.tensor([[4, 1]])
    whole = embedding(5)
    expected = whole(first).sum() * whole(second).cos().sum()
    expected.backward()

    def again(world: World) -> None:
        module, cut, inner = embedding(5), even(0, 5, world.size), list[Tensor]()

        def finish(out: Tensor) -> Tensor:
            if not inner:
                inner.append(out)  # so that the second use does not use it again
                inner.append(module(input=second))
            return move(out, world.everyone, P, I)

        embed(module, world.everyone, cut, finish)
        cut_rows(module, cut, world.rank)
        loss = module(first).sum() * inner[1].cos().sum()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)
        loss.backward()
        assert whole.weight.grad is not None
        mine = part(whole.weight.grad, cut, world.rank)
        torch.testing.assert_close(module.weight.grad, mine, rtol=1e-12, atol=0.0)

    run_threads(3, again)


def tensors() -> int:
    gc.collect()
    return sum(type(o) is Tensor for o in gc.get_objects())


def test_a_lookup_that_fails_leaves_nothing_behind():
    """Neither for the next one, which is right, nor in memory."""
    module = over(alone(), embedding(5), even(0, 5, 1))
    weight, before = module.weight, tensors()
    for _ in range(3):
        del module.weight
        with pytest.raises(AttributeError, match="weight"):
            module(torch.tensor([1, 2]))
        module.weight = weight
    assert tensors() == before
    assert torch.equal(module(torch.tensor([4, 0])), embedding(5)(torch.tensor([4, 0])))
    assert tensors() == before


def test_hooks_of_others_see_whole_ids_and_whole_results():
    """What was there before the embedding was cut meets what it met."""
    ids = torch.tensor([6, 1])

    def hooked(world: World) -> bool:
        module = embedding(7)
        mine: list[Any] = []
        module.register_forward_pre_hook(lambda _, args: mine.append(args[0]))
        module.register_forward_hook(lambda _, __, out: mine.append(out))
        out = over(world, module, even(0, 7, world.size))(ids)
        return mine[0] is ids and mine[1] is out

    assert run_threads(2, hooked) == [True, True]


@pytest.mark.parametrize("wrong", [-1, 5])
def test_an_id_outside_the_vocabulary_is_an_error_on_every_rank(wrong):
    """No rank would hold it, and its row would be a silent zero; torch says the same."""

    def lookup(world: World) -> None:
        module = over(world, embedding(5), even(0, 5, world.size))
        with pytest.raises(IndexError, match="out of range"):
            module(torch.tensor([0, wrong]))

    run_threads(2, lookup)


REFUSED = {"max_norm": 1.0, "scale_grad_by_freq": True, "sparse": True}


@pytest.mark.parametrize("word", REFUSED)
def test_what_a_part_of_the_rows_cannot_do_is_refused(word):
    """Before anything is changed."""
    module = embedding(5, padding_idx=3, **{word: REFUSED[word]})
    with pytest.raises(InputError, match=rf"{word}={REFUSED[word]}.* Allowed: {word}="):
        embed(module, alone().everyone, even(0, 5, 1), lambda out: out)
    assert module.padding_idx == 3 and not module._forward_hooks


WORDS = GPTConfig(
    vocabulary=33, width=16, layers=1, heads=2, kv_heads=2, hidden=32, sequence=8, tied=True
)


def masked_in_place(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A loss of a program that works in place: cooled, and without the last three words."""
    logits = model(batch["inputs"]).div_(2.0)
    logits[..., 30:] = -1e4
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def stepped(world: World, model: nn.Module, plan: str) -> list[float]:
    ids = torch.arange(36).view(4, 9) % 30
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    engine = sw.parallelize(
        copy.deepcopy(model), plan, world, optimizer=sw.SGD(lr=0.1), loss=masked_in_place
    )
    return [engine.step(batch).loss for _ in range(3)]


@pytest.mark.parametrize("plan", ["tp2 fp64", "tp2 sp fp64"])
def test_a_program_that_changes_its_logits_in_place_trains_the_same(plan):
    """What the engine's layers return may be written to, as what one process computes."""
    model = GPT(WORDS)
    expected = stepped(alone(), model, "fp64")
    for found in run_threads(2, stepped, model, plan):
        assert found == pytest.approx(expected, rel=1e-10)
