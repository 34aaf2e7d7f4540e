"""Attention over ranks computes what PyTorch's attention computes in one process."""

import pytest
import torch

from shardwise.core.errors import RankError
from tests.context import cases
from tests.context.cases import Case
from tests.pool import run_gloo, run_threads

WORDS = ("cp1", "cp2", "cp4", "cp2:ulysses", "cp4:ulysses", "cp4:2x2")
on_words = pytest.mark.parametrize("word", WORDS)


def holds(case: Case, run=run_threads) -> None:
    assert cases.difference(case, run(case.ranks, cases.run, case)) <= 1e-10


@pytest.mark.cases(12)
@on_words
@pytest.mark.parametrize("causal", [True, False])
def test_parity(word: str, causal: bool):
    """The output and the gradients of q, k and v are those of one process, in fp64."""
    holds(Case(word, causal=causal))
    holds(Case(word, causal=causal, zigzag=False))


@pytest.mark.cases(24)
@on_words
@pytest.mark.parametrize("mask", ["padding", "blocks", "by head", "distance"])
def test_masks(word: str, mask: str):
    """Masks, with and without a causal one; a row that attends to no key gives zeros."""
    for length in (16, 13, 5):
        holds(Case(word, length, causal=True, mask=mask))
        holds(Case(word, length, causal=False, mask=mask))


@pytest.mark.cases(12)
@on_words
@pytest.mark.parametrize("key_heads", [2, 1])
def test_grouped_heads(word: str, key_heads: int):
    """Heads that share keys, of which there may be fewer than ranks."""
    holds(Case(word, 13, key_heads=key_heads, mask="by head"))


@pytest.mark.cases(3)
@pytest.mark.parametrize("word", ["cp4", "cp4:ulysses", "cp4:2x2"])
def test_processes(word: str):
    """The same on processes, whose messages go through gloo."""
    holds(Case(word, 13, key_heads=2), run_gloo)
    holds(Case(word, 5, causal=False, mask="blocks"), run_gloo)


@pytest.mark.cases(2)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_other_dtypes(dtype: torch.dtype, bound: float):
    """In fp32 and bf16 a ring differs from fp64 by their rounding."""
    case = Case("cp4", 16, dtype=dtype)
    assert cases.difference(case, run_threads(4, cases.run, case)) <= bound


def test_heads_that_ulysses_cannot_divide():
    """Ulysses refuses such heads, and its error names the ring."""
    for case in (
        Case("cp4:ulysses", heads=6, key_heads=6),
        Case("cp2:ulysses", heads=6, key_heads=3),
    ):
        with pytest.raises(RankError, match=rf"Write instead: cp{case.ranks}, ring attention"):
            run_threads(case.ranks, cases.run, case)
