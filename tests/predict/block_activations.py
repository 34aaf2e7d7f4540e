"""The bytes of activations that one layer stores between its forward and its backward pass.

Of B sequences of T positions, on t tensor ranks, for a layer of width D with H heads. Published
(Korthikanti et al., arXiv 2205.05198, table 2), 16-bit, with dropout, GELU, an explicit softmax:

    one rank             T B D (34 + 5 H T / D)
    tp                   T B D (10 + 24 / t + 5 H T / (D t))    the stream is whole on every rank
    tp sp                T B D (34 + 5 H T / D) / t
    selective            without the term 5 H T / D: scores are recomputed
    full                 2 T B D: only the layer's input is kept

A Block of models/gpt.py, with s bytes an element and w = max(s, 4) for values of norms and softmax,
on a rank with h query heads and k key heads of width E, f of the feed-forward's F, and N of the B T
positions in its stream (all, or under sp its shard), keeps:

    two norms            2 N (2 D + 1) w       the input, the normalised input, the reciprocal root
    two column inputs    2 B T D s             q, k, v read one; gate and up the other
    attention            B T ((2 h + 2 k) E s + h w)     q and k turned, v, the result; log-sum-exp
    feed-forward         4 B T f s             gate, silu of it, up, their product

With recomputation, arXiv 2205.05198 section 5 (docs/explanation/memory.md derives it):

    full                 N D s                 the block's input
    partitioned          N D s / t             its part of the input, padded (without sp)
    selective            N D s + B T ((2 h + 2 k) E s + h w + 2 f s + 2 D s)
                         and what products gave: q, k, v, attention; gate, up; out, down (but under
                         tp without sp, where out and down are summed in place)

No term grows with T squared: torch's attention kernel recomputes the scores. The column inputs are
complete under sp too: they are gathered once, in forward, and kept for the weight gradients; the
paper keeps a shard of each and gathers it again.
"""

from dataclasses import dataclass
from typing import Final

from shardwise.core.errors import bad
from shardwise.core.layouts.uneven import even, heads

WIDE_BYTES: Final = 4  # norms and log-sum-exps are computed in fp32 or wider


@dataclass(frozen=True)
class PaperLayer:
    """A layer as in arXiv 2205.05198, section 4: sequence s, microbatch b, width h, heads a."""

    sequence: int
    batch: int
    width: int
    heads: int


def paper_bytes(
    layer: PaperLayer, ranks: int = 1, sp: bool = False, recompute: str = "none"
) -> float:
    """Bytes of a layer's activations on each of `ranks`, 16-bit, with dropout (table 2).

    `recompute` is "none", "selective" (the attention's scores are computed again) or "full".
    Raises InputError for another word.
    """
    if recompute not in ("none", "selective", "full"):
        raise bad(f"recompute={recompute!r}", "none, selective or full", 'recompute="selective"')
    stream = layer.sequence * layer.batch * layer.width
    if recompute == "full":
        return 2 * stream
    scores = 5 * layer.heads * layer.sequence**2 * layer.batch if recompute == "none" else 0
    whole, cut = (0, 34) if sp or ranks == 1 else (10, 24)
    return whole * stream + (cut * stream + scores) / ranks


def first_stage_layers(layers: int, stages: int = 1, chunks: int = 1) -> float:
    """The number of layers whose activations stage 0 stores under 1F1B (arXiv 2205.05198, 4.2.3).

    It equals `layers`, because as many microbatches are in flight as there are stages; with
    `chunks` interleaved stages a rank, it is 1 + (p-1) / (p m) times as large.
    """
    return layers * (1 + (stages - 1) / (stages * chunks) if chunks > 1 else 1)


@dataclass(frozen=True)
class BlockShape:
    """A Block of models/gpt.py as numbers; see there for the names."""

    width: int
    heads: int
    kv_heads: int
    hidden: int


def block_bytes(
    block: BlockShape,
    tokens: tuple[int, int],
    element_bytes: int,
    ranks: int = 1,
    sp: bool = False,
    rank: int = 0,
    recompute: str = "none",
) -> int:
    """Bytes that one Block holds on `rank` of `ranks` between its forward and its backward.

    `tokens` are B sequences of T positions; `recompute` is "none", "selective", "full" or
    "partitioned". Counts the storages that autograd keeps alive on a CPU, each once: the block's
    input, not its output. Raises ValueError if the heads cannot be shared.
    """
    batch, positions = tokens
    wide = max(element_bytes, WIDE_BYTES)
    shard = -(-positions // ranks) if sp else positions  # padded where they do not divide
    queries, keys = (cut.size(rank) for cut in heads(block.heads, block.kv_heads, ranks))
    features = even(0, block.hidden, ranks).size(rank)
    head_width = block.width // block.heads
    stream = shard * block.width * element_bytes
    attention = 2 * (queries + keys) * head_width * element_bytes + queries * wide
    if recompute == "full" or (recompute == "partitioned" and sp):
        return batch * stream
    if recompute == "partitioned":
        return -(-batch * positions * block.width // ranks) * element_bytes
    if recompute == "selective":
        summed_in_place = ranks > 1 and not sp
        products = 2 * (features + (0 if summed_in_place else block.width)) * element_bytes
        return batch * (stream + positions * (attention + products))
    norms = 2 * shard * (2 * block.width + 1) * wide
    inputs = 2 * block.width * element_bytes
    forward = 4 * features * element_bytes
    return batch * (norms + positions * (inputs + attention + forward))
