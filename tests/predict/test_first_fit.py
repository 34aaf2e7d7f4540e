"""The first-fit allocator on which a recorded step is run: what it needs, and fragmentation."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.prediction.first_fit import (
    AllocationTrace,
    Change,
    FirstFit,
    peak_bytes,
    placed,
    run,
)


def freed(storage: int, stored_bytes: int) -> Change:
    return Change(storage, stored_bytes, allocated=False)


EVENT = Change(-1, 0)
#: Blocks keep 10 bytes each among temporary tensors; then one tensor of 60 bytes is wanted.
KEPT = [
    *(Change(0, 30), Change(1, 10), freed(0, 30)),
    *(Change(2, 25), Change(3, 10), freed(2, 25)),
    *(EVENT, Change(4, 60), freed(4, 60), freed(1, 10), freed(3, 10)),
]
OF = {0: "temporary", 1: "kept", 2: "temporary", 3: "kept", 4: "temporary"}


def test_fragmentation_is_one_minus_the_largest_request_over_free_bytes():
    """Two free ranges of 30 and 60 bytes: a request of 61 fails though 90 are free."""
    memory = FirstFit(100)
    assert memory.allocate(0, 30) and memory.allocate(1, 10)
    memory.free(0)
    assert memory.fragmentation == pytest.approx(1 - 60 / 90)
    assert not memory.allocate(2, 61) and memory.allocate(2, 60)
    assert memory.fragmentation == 0


def test_a_step_that_fails_by_first_fit_and_runs_with_an_arena():
    """With the bytes of the peak the long-lived tensors divide what is free; in an arena not."""
    trace = AllocationTrace(KEPT, OF)
    assert peak_bytes(KEPT) == 80
    assert run(KEPT, 80) is None
    without, with_arena = placed(trace), placed(trace, ("kept",))
    assert with_arena == (80, 80, 0.0)
    assert without.needed_bytes > 80 and without.fragmentation > 0.2


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), max_size=40))
def test_ranges_never_overlap_and_a_run_needs_at_least_the_peak(asked: list[tuple[int, int]]):
    """Whatever is allocated and freed, in any order."""
    memory, changes, live = FirstFit(1000), list[Change](), list[Change]()
    for number, (stored_bytes, drop) in enumerate(asked):
        live.append(Change(number, stored_bytes))
        changes.append(live[-1])
        if memory.allocate(number, stored_bytes) and drop < len(live):
            gone = live.pop(drop)
            changes.append(gone._replace(allocated=False))
            memory.free(gone.storage)
        spans = sorted(memory.of.values())
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    found = placed(AllocationTrace(changes, dict.fromkeys(range(len(asked)), "kept")))
    assert found.needed_bytes >= found.peak_bytes == peak_bytes(changes)
