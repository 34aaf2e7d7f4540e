"""The data-parallel family as a table of rows: placements of the training state, and their moves.

docs/explanation/states.md has the table, with what a step sends and the bytes of a parameter; both
are derived from the placements.  `Row.moves` gives the moves of one step, each with the
moment at which it belongs; techniques/data carries them out and prediction/ adds up their prices:

    moment           state   move                 zero1           zero2           zero3
    before use       param   param -> R           -               -               all_gather
    after backward   grad    P     -> grad        -               reduce_scatter  reduce_scatter
    before update    grad    grad  -> optim       reduce_scatter  -               -
    after update     param   optim -> param       all_gather      all_gather      -

Each state also has a tier.  If the optimizer's state rests on the host or a disk, the gradient goes
there before the update, and the updated parameter to the device after it, before it is gathered.
Parameters that rest there too come to the device before each use.  From a disk, the optimizer's
state comes to the host at a fifth moment, for the update.

A row that is not in the table trains in the same way.  Its plan word lists the three columns:
`row:R,R,S` replicates gradients and shards the optimizer's state.

Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, figure 1 and section 7.

The categories of a rank's bytes, which the engine counts (engine/memory.py); asynchronous
schedules have "versions" too, old parameters:

    category      lasts     part of       on                   owner
    parameters    always                  device, host, disk   flat parameters; the rest of a row
    gathered      a unit    parameters    device               flat parameters that are resharded
    gradients     always                  device, host, disk   flat parameters
    optimizer     always                  device, host, disk   the optimizer: masters, states
    buffers       always                  device, host         the model; pool, arenas, disk
    kept          a unit    activations   device, host         autograd
    temporary     a kernel  activations   device, host         kernels, messages
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Final, Literal, NamedTuple

from shardwise.core.errors import bad
from shardwise.core.layouts.layout import Move, P, Placement, R, S, price

#: Where a state rests between two uses: on the device, in its host's memory, or on a disk.
Tier = Literal["device", "host", "disk"]


class Moment(Enum):
    """The moment of a move in a step."""

    USE = "before use"  # in the forward pass, and in the backward pass if freed since
    BACKWARD = "after backward"  # of each microbatch
    BEFORE_UPDATE = "before update"
    UPDATE = "for the update"  # which streams a state through host memory
    AFTER_UPDATE = "after update"


@dataclass(frozen=True)
class RowMove:
    """One move of a step: it changes the placement or the tier of `state`, not both.
    `axis` is the axis that the row shards states over, or the one over which they are replicated.
    With `block`, the moved tensor is the block of each rank of the shard axis.
    """

    moment: Moment
    state: Literal["param", "grad", "optim"]
    axis: Literal["shard", "replicate"]
    src: Placement
    dst: Placement
    src_tier: Tier = "device"
    dst_tier: Tier = "device"
    block: bool = False

    @property
    def between_tiers(self) -> bool:
        return self.src_tier != self.dst_tier


class RowMoves(tuple[RowMove, ...]):
    """The moves of a step, in order, and what they say of each state."""

    __slots__ = ()

    def at(self, moment: Moment) -> tuple[RowMove, ...]:
        return tuple(move for move in self if move.moment is moment)

    # --- the parameter

    @property
    def fetch(self) -> Tier | None:
        """The tier from which it is copied to the device before use; None if it rests there."""
        return next((m.src_tier for m in self.at(Moment.USE) if m.between_tiers), None)

    @property
    def gather(self) -> RowMove | None:
        return next((m for m in self if m.state == "param" and not m.between_tiers), None)

    @property
    def publish(self) -> Tier | None:
        """The tier to which it is copied after the update; None if it is updated where it rests."""
        copies = (m for m in self.at(Moment.AFTER_UPDATE) if m.between_tiers)
        return next((m.dst_tier for m in copies if m.state == "param"), None)

    @property
    def reshards(self) -> bool:
        return bool(self.at(Moment.USE))

    @property
    def split(self) -> bool:
        return any(move.axis == "shard" and not move.between_tiers for move in self)

    # --- the gradient

    @property
    def sums(self) -> tuple[RowMove, ...]:
        return tuple(move for move in self if move.src == P)

    @property
    def each_backward(self) -> bool:
        """Whether it is summed after each backward pass, and not once before the update."""
        return bool(self.at(Moment.BACKWARD))

    @property
    def shards_gradient(self) -> bool:
        """Whether this sum leaves a block of it, and the memory of the rest is freed."""
        return any(move.dst == S(0) for move in self.at(Moment.BACKWARD))

    @property
    def offload(self) -> Tier | None:
        """The tier to which it is copied for an update in host memory; None for the device."""
        copies = [move for move in self.at(Moment.BEFORE_UPDATE) if move.between_tiers]
        return copies[-1].dst_tier if copies else None


@dataclass(frozen=True)
class Row:
    """The placements and tiers of the states. Raises InputError if it cannot be trained."""

    param: Placement
    grad: Placement
    optim: Placement
    param_tier: Tier = "device"
    optim_tier: Tier = "device"

    def __post_init__(self) -> None:
        given = f"the row '{_word(self)}'"
        if self.param not in (R, S(0)) or self.optim not in (R, S(0)) or self.grad.kind == "I":
            allowed = "a parameter and an optimizer state that are R or S, and a gradient P, R or S"
            raise bad(given, allowed, "row:R,P,S")
        if self.grad.kind == "S" and self.grad != S(0):
            raise bad(f"{given}, sharded on dim {self.grad.dim}", "S(0): it is flat", "row:R,S,S")
        if self.optim == R and S(0) in (self.param, self.grad):
            state = "parameter" if self.param == S(0) else "gradient"
            allowed = (
                "S for the optimizer state as well: an update with the whole optimizer state needs "
                f"the whole {state} on every rank, so sharding the {state} saves nothing"
            )
            raise bad(given, allowed, _word(self, "S"))

    def __str__(self) -> str:
        word = _word(self)
        return next((name for name, row in ROWS.items() if _word(row) == word), word)

    @property
    def sharded(self) -> bool:
        """Whether any state is sharded. If none is, ranks of the replicate axis hold the row."""
        return self.optim == S(0)

    @cache  # noqa: B019 - rows are few
    def moves(self, shard: int = 2, replicate: int = 2, *, trained: bool = True) -> RowMoves:
        """The moves of one step in order, without those that change nothing.
        `shard` and `replicate` are the numbers of ranks of the two axes; parameters that are not
        `trained` are only used.  Between replicas of the shards each rank's block of the gradient
        is reduced once a step: hybrid sharding (FSDP, arXiv 2304.11277, section 3.2.2).
        """
        axis = "shard" if self.sharded else "replicate"
        param, optim = self.param_tier, self.optim_tier
        own = self.optim
        work: Tier = "device" if optim == "device" else "host"  # where the update is made
        near: Tier = "host" if param == "disk" else param
        found = (
            RowMove(Moment.USE, "param", axis, self.param, self.param, param, near, block=True),
            RowMove(Moment.USE, "param", axis, self.param, self.param, near, "device", block=True),
            RowMove(Moment.USE, "param", axis, self.param, R),
            RowMove(Moment.BACKWARD, "grad", axis, P, self.grad),
            RowMove(Moment.BEFORE_UPDATE, "grad", axis, self.grad, self.optim),
            RowMove(Moment.BEFORE_UPDATE, "grad", "replicate", P, R, block=True),
            RowMove(Moment.BEFORE_UPDATE, "grad", axis, own, own, "device", work, block=True),
            RowMove(Moment.BEFORE_UPDATE, "grad", axis, own, own, work, optim, block=True),
            RowMove(Moment.UPDATE, "grad", axis, own, own, optim, work, block=True),
            RowMove(Moment.UPDATE, "optim", axis, own, own, optim, work, block=True),
            RowMove(Moment.AFTER_UPDATE, "optim", axis, own, own, work, optim, block=True),
            RowMove(Moment.AFTER_UPDATE, "param", axis, own, own, work, param, block=True),
            RowMove(Moment.AFTER_UPDATE, "param", axis, own, self.param, param, param),
        )
        ranks = {"shard": shard, "replicate": replicate}
        return RowMoves(
            move
            for move in found
            if (move.between_tiers or (move.src != move.dst and ranks[move.axis] > 1))
            and (self.sharded or move.src == move.dst or not move.block)
            and (trained or move.moment is Moment.USE)
        )


def _word(row: Row, optim: str = "") -> str:
    return f"row:{row.param.kind},{row.grad.kind},{optim or row.optim.kind}"


ROWS: dict[str, Row] = {
    "ddp": Row(param=R, grad=P, optim=R),
    "zero1": Row(param=R, grad=P, optim=S(0)),
    "zero2": Row(param=R, grad=S(0), optim=S(0)),
    "zero3": Row(param=S(0), grad=S(0), optim=S(0)),
}

#: Other names people know the rows by.
ALIASES: dict[str, str] = {"fsdp": "zero3"}


def row_of(word: str) -> Row:
    """The row that a plan word names (`zero1`) or writes out (`row:R,R,S`). Raises InputError."""
    if (row := ROWS.get(ALIASES.get(word, word))) is not None:
        return row
    columns = word.removeprefix("row:").split(",")
    if word.startswith("row:") and len(columns) == 3 and set(columns) <= {"R", "P", "S", "I"}:
        param, grad, optim = (S(0) if c == "S" else Placement.parse(c) for c in columns)
        return Row(param, grad, optim)
    allowed = "row: and the placements of parameter, gradient and optimizer state, R, P or S"
    raise bad(f"the plan word '{word}'", allowed, "row:R,P,S")


def step_moves(row: Row, numel: int, n: int, microbatches: int = 1) -> list[Move]:
    """The moves of one step, in order, for one parameter on n ranks; without replicas of shards."""
    own = [move for move in row.moves() if not move.block]

    def at(moment: Moment) -> list[Move]:
        return [price(m.src, m.dst, numel, n) for m in own if m.moment is moment]

    use = at(Moment.USE)  # before the forward pass, and again before the backward
    once = at(Moment.BEFORE_UPDATE) + at(Moment.AFTER_UPDATE)
    moves = [*use, *use, *at(Moment.BACKWARD)] * microbatches + once
    return [move for move in moves if move.what != "keep"]


def bytes_per_parameter(
    row: Row, n: int, param_bytes: float = 2, grad_bytes: float = 2, optim_bytes: float = 12
) -> float:
    """Bytes that each of n ranks stores for one parameter, padding apart (ZeRO, section 3.1).
    The defaults are mixed-precision Adam: 16-bit weight, gradient; fp32 master, mean, variance.
    """
    param = param_bytes * row.param.share(n)
    grad = grad_bytes * row.grad.share(n)
    return param + grad + optim_bytes * row.optim.share(n)


# --- the table of memory --------------------------------------------------------------------------

ACTIVATIONS, GATHERED, KEPT, TEMPORARY = "activations", "gathered", "kept", "temporary"
#: What an engine owns, and the part of it that lasts as long as a unit is used.
OWNED: Final[tuple[str, ...]] = ("parameters", GATHERED, "gradients", "optimizer", "buffers")
PART_OF: Final = {GATHERED: "parameters"}
#: The categories between steps.
CATEGORIES: Final[tuple[str, ...]] = tuple(name for name in OWNED if name not in PART_OF)
#: Those at a moment of a step: predicted, and measured.
PREDICTED: Final[tuple[str, ...]] = (*OWNED, KEPT)
MEASURED: Final[tuple[str, ...]] = (*PREDICTED, TEMPORARY)


class Event(NamedTuple):
    """A moment of a step: `kind` is forward, loss, backward, update, end or a pipeline action.
    `by_category` has the live bytes of each category; `peak` is the largest sum since the previous
    event, which a dry run does not look for.
    """

    kind: str
    unit: str
    microbatch: int
    by_category: dict[str, int]
    peak: int = 0

    @property
    def total(self) -> int:
        return sum(self.by_category.values())

    def __str__(self) -> str:
        return f"{self.kind} {self.unit}".strip()


def by_tier(
    device: Mapping[str, int], host: Mapping[str, int], disk: Mapping[str, int]
) -> dict[str, int]:
    """Bytes by category on the device, and by category and tier elsewhere if not zero."""
    found = {**device} | {f"{name} on the host": count for name, count in host.items() if count}
    return found | {f"{name} on disk": count for name, count in disk.items() if count}
