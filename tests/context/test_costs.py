"""What context parallelism costs: bytes between ranks, scores computed, tensors kept."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.comm.world import World
from shardwise.engine.predict import predict
from shardwise.models import gpt
from shardwise.techniques.context.attention import attention
from tests.context import cases
from tests.context.cases import BATCH, SCALE, WIDTH, Case
from tests.pool import run_gloo, run_threads


class Scores(TorchDispatchMode):
    """Counts the scores that kernels of attention compute in a forward pass; half if causal."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            q, k, _, *options = args  # dropout and causal, unless both are the defaults
            self.count += q.shape[2] * k.shape[2] / (2 if options else 1)
        return func(*args, **(kwargs or {}))


def costs(world: World, case: Case) -> tuple[dict[tuple[str, str], int], float, int]:
    """Bytes sent by axis and phase, scores computed, and bytes kept for the backward pass."""
    world, ring, ulysses = cases.axes(world, case)
    qkv, grad, mask = cases.shards(world, case)
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    sizes = {"ring_axis": ring, "ulysses_axis": ulysses, "cut": case.cut}
    with Scores() as scores, world.ledger.phase("forward"), saved_tensors_hooks(keep, lambda x: x):
        out = attention(*qkv, mask, causal=case.causal, scale=SCALE, **sizes)
    with world.ledger.phase("backward"):
        torch.autograd.grad(out, qkv, grad)
    sent: dict[tuple[str, str], int] = {}
    for key, tally in world.ledger.lines.items():
        sent[key.axis, key.phase] = sent.get((key.axis, key.phase), 0) + tally.sent_bytes
    return sent, scores.count, sum(x.nbytes for x in kept)


def ring_bytes(case: Case, rank: int) -> dict[tuple[str, str], int]:
    """The formula of ring.py."""
    cut, n = case.cut, case.ranks
    position = 2 * BATCH * case.key_heads * WIDTH
    blocks = position * (case.length - cut.numel((rank + 1) % n))
    grads = position * (case.length - cut.numel(rank)) * max(4, case.dtype.itemsize)
    passed = blocks * case.dtype.itemsize
    return {("ring", "forward"): passed, ("ring", "backward"): passed + grads}


@pytest.mark.cases(6)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("run", "ranks", "length"), [(run_threads, 2, 16), (run_threads, 4, 16), (run_gloo, 4, 13)]
)
def test_ring_bytes(run: Any, ranks: int, length: int, dtype: torch.dtype):
    """A ring sends keys and values n - 1 times in each pass, and their gradients n - 1 times."""
    case = Case(f"cp{ranks}", length, key_heads=2, dtype=dtype)
    for rank, (sent, *_) in enumerate(run(ranks, costs, case)):
        assert sent == ring_bytes(case, rank)
        if length == 16:
            own = 2 * BATCH * 2 * (length // ranks) * WIDTH * dtype.itemsize
            assert sent["ring", "forward"] == (ranks - 1) * own


@pytest.mark.cases(4)
@pytest.mark.parametrize("key_heads", [4, 1])
@pytest.mark.parametrize("length", [16, 13])
def test_ulysses_bytes(length: int, key_heads: int):
    """Ulysses sends what ulysses.py says."""
    case, n = Case("cp4:ulysses", length, key_heads=key_heads), 4
    for rank, (sent, *_) in enumerate(run_threads(n, costs, case)):
        t = case.cut.numel(rank)
        out, qkv = case.heads, case.heads + 2 * max(key_heads, n)
        forward = qkv * t * (n - 1) + out * (length - t)
        backward = out * t * (n - 1) + qkv * (length - t)
        unit = BATCH * WIDTH * 8 // n
        assert sent["ulysses", "forward"] == unit * forward
        assert sent["ulysses", "backward"] == unit * backward


def test_a_mask_equal_in_all_rows_is_not_sent():
    """Padding masks stay where they are; others send their rows, a byte a boolean."""
    plain, padding, blocks = (
        run_threads(4, costs, Case("cp4:ulysses", mask=mask))[0][0]["ulysses", "forward"]
        for mask in ("", "padding", "blocks")
    )
    assert (padding - plain, blocks - plain) == (0, 3 * 4 * 16)


@pytest.mark.parametrize("ranks", [2, 4])
def test_balance_of_a_causal_ring(ranks: int):
    """All ranks compute equally many scores, and together no more than one process."""
    length = 64 * ranks
    counts = [count for _, count, _ in run_threads(ranks, costs, Case(f"cp{ranks}", length))]
    assert max(counts) <= 1.05 * sum(counts) / ranks
    assert sum(counts) == length**2 / 2


def test_what_is_kept_for_the_backward_pass():
    """Only q, k, v, the output and one number a row: 1/n of the sequence on each of n ranks."""
    row = BATCH * 4 * (4 * WIDTH + 1) * 8
    for ranks in (2, 4):
        for _, _, kept in run_threads(ranks, costs, Case(f"cp{ranks}")):
            assert kept == 16 // ranks * row


def activations(plan: str, length: int) -> int:
    """What sw.predict says of a step on 4 rows; that ranks hold it is proved in test_plans."""
    sizes: dict[str, Any] = {"width": 64, "heads": 8, "kv_heads": 8, "hidden": 96}
    with torch.device("meta"):
        model = gpt.GPT(gpt.GPTConfig(vocabulary=61, layers=2, sequence=512, **sizes))
    return predict(model, plan, gpt.random_text(4, length, 61, 0), loss=gpt.loss).activations


@pytest.mark.parametrize("again", ["", " recompute:full"])
@pytest.mark.parametrize(("form", "bound"), [("", 1.001), (":ulysses", 1.06)])
def test_activations_fall_with_the_ranks(form: str, bound: float, again: str):
    """On n ranks n times the length needs those of one; Ulysses has its output in two layouts."""
    one = activations(f"cp1 fp32{again}", 128)
    assert activations(f"cp4{form} fp32{again}", 128) <= 0.27 * one
    for ranks in (2, 4):
        assert activations(f"cp{ranks}{form} fp32{again}", 128 * ranks) <= bound * one
