"""Which library multiplies matrices: of those torch was built with, the faster here.

                        y = x W^T, gx = gy W      gW = gy^T x
    fp32 on AMD's       oneDNN, faster by 1/8     torch's own choice, MKL
    from Zen 5 on       oneDNN, twice as fast     oneDNN, faster by half to all
    everything else     torch's own choice        the same

A layer's product is that of x [..., in], weight [out, in], bias [out] -> [..., out].  The weight
may be a transposed view, so that gy W, which goes on to the layer before, is one as well.  Figures
in docs/measurements.md; `torch.backends.mkldnn.enabled = False` leaves all to torch.
"""

import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]

#: What the vendor is called by the processor itself.
AMD = ("AuthenticAMD", "HygonGenuine")
ZEN_5 = 26  # the family of its processors
TOLD = Path("/proc/cpuinfo")  # of Linux


@dataclass(frozen=True)
class Products:
    """How matrices are multiplied, outside of autograd: by one library, or each by another.

    linear      x [..., in], weight [out, in], bias [out] or None -> [..., out]
    multiply    left [M, K], right [K, N] -> [M, N]
    add         out [M, N] becomes beta out + alpha left right; of beta 0 it is not read
    least       elements of an fp32 weight from which on a node of ours (fused_linear.py) is worth
    it
    """

    linear: Linear
    multiply: Callable[[Tensor, Tensor], Tensor]
    add: Callable[[Tensor, Tensor, Tensor, float, float], object]
    least: int


def fastest(device: torch.device) -> Products:
    """The products that are fastest on `device`; by torch itself where nothing else is known."""
    there = device.type == "cpu" and torch.backends.mkldnn.is_available()
    known = there and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    told = _processor() if known else ""
    if not any(name in told for name in AMD):
        return BY_TORCH
    family = re.search(r"family\s*:?\s*(\d+)", told, re.IGNORECASE)
    return BY_ONEDNN if family and int(family[1]) >= ZEN_5 else BY_BOTH


def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product by oneDNN where it is one of fp32 on a processor, outside of autograd."""
    usual = bias is None or bias.shape == weight.shape[:1]
    if not (usual and _takes(x, weight)):
        return functional.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _takes(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN is to multiply these."""
    able = x.dtype == weight.dtype == torch.float32 and x.device.type == weight.device.type == "cpu"
    fits = x.dim() > 0 and x.shape[-1] == weight.shape[1] > 0 and _apart(weight)
    # a mode that counts or replaces operations knows torch's own
    told = torch._C._get_mkldnn_enabled() and not torch._C._len_torch_dispatch_stack()
    return able and fits and told


def _apart(weight: Tensor) -> bool:
    """Whether no two elements share their memory, by rows or by columns."""
    (out, width), (down, along) = weight.shape, weight.stride()
    return (along == 1 and down >= width) or (down == 1 and along >= out)


def _multiply_by_onednn(left: Tensor, right: Tensor) -> Tensor:
    return _made(left, right).contiguous()


def _made(left: Tensor, right: Tensor) -> Tensor:
    """The product, by rows or by columns: a factor that lies by columns is copied, the smaller."""
    if left.shape[0] > right.shape[1]:
        return by_onednn(right.t(), left, None).t()
    return by_onednn(left, right.t(), None)


def _add_by_torch(out: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> None:
    torch.addmm(out, left, right, beta=beta, alpha=alpha, out=out)


def _add_by_onednn(out: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> None:
    """Made, at the cost of a tensor like `out`, then added: it has none that adds in place."""
    if out.dtype != torch.float32 or not _takes(left, right.t()):
        _add_by_torch(out, left, right, beta, alpha)
        return
    made = _made(left, right)
    if beta == 0:
        torch.mul(made, alpha, out=out)
        return
    if beta != 1:
        out.mul_(beta)
    out.add_(made, alpha=alpha)


BY_TORCH: Final = Products(functional.linear, torch.mm, _add_by_torch, least=2**16)
#: A layer's by oneDNN, its weight's gradient by torch.
BY_BOTH: Final = Products(by_onednn, torch.mm, _add_by_torch, least=2**16)
BY_ONEDNN: Final = Products(by_onednn, _multiply_by_onednn, _add_by_onednn, least=2**13)


def _processor() -> str:
    """What the system says of the first processor."""
    try:
        with TOLD.open(encoding="utf-8", errors="replace") as lines:
            return lines.read(4096)
    except OSError:
        return platform.processor()
