"""Initial weights: a function of the seed and the parameter's name.

Each parameter has its own generator, seeded by a hash of seed and full name. So initial weights do
not depend on the order in which modules are made, the number of ranks, or the sharding: a rank that
materialises one block of a model on the meta device gets exactly the weights of a single process.
"""

import hashlib
import math
import re
from typing import Final

import torch
from torch import Tensor, nn

#: Matrices whose output is added to the residual stream, two per layer.
WRITERS: Final = ("attn.out.weight", "mlp.down.weight", "experts.down", "shared.down.weight")


@torch.no_grad()
def initial(name: str, tensor: Tensor, seed: int) -> None:
    """Fill the full, unsharded parameter `name` in place.

    Vectors are norm scales (1) or biases (0). Matrices [out, in], and stacked ones
    [experts, out, in], are normal with variance 1/in, so that a normalised input gives outputs of
    variance one; those that write to the residual stream are smaller by sqrt(2·layer), so that the
    stream does not grow with depth (GPT-2, section 2.3).
    The embedding and the head are normal with standard deviation 0.02.

    Drawn on the CPU in fp32 and then copied, so that device and precision of `tensor` only change
    the rounding.
    """
    if tensor.dim() < 2:
        tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    draw = torch.empty(tensor.shape, dtype=torch.float32)
    draw.normal_(0.0, deviation(name, tensor.shape), generator=generator(name, seed))
    tensor.copy_(draw)


def deviation(name: str, shape: torch.Size) -> float:
    """The initial standard deviation of the matrix `name` with `shape`."""
    if name.endswith(("embed.weight", "head.weight")):
        return 0.02
    plain = 1 / math.sqrt(shape[-1])
    layer = re.search(r"\bblocks\.(\d+)\.", name)
    if layer is None or not name.endswith(WRITERS):
        return plain
    return plain / math.sqrt(2 * (int(layer.group(1)) + 1))


def generator(name: str, seed: int) -> torch.Generator:
    """The generator of a parameter under a seed, the same on every machine."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    # 63 bits: the range of manual_seed in every supported version of torch
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def fill(model: nn.Module, seed: int) -> None:
    """Fill every parameter of a materialised model, a shared one once."""
    for name, parameter in model.named_parameters():
        initial(name, parameter, seed)
