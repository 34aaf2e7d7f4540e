"""The suite `offload` on one GPU: the largest model that trains, and what its copies cost.

    layers    the most for which a step is predicted to fit: bytes of each tier grow by the same for
              each layer; after a step that runs out of memory, with a tenth less on the device
    TFLOP/s   the model's operations in a step, those of recomputation apart
    hidden    the part of the time of copies between device and host in which kernels ran

All are in bf16 with `recompute:full`, 16 bytes of states a parameter.  So a GPU holds at most its
memory/16 parameters, with offload (device + host)/16 (ZeRO-Offload, arXiv 2101.06840), and with a
disk (device + host + disk)/16 (ZeRO-Infinity, arXiv 2104.07857).
"""

import gc
import os
import shutil
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import shardwise as sw
from benchmarks.contenders.contender import Setup
from benchmarks.contenders.ours import engine_of
from benchmarks.cuda import BILLION, require_gpu
from benchmarks.fit import FEWEST, FILLED_HOST, Fit, Room, most_layers, plan_of, predicted
from benchmarks.table import aligned
from shardwise.comm.start.launch import spawn
from shardwise.comm.tiers.disk import open_unnamed
from shardwise.comm.tiers.host_memory import free_bytes
from shardwise.models import gpt
from shardwise.models.registry import of_gpt
from shardwise.prediction.peak_memory import device_peak_bytes

OFFLOADS: Final = (None, "optim", FILLED_HOST, "param")
ON_DISK: Final = ("optim@disk", "param@disk")
STATE_BYTES: Final = 16
#: The part of the host's free memory, and of the disk's, that states may take.
HOST_PART: Final = 0.8
DISK_PART: Final = 0.9
ROUNDS: Final = 3
GIB: Final = 2**30

Span = tuple[float, float]


@dataclass(frozen=True)
class LargestLine:
    """The largest model of a plan; None for what was not measured.

    share   its parameters over those of which the states fill the device and, as far as the plan
            uses them, the parts of the host's memory and of the disk that they may take
    hidden  the part of the copies' time that lies beside kernels
    """

    contender: str
    layers: int
    parameters: int
    share: float
    step_s: float
    tflops: float
    hidden: float | None
    peak_bytes: int | None
    predicted_bytes: int


def run(folder: Path | None, rounds: int | None) -> list[LargestLine]:
    """The largest models on the first GPU, and with a folder on the disk that it is on.

    Raises InputError without a GPU, and for a folder that cannot be written.
    """
    require_gpu("offload")
    if folder is not None:
        os.close(open_unnamed(folder, 0, "python -m benchmarks offload /mnt/nvme --device cuda"))
    return spawn(rank, 1, (folder and str(folder), rounds or ROUNDS), device="cuda")[0]


def rank(folder: str | None, rounds: int) -> list[LargestLine]:
    """The one rank, on NCCL."""
    dist.init_process_group("nccl")
    device_bytes = torch.cuda.get_device_properties(0).total_memory
    disk_bytes = int(DISK_PART * shutil.disk_usage(folder).free) if folder else 0
    host_bytes = int(HOST_PART * free_bytes())
    room = Room(device_bytes, host_bytes, disk_bytes, BILLION, rows=4, folder=folder)
    return [largest(offload, room, rounds) for offload in (*OFFLOADS, *ON_DISK * bool(folder))]


def largest(offload: str | None, room: Room, rounds: int) -> LargestLine:
    """The largest model that trains with this value of `offload:` in this room."""
    left = room
    while (fit := most_layers(offload, left)).layers >= FEWEST:
        gc.collect()  # the engine before, which is in cycles
        if room.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            return measured(fit, room, rounds)
        except torch.OutOfMemoryError:
            peak = device_peak_bytes(predicted(fit.offload, room, fit.layers))
            left = replace(left, device_bytes=min(peak, left.device_bytes) * 9 // 10)
    return LargestLine(_name(offload), 0, 0, 0.0, 0.0, 0.0, None, None, 0)


def _name(offload: str | None) -> str:
    return "none" if offload is None else f"offload:{offload}"


def measured(fit: Fit, room: Room, rounds: int) -> LargestLine:
    """Train a model that is predicted to fit. Raises torch.OutOfMemoryError."""
    config, device = replace(room.config, layers=fit.layers), torch.device(room.device)
    with torch.device("meta"):
        model = gpt.GPT(config)
    setup = Setup(gpt.loss, gpt.Block, 1, device, "bf16")
    engine = engine_of(
        *(model, plan_of(fit.offload), setup),
        fill=_fill,
        offload_folder=room.folder,
        least_unit_bytes=room.least_unit_bytes,
    )
    batch = of_gpt("largest", config).batch(room.rows, 0, device)
    times: list[float] = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        engine.step(batch)
        _settle(engine, device)
        times.append(time.perf_counter() - began)
    step_s = statistics.median(times[1:])
    count = gpt.parameters(config)
    flops = gpt.flops_per_token(config) * room.rows * config.sequence
    full = room.device_bytes
    full += room.host_bytes * (fit.offload is not None)
    full += room.disk_bytes * ("disk" in (fit.offload or ""))
    peak_bytes = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return LargestLine(
        contender=_name(fit.offload),
        layers=fit.layers,
        parameters=count,
        share=count * STATE_BYTES / full,
        step_s=step_s,
        tflops=flops / step_s / 1e12,
        hidden=hidden_share(lambda: _settled_step(engine, batch, device), device),
        peak_bytes=peak_bytes,
        predicted_bytes=device_peak_bytes(predicted(fit.offload, room, fit.layers)),
    )


def _fill(name: str, tensor: Tensor) -> None:
    """Small random weights; gains of norms are 1."""
    if tensor.dim() > 1:
        tensor.normal_(std=0.02)
    else:
        tensor.fill_(float("norm" in name))


def _settled_step(engine: sw.Engine, batch: Any, device: torch.device) -> None:
    engine.step(batch)
    _settle(engine, device)


def _settle(engine: sw.Engine, device: torch.device) -> None:
    engine.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def hidden_share(step: Callable[[], None], device: torch.device) -> float | None:
    """The part of the copies' time in which kernels ran; None without copies that overlap."""
    if device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
    copies: list[Span] = []
    kernels: list[Span] = []
    for event in found.events() or ():
        if event.device_type == DeviceType.CUDA:
            span = float(event.time_range.start), float(event.time_range.end)
            between = "HtoD" in event.name or "DtoH" in event.name
            (copies if between else kernels).append(span)
    return covered(copies, kernels)


def covered(spans: Iterable[Span], by: Iterable[Span]) -> float | None:
    """The part of the length of `spans` that lies inside of some span of `by`; None without any."""
    merged: list[Span] = []
    for first, last in sorted(by):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    ends = [last for _, last in merged]
    length = inside = 0.0
    for first, last in spans:
        length += last - first
        for low, high in merged[bisect_left(ends, first) :]:
            if low >= last:
                break
            inside += min(last, high) - max(first, low)
    return inside / length if length else None


def as_text(rows: Sequence[LargestLine]) -> str:
    """The rows as a table."""
    head = ("plan", "layers", "parameters", "of memory", "step ms", "TFLOP/s", "hidden")
    return "\n".join(aligned([(*head, "peak GiB", "predicted"), *map(_cells, rows)]))


def _cells(row: LargestLine) -> tuple[str, ...]:
    return (
        row.contender,
        str(row.layers),
        f"{row.parameters / 1e9:.3f}e9",
        f"{row.share:.0%}",
        f"{row.step_s * 1e3:.1f}",
        f"{row.tflops:.1f}",
        "-" if row.hidden is None else f"{row.hidden:.0%}",
        "-" if row.peak_bytes is None else f"{row.peak_bytes / GIB:.1f}",
        f"{row.predicted_bytes / GIB:.1f}",
    )
