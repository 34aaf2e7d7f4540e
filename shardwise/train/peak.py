"""The machine's peak: the floating-point rate that large matrix products reach on it.

Model FLOPs utilisation (MFU; PaLM, arXiv 2204.02311, appendix B) is the share of a peak that the
model's own operations make up. A data sheet's peak says little of a processor core, so this one is
measured, on the run's device, in its precision, by the library that the run takes for large
products, with its threads, while the other ranks measure theirs: an MFU of 50 % means half of what
matrix products alone would do.

Something else may have the machine for a while, so the best of several rounds counts, and the ranks
begin each together. A step that is faster still has shown that the peak was higher: it becomes the
peak, of this step and of all that follow.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardwise.kernels.matmul import Linear, fastest

ROUNDS = 5
REPEATS = 3  # products a round
# large enough to reach the peak, small enough to take milliseconds
SIZES = {"cpu": 768, "cuda": 8192}


@dataclass
class Peak:
    """The most operations a second that this rank has been seen to do."""

    flops: float

    def share(self, flops: float) -> float:
        """A rate as a fraction of the peak; a higher rate becomes the new peak."""
        self.flops = max(self.flops, flops)
        return flops / self.flops


def measured_peak(
    device: torch.device, dtype: torch.dtype, together: Callable[[], object] = bool
) -> float:
    """Operations a second of the best of a few square products, two to a multiply-add.

    Each round begins with `together`, which ranks that share a machine wait in for one another.
    """
    size = SIZES.get(device.type, 2048)
    a = torch.full((size, size), 0.5, device=device, dtype=dtype)
    multiply = fastest(device).linear
    multiply(a, a, None)  # the first one pays for start-up
    best_s = float("inf")
    for _ in range(ROUNDS):
        together()
        best_s = min(best_s, *(_one_s(a, multiply) for _ in range(REPEATS)))
    return 2 * size**3 / best_s


def _one_s(a: torch.Tensor, multiply: Linear) -> float:
    _wait(a.device)
    start = time.perf_counter()
    multiply(a, a, None)
    _wait(a.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
