"""The fewest bytes that a rank has to send in a step, for each kind of parallelism.

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

from itertools import pairwise

from benchmarks.contenders.contender import Task
from shardwise.core.layouts.layout import I, P, Placement, R, S
from shardwise.core.moves import Move, price
from shardwise.core.schedule.library import LIBRARY, build
from shardwise.core.zero import ROWS, step_moves
from shardwise.models.gpt import GPTConfig, parameters

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
        moves = step_moves(ROWS[row], parameters(task.config), ranks)
    elif row == "cp":
        moves = step_moves(ROWS["ddp"], parameters(task.config), ranks)
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
    numel = rows * config.sequence * config.width
    # out of the embedding and of both halves of a layer; into both halves and into the head
    forward = [price(P, stream, numel, ranks), price(stream, R, numel, ranks)]
    backward = [price(*move.adjoint, numel, ranks) for move in forward]
    moves = [*forward, *backward] * (2 * config.layers + 1)
    moves += [price(P, I, rows * config.sequence, ranks)] * LOSS_SUMS
    if sequence:
        moves.append(price(P, I, (2 * config.layers + 1) * config.width, ranks))
    return moves


def pipeline_bytes(word: str, task: Task, ranks: int) -> int:
    """The average bytes of a pipeline's rank: the residual stream over each boundary, twice."""
    home = build(word, ranks).home
    crossings = sum(here != there for here, there in pairwise(home))
    numel = task.rows * task.config.sequence * task.config.width
    return round(2 * numel * crossings * FP32_BYTES / ranks)
