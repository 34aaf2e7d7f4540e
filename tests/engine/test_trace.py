"""The recorded allocations of a step are those that the meter sees."""

from typing import Any

import pytest

import shardwise as sw
from shardwise.comm.world import World
from shardwise.engine.timeline import measuring
from shardwise.engine.trace import Recorder
from shardwise.prediction.first_fit import LONG, Trace, peak_bytes, placed, run
from tests.engine.cases import share
from tests.engine.tensors import gpt_task
from tests.pool import run_threads


def recorded(world: World, plan: str) -> tuple[Trace, list[int], int]:
    """The third step of a plan: its trace, live bytes at its events, and the peak of the meter."""
    task = gpt_task(rows=16)
    named: dict[str, Any] = {"loss": task.loss, "optimizer": sw.AdamW(lr=1e-3), "clip": 1.0}
    engine = sw.parallelize(
        task.make(), plan, world, tokens=task.tokens, least_unit_bytes=0, **named
    )
    batches = [share(task.batch(s), engine.data_rank, engine.data_ranks) for s in range(3)]
    for batch in batches[:2]:
        engine.step(batch)
    recorder = Recorder()
    with measuring(engine, batches[2], recorder) as meter:
        engine.step(batches[2])
    return recorder.trace, [event.total for event in meter.events], meter.most_bytes


def test_a_trace_has_the_bytes_of_the_meter():
    """At each event, and at the peak; each storage is allocated once and freed at most once."""
    for trace, totals, most in run_threads(2, recorded, "dp2 zero3 fp32 recompute:full"):
        live, seen = dict[int, int](), list[int]()
        for storage, stored_bytes, allocated in trace.changes:
            if not stored_bytes:
                seen.append(sum(live.values()))
            elif allocated:
                assert storage not in live
                live[storage] = stored_bytes
            else:
                assert live.pop(storage) == stored_bytes
        assert seen == totals
        assert max(totals) <= peak_bytes(trace.changes) <= most


@pytest.mark.full
def test_first_fit_needs_more_than_the_peak_where_long_lived_tensors_lie_among_others():
    """With 2 % more than the peak `recompute:full` under `zero3` does not fit by first fit."""
    for trace, _, _ in run_threads(2, recorded, "dp2 zero3 fp32 recompute:full"):
        without = placed(trace)
        assert run(trace.changes, int(1.02 * without.peak_bytes)) is None
        assert without.needed_bytes > 1.02 * without.peak_bytes and without.fragmentation > 0.05
        assert {trace.category[storage] for storage in trace.passing(LONG)} == set(LONG)
