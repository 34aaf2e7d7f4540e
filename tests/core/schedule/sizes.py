"""The sizes that the tests of schedules go through: all that a schedule allows, up to 8 by 8."""

from collections.abc import Iterator

from shardwise.core.schedule.library import LIBRARY, Size, size

MOST = 8


def allowed(name: str, p: int, m: int) -> bool:
    """Whether the paper of the schedule lets m microbatches go over p ranks."""
    return {
        "naive": m == 1,
        "2bw": m >= p,
        "interleaved": m % p == 0,
        "dualpipe-v": m >= 2 * p,
    }.get(name, True)


def sizes(name: str) -> Iterator[Size]:
    """Every size up to 8 ranks and 8 microbatches (DualPipe-V: 2p+2, as it needs at least 2p)."""
    chunks = LIBRARY[name].chunks
    for p in range(1, MOST + 1):
        for m in range(1, 2 * p + 3 if name == "dualpipe-v" else MOST + 1):
            if allowed(name, p, m):
                yield from (
                    size(name, p, m, v) for v in ([1, 2, 3] if chunks is None else [chunks])
                )
