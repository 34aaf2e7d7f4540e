"""Matrix products by the fastest of the libraries in torch.

                        y = x W^T, gx = gy W      gW = gy^T x
    fp32 on AMD         oneDNN, 1/8 faster        torch's own choice, MKL
    from Zen 5 on       oneDNN, twice as fast     oneDNN, 1.5 to 2 times as fast
    everything else     torch's own choice        the same

The product of a linear layer is x [..., in], weight [out, in], bias [out] -> [..., out].  The
weight may be a transposed view, so gy W is such a product too.  Figures are in
benchmarks/results/kernels.toml.  With
`torch.backends.mkldnn.enabled = False` torch chooses everywhere.
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

#: Vendor names in /proc/cpuinfo.
AMD = ("AuthenticAMD", "HygonGenuine")
ZEN_5 = 26  # the CPU family
CPU_INFO = Path("/proc/cpuinfo")  # on Linux


@dataclass(frozen=True)
class Products:
    """Matrix products outside of autograd, by one or several libraries.

    linear      x [..., in], weight [out, in], bias [out] or None -> [..., out]
    multiply    left [M, K], right [K, N] -> [M, N]
    add         out [M, N] becomes beta out + alpha left right; with beta 0, out is not read
    least       the least elements of an fp32 weight for which our node (fused_linear.py) is faster
    """

    linear: Linear
    multiply: Callable[[Tensor, Tensor], Tensor]
    add: Callable[[Tensor, Tensor, Tensor, float, float], object]
    least: int


def fastest(device: torch.device) -> Products:
    """The fastest products on `device`; torch's own for unknown devices."""
    has_onednn = device.type == "cpu" and torch.backends.mkldnn.is_available()
    usable = has_onednn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    cpu = _processor() if usable else ""
    if not any(name in cpu for name in AMD):
        return BY_TORCH
    family = re.search(r"family\s*:?\s*(\d+)", cpu, re.IGNORECASE)
    return BY_ONEDNN if family and int(family[1]) >= ZEN_5 else BY_BOTH


def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product by oneDNN in fp32 on a CPU, outside of autograd; otherwise by torch."""
    usual = bias is None or bias.shape == weight.shape[:1]
    if not (usual and _fits_onednn(x, weight)):
        return functional.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _fits_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN can multiply these, and is enabled."""
    on_cpu = x.device.type == weight.device.type == "cpu"
    fp32 = x.dtype == weight.dtype == torch.float32
    fits = x.dim() > 0 and x.shape[-1] == weight.shape[1] > 0 and _is_dense(weight)
    # dispatch modes that count or replace operations expect torch's own
    enabled = torch._C._get_mkldnn_enabled() and not torch._C._len_torch_dispatch_stack()
    return on_cpu and fp32 and fits and enabled


def _is_dense(weight: Tensor) -> bool:
    """Whether no two elements share memory, in row-major or column-major order."""
    (out, width), (down, along) = weight.shape, weight.stride()
    return (along == 1 and down >= width) or (down == 1 and along >= out)


def _multiply_by_onednn(left: Tensor, right: Tensor) -> Tensor:
    return _product(left, right).contiguous()


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The product, row-major or column-major: oneDNN copies the smaller factor if needed."""
    if left.shape[0] > right.shape[1]:
        return by_onednn(right.t(), left, None).t()
    return by_onednn(left, right.t(), None)


def _add_by_torch(out: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> None:
    torch.addmm(out, left, right, beta=beta, alpha=alpha, out=out)


def _add_by_onednn(out: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> None:
    """OneDNN has no product that adds in place: this computes a temporary tensor and adds it."""
    if out.dtype != torch.float32 or not _fits_onednn(left, right.t()):
        _add_by_torch(out, left, right, beta, alpha)
        return
    product = _product(left, right)
    if beta == 0:
        torch.mul(product, alpha, out=out)
        return
    if beta != 1:
        out.mul_(beta)
    out.add_(product, alpha=alpha)


BY_TORCH: Final = Products(functional.linear, torch.mm, _add_by_torch, least=2**16)
#: y and gx by oneDNN, gW by torch.
BY_BOTH: Final = Products(by_onednn, torch.mm, _add_by_torch, least=2**16)
BY_ONEDNN: Final = Products(by_onednn, _multiply_by_onednn, _add_by_onednn, least=2**13)


def _processor() -> str:
    """The system's description of the first CPU."""
    try:
        with CPU_INFO.open(encoding="utf-8", errors="replace") as lines:
            return lines.read(4096)
    except OSError:
        return platform.processor()
