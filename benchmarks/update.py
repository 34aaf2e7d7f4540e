"""The suite `update`: the optimizer's step over states in host memory, and nothing else of a step.

    ours     flat shards, 64 MiB a call: gradients to the host | AdamW | weights back
    FSDP2    the parameters of CPUOffloadPolicy, which rest in host memory: torch's AdamW
    DeepSpeed  one flat parameter, as in its ZeRO-Offload: DeepSpeedCPUAdam

All have the same weights and gradients, in fp32, in one process with one thread unless
OMP_NUM_THREADS is set, and take turns. The two copies are timed apart: on a CPU FSDP2 makes none,
and those of DeepSpeed are not part of its optimizer. AdamW of torch is the fused one for both.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.contenders.contender import LEARNING_RATE, WEIGHT_DECAY, Contender, Setup, adamw
from benchmarks.contenders.ours import engine_of
from benchmarks.stack import stack
from benchmarks.table import aligned
from shardwise.comm.start.launch import spawn
from shardwise.models.gpt import Block
from shardwise.techniques.data.flat.flat_parameter import Flat
from shardwise.techniques.offload.updater import MOST_BYTES, pieces

ROUNDS = 10


@dataclass(frozen=True)
class TimedUpdate:
    """A contender: `step` updates all weights, and returns the seconds of updates and of copies."""

    step: Callable[[], tuple[float, float]]
    weights: Callable[[], Sequence[Tensor]]


@dataclass
class UpdateLine:
    """A row: medians over rounds, None for what was not measured.

    update_s    the optimizer alone
    copies_s    the gradient to the host, and the updated weight back
    ratio       update_s over that of the fastest peer in the same round
    with_copies the same for update_s and copies_s together
    difference  the largest of weights after all rounds from FSDP2's, relative to its largest weight
    """

    contender: str
    parameters: int
    threads: int
    update_s: float | None = None
    copies_s: float | None = None
    ratio: float | None = None
    with_copies: float | None = None
    difference: float | None = None
    note: str = ""


@dataclass
class _Turns:
    """The seconds of each round."""

    updates: list[float] = field(default_factory=list[float])
    copies: list[float] = field(default_factory=list[float])


def run(count: int, rounds: int | None) -> list[UpdateLine]:
    """Measure about `count` parameters in a new process."""
    return spawn(rank, ranks=1, args=(count, ROUNDS if rounds is None else rounds))[0]


def rank(count: int, rounds: int) -> list[UpdateLine]:
    """The process that measures."""
    dist.init_process_group("gloo")
    return compare(count, rounds)


# --- the contenders ------------------------------------------------------------------------------


def ours(plan: str, model: nn.Module, setup: Setup) -> TimedUpdate:
    """The code of an engine's step from the gradient on the device on, without its other thread."""
    by_name = {name: gradient_of(p) for name, p in model.named_parameters()}
    engine = engine_of(model, plan, setup)
    units = [unit.trained for unit in reversed(engine.data.units.order) if unit.trained]
    arrived = {id(flat): _flat_gradient(flat, by_name) for flats in units for flat in flats}

    def step() -> tuple[float, float]:
        """As in a step that clips: all gradients to the host, all updates, all weights back."""
        began = time.perf_counter()
        for flats in units:
            for flat in flats:
                flat.grads.gshard = arrived[id(flat)]
                flat.grads.begin_offload()
                flat.grads.end_reduce()
                flat.grads.used = [True] * len(flat.params)
                flat.grads.attach()
        ready = time.perf_counter()
        for flats in pieces(engine.optimizer, engine.optimizer.flats, MOST_BYTES):
            engine.optimizer.step(flats)
        updated = time.perf_counter()
        for flats in units:
            engine.optimizer.publish(flats)
            for flat in flats:
                flat.grads.clear()
        return updated - ready, ready - began + time.perf_counter() - updated

    return TimedUpdate(step, lambda: [*model.parameters()])


def _flat_gradient(flat: Flat, by_name: dict[str, Tensor]) -> Tensor:
    """The gradient on the device, in the layout of the flat parameter; this rank has all of it."""
    found = torch.zeros(flat.views.plan.padded)
    for name, view in zip(flat.names, flat.views.every(found), strict=True):
        view.copy_(by_name[name])
    return found


def gradient_of(p: Tensor) -> Tensor:
    """The gradient that the suite has set."""
    assert p.grad is not None
    return p.grad


def fsdp2(model: nn.Module, _setup: Setup) -> TimedUpdate:
    """What a loop with CPUOffloadPolicy calls: torch's AdamW over its sharded parameters."""
    gradients = [gradient_of(p) for p in model.parameters()]
    mesh = init_device_mesh("cpu", (1,))
    policy = CPUOffloadPolicy(pin_memory=False)
    for module in (*model.children(), model):
        fully_shard(module, mesh=mesh, offload_policy=policy)
    optimizer = adamw(model.parameters())
    params: list[Any] = [*model.parameters()]
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = DTensor.from_local(gradient, mesh, p.placements)
    return TimedUpdate(partial(_timed, optimizer.step), lambda: [p.to_local() for p in params])


def deepspeed(model: nn.Module, _setup: Setup) -> TimedUpdate:
    """DeepSpeedCPUAdam over one flat parameter, whose kernel it compiles at its first use."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # an optional peer

    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
    flat.grad = torch.cat([gradient_of(p).flatten() for p in model.parameters()])
    optimizer = DeepSpeedCPUAdam([flat], lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    return TimedUpdate(partial(_timed, optimizer.step), lambda: [flat.detach()])


def _timed(act: Callable[[], Any]) -> tuple[float, float]:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began, 0.0


def _no_loss(_model: nn.Module, _batch: Any) -> Tensor:
    raise NotImplementedError  # there is no forward pass


SETUP = Setup(_no_loss, Block, 1, torch.device("cpu"))
FSDP2 = "FSDP2 CPUOffloadPolicy"
DEEPSPEED = "DeepSpeedCPUAdam"
#: Each is built from a model whose parameters have their gradients.
CONTENDERS = (
    Contender("offload:optim", "offload:optim", partial(ours, "offload:optim")),
    Contender(
        "offload:param",
        "offload:param",
        partial(ours, "offload:param"),
        note="weights rest in host memory; they go to the device before their use",
    ),
    Contender(
        FSDP2,
        "offload:param",
        fsdp2,
        note="torch's AdamW, fused; weights rest in host memory, and on a CPU it copies nothing",
    ),
    Contender(
        DEEPSPEED,
        "offload:optim",
        deepspeed,
        package="deepspeed",
        note="its own AdamW; the copies of ZeRO-Offload are not part of it",
    ),
)


# --- the run -------------------------------------------------------------------------------------


def compare(count: int, rounds: int) -> list[UpdateLine]:
    """All contenders in turn, after one round that makes the optimizer's state."""
    numel = sum(p.numel() for p in stack(count).parameters())
    rows = {c.name: UpdateLine(c.name, numel, torch.get_num_threads()) for c in CONTENDERS}
    ready: dict[str, TimedUpdate] = {}
    for each in CONTENDERS:
        row = rows[each.name]
        if each.missing:
            row.note = f"{each.package} is not installed"
            continue
        try:
            updater = each.build(_with_gradients(stack(count)), SETUP)
            updater.step()
        except Exception as error:  # noqa: BLE001 - it becomes the note of the row
            row.note = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        else:
            row.note, ready[each.name] = each.note, updater
    turns = {name: _Turns() for name in ready}
    for index in range(rounds):
        print(f"round {index + 1} of {rounds}", file=sys.stderr, flush=True)
        order = list(ready)[index % len(ready) :] + list(ready)[: index % len(ready)]
        for name in order:
            update_s, copies_s = ready[name].step()
            turns[name].updates.append(update_s)
            turns[name].copies.append(copies_s)
    _fill(rows, turns, ready)
    return list(rows.values())


def _with_gradients(model: nn.Module) -> nn.Module:
    """The model with the same random gradients for every contender."""
    own = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=own) * 1e-2
    return model


def _fill(
    rows: dict[str, UpdateLine], turns: dict[str, _Turns], ready: dict[str, TimedUpdate]
) -> None:
    """Set the numbers of the contenders that ran."""
    peers = [turns[name].updates for name in (FSDP2, DEEPSPEED) if name in turns]
    fastest = [min(times) for times in zip(*peers, strict=True)]
    wanted = _weights(ready[FSDP2]) if FSDP2 in ready else None
    for name, own in turns.items():
        row, both = rows[name], list(map(sum, zip(own.updates, own.copies, strict=True)))
        row.update_s, row.copies_s = map(statistics.median, (own.updates, own.copies))
        if fastest:
            row.ratio, row.with_copies = (
                statistics.median(a / b for a, b in zip(times, fastest, strict=True))
                for times in (own.updates, both)
            )
        if wanted is not None:
            apart = (_weights(ready[name]) - wanted).abs().max()
            row.difference = float(apart / wanted.abs().max())


def _weights(updater: TimedUpdate) -> Tensor:
    return torch.cat([w.detach().flatten() for w in updater.weights()])


def as_text(rows: Sequence[UpdateLine]) -> str:
    """The rows as a table."""
    head = ("contender", "update ms", "ratio", "copies ms", "ratio with", "difference", "note")
    cells = [head, *map(_cells, rows)]
    title = f"{rows[0].parameters:,} parameters, threads: {rows[0].threads}"
    return "\n".join([title, *aligned(cells)])


def _cells(row: UpdateLine) -> tuple[str, ...]:
    def shown(value: float | None, form: str, scale: float = 1.0) -> str:
        return "-" if value is None else format(value * scale, form)

    return (
        row.contender,
        shown(row.update_s, ".2f", 1e3),
        shown(row.ratio, ".3f"),
        shown(row.copies_s, ".2f", 1e3),
        shown(row.with_copies, ".3f"),
        shown(row.difference, ".1e"),
        row.note,
    )
