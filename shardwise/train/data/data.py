"""The batches: the tokens that every rank reads at every step.

The stream of tokens is divided into sequences of T inputs. The target of a position is the next
token, so every token except the first is a target. The last sequence is padded, and its missing
targets are -100.

    stream      t0 t1 t2 t3 t4 t5 t6 t7 t8           T = 4
    inputs     [t0 t1 t2 t3][t4 t5 t6 t7]
    targets    [t1 t2 t3 t4][t5 t6 t7 t8]

The stream is divided into 128 stretches, and some of them, evenly spread, are held out for
validation; or the last source is. The training sequences are shuffled in each epoch, by its number
and the seed. So the state of a run is one number, the sequences consumed, which determines the
global batch of a step. The ranks take contiguous blocks of that batch, whose sizes differ by at
most one.

With weights, each source has epochs of its own. A round of about 1000 sequences has the same number
of each source, by the weights, in an order that is drawn for the round:

    sources, weights 2 to 1    a b a | a a b | b a a
    sequence of its source     0 0 1 | 2 3 1 | 2 4 5
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import bad
from shardwise.train.data.packed import Packed
from shardwise.train.data.tokens import NO_TARGET

IGNORED = -100  # a target that the loss ignores
STRETCHES = 128
COUNTED = 2**24
ROUND = 1000  # sequences, about, in which the weights of sources hold exactly

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Sequences as `inputs` and `targets`, [rows, T]; the loss ignores targets of -100.
    `positions` are those in its document of each token, if documents are kept apart.
    """

    inputs: Index
    targets: Index
    positions: Index | None = None

    @property
    def mask(self) -> NDArray[np.bool_] | None:
        """What each position attends to, [rows, 1, T, T]: its document, up to itself."""
        if self.positions is None:
            return None
        document = (self.positions == 0).cumsum(1)
        same = document[:, None, :, None] == document[:, None, None, :]
        return same & np.tri(same.shape[-1], dtype=bool)


@dataclass(frozen=True)
class Corpus:
    """A stream as sequences of `sequence` tokens; one belongs to the source in which it begins."""

    packed: Packed
    sequence: int
    training: Index
    validation: Index

    @cached_property
    def by_source(self) -> tuple[Index, ...]:
        """The training sequences of each source."""
        source = np.searchsorted(self.packed.ends, self.training * self.sequence, side="right")
        return tuple(self.training[source == k] for k in range(len(self.packed.ends)))

    def rows(self, numbers: Index, *, documents: bool = False) -> Rows:
        """The sequences with these numbers; with `documents` kept apart, no token of one is the
        target of another.
        """
        stream, last = self.packed.stream, len(self.packed.stream) - 1
        at = numbers[:, None] * self.sequence + np.arange(self.sequence)
        inputs = stream[np.minimum(at, last)].astype(np.int64) % NO_TARGET
        targets = stream[np.minimum(at + 1, last)].astype(np.int64)
        targets[(at + 1 > last) | (targets >= NO_TARGET)] = IGNORED
        if not documents:
            return Rows(inputs, targets)
        ends = inputs == self.packed.vocabulary.separator % NO_TARGET
        targets[ends] = IGNORED
        place = np.arange(self.sequence)
        begins = np.where(np.roll(ends, 1, axis=1), place, 0)
        return Rows(inputs, targets, place - np.maximum.accumulate(begins, axis=1))


def split(packed: Packed, sequence: int, validation: float, *, apart: bool = False) -> Corpus:
    """Split a stream; with `apart` the last source is the validation. Raises InputError."""
    count = max(0, -(-(len(packed.stream) - 1) // sequence))
    if count < 2:
        raise bad(
            f"data of {len(packed.stream)} tokens with sequences of {sequence}",
            "at least two sequences, one to train on and one to hold out",
            f"model.sequence = {max(1, (len(packed.stream) - 1) // 2)}, or more data",
        )
    numbers = np.arange(count, dtype=np.int64)
    if apart:  # no sequence is of both
        first = packed.ends[-2]
        return Corpus(
            packed,
            sequence,
            numbers[(numbers + 1) * sequence < first],
            numbers[numbers * sequence >= first],
        )
    stretches = min(STRETCHES, count)
    held = min(stretches - 1, max(1, round(stretches * validation)))
    stretch = numbers * stretches // count
    # stretch k is held out if the integer part of k * held / stretches increases after it
    out = (stretch + 1) * held // stretches > stretch * held // stretches
    return Corpus(packed, sequence, numbers[~out], numbers[out])


@dataclass(frozen=True)
class Batches:
    """The order of training, by `seed`; with `weights`, the sources in these shares."""

    corpus: Corpus
    batch: int
    seed: int
    weights: tuple[float, ...] = ()

    def numbers(self, consumed: int) -> Index:
        """The global batch after `consumed` sequences; at the end of an epoch perhaps fewer."""
        if self.weights:
            every = range(consumed, consumed + self.batch)
            return np.array([self._weighted(number) for number in every])
        epoch, start = divmod(consumed, len(self.corpus.training))
        order = permutation(len(self.corpus.training), self.seed, epoch)
        return self.corpus.training[order[start : start + self.batch]]

    def _weighted(self, number: int) -> int:
        """The sequence that is the `number`-th to be consumed."""
        shares = [max(1, round(ROUND * w / sum(self.weights))) for w in self.weights]
        turn, place = divmod(number, sum(shares))
        # permuted places, each of the source in whose share it falls
        order = np.searchsorted(
            np.cumsum(shares), permutation(sum(shares), self.seed, turn), "right"
        )
        source = order[place]
        consumed = turn * shares[source] + int((order[:place] == source).sum())
        sequences = self.corpus.by_source[source]
        epoch, at = divmod(consumed, len(sequences))
        return sequences[permutation(len(sequences), self.seed, epoch)[at]]


def block(numbers: Index, rank: int, ranks: int) -> Index:
    """The contiguous block of `rank`: 8 numbers on 3 ranks are 3, 3, 2; it may be empty."""
    return np.array_split(numbers, ranks)[rank]


def padded(rows: Rows, count: int) -> Rows:
    """The rows, padded to `count` rows whose targets are all -100."""
    missing = count - len(rows.inputs)
    if missing <= 0:
        return rows
    none = np.zeros((missing, rows.inputs.shape[1]), np.int64)
    return Rows(
        np.concatenate([rows.inputs, none]),
        np.concatenate([rows.targets, none + IGNORED]),
        None if rows.positions is None else np.concatenate([rows.positions, none]),
    )


@lru_cache(maxsize=8)
def permutation(count: int, seed: int, epoch: int) -> Index:
    return np.random.default_rng([seed, epoch]).permutation(count)


def unigram_entropy(corpus: Corpus) -> float:
    """The entropy of token frequencies in the validation split, or a sample, in nats a token."""
    counts = np.zeros(corpus.packed.vocabulary.size, np.int64)
    few = min(len(corpus.validation), max(1, COUNTED // corpus.sequence))
    held = corpus.validation[np.arange(few) * len(corpus.validation) // few]
    for part in np.array_split(held, max(1, len(held) // 4096)):
        targets = corpus.rows(part).targets
        counts += np.bincount(targets[targets != IGNORED], minlength=len(counts))
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())
