"""Grouped products of experts against a loop, and how many operations experts cost."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shardwise.models import moe
from shardwise.models.gpt import GPTConfig
from shardwise.models.moe import MoEConfig
from shardwise.techniques.expert import products as experts
from shardwise.techniques.expert.gate import Gate
from shardwise.techniques.expert.products import Stacks, feed_forward, fits, grouped, looped

COUNTS = [3, 0, 5, 1, 0, 0, 7, 2]
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def made(dtype: torch.dtype, width: int = 24, hidden: int = 40) -> tuple[Tensor, Stacks]:
    """Rows for eight experts, three of them without any, and their weights."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=draw) * shape[-1] ** -0.5
        return x.to(dtype).requires_grad_()

    n = len(COUNTS)
    weights = normal(n, hidden, width), normal(n, hidden, width), normal(n, width, hidden)
    return normal(sum(COUNTS), width), weights


def needs(dtype: torch.dtype) -> None:
    if not experts.has_grouped_products("cpu", dtype):
        pytest.skip("this torch has no grouped products of the dtype on a processor")


@pytest.mark.parametrize("dtype", BOUNDS)
def test_grouped_equals_the_loop(dtype: torch.dtype):
    """Outputs and gradients agree, of experts without rows and of a broadcast gradient too."""
    needs(dtype)
    rows, stacks = made(dtype)
    one, other = (of(rows, COUNTS, stacks) for of in (grouped, looped))
    inputs = [rows, *stacks]
    slope = torch.linspace(-1, 1, rows.numel()).view_as(rows).to(dtype)
    for gradient in (torch.ones((), dtype=dtype).expand_as(rows), slope):
        found = torch.autograd.grad(one, inputs, gradient, retain_graph=True)
        expected = torch.autograd.grad(other, inputs, gradient, retain_graph=True)
        for a, b in zip((one, *found), (other, *expected), strict=True):
            assert float((a - b).detach().abs().max()) <= BOUNDS[dtype] * float(
                b.detach().abs().max()
            )
        assert not found[1][1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows(dtype: torch.dtype):
    """Without a row all experts have gradients of zeros."""
    needs(dtype)
    rows, stacks = made(dtype)
    feed_forward(rows[:0], [0] * len(COUNTS), stacks).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in stacks)


def test_which_are_grouped():
    """Few experts, fp64, unaligned widths and tensors without data are computed in a loop."""
    needs(torch.float32)
    rows, stacks = made(torch.float32)
    assert fits(rows, stacks)
    gate, up, down = stacks
    assert not fits(rows, (gate[:4], up[:4], down[:4]))
    assert not fits(*made(torch.float64))
    assert not fits(*made(torch.float32, width=23))
    assert not fits(*made(torch.float32, hidden=39))
    assert not fits(rows.to("meta"), stacks)


def kept_bytes(of: Callable[[Tensor, list[int], Stacks], Tensor]) -> int:
    """The bytes of the storages that autograd keeps."""
    seen: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = of(*made(torch.float32)[:1], COUNTS, made(torch.float32)[1])
    assert out.requires_grad
    return sum(seen.values())


def test_the_same_activations_are_kept():
    """Autograd keeps as many bytes as in the loop, and the ends of groups."""
    needs(torch.float32)
    assert kept_bytes(grouped) == kept_bytes(looped) + 4 * len(COUNTS)


def test_without_grouped_products(monkeypatch: pytest.MonkeyPatch):
    """A torch that has none computes the same in a loop."""
    rows, stacks = made(torch.float32)
    expected = looped(rows, COUNTS, stacks)
    experts.has_grouped_products.cache_clear()
    monkeypatch.delattr(experts.functional, "grouped_mm", raising=False)
    try:
        assert not fits(rows, stacks)
        assert torch.equal(feed_forward(rows, COUNTS, stacks), expected)
    finally:
        experts.has_grouped_products.cache_clear()


ROOT = Path(__file__).parents[2]
SIZES = GPTConfig(vocabulary=64, layers=1, width=64, heads=2, kv_heads=2, hidden=1024, sequence=16)


def counted(experts: int) -> tuple[int, int]:
    """What torch counts of a forward and backward pass, and what its routers take of that."""
    config = MoEConfig(SIZES, Gate("topk", experts=experts, k=2))
    model, rows = moe.MoEGPT(config), 4
    batch = moe.batch(rows, config, 0)
    with FlopCounterMode(display=False) as flops:
        moe.loss(model, batch).backward()
    routers = 3 * 2 * rows * SIZES.sequence * SIZES.width * experts * SIZES.layers
    return flops.get_total_flops(), routers


def test_operations_per_token_stay_as_experts_become_more():
    """From 4 to 64 experts at k = 2 a step has 1 % more at most, which are the routers'."""
    few, of_few = counted(4)
    many, of_many = counted(64)
    assert few - of_few == many - of_many
    assert many == pytest.approx(few, rel=0.01)


def test_the_example_prints_a_line_for_each_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """examples/expert_growth.py, with few tokens: the ratio of the first number is 1."""
    monkeypatch.setattr("sys.argv", ["expert_growth.py", "64"])
    runpy.run_path(str(ROOT / "examples" / "expert_growth.py"), run_name="__main__")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [int(line[0]) for line in lines] == [4, 16, 64]
    assert lines[0][-1] == "1.00"
