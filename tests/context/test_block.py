"""One block of attention: the plain operations, which CUDA uses with masks and in fp32."""

import pytest
import torch

from shardwise.techniques.context import block
from tests.context.cases import Case

SCALE = 0.4


@pytest.mark.cases(4)
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("mask", ["distance", "by head"])
def test_plain_operations_and_kernel(mask: str, key_heads: int):
    """The plain operations give the output, lse and gradients of the kernel, masked rows too."""
    qkv, grad, bias = Case("cp1", 7, mask=mask, key_heads=key_heads).inputs()
    assert bias is not None
    bias = bias[(None,) * (4 - bias.dim())].clone()
    bias[:, :, 2] = -torch.inf
    found = block.math_forward(*qkv, bias, SCALE)
    out, lse = block.forward(*qkv, bias, False, SCALE)
    torch.testing.assert_close(found, (out, lse))
    assert lse[:, :, 2].eq(-torch.inf).all() and out[:, :, 2].eq(0).all()
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    grads = block.math_backward(grad, qkv, bias, out, lse, SCALE)
    kernel = block.backward(grad, qkv, bias, out, lse, causal=False, scale=SCALE)
    torch.testing.assert_close(grads, kernel)
