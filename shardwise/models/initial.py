"""This file is the value of every weight before the first step, a function of seed and name alone.

Each parameter has a generator of its own, seeded by a hash of the seed and the parameter's whole
name. So the weights do not depend on the order in which modules are made, on how many ranks there
are, or on which of them hold what: a rank that materialises one block of a model that exists only
on the meta device fills it with exactly what a world of one would.
"""

import hashlib
import math
import re
from typing import Final

import torch
from torch import Tensor, nn

# matrices that write to the residual stream: every layer adds two such terms to it
WRITERS: Final = ("attn.out.weight", "mlp.down.weight")


@torch.no_grad()
def initial(name: str, tensor: Tensor, seed: int) -> None:
    """Fills the whole, unsharded parameter `name` in place.

    Vectors are norm scales (1) or biases (0). Matrices [out, in] are normal with variance 1/in,
    so that a normalised input gives outputs of size one; those that write to the residual stream
    are smaller by sqrt(2·layer), which keeps the stream from growing with depth (GPT-2, section
    2.3). The embedding and the head are normal with deviation 0.02.

    Drawn on the processor in fp32 and then copied, so that the device and the precision of
    `tensor` do not change what is drawn, only how it is rounded.
    """
    if tensor.dim() < 2:
        tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    draw = torch.empty(tensor.shape, dtype=torch.float32)
    draw.normal_(0.0, deviation(name, tensor.shape), generator=generator(name, seed))
    tensor.copy_(draw)


def deviation(name: str, shape: torch.Size) -> float:
    """The standard deviation of the matrix `name` of that shape at the start."""
    if name.endswith(("embed.weight", "head.weight")):
        return 0.02
    plain = 1 / math.sqrt(shape[-1])
    layer = re.search(r"\bblocks\.(\d+)\.", name)
    if layer is None or not name.endswith(WRITERS):
        return plain
    return plain / math.sqrt(2 * (int(layer.group(1)) + 1))


def generator(name: str, seed: int) -> torch.Generator:
    """A generator of its own for each pair of seed and name, the same on every machine."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    # 63 bits: what manual_seed takes on every torch this project supports
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def fill(model: nn.Module, seed: int) -> None:
    """`initial` for every parameter of a model that is materialised, a shared one once."""
    for name, parameter in model.named_parameters():
        initial(name, parameter, seed)
