"""Reduces a model to the stages of this rank, and keeps tied parameters equal on all holders.

    rank 0   embed  blocks.0  blocks.1                     stages of the schedule's `home`
    rank 1   blocks.2  blocks.3  norm  head                head.weight is embed.weight: a tie

First all ranks get rank 0's weights. Then each rank keeps only the parameters of its own stages,
under their names in the full model. If several ranks hold a parameter (a tied embedding), they sum
its gradient before the update, so that the copies stay equal.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.move import begin_sum, broadcast
from shardwise.comm.world import Axis, World, traced
from shardwise.core.errors import bad
from shardwise.core.layouts.layouts import stage_layout
from shardwise.core.layouts.param_layout import Groups
from shardwise.core.layouts.tensor_table import Table
from shardwise.core.mesh import PIPELINE
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import schedule_of
from shardwise.core.schedule.schedule import Schedule
from shardwise.engine import default_fill
from shardwise.engine.checks.as_before import as_before
from shardwise.techniques.pipeline.partition import calls_of, starts, starts_of_counts
from shardwise.techniques.pipeline.stage_io import StageTrace
from shardwise.techniques.pipeline.staged_model import Stages
from shardwise.techniques.pipeline.trace.placeholders import Calls, StageLayers, stages_of
from shardwise.techniques.pipeline.trace.placeholders import twin as twin_of
from shardwise.techniques.tensor import apply as tensor_parallel
from shardwise.techniques.tensor import rng
from shardwise.techniques.tensor.sharded_logits import Tensors
from shardwise.wrap.wrap_policy import UnitSpec


@dataclass(frozen=True)
class Staging:
    """A model on the pipeline axis.

    `at` are the stages of each parameter by its name in the full model; `ties` has, for each
    parameter of several ranks, the axis of these ranks, and `sums` the same by groups of ranks;
    `beside` is the twin on the tensor axis, whose stream knows the lengths of sharded sequences.
    """

    axis: Axis
    schedule: Schedule
    stages: Stages
    beside: Tensors
    at: Mapping[str, tuple[int, ...]]
    ties: Mapping[str, Axis] = field(default_factory=dict)
    sums: Mapping[Groups, Axis] = field(default_factory=dict[Groups, Axis])

    @property
    def own_stages(self) -> tuple[int, ...]:
        return self.schedule.stages(self.axis.rank)

    @property
    def begins(self) -> list[str]:
        found = self.stages.layers.found.items()
        firsts = {stage: name for name, layer in reversed(found) for stage in layer.stages[:1]}
        return [firsts[stage] for stage in range(1, len(firsts))]

    def owners(self, stages: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted({self.schedule.home[stage] for stage in stages}))

    def own_units(self, specs: Sequence[UnitSpec]) -> list[UnitSpec]:
        for spec in specs:
            spec.params = [(name, p) for name, p in spec.params if self.stages_using([name])]
        return [spec for spec in specs if spec.params]

    def stages_using(self, names: Iterable[str]) -> set[int]:
        return {stage for name in names for stage in self.at[name]} & set(self.own_stages)

    def copy(self, called: str) -> int:
        """The index of this rank among those that hold the buffer or module of that name."""
        for name, layer in self.stages.layers.found.items():
            if any(f"{called}.".startswith(f"{known}.") for known in (name, *layer.names)):
                return self.owners(layer.stages).index(self.axis.rank)
        return self.axis.rank  # every rank has buffers outside of layers

    @torch.no_grad()
    def share_buffers(self, traces: Iterable[StageTrace]) -> None:
        """Copy what these forwards wrote to buffers outside of layers to all ranks of the axis."""
        written = {(b.index, b.key): b for trace in traces for b in trace.outside}
        for (index, key), buffer in sorted(written.items()):
            table, source = (
                self.stages.layers.pairs[index][0]._buffers,
                self.schedule.home[buffer.stage],
            )
            whole = torch.empty_like(buffer.like, device=self.stages.device)
            if self.axis.rank == source:
                whole.copy_(table[key])
            with self.axis.ledger.phase("check"):
                broadcast(whole, self.axis, source)
            old = table.get(key)
            if old is None or old.shape != whole.shape or old.dtype != whole.dtype:
                table[key] = whole
            elif self.axis.rank != source:
                old.data.copy_(whole)

    def shared(self, names: Sequence[str], used: Tensor) -> Tensor:
        """`used`, where a tied parameter is used if any holder used it: all must update it."""
        places = {name: index for index, name in enumerate(names) if name in self.ties}
        sums = {
            index: begin_sum(used[index : index + 1], self.ties[name])
            for name, index in sorted(places.items())
        }
        used = used.clone() if sums else used
        for index, total in sums.items():
            used[index : index + 1] = total.wait()
            if not self.axis.transport.answered:  # in a dry run, another holder uses it
                used[index : index + 1] = 1.0
        return used


def stage_starts(
    model: nn.Module, plan: Plan, names: Sequence[str] | None, calls: Calls | None = None
) -> tuple[str, ...]:
    """The modules that begin the stages of a pipeline after the first; none without a pipeline."""
    schedule = schedule_of(plan)
    if schedule is None:
        return ()
    if plan.stages is None:
        return starts(model, len(schedule.home), names, calls)
    begin = starts_of_counts(model, plan.stages, calls)
    if names is not None and tuple(names) != begin:
        raise bad(
            f"stages={list(names)} under the plan '{plan}', whose stages begin at {list(begin)}",
            "the modules that begin stages, or the plan word stages",
            f"'{replace(plan, stages=None)}', or no stages=",
        )
    return begin


def calls_under(
    plan: Plan, model: nn.Module, loss: Callable[..., Any] | None = None
) -> Calls | None:
    """The calls of the modules of `model` in its loss, where the plan has a pipeline."""
    with as_before([loss], model):
        return calls_of(model, loss) if plan.pipeline else None


def twin(
    model: nn.Module, world: World, plan: Plan, table: Table | None
) -> tuple[nn.Module, Tensors]:
    """The model on meta, on the tensor axis of a world that moves nothing."""
    copy = twin_of(model)
    nothing = traced(world.rank, world.size).on(plan.mesh)
    return copy, tensor_parallel.lay_out(copy, nothing, plan.sp, table)


def agree(model: nn.Module, axis: Axis, device: torch.device) -> None:
    """Copy the first rank's weights, buffers and generator states to all ranks."""
    if axis.size > 1:
        rng.synchronize(axis, device)
        default_fill.agree([*model.parameters(), *model.buffers()], axis, device)


def lay_out(
    model: nn.Module,
    twins: tuple[nn.Module, Tensors],
    world: World,
    schedule: Schedule,
    begin: Sequence[str],
    calls: Calls | None = None,
) -> Staging:
    """Partition `model` into stages, in place; called by all ranks of the world."""
    axis, at = world.axis(PIPELINE), stages_of(model, begin, calls)
    layers = StageLayers(model, twins[0], begin, schedule.stages(axis.rank), calls)
    stages = Stages(layers, world.device, world.storage)
    found = {name: stage_layout(used, schedule) for name, used in at.items()}
    groups = {name: on.groups for name, on in found.items() if len(on.holders) > 1}
    sums = default_fill.open_sums(world, PIPELINE, groups.values())
    ties = {name: sums[own] for name, own in sorted(groups.items()) if axis.rank in own[0]}
    return Staging(axis, schedule, stages, twins[1], at, ties, sums)
