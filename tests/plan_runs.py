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
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.memory_table import by_tier
from shardwise.core.mesh import CONTEXT, TENSOR
from shardwise.core.plan.plan import Plan
from shardwise.engine.engine import Engine
from shardwise.engine.model_structure import shapes_of
from shardwise.observe.kernels import kernels_of
from shardwise.observe.meter import Leak, Meter
from shardwise.prediction.prediction import Prediction
from shardwise.techniques.expert.expert_moves import Loads
from shardwise.verify.oracles.batches import Division
from shardwise.verify.oracles.loads import Choices
from shardwise.verify.oracles.oracle import Oracle, Weights
from shardwise.verify.oracles.oracles import is_asynchronous, oracles_of
from tests.engine.cases import Case, Task, build, predictor, share
from tests.engine.tensors import ADAMW, Piece, gpt_task, mine, pieces, sent
from tests.engine.test_state import assembled, saved
from tests.expert.moe import task as moe_task
from tests.plans import ON_PROCESSES
from tests.pool import run_gloo, run_gpu, run_threads

STEPS = 3
SAVED = 2  # the steps after which one process saves what the plan then loads
PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
ROWS = 17  # of each global batch
#: The training of each kind of model: GPTs whose sizes divide by nothing convenient, and a mixture
#: whose experts drop tokens.
TASKS = {
    "mixture": moe_task("topk-renormalised", 1.0, rows=ROWS),
    "mixture without a capacity": moe_task("topk", rows=ROWS),
    "untied": gpt_task("untied", rows=ROWS),
    "tied": gpt_task("tied", rows=ROWS),
}


class Adds(torch.autograd.Function):
    """Adds a gradient of its own to that of `term`, as routers of transformers do."""

    @staticmethod
    def forward(_: Any, *of: Tensor) -> Tensor:
        return of[0].view_as(of[0])

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].new_ones(())


def with_gradients_of_its_own(task: Task) -> Task:
    """A hook, and a function in the forward of a block, add numbers to gradients of weights."""

    def make() -> nn.Module:
        model = task.make()
        model.get_parameter("blocks.0.mlp.up.weight").register_hook(lambda grad: grad + 0.01)

        def added(module: nn.Module, args: Any, x: Tensor) -> Any:
            return Adds.apply(x, 0.02 * module.get_parameter("weight").sum())

        model.get_submodule("blocks.1.mlp.up").register_forward_hook(added)
        return model

    return replace(task, make=make)


TASKS |= {f"{kind}, hooks": with_gradients_of_its_own(TASKS[kind]) for kind in ("untied", "tied")}


def kind_of(text: str) -> str:
    """The kind of model that the plan trains: a mixture where experts are spread, else a GPT."""
    plan = Plan.parse(text)
    if plan.ep > 1:
        return "mixture" if plan.cp == 1 else "mixture without a capacity"
    own_head = plan.sp or plan.layers or "head" in (plan.tile or "")
    stale = (plan.pipeline or "").startswith("pipedream")  # whose stages share no weight
    kind = "untied" if own_head or stale else "tied"
    # layers with a mesh of their own compute several microbatches at once; tiles have no `weight`
    seen = plan.precision in (None, "fp64", "fp32") and not (plan.layers or plan.tile)
    return f"{kind}, hooks" if seen else kind


Pair = tuple[dict[Any, int], dict[Any, int]]  # measured and predicted
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
    def tolerance(self) -> float:
        """Relative, of all that is compared with one process."""
        return 1e-10 if self.precision == "fp64" else 1e-5

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
    def oracle(self) -> tuple[str, str]:
        """What determines the training in one process: for most plans their model alone."""
        plan, offload = self.plan, self.plan.offloaded
        delayed = offload is not None and offload.undelayed is not None
        own = self.kind.startswith("mixture") or is_asynchronous(plan) or delayed
        return self.kind, self.exact if own else self.precision


@dataclass
class Trained:
    """One rank's training: its values, and pairs of what was measured and predicted."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    gradients: list[list[Piece]] = field(default_factory=list)
    bytes: list[Pair] = field(default_factory=list)
    memory: list[Pair] = field(default_factory=list)
    leaks: list[Leak] = field(default_factory=list)
    evaluated: float = 0.0
    state: list[Piece] = field(default_factory=list)
    resumed_steps: int = 0
    resumed_loss: float = 0.0
    resumed_state: list[Piece] = field(default_factory=list)
    overflow: tuple[bool, float, bool] | None = None


@dataclass
class Expected:
    """The same in one process, in plain PyTorch; `loads` are those of the experts."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    loads: list[tuple[Loads, ...]] = field(default_factory=list)
    evaluated: float = 0.0
    state: dict[str, Tensor] = field(default_factory=dict)
    resumed_loss: float = 0.0
    resumed_loads: tuple[Loads, ...] = ()
    resumed_state: dict[str, Tensor] = field(default_factory=dict)


def foretell(proof: Proof, expected: Expected, on_ranks: "OnRanks") -> list[list[Prediction]]:
    """Of every rank the predictions of its steps, its evaluation, and its step from a checkpoint.

    Made before any rank starts. Ranks with the same parts and shapes of batches share a recording.
    """
    plan, task, made = proof.plan, proof.task, dict[object, Prediction]()
    steps = [(task.batch(step), expected.loads[step], False) for step in range(STEPS)]
    last = task.batch(STEPS), (), True
    again = task.batch(SAVED), expected.resumed_loads, False

    def of(rank: int, batch: Any, loads: tuple[Loads, ...], whole: bool) -> Prediction:
        places = [plan.mesh.coordinate(r) for r in range(plan.size)]
        place = {axis: at for axis, at in places[rank].items() if axis in (TENSOR, "pp")}
        data_rank = sum(at.items() >= place.items() for at in places[:rank]) // plan.cp
        own = share(batch, data_rank, plan.shares)
        counts = Division(plan.shares, 1 if whole else plan.microbatches).counts(batch)
        if plan.layers:  # of meshes of their own
            return theories[rank].of(own, counts, loads, whole=whole)
        routed = (repr(loads), data_rank) if plan.activations_on_host else ()
        key = (
            place.get(TENSOR),
            plan.coordinate(rank)[CONTEXT],
            shapes_of(own),
            tuple(counts),
            routed,
            whole,
        )
        if key not in made:
            made[key] = theories[rank].of(own, counts, loads, whole=whole)
        return made[key].on(rank)

    kernels = kernels_of(torch.device(device_of(on_ranks)))
    theories = [predictor(rank, plan.size, task, proof.case, kernels) for rank in range(plan.size)]
    return [[of(rank, *each) for each in (*steps, last, again)] for rank in range(plan.size)]


def trained(
    engine: Engine, told: Sequence[Prediction], proof: Proof, expected: Expected
) -> Trained:
    """The training of an engine that has run no step."""
    task, found, meter = proof.task, Trained(), Meter(engine, peaks=False)
    for step in range(STEPS):
        with meter if step == STEPS - 1 else nullcontext():
            before = engine.ledger.copy()
            metrics = engine.step(mine(engine, task.batch(step)))
        if (
            "tp" not in proof.text and "cp" not in proof.text
        ):  # whose ranks compare batches, which no step counts
            lines = engine.ledger.since(before), engine.last
            every, counted = (sum(t.sent_bytes for t in each.values()) for each in lines)
            found.bytes.append(({"in all": every}, {"in all": counted}))
        found.losses.append(metrics.loss)
        found.norms.append(metrics.grad_norm)
        found.tokens.append(metrics.tokens)
        found.gradients.append(pieces(engine.gradients(), "grad/"))
        compare(found, engine, told[step], {"loads": expected.loads[step]})
    engine.world.barrier()  # ranks in threads read each other's tensors until here
    gc.collect()
    # under these, versions of weights replace others in each step, which `memory` counts
    own = {"parameters"} if is_asynchronous(proof.plan) else set[str]()
    found.leaks = [leak for leak in meter.leaks() if leak.place.category not in own]
    found.state = pieces(engine.boxes(), "")
    found.evaluated = evaluate(engine, told[STEPS], task.batch(STEPS), expected.loads[STEPS], found)
    return found


def train_and_go_on(
    world: World,
    proof: Proof,
    expected: Expected,
    foretold: list[list[Prediction]],
    arrays: Arrays,
    scalars: Any,
) -> Trained:
    """Training; then the engine loads a checkpoint of one process, and takes a step."""
    task, case = proof.task, proof.case
    engine, told = build(world, task, case), foretold[world.rank]
    found = trained(engine, told, proof, expected)
    found.overflow = overflowing(engine, task) if proof.precision == "fp16" else None
    load(engine, arrays, scalars)
    batch, done = task.batch(SAVED), engine.steps - engine.steps_run
    found.resumed_loss = engine.step(mine(engine, batch)).loss
    how = {"loads": expected.resumed_loads, "done": done, "flushed": True}
    compare(found, engine, told[-1], how)
    found.resumed_steps = engine.steps
    found.resumed_state = pieces(engine.boxes(), "")
    return found


def overflowing(engine: Engine, task: Task) -> tuple[bool, float, bool]:
    """A step in which a gradient of the last rank alone is infinite.

    Returns whether it was skipped, the factor of the loss scale, and whether all states stayed.
    """
    before, scale = pieces(engine.boxes(), ""), engine.scale.value
    norms = [p for name, p in engine.model.named_parameters() if "norm" in name]
    last = engine.world.rank == engine.world.size - 1
    hook = norms[-1].register_hook(lambda g: g * torch.inf if last else g)
    skipped = engine.step(mine(engine, task.batch(STEPS))).skipped
    hook.remove()
    after = pieces(engine.boxes(), "")
    same = all(torch.equal(a.values, b.values) for a, b in zip(before, after, strict=True))
    return skipped, engine.scale.value / scale, same


def compare(found: Trained, engine: Engine, told: Prediction, how: dict[str, Any]) -> None:
    """Add bytes and memory after a step beside the prediction."""
    found.bytes.append((sent(engine), told.in_step(engine.steps_run - 1, **how)))
    held = by_tier(engine.memory(), engine.host_memory(), engine.disk_memory())
    found.memory.append((held, told.memory_by_tier))
    listed, alive = sum(engine.host_memory().values()), engine.world.tiers.host_bytes
    found.memory.append(({"host": alive}, {"host": listed}))  # all that is alive there


def evaluate(
    engine: Engine, told: Prediction, batch: Any, loads: Sequence[Loads], found: Trained
) -> float:
    """The loss of an evaluation, whose bytes are compared too."""
    engine.wait()
    before, own = engine.ledger.copy(), mine(engine, batch)
    loss, tokens = engine.evaluate(own)
    found.tokens.append(tokens)
    counted = {key: t.sent_bytes for key, t in engine.ledger.since(before).items() if t.sent_bytes}
    predicted = {tuple(line): count for line, count in told.in_evaluation(loads).items()}
    found.bytes.append(({tuple(key): count for key, count in counted.items()}, predicted))
    return loss


def load(engine: Engine, arrays: Arrays, scalars: Any) -> None:
    """Load what another engine saved."""
    tensors = {name: (a.shape, torch.from_numpy(a).dtype) for name, a in arrays.items()}
    for box in engine.loading(tensors, scalars):
        at = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        box.tensor.detach().copy_(torch.from_numpy(np.array(arrays[box.name][at])))
    engine.load_scalars(scalars)
    engine.loaded()


# --- in one process -------------------------------------------------------------------------------


@cache
def checkpoint(kind: str, precision: str) -> tuple[Arrays, Any]:
    """What one process saved after two steps of a kind of model."""
    states = [saved(alone(), TASKS[kind], Proof(f"dp1 {precision}").case, SAVED)]
    return assembled(states), states[0][1]


@cache
def trained_alone(kind: str, exact: str, device: str = "cpu") -> Expected:
    """The oracle's training: three steps, an evaluation, and a step from the checkpoint."""
    proof, task, found = Proof(exact), on_device(TASKS[kind], device), Expected()
    plan, clip = proof.plan, proof.case.clip
    oracle = oracle_of(proof, task)
    choices = Choices(oracle.model)
    for step in range(STEPS):
        batch = task.batch(step)
        found.losses.append(oracle.step(batch, clip))
        found.norms.append(oracle.weights.norm)
        found.loads.append(choices.loads(batch, plan))
        found.gradients.append({n: on_host(g) for n, g in oracle.weights.used.items()})
    found.state = state_of(oracle.weights)
    last = task.batch(STEPS)
    found.evaluated = float(oracle.evaluate(lambda m: oracle.task.loss_of(m, last, oracle.dtype)))
    found.loads.append(choices.loads(last, plan, Division(plan.shares, 1), trained=False))
    resumed = oracle_of(proof, task)
    load_alone(resumed.weights, checkpoint(kind, proof.precision)[0])
    if isinstance(resumed, Oracle):
        resumed.steps = SAVED
    choices, batch = Choices(resumed.model), task.batch(SAVED)
    found.resumed_loss = resumed.step(batch, clip)
    found.resumed_loads = choices.loads(batch, plan)
    found.resumed_state = state_of(resumed.weights)
    return found


def on_device(task: Task, device: str) -> Task:
    """The task with its model and its batches on the device."""

    def batch(step: int) -> Any:
        return tree_map(lambda x: x.to(device), task.batch(step))

    return replace(task, make=lambda: task.make().to(device), batch=batch)


def oracle_of(proof: Proof, task: Task) -> Any:
    recipe = sw.Optim(proof.case.kind, **proof.case.options)
    return oracles_of(task.make, proof.plan, recipe, task.loss, task.tokens).exact


def state_of(weights: Weights) -> dict[str, Tensor]:
    """Copies of the weights and of the optimizer's state, by the names of checkpoints."""
    found = {f"model/{n}": on_host(t) for n, t in weights.values().items()}
    return found | {f"optim/{n}": on_host(t) for n, t in weights.state().items()}


def on_host(x: Tensor) -> Tensor:
    """A copy on the host."""
    return x.detach().to("cpu", copy=True)


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


def run_threads_or_gloo(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Up to four ranks run as threads; more would wait for one interpreter's lock, so as gloo."""
    return (run_gloo if ranks > 4 else run_threads)(ranks, function, *args)


def runner(device: str, text: str) -> OnRanks:
    """Who runs a plan under `--device`."""
    if device == "cuda":
        return run_gpu
    return run_gloo if text in ON_PROCESSES else run_threads_or_gloo


def device_of(on_ranks: OnRanks) -> str:
    """Where these ranks compute."""
    return "cuda" if on_ranks is run_gpu else "cpu"


@dataclass(frozen=True)
class Run:
    """A plan's run on all ranks, and the same in one process."""

    proof: Proof
    ranks: list[Trained]
    expected: Expected


def run_of(on_ranks: OnRanks, text: str) -> Run:
    """The run of a plan on ranks that `on_ranks` provides."""
    proof = Proof(text)
    expected = trained_alone(*proof.oracle, device_of(on_ranks))
    saved_alone = checkpoint(proof.kind, proof.precision)
    told = foretell(proof, expected, on_ranks)
    ranks = on_ranks(proof.plan.size, train_and_go_on, proof, expected, told, *saved_alone)
    return Run(proof, ranks, expected)


@cache
def run_in_16_bits(on_ranks: OnRanks, text: str) -> Run:
    """The run of a plan in 16 bits, and the same in one process in fp32."""
    proof = Proof(text)
    expected, saved_alone = (
        Expected(loads=[()] * (STEPS + 1)),
        checkpoint(proof.kind, proof.precision),
    )
    told = foretell(proof, expected, on_ranks)
    ranks = on_ranks(proof.plan.size, train_and_go_on, proof, expected, told, *saved_alone)
    return Run(proof, ranks, trained_alone(proof.kind, "fp32", device_of(on_ranks)))
