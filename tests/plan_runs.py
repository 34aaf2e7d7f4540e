"""One run of a plan on all ranks, and the same training in one process, for the facts of the table.

run_of(run_gloo, "dp2 zero3")    trains, evaluates, saves, and goes on from a checkpoint
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.plan.plan import Plan
from shardwise.core.tally import sent_bytes
from shardwise.engine.engine import Engine
from shardwise.engine.memory import resting
from shardwise.engine.state.box import Box
from shardwise.engine.step_end import Metrics
from shardwise.observe.dry_engine import ALONE, dry_step
from shardwise.observe.dry_twin import DryTwin
from shardwise.observe.meter import Live, Meter, Stray
from shardwise.observe.work import kernels_of
from shardwise.verify.difference import (
    KINDS,
    EngineStep,
    OracleStep,
    Wholes,
    oracle_state,
    scalar,
    step_errors,
    tensor_errors,
)
from shardwise.verify.finding import BoxPlace, Costs, Errors, Finding, Parts, renamed
from shardwise.verify.oracles.async_oracle import AsyncOracle
from shardwise.verify.oracles.batches import Choices, Division, Loads
from shardwise.verify.oracles.oracle import Oracle, Weights
from shardwise.verify.oracles.oracles import is_asynchronous, oracles_of
from shardwise.verify.report import Report, report
from tests.engine.cases import Case, Task, build, options_of
from tests.engine.tensors import ADAMW, kept, mine, uses_of
from tests.plans import ON_PROCESSES, TASKS, kind_of
from tests.pool import run_gloo, run_gpu, run_threads

STEPS = 3
SAVED = 2  # the steps after which one process saves what the plan then loads
PRECISIONS = ("fp64", "fp32", "bf16", "fp16")

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Proof:
    """A plan, in fp64 if it names no precision, with its model and its division of batches."""

    text: str

    @property
    def exact(self) -> str:
        base, bar, layers = self.text.partition("|")
        known = set(base.split()) & {*PRECISIONS}
        return self.text if known else f"{base.strip()} fp64 {bar}{layers}".strip()

    @property
    def plan(self) -> Plan:
        """On the smallest world on which each word has an effect."""
        return Plan.parse(self.exact).completed(None)

    @property
    def precision(self) -> str:
        return self.plan.precision or ""

    @property
    def kind(self) -> str:
        return kind_of(self.text)

    @property
    def task(self) -> Task:
        return TASKS[self.kind]

    @property
    def case(self) -> Case:
        """Clipped, where stages have a common norm; ranks begin with different weights."""
        clip = None if is_asynchronous(self.plan) else 0.5
        groups = {"*norm*": {"weight_decay": 0.0, "lr": 0.02}}
        options = {**ADAMW["options"], "betas": (0.8, 0.95), "groups": groups}
        return Case(str(self.plan), clip=clip, seeds=True, options=options)

    @property
    def own(self) -> bool:
        """Whether its steps differ from those of other plans of its model, or from each other."""
        offload = self.plan.offloaded
        delayed = offload is not None and offload.undelayed is not None
        return self.kind.startswith("mixture") or is_asynchronous(self.plan) or delayed

    @property
    def oracle(self) -> tuple[str, str]:
        """What determines the training in one process: for most plans their model alone."""
        return self.kind, self.exact if self.own else self.precision


@dataclass
class Trained:
    """One rank's training: its records, and what it sent and held beside the predictions."""

    steps: list[EngineStep] = field(default_factory=list)
    evaluated: tuple[float, float] = (0.0, 0.0)
    state: list[Box] = field(default_factory=list)
    resumed: list[EngineStep] = field(default_factory=list)
    resumed_state: list[Box] = field(default_factory=list)
    resumed_steps: int = 0
    costs: Costs = field(default_factory=Costs)
    measured: dict[str, int] = field(default_factory=dict)
    predicted: dict[str, int] = field(default_factory=dict)
    leaks: list[Stray] = field(default_factory=list)
    overflow: tuple[bool, float, bool] | None = None


@dataclass
class Expected:
    """The same in one process, in plain PyTorch; `loads` are those of the experts."""

    steps: list[OracleStep] = field(default_factory=list)
    evaluated: tuple[float, float] = (0.0, 0.0)
    state: Wholes = field(default_factory=dict)
    resumed: list[OracleStep] = field(default_factory=list)
    resumed_state: Wholes = field(default_factory=dict)
    loads: list[tuple[Loads, ...]] = field(default_factory=list)
    resumed_loads: tuple[Loads, ...] = ()


def dry_run(proof: Proof, world: World) -> DryTwin:
    """The dry run of this rank's engine."""
    options = options_of(proof.task, proof.case, kernels_of(world.device))
    return DryTwin(proof.task.make(), proof.plan, options, world.rank)


def trained(engine: Engine, dry: DryTwin, proof: Proof, expected: Expected) -> Trained:
    """The training of an engine that has run no step."""
    task, found, host = proof.task, Trained(), engine.recompute.host
    meter, live = Meter(engine), Live()
    division = Division(proof.plan.shares, proof.plan.microbatches)
    with ALONE:
        uses = uses_of(task)
    for step in range(STEPS):
        batch = mine(engine, task.batch(step))
        if step < 2 or proof.own:  # the third step sends what the second one does
            theory = dry.step(engine, batch, division.counts(task.batch(step)))
        with live, meter if host is not None and step == STEPS - 1 else nullcontext():
            before = engine.ledger.lines
            metrics = engine.step(batch)
        lines = engine.ledger.since(before), engine.last
        every, counted = (sum(t.sent_bytes for t in each.values()) for each in lines)
        found.steps.append(kept_step(engine, metrics))
        found.costs = found.costs.after(engine, theory, uses, expected.loads[step])
        if "tp" not in proof.text and "cp" not in proof.text:  # whose ranks compare batches
            found.costs = replace(found.costs, hold=found.costs.hold and every == counted)
        note_memory(found, engine, dry, f"after step {step + 1}")
    # where activations alone come and go; of experts a prediction assumes that loads are even
    if host is not None and proof.plan.offload is None and proof.plan.ep == 1:
        hosted = meter.most.get(("activations", "host"), 0)
        found.measured |= {"fetched": host.most_fetched_bytes, "hosted": hosted}
        options = options_of(task, proof.case, kernels_of(engine.world.device))
        with ALONE:
            told = dry_step(task.make(), proof.plan, batch, options, engine.world.rank)
        found.predicted |= {"fetched": told.fetched, "hosted": told.host_activations}
    engine.world.barrier()  # ranks in threads read each other's tensors until here
    gc.collect()
    found.leaks = live.unaccounted(engine)
    found.state = kept(engine.boxes())
    engine.wait()
    before, batch = engine.ledger.lines, mine(engine, task.batch(STEPS))
    counts = Division(proof.plan.shares, 1).counts(task.batch(STEPS))
    theory = dry.evaluate(batch, counts, beside=engine)
    found.evaluated = engine.evaluate(batch)
    sent = sent_bytes(engine.ledger.since(before))
    found.costs = found.costs.after(engine, theory, uses, expected.loads[STEPS], evaluated=sent)
    return found


def train_and_go_on(
    world: World,
    proof: Proof,
    expected: Expected,
    arrays: Arrays,
    scalars: Any,
) -> Trained:
    """Training; then the engine loads a checkpoint of one process, and takes a step."""
    task, case = proof.task, proof.case
    engine, dry = build(world, task, case), dry_run(proof, world)
    found = trained(engine, dry, proof, expected)
    found.overflow = overflowing(engine, task) if proof.precision == "fp16" else None
    load(engine, arrays, scalars)
    batch = mine(engine, task.batch(SAVED))
    counts = Division(proof.plan.shares, proof.plan.microbatches).counts(task.batch(SAVED))
    theory = dry.step(engine, batch, counts)
    metrics = engine.step(batch)
    found.resumed.append(kept_step(engine, metrics))
    found.costs = found.costs.after(engine, theory, loads=expected.resumed_loads)
    note_memory(found, engine, dry, "after loading")
    found.resumed_steps, found.resumed_state = engine.steps, kept(engine.boxes())
    return found


def kept_step(engine: Engine, metrics: Metrics) -> EngineStep:
    """The record of a step, which the next one does not change."""
    step = EngineStep.last(engine, metrics)
    return replace(step, gradients=kept(step.gradients))


def overflowing(engine: Engine, task: Task) -> tuple[bool, float, bool]:
    """A step in which a gradient of the last rank alone is infinite. Returns whether it was
    skipped, the factor of the loss scale, and whether all states stayed.
    """
    before, scale = kept(engine.boxes()), engine.scale.value
    norms = [p for name, p in engine.model.named_parameters() if "norm" in name]
    last = engine.world.rank == engine.world.size - 1
    hook = norms[-1].register_hook(lambda g: g * torch.inf if last else g)
    skipped = engine.step(mine(engine, task.batch(STEPS))).skipped
    hook.remove()
    after = kept(engine.boxes())
    same = all(torch.equal(a.tensor, b.tensor) for a, b in zip(before, after, strict=True))
    return skipped, engine.scale.value / scale, same


def note_memory(found: Trained, engine: Engine, dry: DryTwin, when: str) -> None:
    """Add what an engine holds beside its dry run, and all that is alive on its host."""
    found.measured |= {f"{name}, {when}": count for name, count in resting(engine).items()}
    found.predicted |= {f"{name}, {when}": n for name, n in dry.memory().items()}
    found.measured[f"on the host, {when}"] = engine.world.tiers.host_bytes
    found.predicted[f"on the host, {when}"] = sum(engine.host_memory().values())


def load(engine: Engine, arrays: Arrays, scalars: Any) -> None:
    tensors = {name: (a.shape, torch.from_numpy(a).dtype) for name, a in arrays.items()}
    for box in engine.loading(tensors, scalars):
        at = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        box.tensor.detach().copy_(torch.from_numpy(np.array(arrays[box.name][at])))
    engine.load_scalars(scalars)
    engine.loaded()


@cache
def checkpoint(kind: str, precision: str) -> tuple[Arrays, Any]:
    """What one process saved after two steps of a kind of model."""
    task = TASKS[kind]
    engine = build(alone(), task, Proof(f"dp1 {precision}").case)
    for step in range(SAVED):
        engine.step(task.batch(step))
    scalars, boxes = engine.scalars(), kept(engine.boxes())
    assert all(box.sizes == box.shape for box in boxes)
    return {box.name: box.tensor.numpy() for box in boxes}, scalars


@cache
def trained_alone(kind: str, exact: str, device: str = "cpu") -> Expected:
    """The oracle's training: three steps, an evaluation, and a step from the checkpoint."""
    proof, task, found = Proof(exact), on_device(TASKS[kind], device), Expected()
    plan, clip = proof.plan, proof.case.clip
    oracle = oracle_of(proof, task)
    choices = Choices(oracle.model)
    for step in range(STEPS):
        batch = task.batch(step)
        found.steps.append(kept_alone(oracle, batch, clip))
        found.loads.append(choices.loads(batch, plan))
    found.state = on_host(oracle_state(oracle))
    last = task.batch(STEPS)
    loss = float(oracle.evaluate(lambda m: oracle.task.loss_of(m, last, oracle.dtype)))
    found.evaluated = loss, oracle.task.tokens(last)
    found.loads.append(choices.loads(last, plan, Division(plan.shares, 1), trained=False))
    resumed = oracle_of(proof, task)
    load_alone(resumed.weights, checkpoint(kind, proof.precision)[0])
    if isinstance(resumed, Oracle):
        resumed.steps = SAVED
    choices, batch = Choices(resumed.model), task.batch(SAVED)
    found.resumed.append(kept_alone(resumed, batch, clip))
    found.resumed_loads = choices.loads(batch, plan)
    found.resumed_state = on_host(oracle_state(resumed))
    return found


def kept_alone(oracle: Oracle | AsyncOracle, batch: Any, clip: float | None) -> OracleStep:
    """A step of the oracle, which the next one does not change."""
    step = OracleStep.of(oracle, batch, clip)
    return replace(step, gradients=on_host(step.gradients))


def on_device(task: Task, device: str) -> Task:
    """The task with its model and its batches on the device."""

    def batch(step: int) -> Any:
        return tree_map(lambda x: x.to(device), task.batch(step))

    return replace(task, make=lambda: task.make().to(device), batch=batch)


def oracle_of(proof: Proof, task: Task) -> Oracle | AsyncOracle:
    recipe = sw.Optim(proof.case.kind, **proof.case.options)
    return oracles_of(task.make, proof.plan, recipe, task.loss, task.tokens).exact


def on_host(wholes: Wholes) -> Wholes:
    return {name: x.detach().to("cpu", copy=True) for name, x in wholes.items()}


def load_alone(weights: Weights, arrays: Arrays) -> None:
    """Load a checkpoint into the oracle's weights and its optimizer's state."""
    for name, master in weights.masters.items():
        master.data.copy_(torch.from_numpy(arrays[f"model/{name}"]))
        weights.params[name].data.copy_(master.data)
        kept = {key: f"optim/{key}/{name}" for key in ("step", "exp_avg", "exp_avg_sq")}
        read = {key: torch.from_numpy(np.array(arrays[n])) for key, n in kept.items()}
        state = {key: x.to(master.device) if x.dim() else x for key, x in read.items()}
        weights.optimizer.state[master] = state


OnRanks = Callable[..., list[Trained]]


def runner(device: str, text: str) -> OnRanks:
    """Who runs a plan under `--device`. More than four threads would wait for one interpreter."""
    if device == "cuda":
        return run_gpu
    return run_gloo if text in ON_PROCESSES or Proof(text).plan.size > 4 else run_threads


def device_of(on_ranks: OnRanks) -> str:
    return "cuda" if on_ranks is run_gpu else "cpu"


@dataclass(frozen=True)
class Run:
    """A plan's run on all ranks, and the same in one process."""

    proof: Proof
    ranks: list[Trained]
    expected: Expected

    @property
    def findings(self) -> list[Finding]:
        """The results of the ranks, as those of a proof."""
        return [self._finding(*each) for each in enumerate(self.ranks)]

    @property
    def report(self) -> Report:
        """The first difference from one process, and what no rank compared."""
        return report(self.proof.plan, self.proof.kind, self.findings)

    def _finding(self, number: int, rank: Trained) -> Finding:
        """A rank beside one process: steps, states, an evaluation; and the same after loading."""
        wanted = self.expected
        before = self._errors(rank.steps, wanted.steps, rank.state, wanted.state)
        after = self._errors(rank.resumed, wanted.resumed, rank.resumed_state, wanted.resumed_state)
        errors = [found for found, _ in before]
        for name, *pair in zip(("loss", "tokens"), rank.evaluated, wanted.evaluated, strict=True):
            errors.append(scalar("evaluation", name, pair[0], pair[1:]))
        errors += [renamed(found, "after loading") for found, _ in after]
        facts = {"number of steps": rank.resumed_steps == SAVED + 1}
        errors.append(Errors.of_facts("after loading", facts))
        whole = {**wanted.steps[0].gradients, **wanted.state}
        return Finding(
            *(number, tuple(errors), rank.costs, rank.measured, rank.predicted),
            pieces=tuple((e.kind, pieces) for e, pieces in [*before, *after] if e.kind in KINDS),
            whole=tuple((name, tuple(x.shape)) for name, x in whole.items()),
        )

    def _errors(
        self,
        steps: Sequence[EngineStep],
        alone: Sequence[OracleStep],
        state: Sequence[Box],
        end: Wholes,
    ) -> list[tuple[Errors | Parts, frozenset[BoxPlace]]]:
        """The errors of steps and of the state at their end, and the pieces that they are of."""
        found = tensor_errors(state, [end])
        for number, (step, wanted) in enumerate(zip(steps, alone, strict=True), 1):
            found += [(error, frozenset()) for error in step_errors(number, step, [wanted])]
            if not is_asynchronous(self.proof.plan):  # whose stages have their own gradients
                found += tensor_errors(step.gradients, [wanted.gradients])
        return found


def run_of(on_ranks: OnRanks, text: str) -> Run:
    """The run of a plan on ranks that `on_ranks` provides."""
    proof = Proof(text)
    expected = trained_alone(*proof.oracle, device_of(on_ranks))
    return Run(proof, on_ranks_of(on_ranks, proof, expected), expected)


@cache
def run_in_16_bits(on_ranks: OnRanks, text: str) -> Run:
    """The run of a plan in 16 bits, and the same in one process in fp32."""
    proof = Proof(text)
    ranks = on_ranks_of(on_ranks, proof, Expected(loads=[()] * (STEPS + 1)))
    return Run(proof, ranks, trained_alone(proof.kind, "fp32", device_of(on_ranks)))


def on_ranks_of(on_ranks: OnRanks, proof: Proof, expected: Expected) -> list[Trained]:
    """What the ranks give, each with what one process saved."""
    saved_alone = checkpoint(proof.kind, proof.precision)
    return on_ranks(proof.plan.size, train_and_go_on, proof, expected, *saved_alone)
