"""Shardwise as contenders, by plan words."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from torch import nn

import shardwise as sw
from benchmarks.contenders.contender import (
    LEARNING_RATE,
    WEIGHT_DECAY,
    Batch,
    Contender,
    Loop,
    Setup,
    TierBytes,
    adamw,
    plain_loop,
)
from shardwise.comm.torch_links import TorchLinks
from shardwise.core.zero import ROWS
from shardwise.models import gpt


def engine_of(model: nn.Module, plan: str, setup: Setup, **options: Any) -> sw.Engine:
    """The engine of a plan such as "dp{n} zero1" on n ranks, with the common optimizer.

    `options` are further options of `sw.parallelize`.
    """
    return sw.parallelize(
        model,
        f"{setup.precision} {plan.format(n=setup.ranks)}",
        sw.init(setup.device.type),
        optimizer=sw.AdamW(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY),
        loss=setup.loss,
        tokens=gpt.tokens,
        **options,
    )


def planned(plan: str) -> Callable[[nn.Module, Setup], Loop]:
    """Build with `sw.parallelize` and that plan over all ranks."""

    def build(model: nn.Module, setup: Setup) -> Loop:
        """The engine's loop."""
        return looped(engine_of(model, plan, setup, offload_folder=tempfile.gettempdir()))

    return build


def by_hand(wrap: Callable[..., nn.Module]) -> Callable[[nn.Module, Setup], Loop]:
    """The plain loop of a wrapped module, with torch's own optimizer."""

    def build(model: nn.Module, setup: Setup) -> Loop:
        """The loop, and what its messages send through shared memory."""
        world = sw.init(setup.device.type)
        wrapped = wrap(model, world=world)
        loop = plain_loop(wrapped, adamw(wrapped.parameters()), setup)
        return replace(loop, shared_bytes=lambda: _shared_bytes(world))

    return build


def _shared_bytes(world: sw.World) -> int:
    return world.links.shared_bytes if isinstance(world.links, TorchLinks) else 0


def looped(engine: sw.Engine) -> Loop:
    """The loop of an engine."""

    def step(batch: Batch) -> float:
        return engine.step(batch).loss

    def settle() -> None:
        # a delayed update, and gathers of the updated parameters, overlap with the next step
        engine.flush()
        engine.wait()

    def beyond() -> TierBytes:
        sent = engine.measured_bytes()
        moved_bytes = sum(count for kind, count in sent.items() if kind.startswith("tier "))
        on_host, on_disk = engine.host_memory(), engine.disk_memory()
        return TierBytes(sum(on_host.values()), sum(on_disk.values()), moved_bytes)

    tiers = engine.world.tiers
    return Loop(
        step, settle, lambda: _shared_bytes(engine.world), lambda x: tiers.of(x) != "device", beyond
    )


DATA = tuple(Contender(word, word, planned(f"dp{{n}} {word}")) for word in ROWS)
LOOPS = (
    Contender("sw.DDP", "ddp", by_hand(sw.DDP)),
    Contender("sw.FSDP", "zero3", by_hand(sw.FSDP)),
)
MEMORY = (
    Contender("zero3 recompute:selective", "zero3", planned("dp{n} zero3 recompute:selective")),
    Contender("zero3 recompute:full", "zero3", planned("dp{n} zero3 recompute:full")),
    Contender("zero3 recompute:full arenas", "zero3", planned("dp{n} zero3 recompute:full arenas")),
    Contender("zero3 activations:host", "zero3", planned("dp{n} zero3 activations:host")),
    Contender(
        "zero3 activations:host recompute:full",
        "zero3",
        planned("dp{n} zero3 activations:host recompute:full"),
    ),
    Contender("zero3 buffers:2MiB", "zero3", planned("dp{n} zero3 buffers:2MiB")),
    Contender("ddp recompute:full", "ddp", planned("dp{n} ddp recompute:full")),
    Contender("tp recompute:full", "tp", planned("tp{n} recompute:full"), whole_batch=True),
    Contender(
        "tp recompute:partitioned", "tp", planned("tp{n} recompute:partitioned"), whole_batch=True
    ),
    Contender(
        "tp recompute:partitioned-host",
        "tp",
        planned("tp{n} recompute:partitioned-host"),
        whole_batch=True,
    ),
)
OFFLOAD = tuple(
    Contender(f"{row} offload:{what}", row, planned(f"dp{{n}} {row} offload:{what}"), against=row)
    for row, what in (
        ("zero2", "optim"),
        ("zero2", "optim-delayed=0"),
        ("zero2", "optim@disk"),
        ("zero3", "optim"),
        ("zero3", "param"),
        ("zero3", "param@disk"),
    )
)
TILED = (Contender("zero3 tile:4", "zero3", planned("dp{n} zero3 tile:4"), against="zero3"),)
TENSOR = (
    Contender("tp", "tp", planned("tp{n}"), whole_batch=True),
    Contender("tp sp", "tp sp", planned("tp{n} sp"), whole_batch=True),
)
CONTEXT = tuple(
    Contender(f"cp{more}", "cp", planned(f"cp{{n}}{more}"), whole_batch=True)
    for more in ("", ":ulysses", " zero3")
)

#: Data ranks whose embedding and head are on the tensor axis, beside the uniform plans.
LAYERS = tuple(
    Contender(f"{row} | embed,head: tp", row, planned(f"dp{{n}} {row} | embed,head: tp{{n}} ddp"))
    for row in ("ddp", "zero1", "zero3")
)

#: Every schedule that torch has too, with 4 and 8 microbatches.
SCHEDULES: Final = tuple(
    f"{name}:{microbatches}{chunks}"
    for microbatches in (4, 8)
    for name, chunks in (
        ("gpipe", ""),
        ("1f1b", ""),
        ("interleaved", "x2"),
        ("bfs", "x2"),
        ("zb-h1", ""),
        ("zb-v", ""),
        ("dualpipe-v", ""),
    )
)
PIPELINE = tuple(
    Contender(word, word, planned(f"pp{{n}} {word}"), whole_batch=True, against=f"torch {word}")
    for word in SCHEDULES
)
