"""The dry run: the real engine of one rank on the meta device, in a world whose links only count.

    engine           the one of `parallelize`: its hooks, moves, optimizer and pipeline are those of
                     a run; only `World.dry` differs
    tensors          parameters, what is computed from them, host memory and the disk have no memory
    other ranks      are assumed to send what this one sends (comm/fake.py)
    numbers          that ranks agree on are on the CPU; unknown ones that are read are zeros
    kernels          keep what the device's kernels keep (work.py)

A model whose forward reads values runs on the CPU with its weights and its batch instead.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise.comm.fake import FakeLinks
from shardwise.comm.unchanged import kept_values
from shardwise.comm.world import world_of
from shardwise.core.errors import InputError
from shardwise.core.mesh import PIPELINE
from shardwise.core.plan.plan import Plan
from shardwise.core.schedule.library import allowed
from shardwise.engine import memory
from shardwise.engine.batch import computed_parts, split
from shardwise.engine.engine import Engine
from shardwise.engine.model_structure import shapes_of, valueless
from shardwise.engine.options import EngineOptions
from shardwise.engine.parallelize import build_engine
from shardwise.observe.meta_pass import UNKNOWN, AsOn, ToMeta, meta_copy, value_copy
from shardwise.observe.step_bytes import KeptBytes, StepBytes
from shardwise.observe.work import Kernels, in_backward
from shardwise.prediction.prediction import StepPeaks
from shardwise.prediction.rank_shape import moments

_CPU: Final = torch.device("cpu")
#: The kinds of equal microbatches: the first, which makes gradients, the last, and those between.
MICROBATCHES: Final = 3
#: The second step's peak is at least this part of what the first one stores beside its states.
NEAR: Final = 0.98


class DryRun:
    """The engine of `rank` under a complete plan, for steps within `running`.
    `model` is not changed. Raises InputError like `parallelize`, and torch's error if the forward
    reads values of the model, unless they are `real`.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        options: EngineOptions,
        rank: int,
        *,
        real: bool = False,
    ) -> None:
        self.loss, self.inside = options.objective, 0
        self.seen: Callable[[], None] = lambda: None  # called at the end of a forward pass
        self.kernels: Kernels = options.kernels
        self.mode = nullcontext() if real else ToMeta(read=self._read)
        world = replace(world_of(rank, plan.size, _CPU, FakeLinks()), dry=True, meta=not real)
        options = replace(options, loss=self._objective, fill=None if real else lambda *_: None)
        made = value_copy(model) if real else _with_buffers(meta_copy(model))
        with torch.random.fork_rng(devices=[]), self.mode:
            self.engine: Engine = build_engine(made, plan, world, options)

    @contextmanager
    def running(self) -> Iterator[Engine]:
        with torch.random.fork_rng(devices=[]), AsOn(None, _CPU, self.kernels), self.mode:
            yield self.engine

    def _objective(self, model: nn.Module, batch: Any) -> Tensor:
        self.inside += 1
        try:
            loss = self.loss(model, batch)
            self.seen()
            return loss
        finally:
            self.inside -= 1

    def _read(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What the engine gets of an operation on meta tensors; NotImplemented: what torch gives.
        Numbers that it reads are zeros; known numbers that it would add unknown ones to stay, and
        kernels that update lists in place do nothing.  The model and its backward pass read none.
        """
        x = kwargs.get("out", args[0])
        if _updates(func) and x.is_meta and x.numel():
            return x
        if self.inside or in_backward():
            return NotImplemented
        if func is torch.ops.aten._local_scalar_dense.default:
            return torch.zeros((), dtype=x.dtype, device="cpu").item()
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") == _CPU:
            return torch.zeros(x.shape, dtype=kwargs.get("dtype") or x.dtype, device="cpu")
        if func._schema.is_mutable and isinstance(x, list):
            return None
        return x if func._schema.is_mutable and not x.is_meta else NotImplemented

    def peaks(self, batch: Any, *, parts: bool = True) -> StepPeaks:
        """Those of a second step; the first one learns the order of units, and makes states."""
        with self.running() as engine:
            first, before_update = StepBytes(engine, least=sys.maxsize), list[int]()
            rested, optimizer = first.now, engine.optimizer.torch
            note = optimizer.register_step_pre_hook(lambda *_: before_update.append(first.most))
            with first:
                engine.step(batch)
            engine.wait()
            note.remove()
            step, kept = StepBytes(engine), KeptBytes(engine, batch)
            most = next(iter(before_update), first.most)
            states = step.now - memory.in_step(engine)["gradients"]  # a step begins without any
            step.least = int(NEAR * (most - rested + states)) if parts else sys.maxsize
            self._watched(batch, step, kept)
            if parts and not step.parts:
                step = StepBytes(engine, step.most)
                self._watched(batch, step, kept)
        host = engine.recompute.host
        fetched = 0 if host is None else host.most_fetched_bytes
        return StepPeaks(step.most, step.parts, kept.most, kept.most_on_host, fetched)

    def _watched(self, batch: Any, step: StepBytes, kept: KeptBytes) -> None:
        engine = self.engine
        passes: Any = engine.passes
        if engine.staging is not None:
            passes.watch = lambda _: kept.look()
        else:
            self.seen = kept.look
        with saved_tensors_hooks(kept.saved.save, lambda x: x), step:
            engine.step(batch)
        engine.wait()


@cache
def _updates(func: Any) -> bool:
    """Whether an operation writes to the one tensor that it returns, and changes no shape."""
    returns = [each.alias_info for each in func._schema.returns]
    writes = len(returns) == 1 and returns[0] is not None and returns[0].is_write
    return writes and torch.Tag.inplace_view not in func.tags


def _with_buffers(model: nn.Module) -> nn.Module:
    """The model with zeros in place of buffers that are on meta."""
    for module in model.modules():
        for name, b in module.named_buffers(recurse=False):
            if b.is_meta:
                persistent = name not in module._non_persistent_buffers_set
                module.register_buffer(name, torch.zeros_like(b, device=_CPU), persistent)
    return model


def step_peaks(
    model: nn.Module,
    plan: Plan,
    batch: Any,
    options: EngineOptions,
    rank: int,
    *,
    parts: bool = True,
) -> StepPeaks:
    """The memory of a step of `rank` on its share of a batch; of few of its equal microbatches.
    Raises InputError like `parallelize`, and for a model on meta that does not run there.
    """
    few = _few(plan, batch, options, rank)
    with kept_values(batch):
        try:
            return DryRun(model, few.plan, options, rank).peaks(few.batch, parts=parts)
        except UNKNOWN as error:
            has_values = not any(p.is_meta for p in model.parameters())
            if not has_values and isinstance(error, InputError):
                raise
            if not has_values:
                raise valueless(model) from error
        return DryRun(model, few.plan, options, rank, real=True).peaks(few.batch, parts=parts)


def with_few_microbatches(plan: Plan, rank: int) -> Plan:
    """The plan with as few microbatches of a pipeline as keep as much on a rank as all of them."""
    if plan.pipeline is None:
        return plan
    size = allowed(plan.pipeline, plan.mesh.size_of(PIPELINE))[1]
    few = 2 * size.p if size.v > 1 else size.p + 2  # several stages a rank take turns
    if size.m <= few:
        return plan
    changed = replace(plan, schedule=plan.pipeline.replace(f":{size.m}", f":{few}", 1))
    place = plan.mesh.coordinate(rank)[PIPELINE]
    return changed if moments(changed, place) == moments(plan, place) else plan


class _Few(NamedTuple):
    """A plan with fewer microbatches, and their part of the batch."""

    plan: Plan
    batch: Any


def _few(plan: Plan, batch: Any, options: EngineOptions, rank: int) -> _Few:
    """With the fewest equal microbatches that keep as much at once as all of them."""
    parts = computed_parts(batch, plan.microbatches, plan.cut, options.rows)
    if len({shapes_of(part) for part in parts}) > 1:
        return _Few(plan, batch)
    runs = _least(plan.accumulate, MICROBATCHES)
    fewer = replace(plan, accumulate=runs)
    if plan.pipeline is not None:
        stages, place = plan.mesh.size_of(PIPELINE), plan.mesh.coordinate(rank).get(PIPELINE, 0)
        every = allowed(plan.pipeline, stages)[1].m
        few = _least(every, 2 * stages)
        changed = replace(fewer, schedule=plan.pipeline.replace(f":{every}", f":{few}", 1))
        if moments(changed, place) == moments(fewer, place):
            fewer = changed
    times = plan.microbatches // fewer.microbatches
    return _Few(fewer, split(batch, times, plan.cut, options.rows)[0])


def _least(number: int, least: int) -> int:
    """The least divisor of `number` that is `least` or more; the number itself if none is."""
    return next((n for n in range(least, number) if number % n == 0), number)
