"""Chunks of tensors on a disk: their sizes, and the host memory that streams them.

A chunk is CHUNK_NUMEL elements of a flat tensor: 1 MiB in 32 bits. It begins and ends at multiples
of ALIGN_BYTES in the file, as O_DIRECT asks.
"""

from typing import Final

CHUNK_NUMEL: Final = 2**18
ALIGN_BYTES: Final = 4096
#: Chunks of each streamed tensor in host memory: some read ahead, one in use, some written behind.
CHUNKS_AT_ONCE: Final = 6


def aligned(count: int) -> int:
    """A number of bytes rounded up to whole blocks of the file."""
    return -(-count // ALIGN_BYTES) * ALIGN_BYTES


def buffer_count(states: int) -> int:
    """The buffers that stream gradient, master and `states` state tensors; one more converts."""
    return CHUNKS_AT_ONCE * (2 + states) + 1


def reserved_bytes(states: int, element_bytes: int) -> int:
    """The host memory of these buffers for elements of at most so many bytes."""
    return buffer_count(states) * CHUNK_NUMEL * element_bytes + ALIGN_BYTES
