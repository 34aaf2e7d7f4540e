"""Attention over ranks is that of one process, with the bytes of the papers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from shardwise.comm.world import World
from shardwise.core.errors import RankError
from shardwise.core.mesh import Mesh
from shardwise.techniques.context import block
from shardwise.techniques.context.attention import attention
from shardwise.techniques.context.cut_batch import shard
from shardwise.techniques.context.positions import SequenceCut, visible
from tests.pool import run_gloo, run_threads

BATCH, SIZE, SCALE, F64 = 2, 4, 0.4, torch.float64


def unshard(shards: list[Tensor], cut: SequenceCut, dim: int) -> Tensor:
    """The inverse of `shard`: the tensor whose shards, in the order of ranks, these are."""
    division = cut.on(dim)
    whole = shards[0].new_empty(division.full_shape(shards[0].shape))
    for rank, x in enumerate(shards):
        for here, there, length in division.spans(rank, 0, division.size(rank)):
            whole.narrow(dim, there, length).copy_(x.narrow(dim, here, length))
    return whole


def test_positions_of_ranks():
    """A rank holds an early and a late chunk, as in the figure; Ulysses divides a ring rank's."""
    zigzag, inside = SequenceCut(16, 4, True), SequenceCut(16, 4, True, ulysses=2)
    assert [zigzag.chunks(rank) for rank in range(4)] == [
        *([(0, 2), (14, 16)], [(2, 4), (12, 14)], [(4, 6), (10, 12)], [(6, 8), (8, 10)])
    ]
    assert [inside.chunks(r) for r in range(4)] == [[(0, 4)], [(12, 16)], [(4, 8)], [(8, 12)]]


CUTS = [
    SequenceCut(length, ranks, zigzag, ulysses)
    for length in (1, 3, 13, 16)
    for ranks in (1, 2, 4)
    for zigzag in (True, False)
    for ulysses in (1, 2, 4)
    if ranks % ulysses == 0
]


@pytest.mark.cases(len(CUTS))
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_position_is_on_one_rank(cut: SequenceCut):
    """Ranks differ by at most one position; what is visible of another ring rank is causal."""
    x = torch.arange(cut.length).expand(2, -1)
    pieces = [shard(x, cut, rank, 1) for rank in range(cut.ranks)]
    counts = [piece.shape[1] for piece in pieces]
    assert counts == [cut.numel(rank) for rank in range(cut.ranks)]
    assert max(counts) - min(counts) <= 1
    assert torch.cat(pieces, 1)[0].sort().values.tolist() == list(range(cut.length))
    assert torch.equal(unshard(pieces, cut, 1), x)
    ring = cut.ring
    for rank, source in ((a, b) for a in range(ring.ranks) for b in range(ring.ranks) if a != b):
        rows, keys = (shard(x[0], ring, r, 0) for r in (rank, source))
        first, stop = visible(ring, rank, source)
        part = torch.zeros(len(rows), len(keys), dtype=torch.bool)
        part[first:, :stop] = True
        assert torch.equal(part, rows[:, None] >= keys)


@dataclass(frozen=True)
class Case:
    """`word` is that of a plan; `mask` a name of `mask_of`."""

    word: str
    length: int = 16
    causal: bool = True
    mask: str = ""
    heads: int = 4
    key_heads: int = 4
    dtype: torch.dtype = F64
    zigzag: bool = True

    @property
    def ranks(self) -> int:
        return int(self.word[2])

    @property
    def ulysses(self) -> int:
        return {"": 1, "ulysses": self.ranks, "2x2": 2}[self.word.partition(":")[2]]

    @property
    def cut(self) -> SequenceCut:
        return SequenceCut(self.length, self.ranks, self.zigzag, self.ulysses)

    def inputs(self) -> tuple[list[Tensor], Tensor | None]:
        own = torch.Generator().manual_seed(self.length)
        tensors = [
            torch.randn(BATCH, n, self.length, SIZE, dtype=F64, generator=own).to(self.dtype)
            for n in (self.heads, self.key_heads, self.key_heads, self.heads)
        ]
        return tensors, mask_of(self)


def mask_of(case: Case) -> Tensor | None:
    """A mask of the whole sequence; of `padding`, some rows attend to no key."""
    t = case.length
    at, documents = torch.arange(t), torch.arange(t) // max(1, t // 3)
    masks: dict[str, Callable[[], Tensor | None]] = {
        "": lambda: None,
        "padding": lambda: (at >= torch.tensor([t // 3, 0])[:, None])[:, None, None],
        "blocks": lambda: documents[:, None] == documents,
        "by head": lambda: (at.outer(at) + torch.arange(4)[:, None, None]).sin()[None].to(F64),
        "distance": lambda: -(at[:, None] - at).abs().to(F64),
    }
    return masks[case.mask]()


def expected(case: Case) -> list[Tensor]:
    """The output and the gradients of q, k and v in one process; a row without keys is 0."""
    (*qkv, grad), mask = case.inputs()
    allowed = torch.ones(case.length, case.length, dtype=torch.bool)
    allowed = allowed.tril() if case.causal else allowed
    bias = torch.zeros(case.length, case.length, dtype=F64)
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        bias = mask
    bias = bias.masked_fill(~allowed, -torch.inf)
    q, k, v = leaves = [x.requires_grad_() for x in qkv]
    out = F.scaled_dot_product_attention(q, k, v, bias, scale=SCALE, enable_gqa=True)
    dead = (bias == -torch.inf).all(-1, keepdim=True)
    out = out.masked_fill(dead.expand(BATCH, case.heads, case.length, 1), 0)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


Ran = tuple[list[Tensor], dict[tuple[str, str], int], int]


def run(world: World, case: Case) -> Ran:
    """On this rank: output and gradients, bytes sent by axis and phase, bytes kept for backward."""
    u, n = case.ulysses, case.ranks
    world = world.on(Mesh.parse(f"dp{n}"))
    inner = world.within("dp", [range(r, r + u) for r in range(0, n, u)], "ulysses")
    outer = world.within("dp", [range(r, n, u) for r in range(u)], "ring")
    tensors, mask = case.inputs()
    q, k, v, grad = (shard(x, case.cut, world.rank, 2) for x in tensors)
    if mask is not None and mask.shape[-2] > 1:
        mask = shard(mask, case.cut, world.rank, mask.dim() - 2)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v))
    kept: list[Tensor] = []
    sizes: Any = {"ring_axis": outer, "ulysses_axis": inner, "cut": case.cut}
    note = saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x)
    with world.ledger.phase("forward"), note:
        out = attention(q, k, v, mask, causal=case.causal, scale=SCALE, **sizes)
    with world.ledger.phase("backward"):
        values = [out.detach(), *torch.autograd.grad(out, [q, k, v], grad)]
    sent: dict[tuple[str, str], int] = {}
    for key, tally in world.ledger.lines.items():
        sent[key.axis, key.phase] = sent.get((key.axis, key.phase), 0) + tally.sent_bytes
    return values, sent, sum(x.nbytes for x in kept)


def holds(case: Case, on_ranks: Any = run_threads, bound: float = 1e-10) -> None:
    ran: list[Ran] = on_ranks(case.ranks, run, case)
    exact = expected(replace(case, dtype=F64))
    for parts, whole in zip(zip(*(values for values, *_ in ran), strict=True), exact, strict=True):
        found = unshard(list(parts), case.cut, 2).double()
        assert float((found - whole).abs().max()) <= bound


WORDS = ("cp1", "cp2", "cp4", "cp2:ulysses", "cp4:ulysses", "cp4:2x2")


@pytest.mark.cases(18)
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("mask", ["", "padding", "by head"])
def test_attention_over_ranks_is_that_of_one_process(word: str, mask: str):
    """Output and gradients under any mask, causal or not; rows without a key; grouped heads."""
    holds(Case(word, 13, mask=mask))
    holds(Case(word, 13, causal=False, mask=mask, zigzag=False))
    holds(Case(word, 5, mask=mask, key_heads=1))
    holds(Case(word, 16, causal=False, mask=mask and "blocks", key_heads=2))
    holds(Case(word, 16, mask=mask and "distance"))


def test_attention_of_processes_and_of_other_dtypes():
    """Messages go through gloo; in fp32 and bf16 a ring differs from fp64 by their rounding."""
    holds(Case("cp4:2x2", 13, key_heads=2, mask="blocks"), run_gloo)
    holds(Case("cp4", dtype=torch.float32), bound=1e-5)
    holds(Case("cp4", dtype=torch.bfloat16), bound=0.05)


@pytest.mark.parametrize("heads", [(4, 6, 6), (2, 6, 3)])
def test_heads_that_ulysses_cannot_divide(heads: tuple[int, int, int]):
    """Ulysses refuses such heads, and its error names the ring."""
    ranks, queries, keys = heads
    case = Case(f"cp{ranks}:ulysses", heads=queries, key_heads=keys)
    with pytest.raises(RankError, match=rf"Write instead: cp{ranks}, ring attention"):
        run_threads(ranks, run, case)


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("mask", ["distance", "by head"])
def test_plain_operations_are_the_kernel(mask: str, key_heads: int):
    """What CUDA uses with masks and in fp32 has the same output, lse and gradients."""
    (q, k, v, grad), bias = Case("cp1", 7, mask=mask, key_heads=key_heads).inputs()
    assert bias is not None
    bias = bias[(None,) * (4 - bias.dim())].clone()
    bias[:, :, 2] = -torch.inf
    out, lse = block.forward(q, k, v, bias, False, SCALE)
    torch.testing.assert_close(block.math_forward(q, k, v, bias, SCALE), (out, lse))
    assert lse[:, :, 2].eq(-torch.inf).all()
    assert out[:, :, 2].eq(0).all()
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    kernel = block.backward(grad, (q, k, v), bias, out, lse, causal=False, scale=SCALE)
    torch.testing.assert_close(block.math_backward(grad, (q, k, v), bias, out, lse, SCALE), kernel)


@pytest.mark.parametrize("dtype", [F64, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "length"), [(2, 16), (4, 13)])
def test_costs_of_a_ring(ranks: int, length: int, dtype: torch.dtype):
    """Keys and values go round in each pass, and their gradients; 1/n of the sequence is kept."""
    case, size = Case(f"cp{ranks}", length, key_heads=2, dtype=dtype), dtype.itemsize
    for rank, (_, sent, kept) in enumerate(run_threads(ranks, run, case)):
        position, own = 2 * BATCH * 2 * SIZE, case.cut.numel(rank)
        passed = position * (length - case.cut.numel((rank + 1) % ranks)) * size
        grads = position * (length - own) * max(4, size)
        assert sent == {("ring", "forward"): passed, ("ring", "backward"): passed + grads}
        row = (2 * 4 + 2 * 2) * SIZE * size + 4 * max(4, size)  # q and out, k and v, a number
        assert kept == BATCH * own * row


@pytest.mark.parametrize("key_heads", [4, 1])
@pytest.mark.parametrize("length", [16, 13])
def test_bytes_of_ulysses(length: int, key_heads: int):
    """The all-to-alls of attention.py; a mask that is equal in all rows is not sent."""
    case, n = Case("cp4:ulysses", length, key_heads=key_heads), 4
    for rank, (_, sent, _) in enumerate(run_threads(n, run, case)):
        t, out, qkv = case.cut.numel(rank), case.heads, case.heads + 2 * max(key_heads, n)
        unit = BATCH * SIZE * 8 // n
        assert sent["ulysses", "forward"] == unit * (qkv * t * (n - 1) + out * (length - t))
        assert sent["ulysses", "backward"] == unit * (out * t * (n - 1) + qkv * (length - t))
    plain, padding, blocks = (
        run_threads(n, run, replace(case, length=16, mask=mask))[0][1]["ulysses", "forward"]
        for mask in ("", "padding", "blocks")
    )
    assert (padding - plain, blocks - plain) == (0, 3 * 4 * 16)  # a byte a boolean
