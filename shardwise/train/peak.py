"""The machine's peak: the rate of floating-point operations that large matrix products reach here.

Model FLOPs utilisation (MFU; PaLM, arXiv 2204.02311, appendix B) is the share of a peak that the
model's own operations make up. A data sheet's peak says little of a processor core, so this one is
measured, on the run's device, in its precision, with its threads, while the other ranks measure
theirs: an MFU of 50 % means half of what matrix products alone would do.
"""

import time

import torch

REPEATS = 10
# large enough to reach the peak, small enough to take milliseconds
SIZES = {"cpu": 1024, "cuda": 8192}


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of the best of a few square products, two to a multiply-add."""
    size = SIZES.get(device.type, 2048)
    a = torch.full((size, size), 0.5, device=device, dtype=dtype)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)  # the first one pays for start-up
    best_s = min(_one_s(a, out) for _ in range(REPEATS))
    return 2 * size**3 / best_s


def _one_s(a: torch.Tensor, out: torch.Tensor) -> float:
    _wait(a.device)
    start = time.perf_counter()
    torch.mm(a, a, out=out)
    _wait(a.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
