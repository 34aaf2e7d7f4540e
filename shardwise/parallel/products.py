"""this file is which library multiplies matrices: of those torch was built with, the faster here.

    fp32 on an AMD processor      oneDNN: an eighth faster there than MKL, which torch takes, and
                                  twice as fast from Zen 5 on, for weights' gradients too
    everything else               torch's own choice

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
    """Products, outside of autograd.

    linear      x [..., in], weight [out, in], bias [out] or None -> [..., out]
    multiply    left [M, K], right [K, N] -> [M, N]
    add         out [M, N] becomes beta out + alpha left right; of beta 0 it is not read
    least       elements of a weight from which on a node of ours (nodes.py) is worth it
    """

    linear: Linear
    multiply: Callable[[Tensor, Tensor], Tensor]
    add: Callable[[Tensor, Tensor, Tensor, float, float], object]
    least: int = 2**16


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
    able = x.dtype == weight.dtype == torch.float32 and x.device.type == weight.device.type == "cpu"
    fits = x.dim() > 0 and x.shape[-1] == weight.shape[1]
    usual = bias is None or bias.shape == weight.shape[:1]
    # a mode that counts or replaces operations knows torch's own
    told = torch._C._get_mkldnn_enabled() and not torch._C._len_torch_dispatch_stack()
    if not (able and fits and usual and told):
        return functional.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _multiplied(left: Tensor, right: Tensor) -> Tensor:
    return by_onednn(left, right.t(), None)


def _add(out: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> None:
    torch.addmm(out, left, right, beta=beta, alpha=alpha, out=out)


def _added(out: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> None:
    """Made, then added: in place there is no such product of oneDNN's."""
    if out.dtype != torch.float32:  # where the sum is rounded once
        _add(out, left, right, beta, alpha)
    elif beta:
        out.mul_(beta) if beta != 1 else out
        out.add_(_multiplied(left, right), alpha=alpha)
    else:
        torch.mul(_multiplied(left, right), alpha, out=out)


BY_TORCH: Final = Products(functional.linear, torch.mm, _add)
BY_BOTH: Final = Products(by_onednn, torch.mm, _add)
BY_ONEDNN: Final = Products(by_onednn, _multiplied, _added, least=2**13)


def _processor() -> str:
    """What the system says of the first processor."""
    try:
        with TOLD.open(encoding="utf-8", errors="replace") as lines:
            return lines.read(4096)
    except OSError:
        return platform.processor()
