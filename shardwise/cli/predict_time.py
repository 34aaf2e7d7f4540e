"""`shardwise predict --cluster`: the timeline of a step as a file, and the time over ranks.

    --trace FILE.json          the streams of the rank, for ui.perfetto.dev
    --trace FILE.svg           a pipeline's schedule with its times
    --ranks 8,64 --svg FILE    tokens a second and MFU of the plan on more and more ranks

Each needs a cluster.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from shardwise.core.errors import bad
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import require
from shardwise.core.tools.arguments import parse_count

if TYPE_CHECKING:
    from shardwise.prediction.cluster import Cluster
    from shardwise.prediction.prediction import Prediction
    from shardwise.prediction.time.step_time import StepTime

EXAMPLE: Final = "--cluster h100-sxm --ranks 8,64,512 --svg scaling.svg"


def require_cluster(
    cluster: object, trace: Path | None, ranks: str | None, svg: Path | None
) -> None:
    """Raise InputError for an option of times without a cluster, and a picture without ranks.

    Or for a picture of another ending.
    """
    given = [f"--trace {trace}"] * (trace is not None) + [f"--ranks {ranks}"] * (ranks is not None)
    if given and cluster is None:
        raise bad(f"{given[0]} without --cluster", "a cluster, for times", "--cluster h100-sxm")
    if svg is not None and ranks is None:
        raise bad(f"--svg {svg} without --ranks", "numbers of ranks, for its curve", EXAMPLE)
    if svg is not None and svg.suffix not in (".svg", ".png"):
        raise bad(f"--svg {svg}", "a file that ends in .svg or .png", "--svg scaling.svg")


def write_trace(file: Path, found: "Prediction", cluster: "Cluster") -> None:
    """Write the predicted timeline.

    Raises InputError for another ending, no pipeline to draw, and a file that cannot be written.
    """
    from shardwise.prediction.time.step_spans import schedule_svg, trace

    if file.suffix not in (".json", ".svg"):
        raise bad(f"--trace {file}", "a file that ends in .json or .svg", "--trace step.json")
    if file.suffix == ".svg" and found.plan.pipeline is None:
        given = f"--trace {file} under the plan '{found.plan}', which has no schedule to draw"
        raise bad(
            given, "a plan with a pipeline, or a trace", f"--trace {file.with_suffix('.json')}"
        )
    text = (trace if file.suffix == ".json" else schedule_svg)(found, cluster)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        given = f"--trace {file}, which cannot be written ({error.strerror})"
        raise bad(given, "a file in a folder that exists", "--trace step.json") from None


def over_ranks(
    found: "Prediction", plan: Plan, ranks: str, cluster: "Cluster"
) -> "dict[int, StepTime]":
    """The time of a step of the plan on each number of ranks; each data rank has the same rows.

    `found` is the prediction on any of them: data ranks change no recorded pass. Raises InputError
    for no numbers, a plan that names its data ranks, and ranks on which it cannot run.
    """
    from shardwise.prediction.rank_shape import shape_on

    counts = [parse_count(text) for text in ranks.split(",")]
    if min(counts) < 1:
        raise bad(f"--ranks {ranks}", "numbers of ranks with commas between them", "--ranks 8,64")
    if not plan.open:
        words = [word for word in str(plan).split() if not word.startswith("dp")]
        given = f"--ranks {ranks} under the plan '{plan}', which has {plan.size} ranks"
        raise bad(
            given,
            "a plan without dp, whose data ranks follow from the ranks",
            f"'{' '.join(words)}'",
        )
    times: dict[int, StepTime] = {}
    for count in sorted(set(counts)):
        require(plan, count)
        each = plan.completed(count)
        on_ranks = replace(found, plan=each, rank=0, model=shape_on(found.spec, each, 0))
        times[count] = on_ranks.step_time(cluster)
    return times


def table(times: "dict[int, StepTime]") -> Table:
    """A row for each number of ranks."""
    made = Table()
    for head in ("ranks", "step", "tokens/s", "of a rank", "MFU"):
        made.add_column(head, justify="right")
    for ranks, time in times.items():
        rates = f"{time.tokens_per_s:,.0f}", f"{time.tokens_per_s / ranks:,.0f}"
        made.add_row(f"{ranks:,}", f"{time.seconds:.4g} s", *rates, f"{time.mfu:.1%}")
    return made


def as_json(times: "dict[int, StepTime]") -> list[dict[str, Any]]:
    """The numbers of each row."""
    return [{"ranks": ranks} | time.as_json() for ranks, time in times.items()]


def draw_curve(file: Path, title: str, times: "dict[int, StepTime]") -> None:
    """Draw tokens a second and MFU over ranks. Raises InputError if the file cannot be written."""
    from shardwise.train.report.plots import COLOURS, new_figure
    from shardwise.train.report.section import MEASURED, PREDICTED

    figure, ranks = new_figure(8, 4.5), list(times)
    axes, right = _pair(figure)
    rates = [time.tokens_per_s for time in times.values()]
    linear = [rates[0] * count / ranks[0] for count in ranks]
    axes.plot(ranks, linear, color="grey", linestyle="--", label="in proportion to ranks")
    axes.plot(ranks, rates, "o-", color=COLOURS[MEASURED], label="tokens/s")
    shares = [100 * time.mfu for time in times.values()]
    right.plot(ranks, shares, "s-", color=COLOURS[PREDICTED], label="MFU")
    axes.set(title=title, xlabel="ranks", ylabel="tokens/s", xscale="log", yscale="log")
    axes.set_xticks(ranks, [f"{count:,}" for count in ranks])
    axes.minorticks_off()
    right.set(ylabel="MFU, %", ylim=(0, 1.2 * max(shares)))
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        where = "a file that ends in .svg or .png, in a folder that exists"
        raise bad(f"--svg {file} ({error})", where, "--svg scaling.svg") from None


def _pair(figure: Any) -> Sequence[Any]:
    """Axes, and others on the right of them."""
    axes = figure.subplots()
    return axes, axes.twinx()
