"""The library of schedules: each by its plan word, with its paper and closed forms.

A closed form is a function of n: n.p ranks, n.m microbatches, n.v chunks per rank. Spans are in
units of one action with F = I = W = 1 (B = 2) and no hop. Tapes are the largest number of
activations on each rank, one per microbatch and stage. Tests compare every form with the clock.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from shardwise.core.errors import bad
from shardwise.core.schedule import builders, zero_bubble
from shardwise.core.schedule.schedule import Schedule
from shardwise.core.tools.arguments import suggest

#: The largest number of forwards of one schedule, all ranks together, since it is written out.
MOST_FORWARDS: Final = 2**15


class Size(NamedTuple):
    """p ranks, m microbatches, v chunks per rank; for 2BW, the number of batches of m each."""

    p: int
    m: int
    v: int = 1
    batches: int = 1

    @property
    def work(self) -> int:
        return 3 * self.m * self.v * self.batches


@dataclass(frozen=True)
class Entry:
    """One schedule, with its paper's closed forms.

    meaning        in the table of plan words
    build          the schedule of a size
    span, tapes    closed forms of the makespan, and of the activations on each rank
    bubble_text, tapes_text, versions_text
                   the bubble, the activations, and the weight versions of stage s, as formulas
    microbatches   and
    chunks         per rank: their numbers; None if the user chooses
    updates        the number of updates in one run, 0 for a synchronous schedule
    check          raises InputError for a size that the schedule does not allow
    """

    title: str
    meaning: str
    paper: str
    build: Callable[[Size], Schedule]
    span: Callable[[Size], int]
    tapes: Callable[[Size], tuple[int, ...]]
    bubble_text: str
    tapes_text: str
    microbatches: int | None = None
    chunks: int | None = 1
    versions_text: str = "1"
    updates: Callable[[Size], int] = lambda _: 0
    check: Callable[[Size], None] = lambda _: None

    @property
    def numbers(self) -> str:
        if self.microbatches is not None:
            return ""
        return "MxV" if self.chunks is None else "M"

    def bubble(self, n: Size) -> float:
        return 1 - n.work / self.span(n)


def _plain(n: Size) -> int:
    return n.work + 3 * (n.p - 1)


def _first(n: Size) -> tuple[int, ...]:
    return tuple(min(n.p - r, n.m * n.batches) for r in range(n.p))


def _deep(n: Size) -> tuple[int, ...]:
    step = 2 if n.v > 1 else 1
    return tuple(min(step * (n.p - r - 1) + (n.v - 1) * n.p + 1, n.v * n.m) for r in range(n.p))


_1F1B = "(p-1)/(m+p-1)", "min(p-r, m)"

LIBRARY: dict[str, Entry] = {
    "naive": Entry(
        "naive model parallelism: layers over ranks",
        "pipeline without overlap: one microbatch",
        "no paper",
        lambda n: builders.naive(n.p, n.m),
        span=_plain,
        tapes=lambda n: (1,) * n.p,
        bubble_text="(p-1)/p",
        tapes_text="1",
        microbatches=1,
        check=lambda n: builders.is_one(n.m),
    ),
    "gpipe": Entry(
        "GPipe",
        "pipeline: all M forwards, then all backwards",
        "arXiv 1811.06965",
        lambda n: builders.gpipe(n.p, n.m),
        span=_plain,
        tapes=lambda n: (n.m,) * n.p,
        bubble_text="(p-1)/(m+p-1)",
        tapes_text="m",
    ),
    "1f1b": Entry(
        "1F1B (PipeDream-flush)",
        "pipeline: forwards and backwards of M microbatches alternate",
        "arXiv 2006.09503, 2104.04473",
        lambda n: builders.one_f_one_b(n.p, n.m),
        _plain,
        _first,
        *_1F1B,
    ),
    "dapple": Entry(
        "DAPPLE",
        "early backward: the order of 1f1b",
        "arXiv 2007.01045",
        lambda n: builders.one_f_one_b(n.p, n.m),
        _plain,
        _first,
        *_1F1B,
    ),
    "pipedream": Entry(
        "PipeDream",
        "each stage updates after every microbatch, from older weights",
        "arXiv 1806.03377, SOSP 2019",
        lambda n: builders.pipedream(n.p, n.m),
        _plain,
        _first,
        *_1F1B,
        versions_text="p-s where m >= 2(p-1)",
        updates=lambda n: n.m,
    ),
    "2bw": Entry(
        "PipeDream-2BW",
        "each stage updates by itself once a step; computes the same as 1f1b",
        "arXiv 2006.09503",
        lambda n: builders.two_buffered(n.p, n.m, n.batches),
        _plain,
        _first,
        *_1F1B,
        versions_text="2; 1 for a batch alone",
        updates=lambda n: n.batches,
        check=lambda n: builders.covers(n.p, n.m),
    ),
    "interleaved": Entry(
        "interleaved 1F1B",
        "1f1b with V stages per rank",
        "arXiv 2104.04473",
        lambda n: builders.interleaved(n.p, n.m, n.v),
        span=_plain,
        tapes=_deep,
        bubble_text="(p-1)/(v·m+p-1)",
        tapes_text="min(2(p-r-1)+(v-1)p+1, v·m)",
        chunks=None,
        check=lambda n: builders.divides(n.p, n.m, n.v),
    ),
    "bfs": Entry(
        "breadth-first",
        "V stages per rank: all M microbatches pass one, then the next",
        "arXiv 2211.05953",
        lambda n: builders.breadth_first(n.p, n.m, n.v),
        span=lambda n: 3 * ((n.v - 1) * max(n.m, n.p) + n.m + n.p - 1),
        tapes=lambda n: (n.v * n.m,) * n.p,
        bubble_text="(p-1)/(v·m+p-1) where m >= p",
        tapes_text="v·m",
        chunks=None,
    ),
    "zb-h1": Entry(
        "ZB-H1",
        "1f1b with weight gradients postponed into the bubble",
        "arXiv 2401.10241",
        lambda n: zero_bubble.zb_h1(n.p, n.m),
        span=lambda n: 2 * n.m + n.p - 1 + max(n.m, n.p),
        tapes=lambda n: (min(n.p, n.m),) * n.p,
        bubble_text="(p-1)/(3m+p-1) where m >= p",
        tapes_text="min(p, m)",
    ),
    "zb-v": Entry(
        "ZB-V",
        "two stages per rank in a V; no bubble but the ramps from M = ranks on",
        "arXiv 2401.10241, 2405.15362",
        lambda n: zero_bubble.zb_v(n.p, n.m),
        span=lambda n: max(6 * n.m + n.p - 1, 4 * n.m + 3 * n.p - 1, 2 * n.m + 4 * n.p - 1),
        tapes=lambda n: (2 * min(n.p, n.m),) * n.p,
        bubble_text="(p-1)/(6m+p-1) where m >= p",
        tapes_text="2·min(p, m)",
        chunks=2,
    ),
    "dualpipe-v": Entry(
        "DualPipe-V",
        "two stages per rank in a V; forwards paired with backwards",
        "arXiv 2412.19437",
        lambda n: zero_bubble.dualpipe_v(n.p, n.m),
        span=lambda n: 6 * n.m + n.p - 1,
        tapes=lambda n: (2 * n.p + 1,) * n.p,
        bubble_text="(p-1)/(6m+p-1)",
        tapes_text="2p+1",
        chunks=2,
        check=lambda n: zero_bubble.fills(n.p, n.m),
    ),
}


def entry(name: str) -> Entry:
    if name not in LIBRARY:
        near = suggest(name.lower(), LIBRARY, 0.3)
        raise bad(f"the schedule '{name}'", ", ".join(LIBRARY), near or "1f1b")
    return LIBRARY[name]


def size(name: str, p: int, m: int, v: int | None = None, batches: int = 1) -> Size:
    """The size of the schedule called `name`; chunks default to 2 if the user may choose them."""
    chunks = entry(name).chunks
    n = Size(p, m, chunks or 2 if v is None else v, batches)
    for number, what in zip(n, ("stages", "microbatches", "chunks", "batches"), strict=True):
        if number < 1:
            raise bad(f"{number} {what} for {name}", "a whole number from 1 up", f"--{what} 2")
    if chunks not in (None, n.v):
        free = " or ".join(name for name, one in LIBRARY.items() if one.chunks is None)
        allowed = f"{chunks} of them with {name}, any number with {free}"
        raise bad(f"{v} chunks a rank for {name}", allowed, f"--chunks {chunks}")
    if batches > 1 and name != "2bw":
        raise bad(f"{batches} batches for {name}", "more than one with 2bw alone", "--batches 1")
    return n


def build(word: str, p: int) -> Schedule:
    """The schedule of a plan word on p ranks. Raises InputError for a wrong or too long one."""
    return written(*allowed(word, p))


def written(name: str, n: Size) -> Schedule:
    """The schedule of a name and size. Raises InputError for more than MOST_FORWARDS."""
    one = entry(name)
    forwards = n.p * n.m * n.v * n.batches
    if forwards > MOST_FORWARDS:
        given = f"{name} on {n.p} ranks with {n.m} microbatches"
        given += f", {n.v} chunks a rank" * (n.v > 1) + f", {n.batches} batches" * (n.batches > 1)
        allowed = f"at most {MOST_FORWARDS} forwards over all ranks, chunks and microbatches"
        raise bad(f"{given}: {forwards} forwards", allowed, "fewer microbatches, chunks or ranks")
    return one.build(n)


def updates(word: str | None, p: int) -> int:
    """The number of updates in one run of a schedule; 0 if synchronous. Raises as `build`."""
    if word is None:
        return 0
    name, n = allowed(word, p)
    return entry(name).updates(n)


def allowed(word: str, p: int) -> tuple[str, Size]:
    """The name and size of a plan word. Raises InputError like `build`."""
    name, _, numbers = word.partition(":")
    m, times, v = (numbers or "1").partition("x")
    if not m.isdecimal() or (times and not v.isdecimal()):
        raise bad(f"the schedule '{word}'", "a name, a colon, and M or MxV", f"{name}:8")
    n = size(name, p, int(m), int(v) if v else None)
    entry(name).check(n)
    return name, n
