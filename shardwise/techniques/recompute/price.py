"""What recomputation changes: the storages that autograd keeps, and the operations of a step.

checkpointed.py says what each kind keeps; in other modules autograd keeps what it saves. Added are
all products of a module up to the last tensor that autograd saves there; under selective, those
whose outputs are not kept. One gather of a unit serves recomputation and backward pass. Parts of
inputs are gathered for each recomputation.
"""

from collections.abc import Collection, Iterator, Mapping

from shardwise.core.model_spec import Operation, Product, Taken, Tape

FULL, SELECTIVE, PARTITIONED = "full", "selective", "partitioned"


def storages(
    tape: Tape, kinds: Mapping[str, str], *, arenas: bool = False
) -> Iterator[tuple[int, str]]:
    """The storages that are kept if the modules in `kinds` are recomputed, each in its way. Parts
    of inputs come on top; with `arenas`, copies of all inputs that a gradient reaches. Each storage
    comes with the modules that keep it, maybe several times with one.
    """
    within, returned = Within(kinds), {*tape.returned}
    yield from ((storage, name) for name, storage in tape.saved if within(name) is None)
    yield from (
        (taken.storage, taken.module)
        for taken in tape.taken
        if taken.module in kinds
        and not (taken.trained and (arenas or kinds[taken.module] == PARTITIONED))
    )
    for product in tape.products:
        name = within(product.module)
        if name is not None and kinds[name] == SELECTIVE and not _again(product, name, returned):
            yield from ((storage, name) for storage in product.storages)


def parts(tape: Tape, kinds: Mapping[str, str]) -> Iterator[Taken]:
    yield from (
        taken for taken in tape.taken if taken.trained and kinds.get(taken.module) == PARTITIONED
    )


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


def added_operations(tape: Tape, kinds: Mapping[str, str]) -> Iterator[Operation]:
    """All operations that recomputation adds to the backward pass."""
    within, returned, ends = Within(kinds), {*tape.returned}, _last_saves(tape, kinds)
    for each in tape.operations:
        name = within(each.module)
        if name is None or each.backward or each.saves >= ends[name]:
            continue
        product = tape.products[each.product] if each.product >= 0 else None
        if kinds[name] != SELECTIVE or product is None or _again(product, name, returned):
            yield each._replace(backward=True)


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
