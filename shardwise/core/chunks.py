"""Chunks of tensors on a disk: their sizes, and the host memory that streams them.

A chunk is CHUNK_NUMEL elements of a flat tensor (1 MiB in 32 bits), or fewer in a model without
large parameters, so that its tensors have several too.  It begins and ends at multiples of
ALIGN_BYTES in the file, as O_DIRECT requires.
"""

from typing import Final

CHUNK_NUMEL: Final = 2**18
#: A chunk has no fewer elements: whole blocks of the file also in 16 bits.
LEAST_NUMEL: Final = 2048
ALIGN_BYTES: Final = 4096
#: Chunks of each streamed tensor in host memory: some read ahead, one in use, some written behind.
CHUNKS_AT_ONCE: Final = 6


def aligned(count: int) -> int:
    return -(-count // ALIGN_BYTES) * ALIGN_BYTES


def buffer_count(states: int) -> int:
    """The buffers that stream gradient, master and `states` state tensors; one more converts."""
    return CHUNKS_AT_ONCE * (2 + states) + 1


def chunk_numel(largest: int) -> int:
    """A power of two: at most a quarter of the largest parameter's elements, unless it is tiny."""
    return min(CHUNK_NUMEL, max(LEAST_NUMEL, 2 ** max(0, largest.bit_length() - 3)))


def reserved_bytes(states: int, element_bytes: int, chunk: int) -> int:
    """The host memory of the buffers, for elements of at most `element_bytes` bytes."""
    return buffer_count(states) * chunk * element_bytes + ALIGN_BYTES
