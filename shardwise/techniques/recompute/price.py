"""What recomputation changes, and the choice of `recompute:SIZE`: how each block is recomputed, so
that activations fit a budget.

checkpointed.py says what each kind keeps; in other modules autograd keeps what it saves. Added are
all products of a module up to the last tensor that autograd saves there; under selective, those
whose outputs are not kept.

Of all choices that fit, the one with the fewest operations is chosen; of several, the one that
keeps most bytes, because it repeats the fewest passes over memory. This is a knapsack problem with
one of three items from each block: none, selective or full (Checkmate, arXiv 1910.02653, states the
general problem). Blocks usually have few different sizes, so there are few sums; many sums are
rounded to a thousandth of the budget.

Under a pipeline a stage keeps its blocks once for each microbatch in flight, and the bytes must fit
at every moment. Each rank of the pipeline has its own budget.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from shardwise.core.buffer_sizes import Slots, most_at_once
from shardwise.core.errors import bad
from shardwise.core.mesh import PIPELINE, TENSOR
from shardwise.core.model_spec import PlainPass, Product, Tape
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import moments
from shardwise.core.plan.words import size_text

FULL, SELECTIVE, PARTITIONED = "full", "selective", "partitioned"


def storages(tape: Tape, kinds: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """The storages that are kept if the modules in `kinds` are recomputed, each in its way. Parts
    of inputs come on top. Each storage comes with the modules that keep it, maybe several times
    with one.
    """
    within, returned = Within(kinds), {*tape.returned}
    yield from ((storage, name) for name, storage in tape.saved if within(name) is None)
    yield from (
        (taken.storage, taken.module)
        for taken in tape.taken
        if taken.module in kinds and not (taken.trained and kinds[taken.module] == PARTITIONED)
    )
    for product in tape.products:
        name = within(product.module)
        if name is not None and kinds[name] == SELECTIVE and not _again(product, name, returned):
            yield from ((storage, name) for storage in product.storages)


def added_flops(tape: Tape, kinds: Mapping[str, str]) -> dict[str, int]:
    """The operations that recomputation adds to a backward pass, by recomputed module."""
    within, returned, found = Within(kinds), {*tape.returned}, dict.fromkeys(kinds, 0)
    ends = _last_saves(tape, kinds)
    for product in tape.products:
        name = within(product.module)
        if name is None or product.saves >= ends[name]:
            continue
        if kinds[name] != SELECTIVE or _again(product, name, returned):
            found[name] += product.flops
    return found


def _last_saves(tape: Tape, kinds: Mapping[str, str]) -> dict[str, int]:
    """The number of tensors autograd has saved after the last save of each recomputed module."""
    within, ends = Within(kinds), dict.fromkeys(kinds, 0)
    for name, saves in tape.last_save:
        outer = within(name)
        if outer is not None:
            ends[outer] = max(ends[outer], saves)
    return ends


def _again(product: Product, module: str, returned: Collection[tuple[str, int]]) -> bool:
    """Whether selective recomputation of `module` computes this product again."""
    return not product.storages or any((module, s) in returned for s in product.storages)


class Within:
    """Maps a module to the one of `modules` that is or contains it; None if none does."""

    def __init__(self, modules: Collection[str]) -> None:
        self.modules = modules
        self.known: dict[str, str | None] = {}

    def __call__(self, name: str) -> str | None:
        if name not in self.known:
            outer = name
            while outer and outer not in self.modules:
                outer = outer.rpartition(".")[0]
            self.known[name] = outer if outer in self.modules else None
        return self.known[name]


# --- a budget -------------------------------------------------------------------------------------

NONE: Final = "none"
KINDS: Final = (FULL, SELECTIVE, NONE)
MOST_SUMS, STEPS = 4096, 1000


class BlockCost(NamedTuple):
    """What a choice for one block keeps at each moment, in bytes, and the operations it adds."""

    kept_bytes: tuple[int, ...]
    flops: int


@dataclass(frozen=True)
class _Chosen:
    """Choices for the first blocks: the last one, those `before`, and the cost of them all."""

    cost: BlockCost
    kind: int = 0
    before: "_Chosen | None" = None


def within_budget(
    of: PlainPass, plan: Plan, blocks: Sequence[str], budget_bytes: int
) -> dict[str, str]:
    """The blocks to recompute and their kinds, so that each rank stays within the budget."""
    found, exchanging = dict[str, str](), _exchanging(of, plan, blocks)
    for place in range(plan.mesh.size_of(PIPELINE)):
        every = moments(plan, place)
        here = [b for b in blocks if any(of.stage_of(b) in moment for moment in every)]
        fixed, costs = _costs(of, every, here, blocks)
        costs = [c[:1] if b in exchanging else c for b, c in zip(here, costs, strict=True)]
        room = tuple(budget_bytes - n for n in fixed)
        kinds = cheapest(costs, room)
        if kinds is None:
            least = [min(c.kept_bytes for c in of_block) for of_block in costs]
            needed = max(map(sum, zip(fixed, *least, strict=True)))
            raise bad(
                f"recompute:{size_text(budget_bytes)}, where a rank keeps at least {needed:,} "
                "bytes of activations with every block recomputed",
                f"a budget of {size_text(needed)} or more, or a smaller microbatch",
                f"recompute:{size_text(needed)}",
            )
        found |= dict(zip(here, _in_order(kinds, costs), strict=True))
    return {name: kind for name, kind in found.items() if kind != NONE}


def _exchanging(of: PlainPass, plan: Plan, blocks: Sequence[str]) -> set[str]:
    """The blocks whose data ranks exchange tokens; they are recomputed in full. Each rank chooses
    for the shapes of its own batch, but all must repeat an exchange or none.
    """
    if plan.data_size == 1:
        return set()
    within = Within(blocks)
    return {block for name in of.experts if (block := within(name)) is not None}


def cheapest(costs: Sequence[Sequence[BlockCost]], room: tuple[int, ...]) -> list[int] | None:
    """For each block the index of the choice in its costs; None if nothing fits in `room`."""
    least = [tuple(map(min, zip(*(c.kept_bytes for c in block), strict=True))) for block in costs]
    later = [tuple(0 for _ in room)]  # what the blocks that follow keep at least
    for fewest in reversed(least):
        later.append(_add(later[-1], fewest))
    sums = [_Chosen(BlockCost(tuple(0 for _ in room), 0))]
    for block, rest in zip(costs, later[-2::-1], strict=True):
        every = (
            _Chosen(
                BlockCost(_add(s.cost.kept_bytes, c.kept_bytes), s.cost.flops + c.flops), kind, s
            )
            for s in sums
            for kind, c in enumerate(block)
        )
        sums = _best([s for s in every if _fits(_add(s.cost.kept_bytes, rest), room)], room)
    best = min(sums, key=lambda s: (s.cost.flops, -sum(s.cost.kept_bytes)), default=None)
    if best is None:
        return None
    chosen: list[int] = []
    while best.before is not None:
        chosen.append(best.kind)
        best = best.before
    return chosen[::-1]


def _best(sums: list[_Chosen], room: tuple[int, ...]) -> list[_Chosen]:
    """The sums that no other beats with fewer operations and no more bytes at any moment."""
    same = {s.cost: s for s in sums}
    if len(same) > MOST_SUMS:  # of nearly equal bytes, keep the one with the fewest operations
        same = _rounded(same.values(), room)
    found: list[_Chosen] = []
    for one in sorted(same.values(), key=lambda s: (sum(s.cost.kept_bytes), s.cost.flops)):
        if not any(_beats(other.cost, one.cost) for other in reversed(found)):
            found.append(one)
    return found


def _rounded(sums: Iterable[_Chosen], room: tuple[int, ...]) -> dict[BlockCost, _Chosen]:
    found: dict[BlockCost, _Chosen] = {}
    for one in sorted(sums, key=lambda s: (s.cost.flops, s.cost.kept_bytes)):
        steps = (
            n * STEPS // max(1, most) for n, most in zip(one.cost.kept_bytes, room, strict=True)
        )
        found.setdefault(BlockCost(tuple(steps), 0), one)
    return found


def _beats(one: BlockCost, other: BlockCost) -> bool:
    return one.flops < other.flops and _fits(one.kept_bytes, other.kept_bytes)


def _fits(some: tuple[int, ...], room: tuple[int, ...]) -> bool:
    return all(a <= b for a, b in zip(some, room, strict=True))


def _add(some: tuple[int, ...], more: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(some, more, strict=True))


def _costs(
    of: PlainPass, every: Sequence[Mapping[int, int]], here: Sequence[str], blocks: Sequence[str]
) -> tuple[tuple[int, ...], list[list[BlockCost]]]:
    """The bytes that a rank keeps at each moment outside the blocks, and its blocks' costs."""
    tape = of.tape
    by_kind = {kind: _of_blocks(of, blocks, kind) for kind in KINDS}
    within = Within(blocks)
    kept = {(storage, name) for storage, name in storages(tape, {}) if within(name) is None}
    users: dict[int, set[str]] = defaultdict(set)
    for of_block in by_kind.values():
        for name, kept_there in of_block.items():
            for storage in kept_there:
                users[storage].add(name)
    for storage, names in users.items():  # a storage that several blocks read is always kept
        kept |= {(storage, name) for name in names if len(names) > 1}
    outside, by_stage = {storage for storage, _ in kept}, _stage_bytes(of, kept)
    fixed = tuple(sum(n * by_stage[s] for s, n in moment.items()) for moment in every)
    flops = {kind: added_flops(tape, dict.fromkeys(blocks, kind)) for kind in (FULL, SELECTIVE)}
    costs: list[list[BlockCost]] = []
    for name in here:
        stage = of.stage_of(name)
        costs.append([])
        for kind in KINDS:
            own = sum(tape.storage_bytes[s] for s in by_kind[kind][name] if s not in outside)
            added = 0 if kind == NONE else flops[kind][name]
            costs[-1].append(BlockCost(tuple(own * m.get(stage, 0) for m in every), added))
    return fixed, costs


def _stage_bytes(of: PlainPass, kept: Iterable[tuple[int, str]]) -> dict[int, int]:
    """The bytes that one microbatch keeps in each stage, in `kept` (storage, module) once each."""
    found = dict.fromkeys(range(of.stages), 0)
    for stage, storage in {(of.stage_of(module), storage) for storage, module in kept}:
        found[stage] += of.tape.storage_bytes[storage]
    return found


def _of_blocks(of: PlainPass, blocks: Sequence[str], kind: str) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {name: set() for name in blocks}
    within = Within(blocks)
    for storage, module in storages(of.tape, {} if kind == NONE else dict.fromkeys(blocks, kind)):
        name = within(module)
        if name is not None:
            found[name].add(storage)
    return found


def _in_order(chosen: Sequence[int], costs: Sequence[Sequence[BlockCost]]) -> list[str]:
    """The kinds by block; among blocks with equal costs, the first ones keep least. The backward
    pass reaches these last, when the others have freed their activations.
    """
    kinds_by_cost: dict[tuple[BlockCost, ...], list[int]] = defaultdict(list)
    for of_block, kind in zip(costs, chosen, strict=True):
        kinds_by_cost[tuple(of_block)].append(kind)
    queues = {key: iter(sorted(kinds)) for key, kinds in kinds_by_cost.items()}
    return [KINDS[next(queues[tuple(of_block)])] for of_block in costs]


# --- the slots of a rank's arenas for the inputs that it keeps (comm/tiers/arena.py) --------------


def kept_slots(of: PlainPass, plan: Plan, rank: int) -> Slots:
    """Of each recomputed module, the inputs that a gradient reaches, or this rank's part of them;
    for every microbatch that its stage keeps at once.
    """
    ranks = plan.mesh.size_of(TENSOR)
    by_stage: dict[int, Counter[int]] = {}
    for taken in of.tape.taken:
        kind = of.recomputed.get(taken.module)
        if kind is not None and taken.trained:
            numel = -(-taken.numel // ranks) if kind == PARTITIONED else taken.numel
            sizes = by_stage.setdefault(of.stage_of(taken.module), Counter[int]())
            sizes[numel * taken.element_bytes] += 1
    every = moments(plan, plan.mesh.coordinate(rank).get(PIPELINE, 0))
    return most_at_once(
        sum(
            (by_stage.get(stage, Counter()) for stage in Counter(moment).elements()), Counter[int]()
        )
        for moment in every
    )
