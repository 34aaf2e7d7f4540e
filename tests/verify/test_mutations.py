"""Every sabotage of the catalogue (mutations.txt: edits of functions, made while the package runs)
is refused by verify, and the package as it is holds.
"""

import ast
import gc
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import unwrap
from pathlib import Path
from textwrap import dedent, indent
from types import CodeType
from typing import Any

import pytest
import torch

from shardwise.comm.world import World
from shardwise.core.errors import RankError
from shardwise.core.plan.plan import Plan
from shardwise.core.zero import GATHERED, KEPT, PREDICTED, TEMPORARY, Event
from shardwise.observe.dry_engine import ALONE, dry_step
from shardwise.observe.dry_twin import dry_events
from shardwise.observe.meter import measuring
from shardwise.prediction.prediction import DryStep
from shardwise.techniques.recompute.host_activations import SMALL_BYTES
from shardwise.verify import memory_proof as memory
from shardwise.verify import parity
from shardwise.verify.finding import Finding
from shardwise.verify.inputs import Options
from shardwise.verify.oracles.batches import ragged
from shardwise.verify.oracles.oracles import is_asynchronous
from shardwise.verify.report import report
from tests.engine.cases import Case, build, rows_task
from tests.engine.pipelines import Dropping, chain, with_dropout
from tests.engine.tensors import ADAMW
from tests.pool import run_threads
from tests.verify import micro

FILE = Path(__file__).with_name("mutations.txt")
NAME = re.compile(r"(.+) \[(.+?)(?: of (\w+))?\](?: (\w+))?")


@dataclass(frozen=True)
class Mutation:
    """A sabotage, and `refused_by`, what of a proof refuses it. `edits` has the lines of each
    function, by its file and name.
    """

    name: str
    plan: str
    model: str
    refused_by: str
    edits: dict[str, list[str]]

    @property
    def id(self) -> str:
        return f"{self.name} [{self.plan}]"

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        """Change the code of its functions, which every module that imports them has."""
        for target, lines in self.edits.items():
            function = function_at(target)
            patch.setattr(function, "__code__", edited(function, lines))


def catalogue() -> list[Mutation]:
    """The mutations of the file, in its order."""
    found = list[Mutation]()
    for line in FILE.read_text().splitlines():
        text = line.strip()
        if text[:2] in ("- ", "+ ", "= "):
            found[-1].edits[[*found[-1].edits][-1]].append(text)
        elif line.startswith(" "):
            found[-1].edits[text] = []
        elif match := NAME.fullmatch(line.partition("#")[0]):
            name, plan, model, part = match.groups()
            found.append(Mutation(name, plan, model or "layers", part or "parity", {}))
    return found


def function_at(target: str) -> Callable[..., Any]:
    """The function of the package at `folder/file.py:Class.name`, without its decorators."""
    path, _, name = target.partition(":")
    found: Any = import_module(f"shardwise.{path.removesuffix('.py').replace('/', '.')}")
    for part in name.split("."):
        found = getattr(found, part)
    return inspect.unwrap(found)


def edited(function: Callable[..., Any], edits: Sequence[str]) -> CodeType:
    """The code of a function with the lines of a mutation. Raises LookupError if a line that is
    left out is not there, or twice.
    """
    source = dedent(inspect.getsource(function)).splitlines()
    (whole,) = ast.parse("\n".join(source)).body
    assert isinstance(whole, ast.FunctionDef)
    at, added = whole.body[0].lineno - 1, defaultdict[int, list[str]](list)
    left_out, results = set(range(whole.lineno - 1)), list[str]()
    for sign, text in ((line[0], line[2:]) for line in edits):
        if sign == "-":
            places = [n for n, line in enumerate(source) if line.strip().startswith(text)]
            if len(places) != 1:
                raise LookupError(f"{len(places)} lines of {function.__qualname__} are {text!r}")
            (at,) = places
            left_out.add(at)
        elif sign == "+":
            indented = len(source[at]) - len(source[at].lstrip())
            added[at].append(" " * indented + text)
        else:
            results.append(text)
    lines = [
        each
        for n, line in enumerate(source)
        for each in [*added[n], *([] if n in left_out else [line])]
    ]
    free = ", ".join(function.__code__.co_freevars)
    tree = ast.parse(f"def free({free}):\n" + indent("\n".join(lines), "    "))
    for result in results:
        tree = Results(result).visit(tree)
    code = compile(ast.fix_missing_locations(tree), inspect.getfile(function), "exec")
    for name in ("free", function.__name__):
        code = next(x for x in code.co_consts if isinstance(x, CodeType) and x.co_name == name)
    return code


class Results(ast.NodeTransformer):
    """Replaces what a function returns; not what functions in it do."""

    def __init__(self, result: str) -> None:
        self.result, self.depth = result, 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if self.depth == 2:
            return node
        self.depth += 1
        return self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> ast.AST:
        changed = ast.parse(f"(lambda found: {self.result})(0)", mode="eval").body
        assert isinstance(changed, ast.Call) and node.value is not None
        changed.args = [node.value]
        return ast.Return(changed)


CATALOGUE = catalogue()
NAMED = {mutation.id: mutation for mutation in CATALOGUE}
#: Those that tests of the engine refuse are judged by `make mutants`.
REFUSED = [mutation for mutation in CATALOGUE if mutation.refused_by != "tests"]
PROVED = sorted({(mutation.model, mutation.plan) for mutation in REFUSED})
#: Proofs that notice the most mutations which no plan of the table does.
CORE = {
    *(("layers", f"dp2 {words}".strip()) for words in ("", "zero1", "zero2", "fp16")),
    *(("gpt", "dp2 zero3"), ("moe", "dp2"), ("sigmoid", "dp2")),
    ("layers", "dp2 zero1 offload:optim-delayed=0"),
}
STEPS = 2  # and one more, for a delayed update to be beside a step


def functions() -> dict[tuple[str, str], Any]:
    """What the package calls, by its owner, a module or a class, and its name there."""
    modules = [module for name, module in sys.modules.items() if name.startswith("shardwise")]
    classes = {x for module in modules for x in vars(module).values() if isinstance(x, type)}
    owners = [*modules, *(x for x in classes if x.__module__.startswith("shardwise"))]
    named = [(str(owner), name, x) for owner in owners for name, x in vars(owner).items()]
    # torch puts a function around the `step` of each optimizer
    return {(owner, name): unwrap(x) for owner, name, x in named if callable(x)}


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays() -> Iterator[None]:
    """The package is afterwards what it was: ranks are threads, which could undo a patch twice.
    Each proof collects garbage: what was there before it need not be looked through.
    """
    before = functions()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    after = functions()
    assert [name for name, value in before.items() if after[name] is not value] == []


def read(plan: str) -> Plan:
    """The plan, in fp64 where it says no precision."""
    words, *layers = plan.split("|")
    precision = "" if any(word in words for word in ("bf16", "fp16", "fp32")) else " fp64 "
    return Plan.parse("|".join([words + precision, *layers]))


def small(patch: pytest.MonkeyPatch, *, ten_steps: bool = False) -> None:
    """Proofs are of the models of micro.py; memory is read after six steps, or after one."""
    patch.setattr(parity, "find", micro.find)
    if not ten_steps:
        patch.setattr(memory, "READ_AFTER", (1,))


def prove(world: World, model: str, plan: str) -> Finding:
    return parity.prove(world, read(plan), model, STEPS + ("delayed" in plan))


def refused_by(model: str, plan: str, findings: list[Finding]) -> dict[str, str]:
    """The parts of a proof that refuse the package, and what they say: none where it holds."""
    found = report(read(plan), model, findings)
    refused = {
        "parity": found.first_difference and str(found.first_difference),
        "bytes": "" if all(one.costs.hold for one in findings) else found.sent,
        "memory": "" if all(one.memory_holds for one in findings) else found.memory,
        "coverage": found.uncovered,
    }
    parts = {part: str(said) for part, said in refused.items() if said}
    assert found.holds == (not parts)
    return parts


def proved(model: str, plan: str, part: str = "") -> dict[str, str]:
    """The parts that refuse it; or one fact that is not of verify."""
    if part in FACTS:
        return {} if holds(part, model, read(plan)) else {part: plan}
    try:
        return refused_by(model, plan, run_threads(read(plan).size, prove, model, plan))
    except RankError as error:
        return {"error": str(error)}


@pytest.mark.cases(len(CORE))
@pytest.mark.parametrize(
    ("model", "plan"),
    [each if each in CORE else pytest.param(*each, marks=pytest.mark.full) for each in PROVED],
)
def test_the_package_holds(model: str, plan: str, monkeypatch: pytest.MonkeyPatch):
    """Without a mutation each of these plans holds."""
    parts = {m.refused_by for m in CATALOGUE if (m.model, m.plan) == (model, plan)}
    small(monkeypatch, ten_steps="memory" in parts)
    assert proved(model, plan) == {}
    assert all(holds(part, model, read(plan)) for part in parts & FACTS.keys())


#: Right programs that a proof once refused, of each kind that random plans showed.
ONCE_REFUSED = (
    ("gpt", "zero1 accumulate:2 offload:optim"),
    ("gpt", "zero2 accumulate:2 offload:optim"),
    ("tied", "dp2 offload:optim-delayed=1 fp16"),
    *(("gpt", f"pp2 1f1b:{count} activations:host") for count in (3, 4)),
    ("gpt", "dp2 zero1 accumulate:2 recompute:full"),
    ("gpt", "dp2 zero3 | head: dp2"),
    ("gpt", "dp2 zero3 | blocks.1: tp2"),
    ("moe", "dp2 ep2 activations:host"),
    ("moe", "dp2 ep2 accumulate:2"),
    ("moe", "dp_replicate2 dp_shard2 zero3 ep2 accumulate:2"),
    ("gpt", "dp2 zero3 accumulate:2 bucket:1MiB offload:optim"),
    ("gpt", "dp2 accumulate:2 | blocks.0: offload:param"),
    ("sigmoid", "recompute:full arenas"),
    ("sigmoid", "dp2 accumulate:2"),
    ("layers", "dp2 tp2 zero1 bf16"),
    ("moe", "dp2 ep2 recompute:24KiB"),
    ("gpt", "pp2 dp2 pipedream:4"),
    ("gpt", "tp2 pp2 1f1b:4 recompute:full arenas"),
    ("gpt", "cp2:ulysses pp2 recompute:every2 activations:host"),
    ("constant", "tp2 bf16"),
    ("constant", "tp2"),
    ("spare", "pp2 1f1b:2"),
    ("kinks", "dp2 zero3"),
    ("moe", "dp2 ep2 offload:optim-delayed=0"),
)


@pytest.mark.full
@pytest.mark.parametrize(("model", "plan"), ONCE_REFUSED)
def test_what_was_once_refused_holds(model: str, plan: str, monkeypatch: pytest.MonkeyPatch):
    """Memory of all tiers, delayed updates after an overflow, meshes of layers, experts."""
    small(monkeypatch)
    monkeypatch.setattr(memory, "READ_AFTER", (3, 4))
    assert proved(model, plan) == {}


@pytest.mark.cases(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mutation", REFUSED, ids=lambda mutation: mutation.id)
def test_a_mutation_is_refused(mutation: Mutation, monkeypatch: pytest.MonkeyPatch):
    """The part of the proof that is to find it finds it."""
    part, of = mutation.refused_by, (mutation.model, mutation.plan)
    small(monkeypatch, ten_steps=part == "memory")
    assert part != "moments" or proved(*of, part) == {}  # and foretells them without the mutation
    mutation.apply(monkeypatch)
    assert part in proved(*of, part)


def test_each_mutation_fits_the_package():
    """The lines that it changes are in the functions that it names."""
    for mutation in CATALOGUE:
        for target, lines in mutation.edits.items():
            edited(function_at(target), lines)


# --- facts of the engine alone --------------------------------------------------------------------


def masks(world: World, model: str, plan: Plan) -> bool:
    """The losses of blocks with dropout, under the plan and without it."""
    task, found = rows_task(chain(Dropping, with_dropout)), list[list[float]]()
    for text in ("fp64", str(plan)):
        torch.manual_seed(0)
        engine = build(world, task, Case(text, **ADAMW))
        found.append([engine.step(task.batch(step)).loss for step in range(3)])
    return found[0] == found[1]


#: Events at which messages of the update may be under way, which hold copies of weights.
UPDATE = ("update", "end")
#: The peaks and the events of a dry run by model, plan and rank. A dry run has each fault of
#: its engine, so those beside a mutation were made before it.
FORETOLD: dict[tuple[str, str, int], tuple[DryStep, Sequence[Event]]] = {}


def moments(world: World, model: str, plan: Plan) -> bool:
    """A third step has the bytes of its dry run at each event; an evaluation keeps nothing."""
    trainable = ragged(micro.find(model), plan)
    options = parity.build_options(trainable, plan, Options())
    clip = None if is_asynchronous(plan) else 1.0  # with a norm, all sums end before the update
    engine = parity.engine_of(trainable, plan, world, clip)
    batch = parity.equal_share(trainable, engine, 0)
    engine.step(batch)
    engine.flush()
    with measuring(engine, batch, peaks=False) as evaluation:
        engine.evaluate(batch)
    engine.step(batch)
    with measuring(engine, batch, peaks=False) as seen:
        engine.step(batch)
    engine.wait()
    place = model, str(plan), world.rank
    if place not in FORETOLD:
        of = trainable.plain(), plan, batch, replace(options, clip=clip), world.rank
        with ALONE:
            FORETOLD[place] = dry_step(*of), dry_events(*of)
    found, events = FORETOLD[place]
    host = engine.recompute.host
    good = len(seen.events) == len(events) and all(map(as_foreseen, seen.events, events))
    good &= (0 if host is None else host.most_fetched_bytes) <= found.fetched
    good &= all(
        n <= (0 if event.kind in UPDATE else found.host_activations)
        for event, n in zip(seen.events, seen.on_host, strict=True)
    )
    good &= all(evaluated(event, events) for event in evaluation.events)
    world.barrier()  # ranks in threads read each other's tensors until here
    return good


def as_foreseen(event: Event, foreseen: Event) -> bool:
    """Each category is equal, kept activations but for flags; beside them is no more. Messages of
    the update may be.
    """
    read, theory = event.by_category, foreseen.by_category
    same = all(abs(read[c] - theory[c]) <= SMALL_BYTES * (c == KEPT) for c in PREDICTED)
    more = read[TEMPORARY] > theory[TEMPORARY] + SMALL_BYTES
    return same and (not more or event.kind in UPDATE)


def evaluated(event: Event, events: Sequence[Event]) -> bool:
    """An evaluation keeps nothing, and gathers for a unit what the forward pass of a step does."""
    passes = [e for e in events if e.kind == "forward" and e.unit == event.unit]
    most = max((e.by_category[GATHERED] for e in passes), default=event.by_category[GATHERED])
    return event.by_category[KEPT] <= SMALL_BYTES and event.by_category[GATHERED] <= most


FACTS: dict[str, Callable[[World, str, Plan], bool]] = {"moments": moments, "masks": masks}


def holds(fact: str, model: str, plan: Plan) -> bool:
    return all(run_threads(plan.size, FACTS[fact], model, plan))
