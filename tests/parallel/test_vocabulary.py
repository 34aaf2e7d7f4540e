"""What reads a vocabulary on ranks, embedding and cross-entropy, is what one process computes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import shardwise as sw
from shardwise.comm.move import move, part
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError, RankError
from shardwise.core.layouts.layout import I, P, S
from shardwise.core.layouts.uneven import Cut, even
from shardwise.kernels.cross_entropy import cross_entropy
from shardwise.techniques.tensor.sequence import embed
from shardwise.techniques.tensor.sharded_logits import sharded_logits
from tests.parallel.test_logits import F64, ROWS, V, columns, near, on_rank, sample
from tests.pool import run_gloo, run_threads


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """Any vocabulary of up to 12 words, cut anywhere, in any order, over 1 to 4 ranks."""
    whole, ranks = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    edges = sorted(draw(st.lists(st.integers(0, whole), min_size=ranks - 1, max_size=ranks - 1)))
    bounds = list(zip([0, *edges], [*edges, whole], strict=True))
    return Cut(0, whole, tuple((bound,) for bound in draw(st.permutations(bounds))))


# --- cross-entropy --------------------------------------------------------------------------------

TERMS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0, "reduction": "none"},
    {"z_loss": 0.01},
    {"z_loss": 0.5, "label_smoothing": 0.3, "reduction": "sum"},
    {"ignore_index": 2},
]


def by_torch(x: Tensor, targets: Tensor, z_loss: float = 0.0, **words: Any) -> Tensor:
    """What one process computes, by torch's own functions."""
    x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    counted = targets != words.get("ignore_index", -100)
    z = torch.where(counted, x.logsumexp(1) ** 2, 0)
    how = words.get("reduction", "mean")
    z = z if how == "none" else z.sum() / (counted.sum() if how == "mean" else 1)
    return F.cross_entropy(x, targets, **words) + z_loss * z


def lost(world: World, cut: Cut, x: Tensor, targets: Tensor, terms: dict[str, Any]) -> None:
    """Loss and gradient of this rank's columns, against torch's on the whole."""
    targets = targets.masked_fill(targets == -100, terms.get("ignore_index", -100))
    whole = x.clone().requires_grad_()
    expected = by_torch(whole, targets, **terms)
    weights = torch.linspace(1, 2, expected.numel(), dtype=x.dtype).view(expected.shape)
    (expected * weights).sum().backward()
    local, logits = on_rank(world, x, cut)
    loss = cross_entropy(logits, targets, **terms)
    (loss.reshape(-1) * weights.reshape(-1)).sum().backward()
    assert isinstance(whole.grad, Tensor)
    assert loss.shape == (targets.shape if terms.get("reduction") == "none" else ())
    near(loss.reshape(-1), expected.reshape(-1))
    near(local.grad, columns(world, whole.grad, cut))


INF = torch.inf
EXTREMES: dict[str, list[list[float]]] = {
    "one rank's columns are all -inf": [[1, 2, -INF, -INF], [-INF, -INF, -5000, 3]],
    "the target is -inf": [[-INF, 0, 1, 2], [1, 2, 3, -INF]],
    "all is -inf": [[-INF] * 4, [0, 1, 2, 3]],
    "a column is inf": [[0, INF, 1, 2], [0, 1, 2, 3]],
    "a column is nan": [[0, 1, 2, torch.nan], [0, 1, 2, 3]],
    "far apart": [[0, 800, -800, 1600], [1e5, -1e5, 1, 2]],
}


def parity(world: World, vocabulary: int) -> None:
    x, targets = sample(3, 5, vocabulary) * 4, torch.arange(15).view(3, 5) % vocabulary
    targets[0, 1] = targets[2, 4] = -100
    cut, before = even(0, vocabulary, world.size), world.ledger.lines
    for terms in TERMS:
        lost(world, cut, x, targets, terms)
        lost(world, cut, x.view(-1, vocabulary), targets.view(-1), terms)
        lost(world, cut, x[0, 0], targets[0, 0], terms)
        lost(world, cut, x, torch.full_like(targets, -100), terms)  # the mean is nan, a sum 0
    for name, terms in ((n, t) for n in EXTREMES for t in ({}, {"label_smoothing": 0.2})):
        extreme = torch.tensor(EXTREMES[name], dtype=F64)
        lost(world, even(0, 4, world.size), extreme, torch.tensor([0, 3]), terms)
    assert {key.kind for key in world.ledger.since(before)} == {"all_reduce"}


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("run", "ranks", "vocabulary"), [(run_threads, 2, 16), (run_threads, 3, 10), (run_gloo, 4, 3)]
)
def test_the_loss_and_its_gradient_are_those_of_one_process(run, ranks, vocabulary):
    """Every term, also where ranks have unlike parts, or none (Megatron-LM#1754), or extremes."""
    run(ranks, parity, vocabulary)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(cut=cuts(), terms=st.sampled_from(TERMS), data=st.data())
def test_any_cut_of_any_vocabulary_gives_the_loss_of_one_process(cut, terms, data):
    """Ranges of any length, in any order, with any targets."""
    words = st.sampled_from([*range(cut.whole), -100])
    targets = torch.tensor(data.draw(st.lists(words, min_size=1, max_size=4)))
    x = sample(len(targets), cut.whole)
    run_threads(cut.ranks, lambda world: lost(world, cut, x, targets, terms))


def narrow(world: World, dtype: torch.dtype, terms: dict[str, Any]) -> None:
    """Loss and gradient of 16-bit logits are those in fp64, rounded once."""
    x = (sample(15, 4001) * 4 + 40 * bool(terms)).to(dtype)  # sums are no number of 16 bits
    exact, targets = x.double().requires_grad_(), torch.arange(15) * 200
    expected = by_torch(exact, targets, **terms)
    expected.backward()
    local, logits = on_rank(world, x)
    loss = cross_entropy(logits, targets, **terms)
    assert loss.dtype == dtype
    (loss * 1024).backward()
    assert isinstance(exact.grad, Tensor)
    assert isinstance(local.grad, Tensor)
    mine, eps = columns(world, exact.grad) * 1024, torch.finfo(dtype).eps
    seen = mine.abs() > torch.finfo(dtype).tiny
    assert ((local.grad.double() - mine) / mine)[seen].abs().max() <= eps
    assert ((loss.double() - expected) / expected).abs() <= eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("terms", [{}, {"label_smoothing": 0.3}], ids=["plain", "smoothing"])
def test_16_bit_logits_are_summed_in_fp32(dtype: torch.dtype, terms: dict[str, Any]):
    """Under autocast the loss itself is fp32, as torch's."""
    run_threads(2, narrow, dtype, terms)
    logits = on_rank(alone(), sample().to(dtype))[1]
    with torch.autocast("cpu", dtype):
        assert cross_entropy(logits, ROWS).dtype == torch.float32


@pytest.mark.cases(3)
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16], ids=str)
def test_one_softmax_is_kept_for_the_backward_pass(dtype: torch.dtype):
    """And of 16-bit logits none: the logits themselves are kept."""
    x, kept = sample(2, 3, 50).to(dtype).requires_grad_(), list[Tensor]()
    with saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        logits = sharded_logits(x, alone().everyone, even(0, 50, 1))
        loss = cross_entropy(logits, ROWS, label_smoothing=0.1, z_loss=0.1)
    large = [t for t in kept if t.numel() >= x.numel()]
    assert [t.dtype for t in large] == [dtype]
    assert (large[0].data_ptr() == x.data_ptr()) == (dtype == torch.bfloat16)
    once = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(once[0], torch.autograd.grad(loss, x)[0])


def as_transformers_does(logits: Tensor, labels: Tensor) -> Tensor:
    """The steps of a causal language model's loss: cast, shift, flatten, sum, divide."""
    logits = (torch.tanh(logits / 30.0) * 30.0).float()
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, V), shifted.view(-1), reduction="sum") / 4


def programs(world: World) -> None:
    x, targets = sample(), ROWS.flatten()
    logits = on_rank(world, x)[1]
    flat, expected = logits.flatten(0, 1), by_torch(x, ROWS, label_smoothing=0.1)
    near(nn.CrossEntropyLoss(label_smoothing=0.1)(flat, targets), expected)
    near(F.cross_entropy(flat, targets, None, None, -100, None, "mean", 0.1), expected)
    near(F.cross_entropy(input=flat, target=targets, label_smoothing=0.1), expected)
    wanted = as_transformers_does(x, ROWS)
    torch.testing.assert_close(as_transformers_does(logits, ROWS), wanted, rtol=1e-6, atol=0.0)
    assert {key.kind for key in world.ledger.lines} == {"all_reduce"}


def test_losses_of_programs_gather_nothing():
    """`nn.CrossEntropyLoss`, `F.cross_entropy` by any arguments, and transformers' own."""
    run_threads(3, programs)


@pytest.mark.cases(len(TERMS))
@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_of_plain_logits_it_is_torchs_own(terms: dict[str, Any]):
    """Bit for bit without a z-loss; and with the vocabulary last, whatever the dims."""
    x = sample().float()
    loss, expected = sw.cross_entropy(x, ROWS, **terms), by_torch(x, ROWS, **terms)
    rtol = 1e-6 if terms.get("z_loss") else 0.0
    torch.testing.assert_close(loss.reshape(-1), expected.reshape(-1), rtol=rtol, atol=0.0)


NO_LOSS: list[tuple[tuple[int, ...], Tensor, dict[str, Any], str]] = [
    ((2, 5, 3), torch.zeros(2, 3).long(), {}, "the vocabulary last"),
    ((2,), torch.tensor(0.5), {}, "index of a class"),
    ((2, 5), torch.zeros(2).bool(), {}, "index of a class"),
    ((2, 5), torch.zeros(2).long(), {"label_smoothing": 1.1}, "0 to 1"),
    ((2, 5), torch.zeros(2).long(), {"z_loss": -1.0}, "0 or more"),
    ((2, 5), torch.zeros(2).long(), {"reduction": "avg"}, "mean, sum or none"),
]


@pytest.mark.cases(len(NO_LOSS))
@pytest.mark.parametrize(("shape", "targets", "terms", "said"), NO_LOSS)
def test_what_cannot_be_a_loss_is_refused(shape: Any, targets: Tensor, terms: Any, said: str):
    """The same for logits that are whole and that are on ranks."""
    x = torch.zeros(shape)
    for logits in (x, sharded_logits(x, alone().everyone, even(0, shape[-1], 1))):
        with pytest.raises(InputError, match=said):
            cross_entropy(logits, targets, **terms)


def test_whole_logits_are_not_taken_for_a_part():
    """Megatron-LM#7452: every rank's exponentials would be summed, and the loss off by log n."""
    with pytest.raises(RankError, match=r"logits with 10 columns on rank .*the 5 columns of 10"):
        run_threads(2, lambda w: sharded_logits(torch.zeros(3, 10), w.everyone, even(0, 10, 2)))


# --- embedding ------------------------------------------------------------------------------------


def embedding(vocabulary: int, **words: Any) -> nn.Embedding:
    module = nn.Embedding(vocabulary, 4, dtype=F64, **words)
    module.weight.data.copy_(sample(vocabulary, 4))
    if module.padding_idx is not None:
        module.weight.data[module.padding_idx] = 0
    return module


def over(world: World, module: nn.Embedding, cut: Cut, placement: Any = I) -> nn.Embedding:
    """The same embedding with its rows on ranks; its results are whole, or as `placement` says."""
    embed(module, world.everyone, cut, lambda out: move(out, world.everyone, P, placement))
    module.weight.data = part(module.weight.data, cut, world.rank)
    return module


def looked_up(world: World, cut: Cut, ids: Tensor, padding: int | None) -> None:
    """What is looked up, and the gradient of this rank's rows, against the whole embedding."""
    whole = embedding(cut.whole, padding_idx=padding)
    module = over(world, embedding(cut.whole, padding_idx=padding), cut)
    expected, out = whole(ids), module(ids)
    assert torch.equal(out, expected)
    expected.cos().sum().backward()
    out.cos().sum().backward()
    assert whole.weight.grad is not None
    near(module.weight.grad, part(whole.weight.grad, cut, world.rank), rtol=1e-13, atol=0.0)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(data=st.data(), cut=cuts())
def test_any_cut_of_any_ids(data: st.DataObject, cut: Cut):
    """Ranges of any length, or none; ids of any number and dtype, also none; any padding."""
    ids = torch.tensor(data.draw(st.lists(st.integers(0, cut.whole - 1), max_size=6)))
    ids = ids.to(data.draw(st.sampled_from([torch.int32, torch.int64])))
    padding = data.draw(st.none() | st.integers(0, cut.whole - 1))
    run_threads(cut.ranks, looked_up, cut, ids, padding)


def sequences(world: World) -> None:
    """`finish` decides: P -> S(1) gives each rank its positions; padding is a row of one rank."""
    module, ids = over(world, embedding(8, padding_idx=5), even(0, 8, 2), S(1)), torch.arange(8)
    expected = embedding(8, padding_idx=5)(ids.view(2, 4)).chunk(2, 1)[world.rank]
    assert torch.equal(module(ids.view(2, 4)), expected)
    assert [key.kind for key in world.ledger.lines] == ["reduce_scatter"]
    assert module.padding_idx == [None, 1][world.rank]


def hooked(world: World) -> None:
    """Hooks of others see whole ids and results; an id of no rank is an error, as in torch."""
    module, seen, ids = embedding(7), list[Any](), torch.tensor([6, 1])
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    module.register_forward_hook(lambda _, __, out: seen.append(out))
    out = over(world, module, even(0, 7, world.size))(ids)
    assert seen[0] is ids
    assert seen[1] is out
    for wrong in (-1, 7):
        with pytest.raises(IndexError, match="out of range"):
            module(torch.tensor([0, wrong]))
    assert torch.equal(module(ids), out)


@pytest.mark.parametrize("use", [sequences, hooked])
def test_uses_of_an_embedding(use: Any):
    """Its results in shards; with hooks, and after an error."""
    run_threads(2, use)


@pytest.mark.cases(3)
@pytest.mark.parametrize("word", ["max_norm=1.0", "scale_grad_by_freq=True", "sparse=True"])
def test_what_a_part_of_the_rows_cannot_do_is_refused(word: str):
    """Before anything is changed."""
    name, _, value = word.partition("=")
    module = embedding(5, padding_idx=3, **{name: 1.0 if name == "max_norm" else value == "True"})
    with pytest.raises(InputError, match=rf"{word}.* Allowed: {name}="):
        embed(module, alone().everyone, even(0, 5, 1), lambda out: out)
    assert module.padding_idx == 3
    assert not module._forward_hooks
