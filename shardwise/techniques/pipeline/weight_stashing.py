"""Weight stashing: versions of the weights under a schedule that updates each stage by itself.

    PipeDream, stage 0 of 2      F0  F1  B0  U0  F2  B1  U1  F3  B2  ...
    newest version               0   0   0   1   1   1   2   2   2
    used                         0   0   0       1   0       2   1

The backward pass of a microbatch uses the same weights as its forward pass. Autograd saves either
the parameter itself, which it reads during the backward pass, or a view of it (its transpose),
which refers to the memory of the forward pass. So a version keeps its memory until its last use,
and parameters point there for each F, B, I and W that uses it. An update writes to a new buffer if
a later action uses the old version, else in place. Updates do not change the parameter's version
counter: autograd would raise an error in backward. One version is left after the run.

An update (U) sums the gradients of its microbatches over the data ranks and divides the sum by the
number of those that have tokens (engine/optimizer/norm.py). (Narayanan et al., "PipeDream",
arXiv 1806.03377, section 3.3.)
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from shardwise.comm.move import begin_sum
from shardwise.comm.tiers.host_memory import HostNumbers, doubles_on
from shardwise.core.errors import bad
from shardwise.core.plan.plan import Plan
from shardwise.core.schedule.schedule import COMPUTE_OPS
from shardwise.engine.checks.guard import Guard
from shardwise.engine.optimizer.optimizer import Factor, ShardedOptimizer
from shardwise.engine.options import EngineOptions
from shardwise.flat.flat_parameter import Flat
from shardwise.techniques.data.unit_hooks import Data
from shardwise.techniques.pipeline import stage_module
from shardwise.techniques.pipeline.stage_module import Staging


def require(
    model: nn.Module, plan: Plan, starts: Sequence[str] | None, options: EngineOptions
) -> float | None:
    """The bound on the gradient's norm; under an asynchronous schedule infinity becomes None. Such
    a schedule cannot clip, skip a step, or train a parameter in stages that update apart.
    """
    schedule, clip = stage_module.schedule_of(plan), options.clip
    if schedule is None or not schedule.update:
        return clip
    if clip is not None and math.isfinite(clip):
        raise bad(
            f"clip={clip} with {plan.pipeline}, whose updates know no norm of all gradients",
            f"clip=None, or a schedule that updates at the end, 1f1b:{schedule.microbatches}",
            "--set train.clip=0 (in Python: clip=None)",
        )
    if options.on_nonfinite != "raise":
        raise bad(
            f"on_nonfinite='{options.on_nonfinite}' with {plan.pipeline}, which updates in a step",
            "on_nonfinite='raise', or a schedule that updates at the end of the step",
            f"1f1b:{schedule.microbatches}",
        )
    at = stage_module.stages_of(
        model, starts or (), stage_module.calls_under(plan, model, options.objective)
    )
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    for name, stages in at.items():
        if name in trained and len({schedule.lag[stage] for stage in stages}) > 1:
            raise bad(
                f"{plan.pipeline} for a model whose {name} is in stages "
                f"{' and '.join(map(str, stages))}, which update at different times",
                "parameters that one stage uses, or a schedule whose stages are equally late",
                f"2bw or 1f1b:{schedule.microbatches}, or a model without tied weights",
            )
    return None


class Stale:
    """The versions of the parameters of this rank's stages, during one run of a schedule."""

    def __init__(
        self, staged: Staging, data: Data, optimizer: ShardedOptimizer, guard: Guard
    ) -> None:
        assert data.staged is not None
        self.schedule, self.data, self.optimizer = staged.schedule, data, optimizer
        self.units = data.staged
        self.guard = guard
        self.staged, self.device = staged, staged.stages.device
        trained = {
            stage: [group for unit in self.units.units[stage] for group in unit.trained]
            for stage in staged.own_stages
        }
        self.flats: dict[int, list[Flat]] = trained
        self.uses = Counter(
            (action.stage, self.schedule.version(*action[1:]))
            for action in self.schedule.actions(staged.axis.rank)
            if action.op in COMPUTE_OPS
        )
        self.left = Counter(self.uses)
        self.kept: dict[int, dict[int, list[Tensor]]] = {}  # stage -> version -> its buffers
        self.shown: dict[int, int] = {}  # the version that parameters are views of
        self.peak_bytes = 0  # of old versions

    @contextmanager
    def running(self) -> Iterator[None]:
        """A run of the schedule, from version 0. The newest version stays, also after an error."""
        self.left = Counter(self.uses)
        self.kept = {stage: {0: [f.full for f in flats]} for stage, flats in self.flats.items()}
        self.shown = dict.fromkeys(self.flats, 0)
        self.peak_bytes = 0
        try:
            yield
        finally:
            for flat in (flat for flats in self.flats.values() for flat in flats):
                flat.point_at(flat.full)
            self.kept = {}
        if isinstance(last := self.optimizer.factor, Tensor):
            (self.optimizer.factor,) = HostNumbers(last.view(1)).read()

    @contextmanager
    def during(self, stage: int, microbatch: int) -> Iterator[None]:
        """Point parameters at the version that the microbatch uses; free it after its last use."""
        version = self.schedule.version(stage, microbatch)
        self._show(stage, version)
        yield
        self.left[stage, version] -= 1
        if not self.left[stage, version] and version != self._newest(stage):
            self._show(stage, self._newest(stage))
            del self.kept[stage][version]

    def update_stage(self, stage: int, divisor: Tensor) -> None:
        """U: update a stage from the sum of its gradients since its last update, over `divisor`."""
        phase = self.data.consensus.phase
        flats = self.flats[stage]
        phase("backward")
        self.data.order.begin_run()
        self.data.reduce_stage(stage)
        self.data.reduce_last()  # of tied parameters
        self.data.finish_sums()
        phase("check")
        factor, spoilt = self._agree(flats, divisor)
        phase("update")
        version = self._newest(stage)
        self._show(stage, version)
        if self.left[stage, version]:  # a later action uses it
            for flat in flats:
                flat.renew()
        else:
            del self.kept[stage][version]
        params = tuple(p for flat in flats for p in flat.params)
        for unit in self.units.units[stage]:
            unit.to_sharded()
        if factor.skips is not None or not spoilt.item():
            # autograd must not notice writes to parameters
            with self.optimizer.step_hooks(), _unsafe_preserve_version_counter(params):
                self.optimizer.begin(flats, factor)()
                self.optimizer.publish(flats)
        self.guard.spoil(spoilt, flats)
        self.optimizer.clear(flats)
        for unit in self.units.units[stage]:
            unit.unshard()
        self.kept[stage][version + 1] = [flat.full for flat in flats]
        self.shown[stage] = version + 1
        self.peak_bytes = max(self.peak_bytes, self._old_bytes())

    def _agree(self, flats: Sequence[Flat], number: Tensor) -> tuple[Factor, Tensor]:
        """Set which parameters have a gradient on any data rank; the factor, and bad gradients."""
        own = [float(flag) for flat in flats for flag in flat.grads.has_grad]
        spoilt = self.guard.not_finite(flats)
        agreed = self.data.consensus.agree(torch.cat([spoilt, doubles_on(own, self.device)]))
        spoilt = begin_sum(agreed[:1], self.guard.axis).wait()
        names = [name for flat in flats for name in flat.names]
        used = self.staged.shared(names, agreed[1:])
        on_device = self.optimizer.skips_on_device
        flags = iter(own if on_device and all(own) else used.tolist())
        for flat in flats:
            flat.grads.used = [next(flags) > 0 for _ in flat.grads.used]
        divisor = torch.where(number == 0, 1.0, number)
        if on_device:
            return Factor(1 / divisor.squeeze(), (spoilt > 0).float().squeeze()), spoilt
        return Factor(1 / divisor.item()), spoilt

    def _show(self, stage: int, version: int) -> None:
        if self.shown[stage] != version:
            for flat, full in zip(self.flats[stage], self.kept[stage][version], strict=True):
                flat.point_at(full)
            self.shown[stage] = version

    def _newest(self, stage: int) -> int:
        return max(self.kept[stage])

    def _old_bytes(self) -> int:
        every = ((v, max(kept), fulls) for kept in self.kept.values() for v, fulls in kept.items())
        old = (full for version, newest, fulls in every if version != newest for full in fulls)
        return sum(full.untyped_storage().nbytes() for full in old)
