"""The batches: which tokens every rank reads at every step.

The stream of tokens is cut into sequences of T inputs; the target of a position is the token after
it, so neighbours share one token and nothing is lost but the first. The last sequence is padded,
its missing targets are -100.

    stream      t0 t1 t2 t3 t4 t5 t6 t7 t8           T = 4
    inputs     [t0 t1 t2 t3][t4 t5 t6 t7]
    targets    [t1 t2 t3 t4][t5 t6 t7 t8]

The sequences are dealt to 128 stretches of the stream, and whole stretches, evenly spread, are held
out for validation. Those for training are shuffled anew each epoch, by a permutation that can be
evaluated anywhere. So the state of a run is one number, the sequences consumed, and a step's global
batch follows from it alone: the ranks take contiguous blocks of that same batch, as even as can be.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import bad
from shardwise.train.packed import Packed, Stream

IGNORED = -100  # a target that takes no part in the loss
STRETCHES = 128
ROUNDS = 6  # of the Feistel network; four make a strong permutation of a good round function

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Sequences as `inputs` and `targets`, [rows, T]; -100 is no target."""

    inputs: Index
    targets: Index

    @property
    def tokens(self) -> int:
        """How many targets take part in the loss."""
        return int((self.targets != IGNORED).sum())


@dataclass(frozen=True)
class Corpus:
    """A stream cut into sequences of `sequence` tokens, numbered from 0, in two parts."""

    packed: Packed
    sequence: int
    training: Index
    validation: Index

    def rows(self, numbers: Index) -> Rows:
        """The sequences with these numbers."""
        return cut(self.packed.stream, numbers, self.sequence)


def split(packed: Packed, sequence: int, validation: float) -> Corpus:
    """The two parts of a stream. Raises InputError where there is too little for one of each."""
    count = max(0, -(-(len(packed.stream) - 1) // sequence))
    if count < 2:
        raise bad(
            f"data of {len(packed.stream)} tokens with sequences of {sequence}",
            "at least two sequences, one to train on and one to hold out",
            f"model.sequence = {max(1, (len(packed.stream) - 1) // 2)}, or more data",
        )
    numbers = np.arange(count, dtype=np.int64)
    stretches = min(STRETCHES, count)
    held = min(stretches - 1, max(1, round(stretches * validation)))
    stretch = numbers * stretches // count
    # stretch k is held out where the staircase k * held / stretches takes a step: evenly spread
    out = (stretch + 1) * held // stretches > stretch * held // stretches
    return Corpus(packed, sequence, numbers[~out], numbers[out])


def cut(stream: Stream, numbers: Index, sequence: int) -> Rows:
    """Sequences by number, as [rows, sequence] inputs and targets."""
    at = numbers[:, None] * sequence + np.arange(sequence)
    last = len(stream) - 1
    inputs = stream[np.minimum(at, last)].astype(np.int64)
    targets = stream[np.minimum(at + 1, last)].astype(np.int64)
    targets[at + 1 > last] = IGNORED
    return Rows(inputs, targets)


@dataclass(frozen=True)
class Batches:
    """The order of training: `batch` sequences a step, from `corpus.training`, keyed by `seed`."""

    corpus: Corpus
    batch: int
    seed: int

    def numbers(self, consumed: int) -> Index:
        """The global batch after `consumed` sequences; an epoch's last one may be smaller."""
        epoch, start = divmod(consumed, len(self.corpus.training))
        places = np.arange(start, min(start + self.batch, len(self.corpus.training)))
        return self.corpus.training[shuffle(places, len(self.corpus.training), self.seed, epoch)]


def block(numbers: Index, rank: int, ranks: int) -> Index:
    """Rank `rank`'s contiguous share: 8 numbers over 3 ranks are 3, 3, 2; there may be none."""
    size, more = divmod(len(numbers), ranks)
    start = rank * size + min(rank, more)
    return numbers[start : start + size + (rank < more)]


def padded(rows: Rows, count: int) -> Rows:
    """The rows and as many that ask for nothing (all targets -100) as make `count` of them."""
    missing = count - len(rows.inputs)
    if missing <= 0:
        return rows
    shape = (missing, rows.inputs.shape[1])
    return Rows(
        np.concatenate([rows.inputs, np.zeros(shape, np.int64)]),
        np.concatenate([rows.targets, np.full(shape, IGNORED, np.int64)]),
    )


def shuffle(places: Index, count: int, seed: int, epoch: int) -> Index:
    """Where a permutation of [0, count), keyed by seed and epoch, takes `places`.

    A Feistel network on the smallest even number of bits that holds `count`; a result outside is
    taken through it again until it falls inside (cycle walking: Black and Rogaway, "Ciphers with
    Arbitrary Finite Domains", 2002). No table, so no memory and no work for what is not asked.
    """
    half = np.uint64(max(1, (max(1, count - 1).bit_length() + 1) // 2))
    key = _mix(np.array([seed % 2**64], np.uint64)) ^ np.uint64(epoch)
    result = places.astype(np.uint64)
    outside = np.ones(len(result), bool)
    while outside.any():
        result[outside] = _feistel(result[outside], half, key)
        outside = result >= count
    return result.astype(np.int64)


def _feistel(x: NDArray[np.uint64], half: np.uint64, key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for turn in range(ROUNDS):
        left, right = right, left ^ (_mix(right ^ _mix(key + np.uint64(turn))) & mask)
    return (left << half) | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: every bit of the result hangs on every bit of x."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def unigram_entropy(corpus: Corpus) -> float:
    """Nats a token of the best guess that knows only how frequent each validation token is."""
    counts = np.zeros(corpus.packed.vocabulary.size, np.int64)
    for part in np.array_split(corpus.validation, max(1, len(corpus.validation) // 4096)):
        targets = corpus.rows(part).targets
        counts += np.bincount(targets[targets != IGNORED], minlength=len(counts))
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())
