"""The bytes that layers of experts send in a step, given the loads of the experts.

In an exchange of rows, rank r of n sends all rows except its own, and the backward pass returns as
many bytes:

    forward     dispatch: sent - sent[r]         combine: received - received[r]
    backward    dispatch: received - received[r] combine: sent - sent[r]

With an even load of N tokens with k choices of width D, each of the four is N k D (n-1)/n.

The loads depend on the values of the batch: all ranks are assumed to have as many tokens as this
one, and all experts as many choices.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Final, TypeVar

from shardwise.comm.ledger import Key
from shardwise.core.layouts.layout import I, P, R, S
from shardwise.core.layouts.uneven import Lengths
from shardwise.core.mesh import EXPERTS, TENSOR
from shardwise.core.model_spec import ModelSpec
from shardwise.core.plan.plan import Plan
from shardwise.prediction.rank_shape import stage_of, stages_on
from shardwise.prediction.traffic import Counted, Price, Share, Tariff
from shardwise.techniques.expert.expert_moves import (
    Counts,
    ExpertLayer,
    ExpertMove,
    LayerMove,
    Loads,
)

T = TypeVar("T")

#: The note on a prediction without loads.
EVEN: Final = (
    "the bytes on the axis ep and the activations are those of an even load of the experts: they "
    "depend on the routing of tokens"
)
#: Rows to other ranks of the axis, and rows from them.
Away = tuple[int, int]


def _sends(share: Share) -> Counted:
    plan, spec, rank = share.plan, share.spec, share.rank
    tariff = Tariff(plan, rank)
    for moves in spec.expert_moves:
        own = even_loads(plan, spec, moves)
        for name, move, _ in _moves_on(spec, plan, rank, moves):
            layer = spec.expert_layers[name]
            if move.kind in ("dispatch", "combine"):
                shard = plan.coordinate(rank).get(TENSOR, 0)
                _exchange(tariff, move, layer, _away(plan, rank, own.on(name, shard)))
            elif move.kind == "gather_counts":
                tariff.move(EXPERTS, S(0), R, plan.ep * move.numel, move.element_bytes, move.phase)
            elif move.kind in ("enter", "leave"):
                _on_tensor_axis(tariff, move, spec, name)
            else:  # all ranks have as many tokens
                _on_data_axes(tariff, move, own.tokens[0] * layer.experts)
    return tariff.sent_bytes


class _OfRanks(Sequence[T]):
    """A value for each data rank, computed on demand: there may be 10^9 ranks."""

    def __init__(self, ranks: int, of: Callable[[int], T]) -> None:
        self.ranks, self.of = ranks, of

    def __len__(self) -> int:
        return self.ranks

    def __getitem__(self, rank: Any) -> Any:
        return self.of(int(rank))


def even_loads(plan: Plan, spec: ModelSpec, moves: Iterable[LayerMove]) -> Loads:
    """The loads of a microbatch if all data ranks have as many tokens, and all experts too."""
    ranks, found = plan.data_size, dict[str, Counts]()
    tokens, every = 0, list(moves)
    for name in dict.fromkeys(found.layer for found in every):
        layer = spec.expert_layers[name]
        tokens = tokens_of(every, name)
        own_tokens = _dispatched(plan, layer, tokens)
        if layer.takes:
            taken = min(_capacity(layer, ranks * tokens), ranks * tokens)
            found[name] = _OfRanks(ranks, partial(_taken, layer, taken, ranks))
        else:
            own = _spread(own_tokens * layer.choices, layer.experts)
            found[name] = _OfRanks(ranks, partial(_same, own))
    return Loads(_OfRanks(ranks, partial(_same, tokens)), found)


def _taken(layer: ExpertLayer, taken: int, ranks: int, rank: int) -> tuple[int, ...]:
    """The tokens of a rank that each expert takes, out of `taken` of all ranks."""
    return (_share(taken, ranks, rank),) * layer.experts


def _same(value: T, _: int) -> T:
    return value


def tokens_of(moves: Iterable[LayerMove], name: str) -> int:
    return next(
        move.tokens for layer, move, _ in moves if layer == name and move.kind == "dispatch"
    )


def _dispatched(plan: Plan, layer: ExpertLayer, tokens: int) -> int:
    """The tokens of a data rank that one tensor rank dispatches."""
    ranks = plan.mesh.size_of(TENSOR) if plan.sp and layer.by_shard else 1
    return -(-tokens // ranks)


def _moves_on(
    spec: ModelSpec, plan: Plan, rank: int, moves: Sequence[LayerMove]
) -> Iterator[LayerMove]:
    """The moves of the rank's stages, and again, without a gradient, of recomputed layers."""
    stages = stages_on(plan, rank)
    here = [found for found in moves if stage_of(spec, found.layer) in stages]
    yield from here
    for found in here:
        name, move, _ = found
        if move.phase == "forward" and any(_repeats(spec, own, found) for own in spec.recomputed):
            again = replace(move, phase="backward", returns=0)
            yield LayerMove(name, again)


def _repeats(spec: ModelSpec, module: str, found: LayerMove) -> bool:
    """Whether the recomputation of `module`, up to its last saved tensor, makes the move again."""
    if found.layer != module and not found.layer.startswith(f"{module}."):
        return False
    if found.move.kind != "leave":
        return True
    end = next(
        number
        for number, call in enumerate(spec.run.calls)
        if call.module == module and not call.begins
    )
    return any(found.calls < number <= end for number in spec.run.saves)


def _on_tensor_axis(tariff: Tariff, move: ExpertMove, spec: ModelSpec, layer: str) -> None:
    if spec.tensors is None or not any(
        name.startswith(f"{layer}.") for name in spec.tensors.experts
    ):
        return
    send = partial(tariff.move, TENSOR)
    if move.kind == "enter":
        for _ in range(0 if spec.tensors.sp else move.returns):  # a style gathers under sp
            send(P, I, move.numel, move.element_bytes, "backward")
        return
    ranks, length = tariff.size(TENSOR), move.tokens
    if not spec.tensors.sp:
        send(P, I, move.numel, move.element_bytes, move.phase)
        return
    padded = move.numel // length * Lengths(ranks).shard(length) * ranks
    send(P, S(0), padded, move.element_bytes, move.phase)
    for _ in range(move.returns):
        send(S(0), R, padded, move.element_bytes, "backward")


def _on_data_axes(tariff: Tariff, move: ExpertMove, scores: int) -> None:
    """A gather or a sum; `scores` are those of the rank with most tokens."""
    axes, numel, size = list(tariff.plan.data_axes), move.numel, move.element_bytes
    if move.kind == "sum":
        for phase, axis in product((move.phase, *["backward"] * move.returns), axes):
            tariff.move(axis, P, R, numel, size, phase)
        return
    numel = scores if move.kind == "gather_padded" else numel
    for axis in reversed(axes):
        numel *= tariff.size(axis)
        tariff.move(axis, S(0), R, numel, size, move.phase)


def _exchange(tariff: Tariff, move: ExpertMove, layer: ExpertLayer, away: Away) -> None:
    sent, received = away if move.kind == "dispatch" else away[::-1]
    add = partial(_add, tariff, layer.width * move.element_bytes)
    add(sent, move.phase)
    add(received * move.returns, "backward")


def _add(tariff: Tariff, row_bytes: int, rows: int, phase: str) -> None:
    tariff.add(Key(EXPERTS, "all_to_all", phase), rows * row_bytes)


def _away(plan: Plan, rank: int, choices: Sequence[Sequence[int]]) -> Away:
    """The rows that the rank sends to others of its axis, and those that it receives."""
    here, peers = _peers(plan, rank)
    own, experts = here - peers.start, len(choices[here]) // plan.ep
    mine = slice(own * experts, (own + 1) * experts)
    sent = sum(choices[here]) - sum(choices[here][mine])
    return sent, sum(sum(choices[peer][mine]) for peer in peers if peer != here)


def _peers(plan: Plan, rank: int) -> tuple[int, range]:
    """The rank's number among the data ranks, and the numbers of its axis's ranks."""
    place, here = plan.coordinate(rank), 0
    for axis in plan.data_axes:
        here = here * plan.size_of(axis) + place.get(axis, 0)
    first = here - place[EXPERTS]
    return here, range(first, first + plan.ep)


def _capacity(layer: ExpertLayer, tokens: int) -> int:
    """The most choices that an expert computes for `tokens` tokens of the global batch."""
    factor = 1.0 if layer.capacity is None else layer.capacity
    return math.ceil(factor * (tokens * layer.choices) / layer.experts)


def _spread(number: int, parts: int) -> tuple[int, ...]:
    """`number` split into `parts` parts; the first ones may be larger by one."""
    return tuple(_share(number, parts, part) for part in range(parts))


def _share(number: int, parts: int, part: int) -> int:
    return (number + parts - 1 - part) // parts


EXPERT: Final = Price(_sends)
