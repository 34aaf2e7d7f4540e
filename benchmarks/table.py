"""The table of a benchmark, as text and JSON, and the fewest bytes that a rank has to send.

With n ranks, Ψ parameters, L layers, and activations of N = B·T·D elements:

    ddp zero1 zero2    2Ψ(n-1)/n
    zero3              3Ψ(n-1)/n
    cp                 as ddp; and in each layer the smaller of keys, values forward and backward
                       and their gradients, each 2N'(n-1)/n with N' = B·T·E·K, or by heads
    tp                 2N(n-1)/n for each of 4L + 2 all-reduces: two forward and two backward in
                       each layer (arXiv 1909.08053, figure 4), forward out of the embedding,
                       backward out of the head; and for three of B·T numbers in the loss:
                       maximum, sum of exponentials, the target's logit
    pp                 N forward and N backward for each boundary between stages on different ranks:
                       2N(p-1) on p ranks with one stage each, 2N(p·v-1) interleaved with v chunks,
                       2N(2p-2) in a V; a rank sends 1/p of that on average
    tp sp              as tp, by all-gathers and reduce-scatters (arXiv 2205.05198, section 4.2.2);
                       and an all-reduce of the gradients of the 2L + 1 norms' weights
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from benchmarks.contenders.contender import Task
from benchmarks.contenders.roster import ROSTER
from benchmarks.measure import Record
from shardwise.core.layouts.layout import I, Move, P, Placement, R, S, price
from shardwise.core.schedule.library import LIBRARY, build
from shardwise.core.zero import ROWS, step_moves
from shardwise.models.gpt import GPTConfig

MIB = 2**20
LATE = 0.01  # the fraction of a contender's bytes that may be sent after its step without a note
#: Less than this is not reported: it would be shown as 0.0 MiB.
LEAST_LATE_BYTES = MIB / 20


@dataclass(frozen=True)
class Line:
    """One row of the JSON: a contender at a size.

    step_s      the median over rounds of the slowest rank's time
    ratio       the median over rounds of that time divided by the reference's in the same round
    wire_bytes  the median bytes that a rank sends in a step
    wire_ratio  the same divided by the fewest bytes that its row can send
    peak_bytes  the peak of live tensor bytes of any rank within a step
    buffers_bytes  the peak of those that belong to communication (communication_bytes.py)
    loss        the mean over ranks in the last step
    host_bytes  the bytes that a rank has in host memory between steps, under an offload
    disk_bytes  the same on a disk
    moved_bytes  the bytes that it copies between tiers in a step

    None for what was not measured; `note` says why.
    """

    size: str
    contender: str
    ranks: int
    step_s: float | None
    ratio: float | None
    wire_bytes: int | None
    wire_ratio: float | None
    peak_bytes: int | None
    buffers_bytes: int | None
    loss: float | None
    note: str
    host_bytes: int | None = None
    disk_bytes: int | None = None
    moved_bytes: int | None = None


def lines(task: Task, by_rank: Sequence[Sequence[Record]]) -> list[Line]:
    """The rows of one run from the records of each rank."""
    by_contender = list(zip(*by_rank, strict=True))
    slowest = {records[0].name: _slowest(records) for records in by_contender}
    return [_line(task, records, slowest[records[0].name], slowest) for records in by_contender]


def _line(
    task: Task, records: Sequence[Record], step_s: list[float], everyones: Mapping[str, list[float]]
) -> Line:
    name, ranks = records[0].name, len(records)
    finished = len(step_s) == task.rounds
    nothing = None, None, None, None, None, None, None
    blank = Line(task.size, name, ranks, *nothing, records[0].note)
    if not finished:
        return blank
    wire_bytes = statistics.median(_mean([r.wire[i] for r in records]) for i in range(task.rounds))
    least = least_bytes(ROSTER[name].row, task, ranks)
    against = everyones[ROSTER[name].against or task.reference]
    ratios = [own / other for own, other in zip(step_s, against, strict=False)]
    return Line(
        size=task.size,
        contender=name,
        ranks=ranks,
        step_s=statistics.median(step_s),
        ratio=statistics.median(ratios) if ratios else None,
        wire_bytes=round(wire_bytes),
        wire_ratio=wire_bytes / least if least else None,
        peak_bytes=_most([record.peak_bytes for record in records]),
        buffers_bytes=_most([record.buffers_bytes for record in records]),
        loss=_mean([r.loss for r in records if r.loss is not None]),
        note=records[0].note or _late(records, wire_bytes),
        host_bytes=_most([record.tiers and record.tiers.host_bytes for record in records]),
        disk_bytes=_most([record.tiers and record.tiers.disk_bytes for record in records]),
        moved_bytes=_most([record.tiers and record.tiers.moved_bytes for record in records]),
    )


def _late(records: Sequence[Record], wire_bytes: float) -> str:
    """A note on communication after the end of a step; "" if there is little."""
    late = statistics.median(
        _mean(moment) for moment in zip(*(r.late for r in records), strict=True)
    )
    if not wire_bytes or late < max(LATE * wire_bytes, LEAST_LATE_BYTES):
        return ""
    return f"{late / MIB:.1f} MiB moved after its time was taken"


def _slowest(records: Sequence[Record]) -> list[float]:
    """The time of the slowest rank in each round."""
    return [max(times) for times in zip(*(record.step_s for record in records), strict=True)]


def _most(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def as_json(rows: Sequence[Any]) -> dict[str, Any]:
    """The object that `--json` prints, for the lines of any suite."""
    return {"rows": [asdict(row) for row in rows]}


def as_text(rows: Sequence[Line]) -> str:
    """The rows as text, one table per size."""
    head = ("contender", "step ms", "ratio", "wire MiB", "over least", "peak MiB", "buffers")
    beyond = any(row.host_bytes or row.disk_bytes for row in rows)
    head += (*(("host MiB", "disk MiB", "moved MiB") if beyond else ()), "loss", "note")
    blocks = []
    for size in dict.fromkeys(row.size for row in rows):
        cells = [head, *(_cells(row, beyond) for row in rows if row.size == size)]
        ranks = next(row.ranks for row in rows if row.size == size)
        blocks.append(f"{size}, {ranks} ranks")
        blocks.extend(aligned(cells))
        blocks.append("")
    return "\n".join(blocks).rstrip()


def _cells(row: Line, beyond: bool) -> tuple[str, ...]:
    tiers = (row.host_bytes, row.disk_bytes, row.moved_bytes) if beyond else ()
    return (
        row.contender,
        _number(row.step_s, 1, 1000.0),
        _number(row.ratio, 3),
        _number(row.wire_bytes, 2, 1 / MIB),
        _number(row.wire_ratio, 3),
        _number(row.peak_bytes, 1, 1 / MIB),
        _number(row.buffers_bytes, 1, 1 / MIB),
        *(_number(count, 1, 1 / MIB) for count in tiers),
        _number(row.loss, 5),
        row.note,
    )


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def aligned(cells: Sequence[tuple[str, ...]]) -> list[str]:
    """The rows in columns: a name, numbers aligned right, and a note. The first row has titles."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return [_aligned(line, widths) for line in cells]


def _aligned(line: tuple[str, ...], widths: list[int]) -> str:
    name, *numbers, note = line
    middle = (number.rjust(width) for number, width in zip(numbers, widths[1:-1], strict=True))
    return "  ".join((name.ljust(widths[0]), *middle, note)).rstrip()


# --- the fewest bytes ------------------------------------------------------------------------

FP32_BYTES = 4
LOSS_SUMS = 3


def least_bytes(row: str, task: Task, ranks: int) -> int:
    """The fewest bytes that a rank sends in a step of this task in fp32; `row` is in plan words.

    An empty row is one process, which sends nothing.
    """
    if not row:
        return 0
    if row.partition(":")[0] in LIBRARY:
        return pipeline_bytes(row, task, ranks)
    if row in ROWS:
        moves = step_moves(ROWS[row], task.config.parameters, ranks)
    elif row == "cp":
        moves = step_moves(ROWS["ddp"], task.config.parameters, ranks)
        return round((sum(move.sent for move in moves) + context_numel(task, ranks)) * FP32_BYTES)
    else:
        moves = tensor_moves(task.config, task.rows, ranks, sequence="sp" in row.split())
    return round(sum(move.sent for move in moves) * FP32_BYTES)


def context_numel(task: Task, ranks: int) -> float:
    """The elements of attention that a rank of a ring sends, or of Ulysses, if these are fewer."""
    config = task.config
    head = task.rows * config.sequence * config.head_width * (ranks - 1) / ranks
    ring = 3 * 2 * config.kv_heads * head
    ulysses = 2 * (2 * config.heads + 2 * max(config.kv_heads, ranks)) * head / ranks
    return config.layers * min(ring, ulysses)


def tensor_moves(config: GPTConfig, rows: int, ranks: int, sequence: bool) -> list[Move]:
    """The moves of one step on `rows` sequences, forward and (by duality) backward.

    With `sequence` the residual stream is sharded along the sequence, otherwise replicated.
    """
    stream: Placement = S(1) if sequence else I
    numel = rows * config.sequence * config.hidden_size
    # out of the embedding and of both halves of a layer; into both halves and into the head
    forward = [price(P, stream, numel, ranks), price(stream, R, numel, ranks)]
    backward = [price(*move.adjoint, numel, ranks) for move in forward]
    moves = [*forward, *backward] * (2 * config.layers + 1)
    moves += [price(P, I, rows * config.sequence, ranks)] * LOSS_SUMS
    if sequence:
        moves.append(price(P, I, (2 * config.layers + 1) * config.hidden_size, ranks))
    return moves


def pipeline_bytes(word: str, task: Task, ranks: int) -> int:
    """The average bytes of a pipeline's rank: the residual stream over each boundary, twice."""
    home = build(word, ranks).home
    crossings = sum(here != there for here, there in pairwise(home))
    numel = task.rows * task.config.sequence * task.config.hidden_size
    return round(2 * numel * crossings * FP32_BYTES / ranks)
