"""The promises of a plan's words, by the closed forms of the papers.

Run and prediction read the same tables: the states of a row, the tiers of an offload, the actions
of a schedule, the recomputed blocks, the size of the pool. A wrong entry changes both alike. So the
promises of these words are compared with the engine:

    zero1, zero2, zero3     bytes of parameters, gradients and optimizer state: of N parameters all,
                            or 1/n on each of n ranks (ZeRO, arXiv 1910.02054, figure 1)
    offload:optim           the states of all parameters leave the device; with @disk they are on a
                            disk, in a file of their size
    offload:optim-delayed=N the update of step N, from 0, is the first that is delayed; without
                            N that of step 40 (ZeRO-Offload, arXiv 2101.06840, section 5.2)
    1f1b:M and others       activations of so many microbatches at once (core/schedule/library.py)
    recompute:full, everyN  all blocks, or every N-th one
    tile:N                  units with 1/N of the rows of a layer, rounded up (ZeRO-Infinity,
                            arXiv 2104.07857, section 5.1.3)
    buffers:SIZE            the bytes of the pool
    recompute:SIZE          activations of at most so many bytes
    arenas                  every tensor that is to lie in an arena has found a slot
    blocks.A-B              the layers with the numbers A to B, both included

And of the bytes that a step sends, of N bytes of parameters on n ranks (ZeRO, section 7; GShard,
arXiv 2006.16668, section 3.2):

    ddp                     2 N (n-1)/n in all-reduces
    zero1                   N (n-1)/n in reduce-scatters, and as many in all-gathers
    zero2                   the same, with the reduce-scatters of each microbatch
    zero3                   N (n-1)/n in reduce-scatters of each microbatch, and in all-gathers of
                            its forward pass, at most for each call; fewer in the backward pass
    epN                     the rows of tokens for experts of other ranks, there and back

Other words, and models that use a weight outside of the module that owns it, have no closed form.

Units are padded by less than 64 bytes for each parameter and each rank.
"""

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.core.plan.plan import Plan
from shardwise.core.schedule.library import allowed, entry
from shardwise.core.schedule.lower import peaks
from shardwise.core.tally import Key
from shardwise.core.zero import ALIASES, CATEGORIES, PART_OF, Tier
from shardwise.engine.engine import Engine
from shardwise.engine.memory import owned
from shardwise.flat.flat_parameter import Flat
from shardwise.techniques.data.units import Unit
from shardwise.techniques.expert.apply import ExpertLayout, experts_in, shapes_of
from shardwise.techniques.recompute.checkpointed import FULL, SELECTIVE
from shardwise.techniques.recompute.word import PARTITIONED_WORDS, recompute_every
from shardwise.verify.oracles.batches import Loads

#: By row: whether parameters, gradients and optimizer state are sharded.
SHARDED: Final[Mapping[str, tuple[bool, bool, bool]]] = {
    "ddp": (False, False, False),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "zero3": (True, True, True),
}
#: Bytes of AdamW's state for each element of a parameter of so many bytes.
STATE_BYTES: Final = {2: 12, 4: 8, 8: 16}
#: The same without the master.
MOMENT_BYTES: Final = {2: 8, 4: 8, 8: 16}
#: The relative difference that padding and step counts may cause, and the bytes of such a count.
SLACK, COUNT_BYTES = 0.25, 8
#: A page of a file, and the most tensors of a flat parameter in it.
PAGE_BYTES, EXTENTS = 4096, 6
#: Steps before updates are delayed, if the plan has no number of them.
UNDELAYED_STEPS: Final = 40
NAMES: Final = tuple(name for name in CATEGORIES if name != "buffers")
#: A flat parameter is padded by less than this for each parameter and each rank.
ALIGNED_BYTES: Final = 64
#: Numbers of layers in a pattern, both included.
RANGE: Final = re.compile(r"\d+-\d+")
#: The bytes of a unit of sizes.
UNITS: Final = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

#: By name: as read, and as promised.
Promises = dict[str, tuple[int, int]]


def recompute_bytes(plan: Plan) -> int:
    """The bytes of activations that `recompute:SIZE` allows; 0 for other words."""
    size = re.fullmatch(r"(\d+)(B|KiB|MiB|GiB)", plan.recompute or "")
    return int(size[1]) * UNITS[size[2]] if size else 0


def broken(engine: Engine) -> Promises:
    """The promises of the plan that this rank of `engine` does not keep, between two steps."""
    plan = engine.plan
    found = _padded(engine.flats) | _ranges(plan, engine.names)
    missed = engine.world.arenas.kept.missed + engine.world.arenas.gradients.missed
    found |= _unequal("tensors without a slot of an arena", missed, 0)
    if plan.offloaded is None:
        found |= _states(engine)
    else:
        offload = plan.offloaded
        tier = "disk" if offload.on_disk else "host"
        found |= _offloaded(engine.data.units.order, tier)
        found |= _file(engine)
    if plan.buffers_bytes and engine.world.pool.memory is not None:
        found |= _unequal("pool", engine.world.pool.memory.nbytes, plan.buffers_bytes)
    if engine.staging is not None:
        name, size = allowed(plan.pipeline or "", engine.staging.axis.size)
        rank = engine.staging.axis.rank
        read, theory = peaks(engine.staging.schedule)[rank], entry(name).tapes(size)[rank]
        found |= _unequal("activations at once", int(read), theory)
    if plan.tiled is not None:
        found |= _tiled(engine, plan.tiled.number)
    if plan.recompute is not None and not plan.layers and engine.staging is None:
        found |= _recomputed(engine, plan.recompute)
    return found


def first_delayed(plan: Plan) -> Promises:
    """The first step whose update is delayed, if it is another than the plan says."""
    word, _, number = (plan.offload or "").partition("=")
    if plan.offloaded is None or word != "optim-delayed":
        return {}
    first = int(number or UNDELAYED_STEPS)
    steps = range(max(0, first - 1), first + 2)
    read = next((step for step in steps if plan.offloaded.delays(step)), steps.stop)
    return _unequal("first delayed step", read, first)


def _unequal(name: str, read: int, theory: int) -> Promises:
    return {} if read == theory else {f"{name}, as the plan's words": (read, theory)}


def _padded(flats: Sequence[Flat]) -> Promises:
    """The bytes of the flat parameters with more padding than alignment needs."""
    found: Promises = {}
    for flat in flats:
        size, padding = flat.shard.element_size(), flat.plan.padded - sum(flat.plan.numels)
        most = ALIGNED_BYTES * (len(flat.params) + flat.shard_axis.size)
        if padding * size > most:
            found |= _unequal(f"padding of {flat.names[0]}", padding * size, most)
    return found


def _ranges(plan: Plan, names: Sequence[str]) -> Promises:
    """The parameters of layers in a range of numbers that have the plan of other layers."""
    found: Promises = {}
    for number, layer in enumerate(plan.layers, 1):
        for pattern in layer.patterns:
            inside = [name for name in names if _in_range(pattern, name)]
            read = sum(0 < plan.layer_of(name) <= number for name in inside)
            found |= _unequal(f"parameters of {pattern}", read, len(inside))
    return found


def _in_range(pattern: str, name: str) -> bool:
    """Whether a parameter's layer matches a pattern with a range, such as blocks.0-3."""
    ranges = [text.split("-") for text in RANGE.findall(pattern)]
    fixed = (
        re.escape(text).replace(r"\*", ".*").replace(r"\?", ".") for text in RANGE.split(pattern)
    )
    match = re.match(r"(\d+)".join(fixed) + r"(?:\.|$)", name)
    if not ranges or match is None:
        return False
    numbers = zip(ranges, map(int, match.groups()), strict=True)
    return all(int(first) <= n <= int(last) for (first, last), n in numbers)


def _states(engine: Engine) -> Promises:
    by_plan: dict[str, list[Flat]] = defaultdict(list)
    for flat in engine.flats:
        by_plan[_words(engine.plan, flat)].append(flat)
    found: Promises = {}
    for words, flats in by_plan.items():
        of = f" under {words}" if len(by_plan) > 1 else ""
        counts = COUNT_BYTES * sum(len(flat.params) for flat in flats)
        each = zip(NAMES, _stored(engine, flats), _promised(words, flats), strict=True)
        for name, read, (least, most) in each:
            slack = SLACK * most + counts
            if not least - slack <= read <= most + slack:
                found |= _unequal(f"{name}{of}", read, round(most))
    return found


def _stored(engine: Engine, flats: Sequence[Flat]) -> list[int]:
    """The bytes of parameters, gradients and optimizer state of some flat parameters."""
    every = [(PART_OF.get(name, name), t) for name, flat, t in owned(engine) if flat in flats]
    storages = (
        {t.untyped_storage()._cdata: t.untyped_storage() for kind, t in every if kind == category}
        for category in NAMES
    )
    return [sum(storage.nbytes() for storage in one.values()) for one in storages]


def _promised(words: str, flats: Sequence[Flat]) -> list[tuple[float, float]]:
    """The least and the most bytes of each kind of state: unused parameters may have no moments."""
    columns = words.removeprefix("row:").split(",")
    sharded = SHARDED.get(words) or tuple(column == "S" for column in columns)
    found, without_bytes = [0.0, 0.0, 0.0], 0
    for flat in flats:
        size, numel = flat.shard.element_size(), flat.plan.padded
        every = numel * size, numel * size * flat.trained, numel * STATE_BYTES[size] * flat.trained
        for k, (whole, cut) in enumerate(zip(every, sharded, strict=True)):
            found[k] += whole / (flat.shard_axis.size if cut else 1)
        graded = zip(flat.plan.numels, flat.grads.used, strict=True) if flat.trained else ()
        moments = numel * flat.trained - sum(n for n, used in graded if used)
        without_bytes += moments * MOMENT_BYTES[size]
    parameters, gradients, states = found
    return [(parameters, parameters), (gradients, gradients), (states - without_bytes, states)]


def _recomputed(engine: Engine, what: str) -> Promises:
    if not (every := recompute_every(what)) and what not in (FULL, SELECTIVE, *PARTITIONED_WORDS):
        return {}
    chosen: dict[str, list[nn.Module]] = defaultdict(list)
    for name in engine.recompute.kinds:
        chosen[name.rpartition(".")[0]].append(engine.model.get_submodule(name))
    found: Promises = {}
    for parent, modules in chosen.items():
        kinds = {type(module) for module in modules}
        blocks = sum(type(one) in kinds for one in engine.model.get_submodule(parent).children())
        found |= _unequal(
            f"recomputed blocks of {parent}", len(modules), -(-blocks // (every or 1))
        )
    return found


def _tiled(engine: Engine, number: int) -> Promises:
    """The elements of the largest unit with tiles of each layer."""
    found: Promises = {}
    for name, layer in engine.model.named_modules():
        tiles = dict(layer.named_children()).get("tiles")
        if not isinstance(layer, nn.Linear) or tiles is None:
            continue
        own = {*tiles.children()}
        units = [unit for unit in engine.data.units.order if own.intersection(unit.modules)]
        read = max(sum(s.numel() for flat in u.groups for s in flat.shapes) for u in units)
        columns = layer.in_features + (layer.bias is not None)
        most = -(-layer.out_features // number) * columns
        found |= _unequal(f"elements of a tile of {name}", read, most) if read > most else {}
    return found


def _words(plan: Plan, flat: Flat) -> str:
    """The row's word among those of the parameters' layer, or else of the model."""
    number = plan.layer_of(flat.names[0])
    own = plan.layers[number - 1].words.split() if number else []
    rows = [ALIASES.get(word, word) for word in own]
    return next((word for word in rows if word in SHARDED or word.startswith("row:")), plan.row)


def _file(engine: Engine) -> Promises:
    """The file on the disk has room for the states, each rounded to pages, and for nothing else."""
    if engine.disk is None:
        return {}
    read = os.fstat(engine.disk.file).st_size
    stored = sum(engine.disk_memory().values())
    pages = PAGE_BYTES * EXTENTS * len(engine.flats)
    return _unequal("file", read, stored) if read > (1 + SLACK) * stored + pages else {}


def _offloaded(units: Sequence[Unit], tier: Tier) -> Promises:
    flats = [flat for unit in units for flat in unit.trained]
    left = sum(flat.moves.offload == tier for flat in flats)
    return _unequal(f"flat parameters with states on {tier}", left, len(flats))


# --- the bytes of a step --------------------------------------------------------------------------


class Uses(TorchFunctionMode):
    """How the forward of a plain model uses its weights, while entered.

    calls     the number of calls of each module, by name
    outside   the parameters that are read outside of the modules that own them
    experts   its layers of experts, by name
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls, self.outside = Counter[str](), set[str]()
        self.running, self.experts = Counter[str](), shapes_of(model)
        self.params = dict[int, tuple[str, set[str]]]()
        for name, p in model.named_parameters(remove_duplicate=False):
            self.params.setdefault(id(p), (name, set()))[1].add(name.rpartition(".")[0])
        self.handles = list[Any]()
        for name, module in model.named_modules():
            self.handles += [
                module.register_forward_pre_hook(partial(self._begin, name)),
                module.register_forward_hook(partial(self._end, name), always_call=True),
            ]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in args if getattr(func, "__name__", "") != "__get__" else ():
            name, owners = self.params.get(id(x), ("", set[str]()))
            if isinstance(x, Tensor) and name and not any(self.running[own] for own in owners):
                self.outside.add(name)
        return func(*args, **(kwargs or {}))

    def __exit__(self, *of: object) -> None:
        super().__exit__(None, None, None)
        for handle in self.handles:
            handle.remove()

    def _begin(self, name: str, *_: Any) -> None:
        self.calls[name] += 1
        self.running[name] += 1

    def _end(self, name: str, *_: Any) -> None:
        self.running[name] -= 1


#: The least and the most bytes of a line.
Bounds = dict[Key, tuple[float, float]]


def broken_bytes(engine: Engine, sent: Mapping[Key, int], uses: Uses, *, trains: bool) -> Promises:
    """The lines of a step, or of an evaluation, that have other bytes than the closed form. What
    ranks agree on (`check`) has none, nor the owners' pieces of weights that are updated whole.
    """
    plan = engine.plan
    alone = plan.size == plan.data_size and plan.cp * plan.ep == 1
    if not alone or plan.tiled or plan.layers or experts_in(engine.model):
        return {}
    bounds = _bounds(engine, uses, trains=trains)
    found: Promises = {}
    for line in {*bounds, *sent}:
        free = line.axis == "tier" or line.phase == "check" or line.kind == "all_to_all"
        least, most = bounds.get(line, (0, 0))
        read = sent.get(line, 0)
        if not free and not least <= read <= most:
            theory = most if read > most else least
            found |= _unequal(f"{line.axis} {line.kind}, {line.phase}", read, round(theory))
    return found


def _bounds(engine: Engine, uses: Uses, *, trains: bool) -> Bounds:
    found, runs = Bounds(), engine.microbatches if trains else 1

    def add(axis: Any, what: tuple[str, str], least: float, most: float | None = None) -> None:
        key = Key(axis.name, *what)
        before = found.get(key, (0, 0)) if axis.size > 1 else (0, 0)
        found[key] = before[0] + least, before[1] + (least if most is None else most)

    for axis in engine.axes if trains else ():
        stored = sum(b.nbytes for b in engine.model.buffers()) if axis.rank == 0 else 0
        add(axis, ("broadcast", "forward"), stored * (axis.size - 1))
    names = {module: name for name, module in engine.model.named_modules()}
    called = [
        (runs * sum(uses.calls[names[module]] for module in unit.modules), flat)
        for unit in engine.data.units.order
        for flat in unit.groups
    ]
    for calls, flat in called:
        axis, (param, grad, optim) = flat.shard_axis, _columns(engine.plan, flat)
        n, r, size = axis.size, flat.replicate_axis.size, flat.shard.element_size()
        part = flat.plan.padded // n * (n - 1) * size
        if param == "S":
            known = calls and not uses.outside.intersection(flat.names)
            forward = (part * runs, part * calls) if known else (0, math.inf)
            add(axis, ("all_gather", "forward"), *forward)
            add(axis, ("all_gather", "backward"), 0, part * calls if known else math.inf)
        if trains and flat.trained:
            shared = round(2 * (flat.plan.padded // n / r) * (r - 1)) * size
            each = runs if grad == "R" and optim != "S" else 1
            add(flat.replicate_axis, ("all_reduce", "backward"), shared * each)
            if optim == "S":
                kind = "all_reduce" if grad == "R" else "reduce_scatter"
                sums = part * (1 if grad == "P" else runs) * (1 + (grad == "R"))
                add(axis, (kind, "backward"), sums)
                add(axis, ("all_gather", "update"), part * (param == "R"))
    return {key: bounds for key, bounds in found.items() if bounds[1]}


def _columns(plan: Plan, flat: Flat) -> Sequence[str]:
    words = _words(plan, flat)
    letters = zip("RPR", SHARDED.get(words, ()), strict=False)
    return [("S" if cut else own) for own, cut in letters] or words.removeprefix("row:").split(",")


def exchanged(engine: Engine, uses: Uses, loads: Sequence[Loads], *, trains: bool) -> int:
    """The bytes of rows for experts of other ranks, and back, for the loads of microbatches."""
    layout, total = engine.sharded.of(ExpertLayout), 0
    ep, here, tensor = layout.axis, engine.sharded.place, engine.sharded.tensor.rank
    peers = range(here - ep.rank, here - ep.rank + ep.size)
    modules = dict(engine.model.named_modules())
    for name in (name for name in uses.experts if name in modules):
        weight = next(modules[name].parameters(), None)
        if weight is None:  # another stage has it
            continue
        again = any(f"{name}.".startswith(f"{own}.") for own in engine.recompute.kinds)
        row_bytes = uses.experts[name].width * weight.element_size() * (1 + trains * (1 + again))
        for choices in (each.on(name, tensor) for each in loads):
            own = len(choices[here]) // ep.size
            for peer in (peer for peer in peers if peer != here):
                first, at = (own * (rank - peers.start) for rank in (peer, here))
                sent, received = choices[here][first : first + own], choices[peer][at : at + own]
                total += (sum(sent) + sum(received)) * row_bytes
    return total
