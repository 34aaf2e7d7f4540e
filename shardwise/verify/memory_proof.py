"""Memory over six steps: every live storage must belong to a category with the predicted bytes.

observe/meter.py tracks an engine of the plan while it is built, takes six steps and evaluates once.
After the third and the sixth step the bytes of each category by its formula are compared with the
sizes of the live storages. In host memory these are counted from the storages that
comm/tiers/tiers.py knows too, since a category may leave one out.

The fourth step is measured at each event of a dry run (observe/dry_engine.py). Its largest numbers
are compared as `peak` and `activations` (docs/explanation/proof.md). Kernels of devices and dtypes
save different statistics for the backward pass, so activations may be a quarter above theory.

Attributes of modules in which the model keeps activations in one process too (`self.seen = x`) are
removed before the comparison.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import Tensor, nn

from shardwise.comm.start.peers import PEERS
from shardwise.core.tools.hook import collect
from shardwise.core.zero import GATHERED, KEPT, PREDICTED, Event
from shardwise.engine.engine import Engine
from shardwise.engine.memory import resting
from shardwise.observe.dry_twin import DryTwin
from shardwise.observe.meter import Live, StepMeter, Stray, measuring
from shardwise.techniques.expert.apply import experts_in
from shardwise.verify.finding import Costs
from shardwise.verify.oracles import textbook
from shardwise.verify.oracles.batches import Loads

READ_AFTER: Final = (3, 6)
MEASURED_STEP: Final = 4
EVALUATED_STEP: Final = 1  # an evaluation follows it
#: What kernels may save in place of what is predicted: relative, and the bytes of flags and sums.
SAVED_BY_KERNELS, SLACK_BYTES = 1.25, 1024
OWNED: Final = tuple(name for name in PREDICTED if name != KEPT)
_PEERS_S: Final = 10.0  # time in which the thread of heartbeats releases frames, on a busy machine


@dataclass(frozen=True)
class Memory:
    """Bytes by category, measured and predicted; the largest strays in words; the bytes sent."""

    read: dict[str, int]
    theory: dict[str, int]
    strays: str
    costs: Costs


#: Tensors that are attributes of modules, by the names of module and attribute.
Attributes = dict[tuple[str, str], Tensor]


def attributes(model: nn.Module) -> Attributes:
    """Tensors that are attributes of modules, and neither parameters nor buffers."""
    return {
        (name, key): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def over_steps(
    engine: Engine,
    live: Live,
    batch: Callable[[int], Any],
    dry: DryTwin,
    own: Collection[tuple[str, str]] = (),
    loads: Callable[[int], Sequence[Loads]] = lambda _: (),
    uses: textbook.Uses | None = None,
) -> Memory:
    """Train `engine`, which was built under `live`, on `batch(step)`; called by all ranks.

    `dry` is its dry run. `own` are the attributes that the model has in one process too;
    `loads(step)` are its experts', `uses` those of its weights. The result has only categories that
    differ from the dry run.
    """
    built = attributes(engine.model)
    read: dict[str, int] = {}
    theory: dict[str, int] = {}
    strays, costs = "", Costs()
    peaks = dict[str, tuple[int, int]]()
    for step in range(1, READ_AFTER[-1] + 1):
        # the measured step has the lengths of the one before it, so that arenas are not made anew
        seed = step - (step == MEASURED_STEP)
        share, routed = batch(seed), loads(seed)
        if step == MEASURED_STEP:
            sent, events = dry.events(engine, share)
            with live, measuring(engine, share, peaks=False) as seen:
                engine.step(share)
            peaks = _peaks(seen, events, uses)
            if len(set(peaks.get("peak", ()))) > 1:
                theory["peak of a step"], read["peak of a step"] = peaks["peak"]
        else:
            sent = dry.step(engine, share)
            with live:
                engine.step(share)
        with live:
            costs = costs.after(engine, sent, loads=routed, note=dry.note)
            if step == EVALUATED_STEP:
                engine.flush()  # a delayed update, which an evaluation finishes
                engine.evaluate(share)
        if step in READ_AFTER:
            engine.wait()
            engine.world.barrier()  # ranks in threads read each other's tensors until here
            _restore(engine.model, built, own)
            left = _left(engine, live)
            found = resting(engine)
            expected = dry.memory()
            names = [*found, *(name for name in expected if name not in found)]
            off = {n: found.get(n, 0) for n in names if found.get(n, 0) != expected.get(n, 0)}
            when = f"after step {step}"
            read |= {f"{name}, {when}": n for name, n in off.items()}
            theory |= {f"{name}, {when}": expected.get(name, 0) for name in off}
            for name, (alive, listed) in _beside(engine).items():
                read[f"{name}, {when}"], theory[f"{name}, {when}"] = alive, listed
            read[f"in no category, {when}"] = sum(stray.stored_bytes for stray in left)
            theory[f"in no category, {when}"] = 0
            strays = strays or _words(left, when)
    return Memory(read, theory, strays, replace(costs, peaks=peaks))


def _peaks(
    seen: StepMeter, events: Sequence[Event], uses: textbook.Uses | None
) -> dict[str, tuple[int, int]]:
    """The most bytes of a step by name: predicted or bounded, and measured."""
    engine, plan = seen.engine, seen.engine.plan

    def most(every: Sequence[Event], names: Collection[str]) -> int:
        return max(sum(event.by_category[name] for name in names) for event in every)

    found, kept = {"peak": (0, 0)} if events else {}, most(seen.events, (KEPT,))
    if events:
        found["peak"] = most(events, OWNED), most(seen.events, OWNED)
    if plan.pipeline is None and not engine.recompute.kinds:
        gathered = _gathered_most(engine, uses), most(seen.events, (GATHERED,))
        found |= {"gathered": gathered} if any(gathered) else {}
    if events and plan.pipeline is None and not experts_in(engine.model):
        bound = int(most(events, (KEPT,)) * SAVED_BY_KERNELS) + SLACK_BYTES
        found["activations"] = bound, kept
    if budget := textbook.recompute_bytes(plan):
        found["activations, as the plan's words"] = int(budget * SAVED_BY_KERNELS), kept
    return found


def _gathered_most(engine: Engine, uses: textbook.Uses | None) -> int:
    """All units if a pass calls one twice, or reads weights outside of the calls; else a few."""
    own = {module for unit in engine.data.units.order for module in unit.modules}
    names = [name for name, module in engine.model.named_modules() if module in own]
    again = uses is not None and (uses.outside or any(uses.calls[name] > 1 for name in names))
    few = None if again else 2 + engine.data.pace.ahead
    stay, others = 0, list[int]()
    for unit in engine.data.units.order:
        flats = [flat for flat in unit.groups if flat.reshards]
        stored = sum(flat.plan.padded * flat.shard.element_size() for flat in flats)
        stay += stored * unit.state.stays
        others += [] if unit.state.stays else [stored]
    return stay + sum(sorted(others, reverse=True)[:few])


def _beside(engine: Engine) -> dict[str, tuple[int, int]]:
    arenas, listed = engine.world.arenas, sum(engine.host_memory().values())
    found = {
        "in host memory": (engine.world.tiers.host_bytes, listed),
        "tensors without a slot of an arena": (arenas.kept.missed + arenas.gradients.missed, 0),
    }
    return {name: each for name, each in found.items() if each[0] != each[1]}


def _restore(model: nn.Module, built: Attributes, own: Collection[tuple[str, str]]) -> None:
    """Keep only the attributes in `own` that the model was built with."""
    for name, key in attributes(model).keys() & set(own):
        vars(model.get_submodule(name)).pop(key)
        if (name, key) in built:
            setattr(model.get_submodule(name), key, built[name, key])


def _left(engine: Engine, live: Live) -> list[Stray]:
    """The live storages in no category, once the heartbeats have released the frames they read."""
    ends = time.monotonic() + _PEERS_S
    while True:
        collect()  # storages that only a reference cycle keeps alive do not count
        left = live.unaccounted(engine)
        watched = any(thread.name == PEERS for thread in threading.enumerate())
        if not left or not watched or time.monotonic() > ends:
            return left
        time.sleep(0.1)


def _words(left: list[Stray], when: str) -> str:
    if not left:
        return ""
    kinds = Counter(left).most_common()
    kinds.sort(key=lambda kind: -kind[0].stored_bytes * kind[1])
    named = [f"{n} of {one.stored_bytes:,} bytes made by {one.made_by}" for one, n in kinds[:3]]
    return f"alive {when} and in no category: {', '.join(named)}"
