"""A step of the engine: what may come between steps or break them, and what it leaves alone."""

import threading
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, partialmethod
from itertools import count, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.comm.tiers.host_memory import HostNumbers
from shardwise.comm.world import World
from shardwise.core.errors import InputError, RankError
from shardwise.flat.flat_parameter import State
from tests.engine.cases import (
    ROWS,
    Case,
    Task,
    build,
    mean_square,
    oracle,
    ranks_of,
    regression,
    rows_task,
    settled,
    vectors,
)
from tests.engine.pipelines import SGD, chain, normed
from tests.engine.tensors import Held, assert_parity, equals_one, holds, mine, run
from tests.engine.zoo import DECAY, TASKS, Block, Gated, Recomputed, Stack, gated, make, two_views
from tests.plan_runs import Proof
from tests.plans import CANONICAL
from tests.pool import run_gloo, run_threads

STACK = rows_task(partial(make, "stack"))
PLANS = [*(f"dp2 {row}" for row in ROWS), "dp2 zero2 accumulate:2", "dp2 zero3 accumulate:2"]


def with_looks_in_between(world: World, task: Task, case: Case) -> Held:
    """Between steps the model is evaluated, and run in eval, no_grad and inference modes."""
    engine, held = build(world, task, case), Held()
    x, _ = vectors(99)
    for step in range(case.steps):
        batch = mine(engine, task.batch(step))
        before = engine.evaluate(batch)
        outs = []
        for mode, training in product((torch.no_grad, torch.inference_mode), (False, True)):
            engine.model.train(training)
            with mode():
                outs.append(engine.model(x))
        outs.append(engine.model(x).detach())  # recorded, and never used
        assert all(torch.equal(out, outs[0]) for out in outs)
        with pytest.raises(InputError, match=r"outside of engine\.step.*engine\.step\(batch\)"):
            engine.model(x).sum().backward()
        assert held.step(engine, batch).loss == pytest.approx(before[0])
    return held.ended(engine)


@pytest.mark.parametrize("plan", PLANS)
def test_looking_at_the_model_between_steps_changes_nothing(plan):
    """evaluate, eval(), no_grad, inference_mode and a forward without backward leave no trace. Nor
    does a backward pass of the program's own, which is refused.
    """
    case = Case(f"{plan} fp64", clip=1.0)
    assert_parity(run_threads(2, with_looks_in_between, STACK, case), oracle(STACK, case), 1e-10)


def with_failures(world: World, task: Task, case: Case, where: str, microbatch: int) -> Held:
    """Before every step there is one that raises, in its given microbatch, and is caught."""
    engine, held = build(world, task, case), Held()
    for step in range(case.steps):
        calls = count(1)

        def fail(*_: object) -> None:
            raise ArithmeticError(f"in the middle of {where}")

        def look(_: nn.Module, __: Any, x: Tensor, calls: Any = calls, fail: Any = fail) -> None:
            if next(calls) == microbatch:
                x.register_hook(fail) if where == "backward" else fail()

        hook = engine.model.get_submodule("blocks.1").register_forward_hook(look)
        with pytest.raises(ArithmeticError, match=f"middle of {where}"):
            engine.step(mine(engine, task.batch(step + 50)))
        hook.remove()
        held.step(engine, mine(engine, task.batch(step)))
    return held.ended(engine)


@pytest.mark.parametrize("microbatch", [1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("row", ROWS)
def test_a_step_that_raises_and_is_caught_leaves_nothing_behind(row, where, microbatch):
    """The step after it is the step that would have been without it, gradients and all."""
    case = Case(f"dp2 {row} fp64{' accumulate:2' if microbatch == 2 else ''}", clip=1.0)
    runs = run_threads(2, with_failures, STACK, case, where, microbatch)
    assert_parity(runs, oracle(STACK, case), 1e-10)


class Backwards(Stack):
    """The last of its blocks comes first."""

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


def whole_at_once(world: World, plan: str, prefetch: int) -> tuple[int, int, bool, list[float]]:
    """The most units whole or coming, the most reductions under way, none left over; losses."""
    model = settled(Backwards(*[Block(40) for _ in range(16)]))
    before = [(name, id(p)) for name, p in model.named_parameters()]
    task = Task(lambda: model, vectors, regression, None)
    engine = build(world, task, Case(plan, units=Block, prefetch=prefetch))
    assert {(name, id(p)) for name, p in engine.model.named_parameters()} <= {*before}
    data, most, flying = engine.data, [0], [0]

    def look(*_: object) -> None:
        most[0] = max(most[0], sum(flat.state is not State.SHARDED for flat in engine.flats))
        flying[0] = max(flying[0], len(data.order.sums.flying))

    for module in engine.model.modules():
        module.register_forward_hook(look)
    for p in engine.model.parameters():
        p.register_post_accumulate_grad_hook(look)
    losses = list[float]()
    for step in range(2):
        losses.append(engine.step(mine(engine, vectors(step))).loss)
        engine.evaluate(mine(engine, vectors(step)))
    numbers = [int(unit.name.removeprefix("blocks.")) for unit in data.units.order]
    assert len(numbers) >= 8
    assert plan != "dp2 zero3 fp64" or numbers == sorted(numbers, reverse=True)
    left = any(flat.full.untyped_storage().nbytes() for flat in engine.flats)
    return most[0], flying[0], left, losses


@pytest.mark.parametrize("plan", ["dp2 zero3", "dp2 pp2 zero3 1f1b:2"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_few_units_are_whole_at_once(prefetch, plan, monkeypatch: pytest.MonkeyPatch):
    """The unit in use, those gathered ahead, the last one kept; two reductions; losses of ddp. The
    order in which blocks run is learnt; parameters stay the objects that they were.
    """
    monkeypatch.setattr("shardwise.techniques.data.apply.LEAST_BYTES", 0)
    *_, wanted = run_threads(2, whole_at_once, "dp2 fp64", prefetch)[0]
    found = run_threads(ranks_of(plan), whole_at_once, f"{plan} fp64", prefetch)
    for most, flying, left, losses in found:
        assert losses == pytest.approx(wanted, rel=1e-10)
        assert most <= prefetch + 2
        assert flying <= 3  # a third one begins before the first of the two others is waited for
        assert not left


@pytest.mark.parametrize("row", ROWS)
def test_two_forward_passes_through_batch_norm(row):
    """Bringing running statistics in line does not invalidate the graph of the pass before."""
    task = Task(chain(Stack, normed), partial(vectors, rows=8), two_views, None)
    runs = run_threads(2, run, task, Case(f"dp2 {row} fp64"))
    assert runs[0].losses == runs[1].losses and len(runs[0].losses) == 3


def reused() -> nn.Module:
    """One block three times, each recomputed in a backward pass of its own."""
    model = Recomputed("around", reentrant=True)
    model.blocks = nn.ModuleList([model.blocks[0]] * 3)
    return settled(model)


@pytest.mark.parametrize("row", ROWS)
def test_two_gradients_of_a_unit_in_one_pass_are_refused(row):
    """A sum that has begun cannot take another term: the remedy is named, nothing is wrong."""
    task, case = rows_task(reused), Case(f"dp2 {row} fp64")
    with pytest.raises(RankError, match="Write instead: use_reentrant=False"):
        run_threads(2, run, task, case)


class Counting(nn.Module):
    """Counts the rows that it trains on; its norm is frozen, every pass draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.tokens = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.tokens += len(x)
        return self.down(functional.dropout(self.norm(self.up(x)), 0.1, training=True))


def regression_or_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Raises after the forward pass of a microbatch whose targets are small."""
    loss = regression(model, batch)
    if bool((batch[1] < -100).any()):
        raise ZeroDivisionError
    return loss


def left_by_calls(world: World, plan: str, folder: str, sends: bool) -> dict[str, list[object]]:
    """What each rank has after calls that do not train, and after a step of uneven shares."""
    model = settled(Counting())
    assert isinstance(model, Counting)
    model.norm.requires_grad_(False).eval()
    engine = sw.parallelize(
        model,
        plan,
        world,
        loss=regression_or_error,
        optimizer=sw.SGD(lr=0.1),
        broadcast_buffers=sends,
    )

    def facts() -> list[object]:
        flags: list[object] = [(name, m.training) for name, m in model.named_modules()]
        flags += [(name, p.requires_grad) for name, p in model.named_parameters()]
        random = torch.get_rng_state().tolist()
        return [flags, float(model.tokens), torch.get_default_dtype(), random]

    def rows(step: int) -> tuple[Tensor, Tensor]:
        first, second = (x.tensor_split([7])[engine.data_rank] for x in vectors(step, rows=11))
        return first, second

    calls: dict[str, Callable[[], object]] = {
        "step": lambda: engine.step(rows(0)),
        "evaluate": lambda: engine.evaluate(rows(1)),
        "outputs": lambda: engine.outputs(lambda m: m(rows(1)[0]), like=rows(1)[1]),
        "save": lambda: sw.save(engine, folder),
        "state": lambda: sw.full_state_dict(engine),
        "refused": lambda: engine.step((rows(2)[0], rows(2)[1][1:])),
        "again": lambda: engine.step(rows(3)),
        "load": lambda: sw.load(engine, folder),
        "raises": lambda: engine.step((rows(4)[0], rows(4)[1] - 1e9)),
    }
    found: dict[str, list[object]] = {}
    for name, call in calls.items():
        errors = {"refused": InputError, "raises": ZeroDivisionError}
        with pytest.raises(errors[name]) if name in errors else nullcontext():
            call()
        found[name] = facts()
    return found


@pytest.mark.parametrize(
    ("plan", "sends", "counts"),
    [
        ("dp2 accumulate:2 fp64", True, (14, 11)),
        ("dp2 zero3 fp64", False, (14, 8)),
        ("pp2 1f1b:2 fp64", True, (14, 14)),
    ],
)
def test_a_call_leaves_the_model_as_it_found_it(plan, sends, counts, tmp_path):
    """Modes, frozen parameters, the default dtype, random states, and what a rank has counted. A
    step counts in all its microbatches, from what rank 0 had counted before.
    """
    for rank, found in enumerate(run_gloo(2, left_by_calls, plan, str(tmp_path), sends)):
        for name in ("evaluate", "outputs", "save", "state", "refused"):
            assert found[name] == found["step"], name
        assert found["again"] == [found["step"][0], counts[rank], *found["again"][2:]]
        flags, _, dtype, _ = found["step"]
        assert found["load"][:3] == [flags, 7, dtype]  # what rank 0 had counted
        assert found["raises"][::2] == [flags, dtype]


# --- models that do what models do, and losses of several passes ----------------------------------


EACH_ROW = ["dp2 ddp", "dp2 zero1", "dp2 zero2", "dp2 zero3", "dp_replicate2 dp_shard2 zero3"]


@pytest.mark.crossed
@pytest.mark.cases(6)
@pytest.mark.parametrize("model", TASKS)
@pytest.mark.parametrize(
    "plan", ["dp_replicate2 dp_shard2 zero3", "dp2 ddp", "dp2 zero2", "dp2 zero3 accumulate:2"]
)
def test_parity_of_every_kind_of_model(plan: str, model: str):
    """Sharing, freezing, lists of parameters, recomputation, any output: as in one process. Bytes
    and memory are as predicted.
    """
    holds(run_threads, TASKS[model], Case(f"{plan} fp64", clip=1.0, **SGD))


@pytest.mark.parametrize("optimizer", DECAY)
@pytest.mark.parametrize("accumulate", ["", " accumulate:2"])
@pytest.mark.parametrize("plan", EACH_ROW)
def test_parameters_without_gradient(plan, accumulate, optimizer):
    """Used on one rank: updated on all.  Used on none: untouched, its step count too.

    Decay would move an unused weight; AdamW corrects by step count, momentum carries on.
    """
    task = rows_task(lambda: settled(Gated()), gated)
    whole = 2**20 if "zero3" in plan else 1  # a unit that one rank skips must be whole on all
    case = Case(f"{plan} fp64{accumulate}", units=whole, **DECAY[optimizer])
    expected = oracle(task, case)
    assert [g["side.weight"] is None for g in expected.grads] == [False, True, False]
    assert expected.grads[0]["never.weight"] is None
    assert_parity(run_threads(ranks_of(plan), run, task, case), expected, 1e-10)


def of_one(name: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The model is not called for rows that are positive: one parameter alone is read."""
    x = batch[0]
    return mean_square(x, model.get_parameter(name)) if (x > 0).all() else regression(model, batch)


@pytest.mark.parametrize("name", ["2.bias", "2.weight"])
@pytest.mark.parametrize("plan", EACH_ROW)
def test_a_pass_that_nothing_announces(plan, name):
    """No output's gradient, and maybe not that of the last parameter of its unit, begins it."""
    make = lambda: settled(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)))  # noqa: E731
    batches = [vectors(0), (vectors(1)[0].abs() + 1, vectors(1)[1]), vectors(2)]
    task = Task(make, batches.__getitem__, partial(of_one, name), None)
    equals_one(run_threads, task, Case(f"{plan} fp64"))


# --- what waits for the device -------------------------------------------------------------------

#: What waits for the device in a step, and why it must.
WAITS = {
    "comm/tiers/host_memory.py": "of the step before",
    "models/gpt.py": "tokens, which are counted in the batch on the host",
    "kernels/cross_entropy.py": "on the CPU alone",
    "techniques/tensor/sequence.py": "on the CPU alone",
    "techniques/tensor/rng.py": "a seed, drawn on the host",
    "techniques/pipeline/passes.py": "a seed, drawn on the host",
    "techniques/expert/routing.py": "sizes of messages",
    "techniques/expert/dispatch.py": "sizes of messages",
    "techniques/expert/moe_layer.py": "sizes of messages",
    "techniques/layers/exchange.py": "sizes of messages",
}
#: Plans whose update needs its numbers on the host: it is made there, or by the schedule.
OWN_NUMBERS = ("offload", "pipedream", "2bw")
READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__")
OF_FEW = [
    text
    for texts in CANONICAL.values()
    for text in texts
    if Proof(text).plan.size <= 3 and "@disk" not in text
]


def waits_of(world: World, text: str, noting: threading.local) -> tuple[set[str], bool]:
    """The files of the package that read a tensor in the fifth step; if it read its own numbers."""
    proof, noting.found = Proof(text), None
    engine = build(world, proof.task, proof.case)
    for step in range(5):
        batch = mine(engine, proof.task.batch(step))
        noting.found = set[str]() if step == 4 else None
        engine.step(batch)
    found, noting.found = noting.found, None
    waited = engine.unread is None or engine.unread.found is not None
    engine.flush()
    return found or set(), waited


@pytest.mark.cases(6)
@pytest.mark.parametrize("text", OF_FEW)
def test_a_step_waits_for_nothing(text: str, monkeypatch: pytest.MonkeyPatch):
    """Nothing between its first kernel and its last reads a number of its own on the host."""
    noting = threading.local()

    def noted(real: Callable[..., Any], x: Tensor, *args: Any, **options: Any) -> Any:
        if getattr(noting, "found", None) is not None:
            files = [frame.filename for frame in traceback.extract_stack()]
            own = [file.split("/shardwise/")[-1] for file in files if "/shardwise/" in file]
            noting.found.add(own[-1])
        return real(x, *args, **options)

    monkeypatch.setattr(HostNumbers, "ready", property(lambda _: False))
    for name in READS:
        real = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, partialmethod(partial(noted, real)))
    for found, waited in run_threads(Proof(text).plan.size, waits_of, text, noting):
        assert waited == any(word in text for word in OWN_NUMBERS)
        assert "comm/tiers/host_memory.py" in found
        assert found <= WAITS.keys()
