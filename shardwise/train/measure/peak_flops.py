"""The machine's peak: the measured floating-point rate of large matrix products.

Model FLOPs utilisation (MFU; PaLM, arXiv 2204.02311, appendix B) is the rate of the model's
operations as a fraction of the peak. A data sheet's peak says little about one CPU core, so the
peak is measured: on the run's device, in its precision and with its threads, on all ranks at once.
An MFU of 50 % means half the rate of matrix products alone.

Other programs may slow the machine down for a while, so the best of several rounds counts, and the
ranks begin each round together. If a step is faster than the peak, its rate becomes the new peak.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

ROUNDS = 5
REPEATS = 3  # products per round
# large enough to reach the peak, small enough to take milliseconds
SIZES = {"cpu": 768, "cuda": 8192}


@dataclass
class Peak:
    """The highest measured rate of this rank, in operations per second."""

    flops: float

    def share(self, flops: float) -> float:
        """A rate as a fraction of the peak; a higher rate becomes the new peak."""
        self.flops = max(self.flops, flops)
        return flops / self.flops


def measured_peak(
    device: torch.device, dtype: torch.dtype, together: Callable[[], object] = bool
) -> float:
    """The best rate of a few square products, in operations per second; a multiply-add is two.

    Each round begins with `together`, a barrier for ranks that share a machine.
    """
    size = SIZES.get(device.type, 2048)
    a = torch.full((size, size), 0.5, device=device, dtype=dtype)
    torch.mm(a, a)  # warm-up
    best_s = float("inf")
    for _ in range(ROUNDS):
        together()
        best_s = min(best_s, *(_one_s(a) for _ in range(REPEATS)))
    return 2 * size**3 / best_s


def _one_s(a: torch.Tensor) -> float:
    _wait(a.device)
    start = time.perf_counter()
    torch.mm(a, a)
    _wait(a.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
