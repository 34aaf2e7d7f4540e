"""The recorded operations of a pass: FLOPs as torch counts them, bytes as kernels move them."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import shardwise as sw
from shardwise.core.tools.tape import Operation
from shardwise.models.gpt import GPT, GPTConfig, loss

CONFIG = GPTConfig(96, 2, 32, heads=4, kv_heads=4, hidden=64, sequence=16)
TOKENS = torch.arange(48).reshape(3, 16)
BATCH = {"inputs": TOKENS, "targets": TOKENS}


def recorded(plan: str, device: str = "cpu") -> tuple[Operation, ...]:
    """The operations of a pass of the small GPT."""
    found = sw.predict(GPT(CONFIG), plan, BATCH, loss=loss, device=device)  # type: ignore[arg-type]
    return found.spec.run.tape.operations


def test_flops_are_those_of_a_run() -> None:
    """Forward and backward together, as torch's FlopCounterMode counts a step of one process.

    It does not count the attention of a CPU, whose backward pass has five products.
    """
    with FlopCounterMode(display=False) as counter:
        loss(GPT(CONFIG), BATCH).backward()
    found = sum(each.flops for each in recorded("dp2 zero3"))
    rows, width = TOKENS.numel(), CONFIG.width
    attention = 2 * 2 * rows * CONFIG.sequence * width
    assert found - CONFIG.layers * attention * 7 // 2 == counter.get_total_flops()


def test_ranks_of_a_tensor_axis_share_the_flops() -> None:
    """Two ranks do the products of one, each half of every product."""
    whole, half = recorded("dp2"), recorded("dp2 tp2")
    assert 2 * sum(each.flops for each in half) == sum(each.flops for each in whole)


def test_causal_attention_computes_half() -> None:
    """Its kernel skips the scores above the diagonal; all other products are done in full."""
    short = [each for each in recorded("dp2") if each.done_flops != each.flops]
    assert {each.module for each in short} == {"blocks.0.attn", "blocks.1.attn"}
    assert all(each.done_flops == each.flops // 2 for each in short)


def test_a_backward_pass_belongs_to_the_modules_of_the_forward() -> None:
    """Each linear layer has two products backward, with the FLOPs of its product forward."""
    operations = recorded("dp2")
    for name, module in GPT(CONFIG).named_modules():
        own = [each for each in operations if each.module == name and each.flops]
        if isinstance(module, nn.Linear):
            forward, *backward = own
            assert [each.flops for each in backward] == [forward.flops] * 2
            assert [each.backward for each in own] == [False, True, True]


@pytest.mark.parametrize(("device", "passes"), [("cpu", 4), ("cuda", 2)])
def test_a_fused_norm_passes_over_memory_once(device: str, passes: int) -> None:
    """A CPU reads and writes the stream in several operations, the kernel of a GPU in one."""
    own = [
        each for each in recorded("dp2 bf16", device) if each.module == "norm" and not each.backward
    ]
    stream_bytes = TOKENS.numel() * CONFIG.width * 2
    moved_bytes = sum(each.moved_bytes for each in own)
    assert moved_bytes // stream_bytes >= passes
    assert (len(own) == 1) == (device == "cuda")
