"""The speed of a rank's device, as a step uses it: all ranks measure at the same time.

    products    n x n by n x n, with other operands each time: a step finds few of them in a cache
    memory      the sum of two tensors into a new one
    launch      what each microbatch adds to a step of a tiny model, over its number of operations
    step        the rest of such a step: hooks, the agreement of ranks, the optimizer's own calls
    overlap     products alone, a message alone, then products during messages
    host link   copies to pinned memory, on CUDA

Ranks that share a machine share its caches and its memory too, so each rank alone would be faster
than it is in a step. Times are the lower quartile of several, since other programs only add time.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from shardwise.comm import move
from shardwise.comm.world import Axis, World, alone
from shardwise.core.plan.plan import Plan
from shardwise.doctor.collectives import lower_quartile, timed
from shardwise.engine.options import EngineOptions
from shardwise.engine.parallelize import build_engine
from shardwise.engine.predict import predict_with
from shardwise.models import gpt
from shardwise.prediction.prediction import Operation
from shardwise.prediction.time.network import PRECISIONS

Act = Callable[[], object]
#: The sizes n of products, and the elements (fp32) of tensors in memory.
PRODUCTS: Final = {"cpu": (64, 128, 256, 512), "cuda": (256, 512, 1024, 2048, 4096, 8192)}
ELEMENTS: Final = {"cpu": 2**22, "cuda": 2**27}
OPERANDS_BYTES: Final = 2**26  # more than a cache
ROUNDS: Final = 9
RUNS: Final = 5  # microbatches of a step
ROUND_S: Final = 0.02
MOST_S: Final = 0.2  # of one product; larger ones of its precision are not measured
TINY: Final = gpt.GPTConfig(
    vocabulary=32, layers=4, hidden_size=16, heads=2, kv_heads=2, intermediate_size=32, sequence=8
)


@dataclass(frozen=True)
class DeviceSpeed:
    """One rank's device.

    products   (FLOPs, FLOPs a second) of each size, by precision
    figures    the other speeds, as prediction/cluster.py names them
    link       the fields of its link to the host; empty for "cpu"
    """

    kind: str
    products: dict[str, list[tuple[float, float]]]
    figures: dict[str, float]
    link: dict[str, float]


def measure_device(world: World) -> DeviceSpeed:
    """The speeds of this rank's device; called by all ranks."""
    device, together = world.device, world.barrier
    kind = "cuda" if device.type == "cuda" else "cpu"
    products = {name: _products(dtype, kind, world) for dtype, name in PRECISIONS.items()}
    figures = {"memory_bytes_per_s": _memory(ELEMENTS[kind], device, together)}
    figures["launch_s"], figures["step_s"] = _launches_s(device, together)
    figures["overlap"] = _overlap(world.everyone, world) if world.size > 1 else 1.0
    link = _host_link(device, together) if kind == "cuda" else {}
    return DeviceSpeed(kind, products, figures, link)


def _products(dtype: str, kind: str, world: World) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for n in PRODUCTS[kind]:
        seconds = _seconds(_product(n, dtype, world.device), world.device, world.barrier)
        flops = 2.0 * n**3
        found.append((flops, flops / seconds))
        if 8 * seconds > MOST_S:
            break
    return found


def _product(n: int, dtype: str, device: torch.device) -> Act:
    """Multiplies two of many matrices, two others at each call."""
    form = getattr(torch, dtype)
    count = max(2, OPERANDS_BYTES // (n * n * form.itemsize))
    operands = torch.full((count, n, n), 0.5, dtype=form, device=device)
    calls = 0

    def act() -> Tensor:
        nonlocal calls
        calls += 1
        return operands[calls % count] @ operands[(7 * calls + 1) % count].t()

    return act


def _memory(numel: int, device: torch.device, together: Act) -> float:
    a, b = (torch.ones(numel, device=device) for _ in range(2))
    return 3 * 4 * numel / _seconds(lambda: a + b, device, together)


def _launches_s(device: torch.device, together: Act) -> tuple[float, float]:
    """The time of an operation, and of the rest of a step, of TINY: its work is next to nothing."""
    times: list[float] = []
    options, operations = EngineOptions(loss=gpt.loss), 1
    for runs in (1, RUNS):
        plan = Plan.parse(f"dp1 fp32 accumulate:{runs}")
        tokens = torch.zeros(runs, TINY.sequence, dtype=torch.long, device=device)
        batch = {"inputs": tokens, "targets": tokens}
        with torch.device("meta"):
            model = gpt.GPT(TINY)
        found = predict_with(model, plan, batch, options)
        step = found.dry_step
        kernels = sum(isinstance(each, Operation) for each in step.issued)
        operations = kernels / step.few.microbatches
        engine = build_engine(gpt.GPT(TINY), plan, alone(device), options)
        times.append(
            _seconds(lambda engine=engine, batch=batch: engine.step(batch), device, together)
        )
    run_s = max(0.0, times[1] - times[0]) / (RUNS - 1)
    return run_s / operations, max(0.0, times[0] - run_s)


def _overlap(axis: Axis, world: World) -> float:
    """The part of a message's time in which products lose no time."""
    device, together = world.device, world.barrier
    x = torch.zeros(2**21, device=device)
    product = _product(256, "float32", device)
    message_s = _seconds(lambda: move.begin_sum(x, axis).wait(), device, together, calls=4)
    count = max(1, round(message_s / _seconds(product, device, together)))

    def compute() -> None:
        for _ in range(count):
            product()

    def both() -> None:
        pending = move.begin_sum(x, axis)
        compute()
        pending.wait()

    alone_s = _seconds(compute, device, together, calls=4)
    both_s = _seconds(both, device, together, calls=4)
    hidden_s = alone_s + message_s - both_s
    return min(1.0, max(0.0, hidden_s / min(alone_s, message_s)))


def _host_link(device: torch.device, together: Act) -> dict[str, float]:
    times: list[float] = []
    small, large = sizes = (2**10, 2**26)
    for numel in sizes:
        x, out = torch.zeros(numel, device=device), torch.zeros(numel).pin_memory()
        times.append(_seconds(lambda x=x, out=out: out.copy_(x), device, together))
    rate = 4 * (large - small) / max(1e-12, times[1] - times[0])
    return {"latency_s": max(0.0, times[0] - 4 * small / rate), "bytes_per_s": rate}


def _seconds(act: Act, device: torch.device, together: Act, calls: int | None = None) -> float:
    """The lower quartile of the times of a call, in rounds of about ROUND_S or of `calls`."""
    act()
    timed(act, device)
    if calls is None:
        calls = max(1, min(1000, round(ROUND_S / timed(act, device))))
    times: list[float] = []
    for _ in range(ROUNDS):
        together()
        times.append(timed(act, device, calls))
    return lower_quartile(times)


def median_device(by_rank: Sequence[DeviceSpeed]) -> DeviceSpeed:
    """The median over ranks of each figure, because the ranks of a step wait for one another."""

    def middle(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return {name: statistics.median(each[name] for each in figures) for name in figures[0]}

    first = by_rank[0]
    products = {
        name: [
            (pairs[0][0], statistics.median(rate for _, rate in pairs))
            for pairs in zip(*(each.products[name] for each in by_rank), strict=False)
        ]
        for name in first.products
    }
    figures = middle([each.figures for each in by_rank])
    return DeviceSpeed(first.kind, products, figures, middle([each.link for each in by_rank]))
