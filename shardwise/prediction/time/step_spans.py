"""The predicted timeline of a step, as a trace for viewers and as a drawing.

    without a pipeline    a track for each stream of the rank: compute, and each axis that sends
    with one              a track for each rank of the pipeline: the actions of one run

The trace has the format of measured ones (core/schedule/measured.py), so that both open beside one
another in ui.perfetto.dev or chrome://tracing. Its last event is the update.
"""

from shardwise.core.mesh import PIPELINE
from shardwise.core.schedule.clock import Timeline
from shardwise.core.schedule.draw import as_svg
from shardwise.core.schedule.measured import named_event, span_event, trace_text
from shardwise.prediction.cluster import Cluster
from shardwise.prediction.prediction import Prediction
from shardwise.prediction.time.staged import staged_streams
from shardwise.prediction.time.step_time import RankWork, unstaged_streams, update_s
from shardwise.prediction.time.streams import StreamSpan


def trace(found: Prediction, cluster: Cluster, ahead: int = 1) -> str:
    """The trace as JSON; `ahead` is the option `prefetch`."""
    spans = step_spans(found, cluster, ahead)
    tracks = list(dict.fromkeys(span.stream for span in spans))
    events = [named_event("process_name", 0, f"predicted: {found.plan}")]
    events += [named_event("thread_name", n, name) for n, name in enumerate(tracks)]
    events += [
        span_event(name, stream, tracks.index(stream), (start_s, end_s))
        for stream, name, start_s, end_s in spans
    ]
    return trace_text(events)


def step_spans(found: Prediction, cluster: Cluster, ahead: int = 1) -> list[StreamSpan]:
    """The parts of a step on its streams; those of a rank have "rank N" before them."""
    work, own = RankWork(found, cluster), f"rank {found.rank}"
    if found.plan.pipeline is None:
        streams = unstaged_streams(work, ahead)
        streams.exchange(work.after(), "between steps")
        streams.compute(update_s(found, cluster), "update")
        return [each._replace(stream=f"{own} {each.stream}") for each in streams.spans]
    timeline = staged_streams(work, ahead)[2]
    ranks = found.plan.mesh.line(PIPELINE, found.rank)
    spans = [
        StreamSpan(f"rank {rank}", str(span.action), span.start, span.end)
        for rank, row in zip(ranks, timeline.spans, strict=True)
        for span in row
        if span.end > span.start
    ]
    end_s = timeline.makespan
    return [*spans, StreamSpan(own, "update", end_s, end_s + update_s(found, cluster))]


def schedule_svg(found: Prediction, cluster: Cluster, ahead: int = 1) -> str:
    """The drawing of a pipeline's schedule with the times of its actions."""
    timeline: Timeline = staged_streams(RankWork(found, cluster), ahead)[2]
    title = f"{found.plan}: {1e3 * timeline.makespan:.1f} ms, bubble {timeline.bubble:.1%}"
    return as_svg(timeline, title, unit=("ms", 1e3))
