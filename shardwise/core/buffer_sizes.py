"""The sizes of a rank's pool of communication buffers and of its arena, which the plan fixes.

The pool holds received messages that a rank adds to its own data, and sums of 16-bit numbers in
fp32 (comm/gloo/pool.py).  A message that would take more than a quarter of it is sent in pieces, so
the memory does not grow with the model or the world.  NCCL sums in the memory of the tensors: on
CUDA there is a pool only if a plan sets its size.  (Constant-size buffers, C_B: Rajbhandari et al.,
"ZeRO", arXiv 1910.02054, section 6.2.)
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shardwise.core.plan.plan import Plan


#: A slot, the memory of one piece, takes at most 1/SLOTS of the pool.
SLOTS: Final = 4
#: The size of the smallest message; every tensor in the pool begins at a multiple of it.
PIECE_BYTES: Final = 64
#: The size of two fp32 sums of a 16-bit message, in units of the message.
SUMS: Final = 4
#: The size of the default pool, unless the model's parameters are smaller.
POOL_BYTES: Final = 16 * 2**20


def pool_bytes(plan: "Plan", model_bytes: int, device: str) -> int:
    """The bytes of each rank's pool on `device`, "cpu" or "cuda"; 0 for a plan of one rank."""
    if plan.size == 1:
        return 0
    return plan.buffers_bytes or usual_pool_bytes(_longest(plan), model_bytes, device)


def usual_pool_bytes(ranks: int, model_bytes: int, device: str) -> int:
    if ranks == 1 or device == "cuda":
        return 0
    model_bytes += -model_bytes % (SLOTS * PIECE_BYTES)
    return max(min(POOL_BYTES, model_bytes), _smallest(ranks))


def smallest_pool_bytes(plan: "Plan") -> int:
    return _smallest(_longest(plan))


def _longest(plan: "Plan") -> int:
    return max((size for own in plan.of_all_layers for _, size in own.axes), default=1)


def _smallest(ranks: int) -> int:
    """A piece needs a message from each other rank, perhaps a copy of each sent one, and sums."""
    return SLOTS * PIECE_BYTES * (2 * (ranks - 1) + SUMS)


def slot_bytes(pool: int) -> int:
    return pool // SLOTS // PIECE_BYTES * PIECE_BYTES


def piece_bytes(slot: int, messages: int, *, sums: bool) -> int:
    """The largest size of `messages` messages (and, with `sums`, two fp32 sums) in one slot."""
    return slot // PIECE_BYTES // (messages + SUMS * sums) * PIECE_BYTES


# --- slots of an arena (comm/tiers/arena.py) ------------------------------------------------------

#: Slots begin at multiples of this, as an allocator's tensors do.
ALIGNMENT: Final = 512

#: Sums of gradients under way at once, where each holds memory of its own.
IN_FLIGHT: Final = 2

#: How many slots there are of each size in bytes.
Slots = Mapping[int, int]


def aligned(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNMENT


def arena_bytes(slots: Slots) -> int:
    return sum(aligned(size) * count for size, count in slots.items())


def most_at_once(moments: Iterable[Counter[int]]) -> Slots:
    """As many slots of each size as tensors of that size are in the arena at once."""
    found: Counter[int] = Counter()
    for moment in moments:
        found |= moment
    return dict(found)


def gradient_slots(units: Sequence[Sequence[int]], in_flight: int) -> Slots:
    """The slots for gradients that are reduced and freed unit by unit.
    `units` has the bytes of each gradient of each unit, in the order of the forward pass.  While
    one unit's gradients are computed, `in_flight` units after it are being reduced.
    """
    sizes = [Counter(unit) for unit in units if unit]
    windows = (sizes[k : k + in_flight + 1] for k in range(len(sizes)))
    return most_at_once(sum(window, Counter[int]()) for window in windows)


# --- chunks of tensors on a disk ------------------------------------------------------------------

# A chunk is CHUNK_NUMEL elements of a flat tensor (1 MiB in 32 bits), or fewer in a model without
# large parameters, so that its tensors have several too.  It begins and ends at multiples of
# ALIGN_BYTES in the file, as O_DIRECT requires.

CHUNK_NUMEL: Final = 2**18
#: A chunk has no fewer elements: whole blocks of the file also in 16 bits.
LEAST_NUMEL: Final = 2048
ALIGN_BYTES: Final = 4096
#: Chunks of each streamed tensor in host memory: some read ahead, one in use, some written behind.
CHUNKS_AT_ONCE: Final = 6


def in_blocks(count: int) -> int:
    return -(-count // ALIGN_BYTES) * ALIGN_BYTES


def chunk_numel(largest: int) -> int:
    """A power of two: at most a quarter of the largest parameter's elements, unless it is tiny."""
    return min(CHUNK_NUMEL, max(LEAST_NUMEL, 2 ** max(0, largest.bit_length() - 3)))


def reserved_bytes(states: int, element_bytes: int, chunk: int) -> int:
    """The host memory of the buffers, for elements of at most `element_bytes` bytes."""
    count = CHUNKS_AT_ONCE * (2 + states) + 1  # of gradient, master, states; one more converts
    return count * chunk * element_bytes + ALIGN_BYTES
