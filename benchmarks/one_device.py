"""The overhead of Shardwise without communication: the suite `data` on one GPU, and `host`.

    A   the model, loss and AdamW in a plain PyTorch loop
    B   a row of the states table on a world of one: the same arithmetic, with all hooks

A and B take turns. With one rank every row keeps everything: 16 bytes for each parameter.

On a GPU the time is that of a step, in the suite `host` the processor's, for many small layers.
"""

import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.contenders.contender import Batch, Loop, Setup, adamw
from benchmarks.contenders.ours import engine_of
from benchmarks.table import aligned
from shardwise.comm.link_times import settle
from shardwise.comm.start.launch import spawn
from shardwise.core.errors import bad
from shardwise.core.zero import ROWS, bytes_per_parameter
from shardwise.models import gpt
from shardwise.models.gpt import SIZES, GPTConfig
from shardwise.models.registry import of_sizes

#: 1.05e9 parameters.
BILLION: Final = GPTConfig(
    vocabulary=32768,
    layers=18,
    hidden_size=2048,
    heads=16,
    kv_heads=16,
    intermediate_size=5504,
    sequence=2048,
)
#: 24 layers whose products take little time.
NARROW: Final = GPTConfig(
    vocabulary=256,
    layers=24,
    hidden_size=64,
    heads=4,
    kv_heads=4,
    intermediate_size=256,
    sequence=32,
)
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Bytes per parameter of the parameter, its gradient and AdamW's state.
STATE_BYTES: Final = {"fp32": (4, 4, 8), "bf16": (2, 2, 12)}


@dataclass(frozen=True)
class Pair:
    """One comparison: a row, a size and a precision."""

    size: str
    config: GPTConfig
    precision: str
    row: str
    rows: int  # sequences in a batch
    rounds: int
    device: str = "cuda"


@dataclass(frozen=True)
class DeviceLine:
    """The result of a comparison: medians of B, its ratio to A, its MFU.

    `state_bytes` are the engine's parameters, gradients and optimizer state between steps;
    `predicted_bytes` excludes the optimizer's step counts (4 bytes for each tensor). MFU is
    relative to large matrix products on this GPU.
    """

    size: str
    contender: str
    precision: str
    step_s: float
    plain_s: float
    ratio: float
    mfu: float
    state_bytes: int
    predicted_bytes: int
    loss: float
    plain_loss: float


def run(rounds: int | None, device: str = "cuda") -> list[DeviceLine]:
    """All comparisons, in one process on that device. Raises InputError without a GPU."""
    if device == "cuda":
        require_gpu()
        sizes = (("small", SIZES["small"], "fp32", 32), ("1B", BILLION, "bf16", 4))
    else:
        sizes = tuple(("24 layers", NARROW, precision, 2) for precision in DTYPES)
    count = (10 if device == "cuda" else 40) if rounds is None else rounds
    pairs = [
        Pair(size, config, precision, row, rows, count, device)
        for size, config, precision, rows in sizes
        for row in ROWS
    ]
    return spawn(rank, ranks=1, args=(pairs,), device=device)[0]


def require_gpu() -> None:
    """Raise InputError where PyTorch sees no GPU."""
    if not torch.cuda.is_available():
        raise bad(
            "--device cuda, where PyTorch sees no GPU",
            "a machine with an NVIDIA GPU and a PyTorch built for it; or the CPU",
            "python -m benchmarks data --device cpu",
        )


def rank(pairs: Sequence[Pair]) -> list[DeviceLine]:
    """The one rank."""
    dist.init_process_group("nccl" if pairs[0].device == "cuda" else "gloo")
    return [compare(pair) for pair in pairs]


def compare(pair: Pair) -> DeviceLine:
    """A and B take turns, A first, for `rounds` rounds after two warm-up rounds."""
    gc.collect()  # frees the models of the previous pair, whose hooks and modules form cycles
    device = torch.device(pair.device)
    trainable = of_sizes(pair.size, pair.config)
    batch = trainable.batch(pair.rows, 0, device)
    setup = Setup(gpt.loss, gpt.Block, 1, device, pair.precision)
    model = _built(pair.size, pair.config, device)
    plain = bare_loop(copy.deepcopy(model), setup)
    engine = engine_of(copy.deepcopy(model), f"dp{{n}} {pair.row}", setup)
    steps = (plain.step, lambda batch: engine.step(batch).loss)
    times: list[tuple[float, float]] = []
    losses = (0.0, 0.0)
    for _ in range(pair.rounds + 2):
        turn = [_timed(step, batch, device) for step in steps]
        times.append((turn[0][0], turn[1][0]))
        losses = (turn[0][1], turn[1][1])
    times = times[2:]
    step_s = statistics.median(b for _, b in times)
    flops = pair.config.flops_per_token * pair.rows * pair.config.sequence
    kept = engine.memory()
    n_bytes = bytes_per_parameter(ROWS[pair.row], 1, *STATE_BYTES[pair.precision])
    return DeviceLine(
        size=pair.size,
        contender=pair.row,
        precision=pair.precision,
        step_s=step_s,
        plain_s=statistics.median(a for a, _ in times),
        ratio=statistics.median(b / a for a, b in times),
        mfu=flops / step_s / measured_peak(device, DTYPES[pair.precision]),
        state_bytes=sum(kept[kind] for kind in ("parameters", "gradients", "optimizer")),
        predicted_bytes=round(n_bytes * pair.config.parameters),
        loss=losses[1],
        plain_loss=losses[0],
    )


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """The best rate of a few square products, in operations a second; a multiply-add is two."""
    size = 8192 if device.type == "cuda" else 768
    a = torch.full((size, size), 0.5, device=device, dtype=dtype)
    return (
        2 * size**3 / min(_timed(lambda _: float((a @ a)[0, 0]), {}, device)[0] for _ in range(9))
    )


@lru_cache(maxsize=1)
def _built(size: str, config: GPTConfig, device: torch.device) -> nn.Module:
    """The initial model; to draw its weights takes longer than the steps."""
    return of_sizes(size, config).build(device)


def bare_loop(model: nn.Module, setup: Setup) -> Loop:
    """The plain PyTorch loop; in bf16 with fp32 master weights."""
    if setup.precision == "fp32":
        optimizer = adamw(model.parameters())
        masters: list[Tensor] = []
    else:
        masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
        optimizer = adamw(masters)
        model = model.to(DTYPES[setup.precision])

    def step(batch: Batch) -> float:
        """One step; in bf16 the optimizer updates the masters."""
        loss = setup.loss(model, batch)
        loss.backward()
        for master, p in zip(masters, model.parameters(), strict=False):
            assert p.grad is not None
            master.grad = p.grad.float()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        if masters:
            with torch.no_grad():
                for p, master in zip(model.parameters(), masters, strict=True):
                    p.copy_(master)
        return loss.item()

    return Loop(step)


def _timed(
    step: Callable[[Batch], float | None], batch: Batch, device: torch.device
) -> tuple[float, float]:
    settle(device)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    began = clock()
    loss = step(batch)
    settle(device)
    assert loss is not None  # every rank knows the loss of a world of one
    return clock() - began, loss


def as_text(rows: Sequence[DeviceLine]) -> str:
    """A line for each comparison."""
    times = (
        "step ms",
        "plain ms",
        "ratio",
        "MFU",
        "states MiB",
        "formula MiB",
        "loss",
        "plain",
        "",
    )
    return "\n".join(aligned([("size, row, precision", *times), *map(_cells, rows)]))


def _cells(row: DeviceLine) -> tuple[str, ...]:
    return (
        f"{row.size} {row.contender} {row.precision}",
        *(f"{row.step_s * 1e3:.2f}", f"{row.plain_s * 1e3:.2f}", f"{row.ratio:.3f}"),
        *(f"{row.mfu:.1%}", f"{row.state_bytes / 2**20:.1f}", f"{row.predicted_bytes / 2**20:.1f}"),
        *(f"{row.loss:.5f}", f"{row.plain_loss:.5f}", ""),
    )
