"""The plan words of data parallelism: its axes, the row of states, microbatches and buffers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from shardwise.core.buffer_sizes import PIECE_BYTES, smallest_pool_bytes
from shardwise.core.errors import Problem
from shardwise.core.plan.words import (
    Field,
    Technique,
    Word,
    keyed,
    read_count,
    read_size,
    size_text,
)
from shardwise.core.zero import ALIASES, ROWS, row_of

if TYPE_CHECKING:
    from shardwise.core.plan.plan import Plan


def _row(word: str) -> str | None:
    if word.startswith("row:"):
        return str(row_of(word))
    return ALIASES.get(word, word) if word in ROWS or word in ALIASES else None


def _size(key: str, what: str) -> Field:
    field = keyed(key, what, lambda value: read_size(key, value))
    return Field(f"{key}_bytes", what, field.read, lambda nbytes: f"{key}:{size_text(nbytes)}")


def _problems(plan: "Plan", world_size: int | None) -> Iterator[Problem]:
    yield from _axes(plan)
    yield from _buffers(plan.completed(world_size) if world_size else plan)


def _axes(plan: "Plan") -> Iterator[Problem]:
    """Data axes that contradict each other or the row."""
    sizes = dict(plan.axes)
    given = " ".join(f"{name}{size}" for name, size in plan.axes if name.startswith("dp"))
    remedy = f"dp{plan.data_size} in place of {given}"
    hybrid = [name for name in ("dp_replicate", "dp_shard") if name in sizes]
    if "dp" in sizes and hybrid:
        allowed = "either dpN, or dp_replicateN and dp_shardN, whose product is the same"
        yield Problem(f"'{given}', which splits the data in two ways", allowed, remedy)
    elif hybrid and not row_of(plan.row).sharded:
        allowed = f"dp_shardN together with zero1, zero2 or zero3; {plan.row} shards nothing"
        yield Problem(f"'{given}' under the row {plan.row}", allowed, remedy)
    elif hybrid == ["dp_replicate"]:
        allowed = "dp_replicateN together with dp_shardN, which says what is sharded over what"
        yield Problem(f"'{given}' without dp_shard under {plan.row}", allowed, remedy)


def _buffers(plan: "Plan") -> Iterator[Problem]:
    """A pool of communication buffers in which the ranks cannot sum the smallest piece."""
    least = smallest_pool_bytes(plan)
    if plan.buffers_bytes is None or plan.buffers_bytes >= least or plan.size == 1:
        return
    ranks = max(size for _, size in plan.axes)
    given = f"'buffers:{size_text(plan.buffers_bytes)}' with {ranks} ranks on an axis"
    allowed = f"{least} bytes or more, in which {ranks} ranks can sum pieces of {PIECE_BYTES} bytes"
    yield Problem(given, allowed, f"buffers:{size_text(least)}")


TECHNIQUE: Final = Technique(
    words=(
        Word("dpN", "dp2", "data parallelism on N ranks", of_layers=True),
        Word(
            "dp_replicateN",
            "dp_replicate2",
            "hybrid sharding: N groups, each with a full copy",
            of_layers=True,
        ),
        Word(
            "dp_shardN",
            "dp_shard4",
            "hybrid sharding: N ranks per group, each with a shard",
            of_layers=True,
        ),
        Word("ddp", "ddp", "every rank keeps all states (the default)", of_layers=True),
        Word("zero1", "zero1", "shard the optimizer's state", of_layers=True),
        Word("zero2", "zero2", "shard the optimizer's state and gradients", of_layers=True),
        Word("zero3", "zero3", "shard parameters too; also written fsdp", of_layers=True),
        Word(
            "row:P,G,O",
            "row:R,R,S",
            "any row: placements of parameters, gradients, optimizer state",
            of_layers=True,
        ),
        Word("accumulate:N", "accumulate:4", "accumulate gradients over N microbatches per step"),
        Word(
            "bucket:SIZE",
            "bucket:25MiB",
            "reduce gradients in buckets of SIZE (the default: 25MiB)",
        ),
        Word(
            "buffers:SIZE",
            "buffers:64MiB",
            "communication buffers of SIZE (the default: 16 MiB)",
        ),
    ),
    fields=(
        Field("row", "row of the states table", _row),
        keyed(
            "accumulate",
            "number of microbatches to accumulate",
            lambda value: read_count("accumulate", value),
        ),
        _size("bucket", "bucket size"),
        _size("buffers", "size of communication buffers"),
    ),
    problems=_problems,
)
