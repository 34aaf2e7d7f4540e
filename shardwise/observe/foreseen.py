"""What recomputation decides before a step on a batch, from steps of a dry run.

    recompute:SIZE   which blocks are recomputed, so that what autograd keeps fits
    arenas           the slots for the inputs that recomputed modules keep

For a budget each choice keeps less than the one before it; the first that fits is found by halves:

    b0 b1   none none    selective none    selective selective    full selective    full full

Selective recomputation repeats passes over memory, full recomputation products too. The backward
pass reaches the first blocks last, when the others have freed what they keep.
"""

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.core.errors import bad
from shardwise.core.mesh import TENSOR
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.words import size_text
from shardwise.engine.options import EngineOptions
from shardwise.observe.dry_engine import DryRun, on_few
from shardwise.techniques.expert.apply import layers_of
from shardwise.techniques.recompute.apply import Foreseen
from shardwise.techniques.recompute.checkpointed import FULL, NONE, SELECTIVE


def foreseen(
    model: nn.Module, plan: Plan, options: EngineOptions, rank: int, batch: Any
) -> Foreseen:
    """The kinds of recomputed modules of this rank, and the slots for their inputs, in a step on
    `batch`. Ranks along `tp` and `cp` choose the same: they repeat messages together. Raises
    InputError for a budget that is too small, and for a model that does not run on meta.
    """
    budget_bytes = plan.recompute_budget_bytes
    if budget_bytes:
        own, axis = plan.mesh.coordinate(rank), plan.inner_data_axis
        place = own.get(axis, 0)
        rank = plan.mesh.rank_at(own | {TENSOR: 0, axis: place - place % plan.cp})
    act = partial(_within, budget_bytes) if budget_bytes else _slots
    with ExitStack() as outside, _disable_current_modes():  # those of another dry run
        for _ in _get_current_function_mode_stack():
            outside.enter_context(_pop_mode_temporarily())
        return on_few(model, plan, batch, options, rank, act)[0]


def _slots(run: DryRun, batch: Any) -> Foreseen:
    kinds = run.engine.recompute.kinds
    return Foreseen(kinds, run.kept(batch, kinds).slots)


def _within(budget_bytes: int, run: DryRun, batch: Any) -> Foreseen:
    recompute, exchanges = run.engine.recompute, run.engine.plan.data_size > 1
    fixed = {
        name: FULL
        for name, one in recompute.modules.items()
        if exchanges and layers_of(one.parts[0])
    }
    free = [name for name in recompute.modules if name not in fixed]

    def kept(place: int) -> int:
        return run.kept(batch, fixed | _choice(free, place)).most

    places = range(2 * len(free) + 1)
    place = bisect_left(places, -budget_bytes, key=lambda place: -kept(place))
    if place == len(places):
        least = kept(places[-1])
        raise bad(
            f"recompute:{size_text(budget_bytes)}, where a rank keeps at least {least:,} bytes",
            f"a budget of {size_text(least)} or more, or a smaller microbatch",
            f"recompute:{size_text(least)}",
        )
    return Foreseen(fixed | _choice(free, place), {})


def _choice(blocks: Sequence[str], place: int) -> dict[str, str]:
    """The kinds of blocks after so many changes: each to selective, then each to full."""
    at_least = (place - len(blocks), FULL), (place, SELECTIVE), (len(blocks), NONE)
    return {
        block: next(kind for count, kind in at_least if k < count) for k, block in enumerate(blocks)
    }
