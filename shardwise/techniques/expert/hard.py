"""Hard gates, which give each token one expert with weight 1; and gates that change with passes.

    N  tokens of this rank      E  experts      D  width of a feature

No gradient reaches a hard gate's router through the output, so its experts train as independent
models on their share of the tokens.

    random number = hash(seed, name of the layer, number of the pass, place in the global batch)

A pass is a microbatch, and a buffer, saved with the model, numbers the passes. So one process, any
number of data ranks and the stages of a pipeline draw the same numbers, whatever the states of
torch's generators are. A recomputation must repeat its first forward pass, though others have run
since (`PassRecords`).
"""

import hashlib
import math

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.core.errors import RunError, bad
from shardwise.techniques.expert.gates import Choice
from shardwise.techniques.expert.routing import GlobalBatch


def assigned(assignment: Tensor, experts: int) -> Choice:
    """The expert of each token from outside: `assignment` [N], from 0 to experts - 1."""
    chosen, valid = _clamp_to_experts(assignment, experts)
    weights = torch.ones(len(chosen), 1, dtype=torch.float64, device=chosen.device)
    zeros = weights.new_zeros(len(chosen), experts)
    probabilities = zeros.scatter(1, chosen.view(-1, 1), 1.0)
    return Choice(chosen.view(-1, 1), weights, probabilities, valid=valid)


def _clamp_to_experts(assignment: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The assignment [N] clamped to the experts that exist, and whether nothing was clamped."""
    chosen = assignment.long().clamp(0, experts - 1)
    if assignment.is_floating_point():
        return chosen, torch.zeros((), dtype=torch.bool, device=chosen.device)
    return chosen, (chosen == assignment).all()


def require_experts(
    assignment: Tensor, experts: int, valid: tuple[bool, ...], batch: GlobalBatch, layer: str
) -> None:
    """Raise InputError, on all data ranks, if the assignment [N] of any is not `valid`."""
    if all(valid):
        return
    found = torch.zeros(3, dtype=torch.float64, device=assignment.device)
    if len(assignment):
        found[0], found[1] = assignment.aminmax()
    found[2] = assignment.is_floating_point()
    every = batch.gather(found).tolist()
    of = [
        f"{low:g} to {high:g}{' (floating point)' if floating else ''} on data rank {rank}"
        for rank, (low, high, floating) in enumerate(every)
        if not valid[rank]
    ]
    highest = max(high if math.isfinite(high) else 0.0 for _, high, _ in every)
    instead = "target.long()" if any(row[2] for row in every) else "ids of experts from 0 up"
    if highest >= experts:
        instead = f"Gate(..., experts={int(highest) + 1}), or another assignment"
    raise bad(
        f"for {layer}, an assignment of tokens to the experts {' and '.join(of)}",
        f"integers from 0 to {experts - 1}, for {experts} experts",
        instead,
    )


def hashed(ids: Tensor, experts: int, seed: int = 0) -> Tensor:
    """The expert of each token id [N], by a fixed random hash of it.

    Hash layers (Roller et al., arXiv 2106.04426), section 3.1. The hash is the finalizer of
    splitmix64 (Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014), a
    signed number of 64 bits, which is halved and rounded down.
    """
    return (mix_bits(ids, seed) >> 1).remainder(experts)


def mix_bits(x: Tensor, seed: int) -> Tensor:
    """64 random-looking bits for each integer of `x`, the same on every machine."""
    z = x.long() + _to_int64(seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15)
    z = (z ^ _shift_right(z, 30)) * _to_int64(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _to_int64(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros: torch's own copies the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _to_int64(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def argmax(logits: Tensor, targets: Tensor | None = None) -> Choice:
    """The expert of the largest logit, with weight 1. The router learns to predict an assignment
    (`assignment_loss`). Gross et al., arXiv 1704.06363, section 3.1.
    """
    given = logits.argmax(-1) if targets is None else targets
    chosen, valid = _clamp_to_experts(given, logits.shape[-1])
    weights = torch.ones_like(logits[:, :1])
    return Choice(chosen.view(-1, 1), weights, logits.softmax(-1), valid=valid)


def assignment_loss(logits: Tensor, targets: Tensor, tokens: int, batch: GlobalBatch) -> Tensor:
    """The cross-entropy of logits [N, E] with the experts `targets` [N], the mean over `tokens`."""
    summed = functional.cross_entropy(logits, targets, reduction="sum")
    return batch.sum(summed.view(1)).squeeze(0) / max(1, tokens)


def nearest(features: Tensor, centroids: Tensor) -> Tensor:
    """The nearest of the centroids [E, D] to each feature [N, D], the first of equals."""
    return _distances(features, centroids).argmin(-1)


def balanced_clusters(
    features: Tensor, experts: int, batch: GlobalBatch, *, iterations: int = 10, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Balanced k-means on a first pass: the centroids [E, D], and the cluster of each feature [N].

    No cluster has more than ceil(tokens / experts) features of the global batch. Features take the
    nearest cluster with room, those that would lose most by the second nearest first. All data
    ranks gather the features and compute the same, with O(N (D + E)) memory. After Gross et al.,
    arXiv 1704.06363, section 3.1, where clusters of images are balanced by hand.
    """
    sizes = batch.sizes(len(features), features.device)
    padded = features.new_zeros(max(sizes), features.shape[-1])
    padded[: len(features)] = features.detach()
    parts = [x[:size] for x, size in zip(batch.gather(padded), sizes, strict=True)]
    every = torch.cat(parts)
    if len(every) < experts:
        raise bad(
            f"a first pass over {len(every)} tokens, to fit {experts} clusters",
            "as many tokens as experts, or more",
            f"a larger first batch, or experts={max(1, len(every))}",
        )
    draw = torch.Generator("cpu").manual_seed(seed)
    order = torch.randperm(len(every), generator=draw, dtype=torch.int64, device="cpu")
    centroids = every[order[:experts].to(every.device)]
    clusters = _assign_with_room(_distances(every, centroids))
    for _ in range(iterations):
        centroids = _means(every, clusters, centroids)
        moved = _assign_with_room(_distances(every, centroids))
        if torch.equal(moved, clusters):
            break
        clusters = moved
    return centroids, clusters.split(sizes)[batch.rank]


def _assign_with_room(distances_NE: Tensor) -> Tensor:
    """The cluster of each feature; a cluster has room for ceil(N / E) of them.

    The same as if features chose one after the other, but all at once: a cluster that more want
    than it has room for is full for all that come later, and those choose again:

        order of choice   1   2   3   4          a cluster has room for 2
        nearest           a   a   a   b          a is full from 3 on
        then              a   a   b   b

    At most E rounds, since in each the first full cluster stays full.
    """
    n, experts = distances_NE.shape
    room = -(-n // experts)
    near = distances_NE.topk(min(2, experts), largest=False).values
    order = (near[:, -1] - near[:, 0]).argsort(descending=True, stable=True)
    left_NE = distances_NE[order]  # infinite to clusters that are full
    chosen = left_NE.argmin(-1)
    while (over := (counts := chosen.bincount(minlength=experts)) > room).any():
        by_cluster = chosen.argsort(stable=True)
        full_from = by_cluster[(counts.cumsum(0) - counts + room)[over]].tolist()
        for cluster, start in zip(over.nonzero().flatten().tolist(), full_from, strict=True):
            left_NE[start:, cluster] = math.inf
        chosen[min(full_from) :] = left_NE[min(full_from) :].argmin(-1)
    return torch.empty_like(chosen).index_copy_(0, order, chosen)


def _means(features: Tensor, clusters: Tensor, centroids: Tensor) -> Tensor:
    """Means [E, D] of clusters, else the old centroids. CUDA's index_add would differ by rank."""
    members = functional.one_hot(clusters, len(centroids)).double()
    sums = torch.zeros_like(centroids, dtype=torch.float64)
    for own, part in zip(_in_parts(members, features), _in_parts(features, features), strict=True):
        sums.addmm_(own.t(), part.double())
    counts = members.sum(0).unsqueeze(1)
    return torch.where(counts > 0, (sums / counts.clamp(min=1)).to(centroids), centroids)


def _distances(features: Tensor, centroids: Tensor) -> Tensor:
    """|x - c|^2 - |x|^2 = |c|^2 - 2 x c for each feature and centroid, [N, E].

    A matrix product rounds differently for other numbers of features. In fp64 rounding does not
    decide which centroid is nearest. Equal centroids have equal distances.
    """
    c_ED = centroids.double()
    parts = [
        torch.addmm(c_ED.square().sum(-1), part.double(), c_ED.t(), alpha=-2)
        for part in _in_parts(features, features)
    ]
    between_EE = torch.cdist(c_ED, c_ED, compute_mode="donot_use_mm_for_euclid_dist")
    return torch.cat(parts)[:, (between_EE == 0).int().argmax(-1)]


def _in_parts(rows: Tensor, features: Tensor) -> tuple[Tensor, ...]:
    """Parts of the rows, each for features that take 8 MiB in fp64."""
    return rows.split(max(1, (1 << 20) // features.shape[-1]))


# --- passes -------------------------------------------------------------------------------------


class PassRecords:
    """What determined the passes of a step: for each its number, or its bias of the experts [E].

    The plan word `recompute` calls the methods of a torch.Generator before the first forward and
    around its repetition. `position` is how many passes of the layer have run, and `values` are by
    the position before the pass. They are kept while `recording`, and not beyond a training step.
    """

    def __init__(self) -> None:
        self.position, self.values, self.recording = 0, dict[int, Tensor](), False

    def get_state(self) -> Tensor:
        """How many passes have run. Later passes may be repeated."""
        self.recording = True
        return torch.tensor(self.position, dtype=torch.int64, device="cpu")

    def set_state(self, state: Tensor) -> Tensor:
        self.position = int(state)
        return state

    def record(self, value: Tensor) -> None:
        if self.recording:
            self.values[self.position] = value.clone()
        self.position += 1

    def end(self) -> None:
        self.values.clear()
        self.recording = False

    def replay(self, layer: str) -> Tensor:
        """The value that was recorded for the pass that is recomputed now."""
        if self.position not in self.values:
            raise RunError(
                f"The activations of {layer} are recomputed by something that does not know the "
                "random numbers or the bias of its gate, such as torch.utils.checkpoint. Write the "
                'plan word recompute instead, or a gate that has neither, such as "topk".'
            )
        self.position += 1
        return self.values[self.position - 1]


def key_of(seed: int, layer: str) -> int:
    digest = hashlib.sha256(f"{seed}/{layer}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def uniform(numbers: Tensor, key: int, number: int) -> Tensor:
    """A number strictly between 0 and 1 for each integer, in a pass: 52 bits of its hash."""
    bits = (mix_bits(numbers, key + number) >> 12) & ((1 << 52) - 1)
    return (bits.double() + 0.5) / (1 << 52)
