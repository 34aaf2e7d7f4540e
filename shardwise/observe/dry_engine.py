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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from threading import RLock
from typing import Any, Final, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise.comm.fake import FakeLinks
from shardwise.comm.ledger import Ledger
from shardwise.comm.unchanged import kept_values
from shardwise.comm.world import world_of
from shardwise.core.errors import InputError, bad
from shardwise.core.mesh import PIPELINE
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import moments
from shardwise.core.schedule.library import allowed, updates
from shardwise.core.schedule.schedule import Action, Step, Transfer
from shardwise.core.tally import Key, Tally
from shardwise.core.tools.tree import leaves
from shardwise.core.zero import Tier
from shardwise.engine import memory
from shardwise.engine.batch import filled, split
from shardwise.engine.checks.consistency import CHECKED_STEPS
from shardwise.engine.engine import Engine
from shardwise.engine.options import EngineOptions
from shardwise.engine.parallelize import build_engine
from shardwise.observe.meta_pass import UNKNOWN, AsOn, ToMeta, meta_copy, value_copy
from shardwise.observe.step_bytes import Issues, KeptBytes, StepBytes
from shardwise.observe.work import Kernels, in_backward
from shardwise.prediction.prediction import DryStep

T = TypeVar("T")
#: A dry run restores torch's global generator: ranks in threads make one at a time.
ALONE: Final = RLock()
#: The totals of lines of the ledger.
Tallies = dict[Key, Tally]
_CPU: Final = torch.device("cpu")
#: The kinds of equal microbatches: the first, which makes gradients, the last, and those between.
MICROBATCHES: Final = 3
#: The second step's peak is at least this part of what the first one stores beside its states.
NEAR: Final = 0.98


class MicrobatchTallies:
    """What a rank sends in the actions of each microbatch, by run of its schedule."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.before = ledger, ledger.lines
        self.first: Step | None = None
        self.runs: list[dict[int, Tallies]] = []

    def see(self, step: Step) -> None:
        """Count what was sent since the step before."""
        self.first = self.first or step
        self.runs += [{}] if step == self.first else []
        number = step.token.microbatch if isinstance(step, Transfer) else step.microbatch
        found = self.runs[-1].setdefault(number, {})
        now = self.ledger.lines
        for key, tally in self.ledger.since(self.before).items():
            found[key] = found.get(key, Tally()) + tally
        self.before = now

    def middle(self, plan: Plan) -> Tallies:
        """Those of a turn of microbatches between chunks, from the middle of the step."""
        run, size = self.runs[len(self.runs) // 2], _alternating(plan)
        first = _microbatches(plan) // size // 2 * size
        found: Tallies = {}
        for number in range(first, first + size):
            found = _plus(found, run[number], 1)
        return found

    def of(self, whole: Plan, few: Plan, sent: Tallies) -> Tallies:
        """What a step of `whole` sends, if one of `few` of its microbatches sends this."""
        most, least = _microbatches(whole), _microbatches(few)
        runs, more = (each.microbatches // _microbatches(each) for each in (few, whole))
        found = _plus(sent, self.middle(few), (most - least) // _alternating(few) * more)
        for tallies in self.runs[len(self.runs) // 2].values() if more > runs else ():
            found = _plus(found, tallies, more - runs)
        return found


def _is_steady(plan: Plan) -> bool:
    """Whether microbatches in the middle send the same: no update, and no units gathered anew."""
    updated = updates(plan.pipeline, plan.mesh.size_of(PIPELINE))
    return not updated and not (_gathers(plan) and _alternating(plan) > 1)


def _gathers(plan: Plan) -> bool:
    return any(each.states.moves().reshards for each in plan.of_all_layers)


def _alternating(plan: Plan) -> int:
    """After so many microbatches a rank changes to another chunk of its stages."""
    if plan.pipeline is None:
        return 1
    size = allowed(plan.pipeline, plan.mesh.size_of(PIPELINE))[1]
    return size.p if size.v > 1 and _microbatches(plan) % size.p == 0 else 1


def _microbatches(plan: Plan) -> int:
    return plan.microbatches // (plan.accumulate if plan.pipeline else 1)


def _plus(some: Tallies, others: Tallies, times: int) -> Tallies:
    found = dict(some)
    for key, tally in others.items() if times else ():
        more = Tally(*(times * n for n in vars(tally).values()))
        found[key] = found.get(key, Tally()) + more
    return found


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
        self.exact = not real and not any(p.is_meta for p in model.parameters())
        self.mode = ToMeta(read=None if real else self._read)
        world = replace(world_of(rank, plan.size, _CPU, FakeLinks()), dry=True, meta=not real)
        options = replace(options, loss=self._objective, fill=None if real else lambda *_: None)
        made = value_copy(model) if real else _with_buffers(meta_copy(model))
        sizes = {name: p.numel() for name, p in made.named_parameters()}
        with torch.random.fork_rng(devices=[]), self.mode:
            self.engine: Engine = build_engine(made, plan, world, options)
        self.stages = _stage_sizes(self.engine, sizes)

    @contextmanager
    def running(self) -> Iterator[Engine]:
        on_cpu = AsOn(None, _CPU, self.kernels, exact=self.exact)
        with torch.random.fork_rng(devices=[]), on_cpu, self.mode:
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

    def step(self, batch: Any, whole: Plan, *, parts: bool = True) -> DryStep:
        """The second step; the first one learns the order of units, and makes states. `whole` may
        have more equal microbatches than the plan of this run.
        """
        with self.running() as engine:
            most = self._first(batch, parts=parts)
            engine.consistency.checked = CHECKED_STEPS  # the first ones send more
            issues, kept = Issues(engine), KeptBytes(engine, batch)
            step = StepBytes(engine, issues=issues)
            states = step.now - memory.in_step(engine)["gradients"]  # a step begins without any
            step.least = int(NEAR * (most + states)) if parts else sys.maxsize
            with issues.recording():
                shares = self._watched(batch, step, kept)
            if parts and not step.parts:
                step = StepBytes(engine, step.most)
                self._watched(batch, step, kept)
            host = engine.recompute.host
            resting = dict[Tier, dict[str, int]]()
            for tier in get_args(Tier):
                resting[tier] = memory.measured(engine, tier)
        units = engine.data.units.order
        return DryStep(
            sent=shares.of(whole, engine.plan, engine.last),
            memory=resting,
            device=step.most,
            parts=step.parts,
            activations=kept.most,
            host_activations=kept.most_on_host,
            fetched=0 if host is None else host.most_fetched_bytes,
            few=engine.plan,
            issued=tuple(issues.found),
            recomputed=dict(engine.recompute.kinds),
            trained=tuple(
                sum(shape.numel() for flat in unit.trained for shape in flat.shapes)
                for unit in units
            ),
            stages=self.stages,
        )

    def _first(self, batch: Any, *, parts: bool) -> int:
        """A step; with `parts` the most bytes before its update beside those that rested."""
        engine, before_update = self.engine, list[int]()
        first = StepBytes(engine, least=sys.maxsize)
        rested, optimizer = first.now, engine.optimizer.torch
        note = optimizer.register_step_pre_hook(lambda *_: before_update.append(first.most))
        self.mode.seen = first.see if parts else None
        engine.step(batch)
        engine.wait()
        note.remove()
        return next(iter(before_update), first.most) - rested

    def kept(self, batch: Any, kinds: Mapping[str, str]) -> KeptBytes:
        """What autograd keeps in a later step with modules that are recomputed so."""
        with self.running() as engine:
            engine.recompute.foresee = None
            engine.recompute.set_kinds(kinds)
            if not engine.steps_run:
                engine.step(batch)  # keeps more
            kept = KeptBytes(engine, batch)
            self._watched(batch, None, kept)
        return kept

    def _watched(self, batch: Any, step: StepBytes | None, kept: KeptBytes) -> MicrobatchTallies:
        engine = self.engine
        passes: Any = engine.passes
        shares = MicrobatchTallies(engine.ledger)

        def watch(action: Step) -> None:
            shares.see(action)
            if step is not None and step.issues is not None and isinstance(action, Action):
                step.issues.found.append(action)
            if engine.staging is not None:
                kept.look()

        passes.watch = watch
        if engine.staging is None:
            self.seen = kept.look
        self.mode.seen = None if step is None else step.see
        with saved_tensors_hooks(kept.saved.save, lambda x: x):
            engine.step(batch)
        engine.wait()
        return shares


@cache
def _updates(func: Any) -> bool:
    """Whether an operation writes to the one tensor that it returns, and changes no shape."""
    returns = [each.alias_info for each in func._schema.returns]
    writes = len(returns) == 1 and returns[0] is not None and returns[0].is_write
    return writes and torch.Tag.inplace_view not in func.tags


def _stage_sizes(engine: Engine, sizes: Mapping[str, int]) -> tuple[int, ...]:
    if engine.staging is None:
        return ()
    found = [0] * len(engine.staging.schedule.home)
    for name, stages in engine.staging.at.items():
        for stage in stages:
            found[stage] += sizes.get(name, 0)
    return tuple(found)


def _with_buffers(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, b in module.named_buffers(recurse=False):
            if b.is_meta:
                persistent = name not in module._non_persistent_buffers_set
                module.register_buffer(name, torch.zeros_like(b, device=_CPU), persistent)
    return model


def dry_step(
    model: nn.Module,
    plan: Plan,
    batch: Any,
    options: EngineOptions,
    rank: int,
    *,
    parts: bool = True,
    whole: Plan | None = None,
    brief: bool = False,
) -> DryStep:
    """A step of `rank` on its share of a batch; of few of its equal microbatches, or if it is
    `brief`, of so few that it only shows what each action issues. `whole`: the plan of which `plan`
    has few. Raises InputError like `parallelize`, and for a model on meta that does not run there.
    """
    brief = brief and not plan.recompute_budget_bytes  # whose choice is that of the whole step
    of, parts = whole or plan, parts and not brief

    def act(run: DryRun, batch: Any) -> DryStep:
        return run.step(batch, of, parts=parts)

    found, note = on_few(model, plan, batch, options, rank, act, brief=brief)
    return replace(found, note=note)


def on_few(
    model: nn.Module,
    plan: Plan,
    batch: Any,
    options: EngineOptions,
    rank: int,
    act: Callable[[DryRun, Any], T],
    *,
    brief: bool = False,
) -> tuple[T, str]:
    """The result of `act(run, batch)` with few microbatches, and a note on what it depends on."""
    few = _few(plan, batch, options, rank, brief=brief)
    dry = DryRuns(model, few.plan, options, rank)
    return dry.within(few.batch, lambda run: act(run, few.batch)), dry.note


class DryRuns:
    """A dry run that is made when it is first asked: on meta, or, if the forward of a model with
    values reads some, on the CPU; `note` says so. Raises InputError like `parallelize`, and for a
    model on meta that does not run there.
    """

    def __init__(self, model: nn.Module, plan: Plan, options: EngineOptions, rank: int) -> None:
        self.model, self.make = model, partial(DryRun, model, plan, options, rank)
        self.note = ""
        self.run: DryRun | None = None

    def within(self, batch: Any, act: Callable[[DryRun], T]) -> T:
        """The result of `act(run)`, whose steps are on `batch`."""
        with ALONE, kept_values(batch):
            if self.run is None:
                try:
                    self.run = self.make()
                    return act(self.run)
                except UNKNOWN as error:
                    self.note = self._reads_values(error)
                self.run = self.make(real=True)
            return act(self.run)

    def _reads_values(self, error: Exception) -> str:
        has_values = not any(p.is_meta for p in self.model.parameters())
        if not has_values and isinstance(error, InputError):
            raise error
        if not has_values:
            kind = type(self.model).__name__
            raise bad(
                f"a {kind} on the meta device whose forward reads values",
                "a model that computes tensors from tensors, or one with its weights",
                "the model built on the CPU",
            ) from error
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return f"the step was run on the CPU with its batch (on meta: {why})"


def with_few_microbatches(plan: Plan, rank: int) -> Plan:
    """The plan with as few microbatches of a pipeline as keep as much on a rank as all of them."""
    if plan.pipeline is None or updates(plan.pipeline, plan.mesh.size_of(PIPELINE)):
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


def _few(plan: Plan, batch: Any, options: EngineOptions, rank: int, *, brief: bool) -> _Few:
    """With the fewest equal microbatches that keep as much at once as all of them."""
    parts = split(batch, plan.microbatches, plan.cut, options.rows)
    tensors = (leaves(filled(part, options.rows), Tensor, objects=True) for part in parts)
    if len({tuple((x.shape, x.dtype) for x in every) for every in tensors}) > 1:
        return _Few(plan, batch)
    runs = _least(plan.accumulate, 1 if brief else MICROBATCHES)
    fewer, stages = replace(plan, accumulate=runs), plan.mesh.size_of(PIPELINE)
    shows = brief and not updates(plan.pipeline, stages)
    if plan.pipeline is not None and (shows or _is_steady(plan)):
        place, turn = plan.mesh.coordinate(rank).get(PIPELINE, 0), _alternating(plan)
        every = allowed(plan.pipeline, stages)[1].m
        least = 1 if shows and not _gathers(plan) else 2 * stages * (1 + (turn > 1))
        few = _least(every, least, turn)
        while shows and not _is_possible(plan.pipeline.replace(f":{every}", f":{few}", 1), stages):
            few = _least(every, few + 1, turn)
        changed = replace(fewer, schedule=plan.pipeline.replace(f":{every}", f":{few}", 1))
        if shows or moments(changed, place) == moments(fewer, place):
            fewer = changed
    times = plan.microbatches // fewer.microbatches
    return _Few(fewer, split(batch, times, plan.cut, options.rows)[0])


def _is_possible(schedule: str, stages: int) -> bool:
    with suppress(InputError):
        return bool(allowed(schedule, stages))
    return False


def _least(number: int, least: int, turn: int = 1) -> int:
    """The least divisor of `number` from `least` up that is a multiple of `turn`, or `number`."""
    return next((n for n in range(least, number) if number % n == n % turn == 0), number)
