"""The cross-entropy over a cut vocabulary is torch's on the whole one, and gathers nothing."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import shardwise as sw
from shardwise.comm.move import part
from shardwise.comm.world import World, alone
from shardwise.core.errors import RankError
from shardwise.core.layouts.uneven import Cut, even
from shardwise.kernels.cross_entropy import cross_entropy
from shardwise.techniques.tensor.sharded_logits import sharded_logits
from tests.pool import run_gloo, run_threads

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


def sample(vocabulary: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits [3, 5, V] and targets [3, 5], two of which are ignored."""
    seed = torch.Generator().manual_seed(vocabulary)
    x = torch.randn(3, 5, vocabulary, generator=seed, dtype=torch.float64) * 4
    targets = torch.randint(0, vocabulary, (3, 5), generator=seed)
    targets[0, 1] = targets[2, 4] = -100
    return x.to(dtype), targets


def by_torch(x: Tensor, targets: Tensor, z_loss: float = 0.0, **words: Any) -> Tensor:
    """What one process computes, by torch's own functions."""
    x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    loss = F.cross_entropy(x, targets, **words)
    counted = targets != words.get("ignore_index", -100)
    z = torch.where(counted, x.logsumexp(1) ** 2, 0)
    reduce = {"sum": torch.sum, "none": lambda z: z}.get(
        words.get("reduction", "mean"), lambda z: z.sum() / counted.sum()
    )
    return loss + z_loss * reduce(z)


def ignoring(targets: Tensor, terms: dict[str, Any]) -> Tensor:
    """What is ignored by default is ignored under the name that `terms` give it."""
    return targets.masked_fill(targets == -100, terms.get("ignore_index", -100))


def same(world: World, cut: Cut, x: Tensor, targets: Tensor, terms: dict[str, Any]) -> None:
    """Loss and gradient of this rank's columns, against torch's on the whole."""
    targets = ignoring(targets, terms)
    whole = x.clone().requires_grad_()
    expected = by_torch(whole, targets, **terms)
    weights = torch.linspace(1, 2, expected.numel(), dtype=x.dtype).view(expected.shape)
    (expected * weights).sum().backward()
    local = part(x, cut.on(x.dim() - 1), world.rank).requires_grad_()
    loss = cross_entropy(sharded_logits(local, world.everyone, cut), targets, **terms)
    (loss.reshape(-1) * weights.reshape(-1)).sum().backward()
    assert isinstance(whole.grad, Tensor)
    mine = part(whole.grad, cut.on(x.dim() - 1), world.rank)
    assert loss.shape == (targets.shape if terms.get("reduction") == "none" else ())
    close = {"rtol": 1e-12, "atol": 1e-15, "equal_nan": True}
    torch.testing.assert_close(loss.reshape(-1), expected.reshape(-1), **close)
    torch.testing.assert_close(local.grad, mine, **close)


def parity(world: World, vocabulary: int) -> None:
    x, targets = sample(vocabulary)
    cut, before = even(0, vocabulary, world.size), world.ledger.copy()
    for terms in TERMS:
        same(world, cut, x, targets, terms)
        same(world, cut, x.view(-1, vocabulary), targets.view(-1), terms)
        same(world, cut, x[0, 0], targets[0, 0], terms)
    assert {key.kind for key in world.ledger.since(before)} == {"all_reduce"}


@pytest.mark.parametrize(
    ("run", "ranks", "vocabulary"), [(run_threads, 2, 16), (run_threads, 3, 10), (run_gloo, 4, 3)]
)
def test_the_loss_and_its_gradient_are_those_of_one_process(run, ranks, vocabulary):
    """Every term and reduction, also where ranks have unlike parts, or none: Megatron-LM#1754."""
    run(ranks, parity, vocabulary)


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """Any vocabulary of up to 12 words, cut anywhere, in any order, over 1 to 4 ranks."""
    whole, ranks = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    edges = sorted(draw(st.lists(st.integers(0, whole), min_size=ranks - 1, max_size=ranks - 1)))
    bounds = list(zip([0, *edges], [*edges, whole], strict=True))
    return Cut(0, whole, tuple((bound,) for bound in draw(st.permutations(bounds))))


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(cut=cuts(), terms=st.sampled_from(TERMS), data=st.data())
def test_any_cut_of_any_vocabulary_gives_the_loss_of_one_process(cut, terms, data):
    """Ranges of any length, in any order, with any targets."""
    words = st.sampled_from([*range(cut.whole), -100])
    targets = torch.tensor(data.draw(st.lists(words, min_size=1, max_size=4)))
    seed = torch.Generator().manual_seed(cut.whole)
    x = torch.randn(len(targets), cut.whole, generator=seed, dtype=torch.float64)
    run_threads(cut.ranks, lambda world: same(world, cut, x, targets, terms))


INF = torch.inf
EXTREMES: dict[str, Sequence[Sequence[float]]] = {
    "one rank's columns are all -inf": [[1, 2, -INF, -INF], [-INF, -INF, -5000, 3]],
    "the target is -inf": [[-INF, 0, 1, 2], [1, 2, 3, -INF]],
    "all is -inf": [[-INF] * 4, [0, 1, 2, 3]],
    "a column is inf": [[0, INF, 1, 2], [0, 1, 2, 3]],
    "a column is nan": [[0, 1, 2, torch.nan], [0, 1, 2, 3]],
    "large": [[5000, 1, 2, 3], [-5000, -4999, -9000, -8000]],
    "far apart": [[0, 800, -800, 1600], [1e5, -1e5, 1, 2]],
}


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("terms", [{}, {"label_smoothing": 0.2}], ids=["plain", "smoothing"])
def test_extreme_logits_give_what_torch_gives(name, terms):
    """No infinity, no NaN that torch would not give, and none less; masked columns are nothing."""
    x, targets = torch.tensor(EXTREMES[name], dtype=torch.float64), torch.tensor([0, 3])
    for ranks in (2, 4):
        run_threads(ranks, lambda w: same(w, even(0, 4, w.size), x, targets, terms))


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_where_all_targets_are_ignored_the_mean_is_nan_and_the_gradient_zero(terms):
    """As torch has it; a sum is 0."""
    x, targets = sample(5)
    targets.fill_(-100)
    run_threads(2, lambda w: same(w, even(0, 5, 2), x, targets, terms))


def narrow(world: World, dtype: torch.dtype, terms: dict[str, Any]) -> tuple[float, float]:
    """How far the loss and the gradient of 16-bit logits are from those in fp64, relatively."""
    x, targets = sample(4001, dtype)
    x += 40 * bool(terms)  # whose sum over half the words is no number of 16 bits
    exact = x.double().requires_grad_()
    expected = by_torch(exact, targets, **terms)
    expected.backward()
    cut = even(2, 4001, world.size)
    local = part(x, cut, world.rank).requires_grad_()
    loss = cross_entropy(sharded_logits(local, world.everyone, cut), targets, **terms)
    assert loss.dtype == dtype
    (loss * 1024).backward()
    assert isinstance(exact.grad, Tensor) and isinstance(local.grad, Tensor)
    mine = part(exact.grad, cut, world.rank) * 1024
    seen = mine.abs() > torch.finfo(dtype).tiny
    off = ((local.grad.double() - mine) / mine)[seen].abs().max().item()
    return ((loss.double() - expected) / expected).abs().item(), off


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("terms", [{}, {"label_smoothing": 0.3}], ids=["plain", "smoothing"])
def test_16_bit_logits_are_summed_in_fp32(dtype, terms):
    """Loss and gradient are the exact ones rounded once."""
    for loss_off, grad_off in run_threads(2, narrow, dtype, terms):
        assert loss_off <= torch.finfo(dtype).eps
        assert grad_off <= torch.finfo(dtype).eps


def test_under_autocast_the_loss_is_told_in_fp32():
    """As torch's cross_entropy does, which autocast runs in fp32."""
    x, targets = sample(6, torch.bfloat16)
    cut, axis = even(0, 6, 1), alone().everyone
    with torch.autocast("cpu", torch.bfloat16):
        assert by_torch(x, targets).dtype == torch.float32
        loss = cross_entropy(sharded_logits(x, axis, cut), targets)
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_one_softmax_is_kept_for_the_backward_pass(dtype):
    """And of 16-bit logits none: the logits themselves are kept."""
    x, targets = sample(50, dtype)
    x.requires_grad_()
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        logits = sharded_logits(x, alone().everyone, even(0, 50, 1))
        loss = cross_entropy(logits, targets, label_smoothing=0.1, z_loss=0.1)
    large = [t for t in kept if t.numel() >= x.numel()]
    assert len(large) == 1 and large[0].dtype == dtype
    assert (large[0].data_ptr() == x.data_ptr()) == (dtype == torch.bfloat16)
    once = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(once[0], torch.autograd.grad(loss, x)[0])


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_of_plain_logits_it_is_torchs_own(terms):
    """Bit for bit without a z-loss; and with the vocabulary last, whatever the dims."""
    x, targets = sample(9, torch.float32)
    targets = ignoring(targets, terms)
    loss, expected = sw.cross_entropy(x, targets, **terms), by_torch(x, targets, **terms)
    rtol = 1e-6 if terms.get("z_loss") else 0.0
    torch.testing.assert_close(loss.reshape(-1), expected.reshape(-1), rtol=rtol, atol=0.0)
    assert loss.shape == (targets.shape if terms.get("reduction") == "none" else ())


def test_modules_and_functions_of_torch_meet_the_parallel_loss():
    """`nn.CrossEntropyLoss` and `F.cross_entropy` on logits that are cut gather nothing."""
    x, targets = sample(7)
    expected = by_torch(x, targets, label_smoothing=0.1)

    def found(world: World) -> list[Tensor]:
        cut = even(2, 7, world.size)
        logits = sharded_logits(part(x, cut, world.rank), world.everyone, cut)
        flat, words = logits.flatten(0, 1), targets.flatten()
        losses = [
            nn.CrossEntropyLoss(label_smoothing=0.1)(flat, words),
            F.cross_entropy(flat, words, None, None, -100, None, "mean", 0.1),
            F.cross_entropy(input=flat, target=words, label_smoothing=0.1),
            sw.cross_entropy(logits, targets, label_smoothing=0.1),
        ]
        assert {key.kind for key in world.ledger.lines} == {"all_reduce"}
        return losses

    for losses in run_threads(3, found):
        for loss in losses:
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)


REFUSED: dict[str, tuple[tuple[int, ...], Tensor, dict[str, Any], str]] = {
    "classes in dim 1": ((2, 5, 3), torch.zeros(2, 3).long(), {}, "the vocabulary last"),
    "too few targets": ((2, 5), torch.zeros(3).long(), {}, "the vocabulary last"),
    "probabilities": ((2,), torch.tensor(0.5), {}, "index of a class"),
    "truths": ((2, 5), torch.zeros(2).bool(), {}, "index of a class"),
    "smoothing": ((2, 5), torch.zeros(2).long(), {"label_smoothing": 1.1}, "0 to 1"),
    "z": ((2, 5), torch.zeros(2).long(), {"z_loss": -1.0}, "0 or more"),
    "reduction": ((2, 5), torch.zeros(2).long(), {"reduction": "avg"}, "mean, sum or none"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_loss_is_refused_with_what_can(name):
    """The same for logits that are whole and that are cut."""
    shape, targets, terms, text = REFUSED[name]
    x = torch.zeros(shape)
    cut = sharded_logits(x, alone().everyone, even(0, shape[-1], 1))
    for logits in (x, cut):
        with pytest.raises(sw.InputError, match=text):
            cross_entropy(logits, targets, **terms)


@pytest.mark.parametrize("wrong", [-1, 5])
def test_a_target_outside_the_vocabulary_is_an_error_on_every_rank(wrong):
    """It would be nobody's, and its logit a silent 0; torch says the same of whole logits."""

    def lost(world: World) -> None:
        cut = even(0, 5, world.size)
        x = torch.zeros(3, cut.size(world.rank))
        logits = sharded_logits(x, world.everyone, cut)
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            cross_entropy(logits, torch.tensor([0, wrong, -100]))

    run_threads(2, lost)
    with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
        cross_entropy(torch.zeros(3, 5), torch.tensor([0, wrong, -100]))


def taken_for_a_part(world: World) -> None:
    sharded_logits(torch.zeros(3, 10), world.everyone, even(0, 10, world.size))


def test_whole_logits_are_not_taken_for_a_part():
    """Megatron-LM#7452: every rank's exponentials would be summed, and the loss off by log n."""
    with pytest.raises(RankError, match=r"logits with 10 columns on rank .*the 5 columns of 10"):
        run_threads(2, taken_for_a_part)
