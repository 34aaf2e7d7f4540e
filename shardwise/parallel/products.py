"""this file is which library multiplies matrices: of those torch was built with, the faster here.

    fp32 on an AMD processor      oneDNN: about an eighth faster there than MKL, which torch takes
    everything else               torch's own choice

A product is that of a linear layer: x [..., in], weight [out, in], bias [out] -> [..., out].  The
weight may be a transposed view, so that gy W, which goes on to the layer before, is one as well.
Figures in docs/measurements.md; `torch.backends.mkldnn.enabled = False` leaves all to torch.
"""

import platform
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]

#: What the vendor is called by the processor itself.
AMD = ("AuthenticAMD", "HygonGenuine")
TOLD = Path("/proc/cpuinfo")  # of Linux


def fastest(device: torch.device) -> Linear:
    """The product that is fastest on `device`; by torch itself where nothing else is known."""
    there = device.type == "cpu" and torch.backends.mkldnn.is_available()
    known = there and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return by_onednn if known and any(name in _processor() for name in AMD) else functional.linear


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


def _processor() -> str:
    """What the system says of the first processor."""
    try:
        with TOLD.open(encoding="utf-8", errors="replace") as lines:
            return lines.read(4096)
    except OSError:
        return platform.processor()
