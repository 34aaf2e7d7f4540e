"""Context parallelism in an engine: its axes, this rank's positions, and its attention."""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from shardwise.comm.move import begin_sum, open_ways
from shardwise.comm.world import Axis, World
from shardwise.core.applied import Applied
from shardwise.core.errors import bad
from shardwise.core.mesh import CONTEXT
from shardwise.core.plan.plan import Plan
from shardwise.techniques.context.attention import attention
from shardwise.techniques.context.cut_batch import Sequences, cut_batch, length_of
from shardwise.techniques.context.operations import OwnPositions
from shardwise.techniques.context.positions import cut_of

if TYPE_CHECKING:
    from shardwise.engine.options import Build


def applied(model: nn.Module, build: "Build") -> "PositionShards | None":
    """Open the axes of `cp`; called by all ranks."""
    plan, world = build.plan, build.world
    if plan.cp == 1:
        return None
    axis, ring, ulysses = _axes(world, plan)
    n = ring.size
    if n > 1:
        open_ways(ring, [(rank, (rank + 1) % n) for rank in range(n)], world.device)

    axes = {"ring_axis": ring, "ulysses_axis": ulysses}

    def count(x: Tensor) -> Tensor:
        return begin_sum(x.to(world.device), axis).wait()

    shifts = require_model(model, plan)
    mode = OwnPositions(lambda *x, of, **how: attention(*x, **how, **axes, cut=of.cut), count)
    return PositionShards(plan, axis, mode, shifts=shifts)


def _axes(world: World, plan: Plan) -> tuple[Axis, Axis, Axis]:
    inner, n = plan.inner_data_axis, plan.cp
    u = plan.context.ulysses if plan.context else 1
    groups = [range(first, first + n) for first in range(0, world.axis(inner).size, n)]
    axis = world.within(inner, groups, CONTEXT)
    if u in (1, n):
        none = Axis(CONTEXT, ledger=world.ledger)
        return (axis, axis, none) if u == 1 else (axis, none, axis)
    rings = [group[first::u] for group in groups for first in range(u)]
    within = [group[first : first + u] for group in groups for first in range(0, n, u)]
    return axis, world.within(inner, rings, CONTEXT), world.within(inner, within, CONTEXT)


def require_model(model: nn.Module, plan: Plan) -> bool:
    """Whether labels are shifted inside the model: a decoder of transformers."""
    base = sys.modules.get("transformers.modeling_utils")
    ours = [m for m in model.modules() if base and isinstance(m, base.PreTrainedModel)]
    for module in ours:
        config = getattr(module, "config", None)
        kind = getattr(config, "_attn_implementation", None)
        if kind not in (None, "sdpa"):
            raise bad(
                f"a {type(module).__name__} with attn_implementation={kind!r} under {plan.context}",
                "models whose attention is F.scaled_dot_product_attention",
                'attn_implementation="sdpa"',
            )
        names = "sliding_window", "attention_chunk_size", "layer_types"
        window, chunk, kinds = (getattr(config, name, None) for name in names)
        if (window or chunk) and (kinds is None or {*kinds} - {"full_attention"}):
            raise bad(
                f"a {type(module).__name__} whose attention has a window of {window or chunk} "
                f"positions, under {plan.context}",
                "attention that is causal or full",
                "sliding_window=None in the configuration of the model",
            )
    causal = {getattr(module, "is_causal", None) for module in model.modules()} - {None}
    return bool(ours) and causal == {True}


class PositionShards(Applied):
    """The positions of one rank in each part of a batch."""

    mixes = True

    def __init__(self, plan: Plan, axis: Axis, mode: OwnPositions, *, shifts: bool) -> None:
        self.plan, self.axis, self.mode, self.shifts = plan, axis, mode, shifts
        self.parts: list[tuple[Any, Sequences, Any]] = []  # cut, how, and whole

    def same_batch(self) -> Iterable[Axis]:
        return (self.axis,)

    def begin(self, batch: Any, parts: Sequence[Any], *, trains: bool) -> Sequence[Any]:
        self.mode.of = None
        here, shifts = self.axis.rank, self.shifts
        self.parts = [(*part_of(self.plan, part, here, shifts=shifts), part) for part in parts]
        self.mode.parts = [of for _, of, _ in self.parts]
        return [part for part, _, _ in self.parts]

    def weight(self, count: float, part: Any, tokens: Callable[[Any], float] | None) -> float:
        """The tokens of this rank's positions; without the user's function, by their number. Labels
        that a model of transformers shifts are not those that such a function counts.
        """
        found = next((of for own, of, _ in self.parts if own is part), None)
        if found is None:
            return count
        self.mode.own_mean = tokens is not None and not self.shifts
        if tokens is not None and self.mode.own_mean:
            return tokens(part) if count else 0  # the part may be a stand-in for one without rows
        return count * found.numel / max(1, found.cut.length)

    def enter(self, part: Any, model: nn.Module, own: Any) -> Any:
        """Returns the whole part, which other techniques know, for this rank's positions."""
        self.mode.of_model(model)
        found = ((of, whole) for cut, of, whole in self.parts if cut is part)
        of, whole = next(found, (None, part))
        if of is not None and own is not part:
            of = of.in_copy(own)
            self.mode.parts = [*self.mode.parts, of]
        self.mode.of = of
        return whole

    def during(self, device: Any) -> AbstractContextManager[Any]:
        return self.mode

    def end(self, *, trains: bool) -> None:
        self.parts = []
        self.mode.end()


def part_of(plan: Plan, part: Any, rank: int, *, shifts: bool) -> tuple[Any, Sequences]:
    """The positions of rank `rank` of `cp` in a part of a batch."""
    length = length_of(part)
    if length < plan.cp:
        raise bad(
            f"sequences of {length} positions under '{plan.context}'",
            f"{plan.cp} positions or more, at least one for each rank",
            "longer sequences, or sequences that are padded",
        )
    return cut_batch(part, cut_of(length, plan.context), rank, shifts=shifts)
