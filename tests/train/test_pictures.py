"""`shardwise schedule`, and `predict` with a timeline: what they print, write and refuse."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from shardwise.cli.predict_command import predict_command
from shardwise.cli.schedule_command import schedule_command
from shardwise.core.errors import InputError
from shardwise.core.schedule.library import LIBRARY
from tests.verify import small


def run(command: Callable[..., None], *argv: str) -> str:
    """What a command prints; the error that it raises."""
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, argv)
    if isinstance(result.exception, InputError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


shown = partial(run, schedule_command)
predicted = partial(run, predict_command)


def test_the_drawing_stands_above_the_numbers() -> None:
    """1F1B on two ranks: the figure, then clock and formula side by side."""
    said = [line.split() for line in shown("1f1b:2", "--stages", "2").splitlines()]
    assert said[2][2:] == ["F0", "F1", "..", "..", "B0", "--", "..", "B1", "--"]
    assert said[3][2:] == ["..", "F0", "B0", "--", "F1", "B1", "--", "..", ".."]
    numbers = {line[0]: line[1:] for line in said[5:] if line}
    assert numbers["makespan"] == ["9", "9"]
    assert numbers["bubble"] == ["33.33%", "33.33%", "(p-1)/(m+p-1)"]
    assert numbers["activations"] == ["2", "1", "2", "1", "min(p-r,", "m)"]
    assert numbers["transfers"] == ["4", "-", "2", "act,", "2", "grad"]


def test_the_schedule_of_a_run_is_that_of_its_plan(tmp_path: Path) -> None:
    """1F1B unless the plan says another, on the ranks of the axis pp; without one it is refused."""
    file, wanted = tmp_path / "run.toml", shown("1f1b:4", "--stages", "2", "--json")
    for plan in ("pp2 dp2", "pp2 1f1b:4"):
        file.write_text(f'[plan]\ntext = "{plan}"')
        assert shown("--config", str(file), "--json") == wanted
    refused = {"dp2": ("has no pipeline", []), "pp2": ("beside a schedule's name", ["1f1b"])}
    for plan, (why, more) in refused.items():
        file.write_text(f'[plan]\ntext = "{plan}"')
        with pytest.raises(InputError, match=why):
            shown(*more, "--config", str(file))
    with pytest.raises(InputError, match="no schedule"):
        shown()


@pytest.mark.parametrize("name", LIBRARY)
def test_json_is_one_object_with_clock_and_formula(name: str) -> None:
    """For every schedule of the library the two agree, by default and at other costs of F and B."""
    said = json.loads(shown(name, "--stages", "2", "--json"))
    for number in ("makespan", "bubble", "activations"):
        assert said[number] == pytest.approx(said["formula"][number])
    assert said["costs"]["F"] == 1 and said["ranks"] == 2
    assert sum(said["transfers"].values()) > 0


def test_formulas_are_held_back_where_they_do_not_hold() -> None:
    """With hops, stages that differ, or halves that do, only the clock speaks of time."""
    for argv in (
        ("1f1b", "--costs", "F=1,I=1,W=1,hop=0.1"),
        ("1f1b", "--costs", "F=1/2/1/1"),
        ("zb-h1", "--costs", "F=2,I=1,W=1"),
        ("1f1b", "--costs", "U=1"),
    ):
        said = json.loads(shown(*argv, "--json"))
        assert (said["formula"]["makespan"], said["formula"]["bubble"]) == (None, None)
        assert said["activations"] == said["formula"]["activations"]
    said = json.loads(shown("1f1b:8", "--costs", "F=2,B=3", "--json"))
    assert said["makespan"] == said["formula"]["makespan"] == 5 * 11


def test_costs_and_hops_reach_the_clock() -> None:
    """The last rank's one forward is late by the hop, the first's backward by both."""
    said = json.loads(shown("naive", "--stages", "2", "--costs", "F=1/2,B=3/5,hop=0.5", "--json"))
    assert (said["makespan"], said["idle"]) == (12, [8, 5])
    assert json.loads(shown("1f1b:1", "--stages=1", "--costs=GATHER=2", "--json"))["makespan"] == 5


def test_batches_of_2bw_are_drawn_without_a_drain() -> None:
    """Two batches of four: two updates a rank, two versions of the weights."""
    said = json.loads(shown("2bw:4", "--stages=2", "--batches=2", "--json"))
    assert said["versions"] == [2, 2]
    assert said["makespan"] == said["formula"]["makespan"] == 3 * 9


def test_pictures_are_written_over(tmp_path: Path) -> None:
    """SVG files, of the schedule that is asked for, where there was one before."""
    for name in ("gpipe", "zb-v"):
        svg = tmp_path / "a.svg"
        shown(name, "--svg", str(svg), "--costs", "U=0")
        assert svg.read_text().startswith("<svg ")
        assert LIBRARY[name].title in svg.read_text()


def test_the_page_shows_what_the_commands_print(tmp_path: Path) -> None:
    """Every figure of docs/explanation/pipeline.md is what the line on the page gives."""
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "explanation" / "pipeline.md").read_text(encoding="utf-8")
    line = re.compile(r"^shardwise schedule (.*) --svg docs/(figures/(.*)\.svg)$", re.MULTILINE)
    lines = line.findall(page)
    assert {name for _, _, name in lines} == set(LIBRARY)
    for argv, figure, name in lines:
        shown(*argv.split(), "--svg", str(tmp_path / name))
        assert (tmp_path / name).read_text() == (docs / figure).read_text()
        assert f"](../{figure})" in page


@pytest.mark.parametrize(
    ("argv", "phrase"),
    [
        (("1f1b", "--stages", "0"), "0 stages for 1f1b"),
        (("1f1b", "--microbatches", "0"), "0 microbatches for 1f1b"),
        (("interleaved", "--microbatches", "6"), "multiples of 4: 4, 8, 12"),
        (("dualpipe-v", "--microbatches", "4"), "from 8 up"),
        (("naive", "--microbatches", "4"), "one microbatch"),
        (("interleafed",), "Write instead: interleaved"),
        (("zb-v", "--chunks", "3"), "2 of them with zb-v"),
        (("1f1b", "--batches", "2"), "2bw alone"),
        (("1f1b:x",), "M or MxV"),
        (("1f1b:4x",), "M or MxV"),
        (("1f1b:8", "--microbatches", "4"), "its numbers again"),
        (("1f1b", "--costs", "X=1"), "the costs 'X=1'"),
        (("1f1b", "--costs", "F=-1"), "the costs 'F=-1'"),
        (("1f1b", "--costs", "F=1/2"), "one for each of 4 stages"),
        (("1f1b", "--costs", "hop=nan"), "'nan' is no time for hop"),
        (("1f1b", "--costs", "F=1e308,B=1e308"), "'1e308' is no time for F"),
        (("1f1b", "--costs", "F=1,I=x"), "'x' is no time for I"),
        (("1f1b", "--costs", "F=1,W"), "W has no time"),
        (("1f1b", "--costs", "F=1,F=2"), "F occurs twice"),
        (("1f1b", "--costs", "F=1,"), "'' is no action"),
        (("1f1b", "--costs", "F=1/2"), "2 times of F for 4 stages"),
        (("1f1b", "--costs", "F=0,B=0"), "by which no action takes any time"),
        (("1f1b", "--costs", "hop=1/1/1/1"), "4 times of hop"),
        (("1f1b:99999999999999",), "99999999999999 microbatches: 399999999999996 forwards"),
        (("1f1b:" + "9" * 5000,), "M or MxV"),
        (("1f1b", "--stages=100000", "--microbatches=100000"), "forwards. Allowed: at most 32768"),
        (("2bw", "--batches=99999999"), "at most 32768 forwards"),
        (("naive", "--stages=99999999"), "at most 32768 forwards"),
        (("1f1b", "--svg", "{folder}/absent/a.svg"), "cannot be written"),
    ],
)
def test_bad_input_is_answered(argv: tuple[str, ...], phrase: str, tmp_path: Path) -> None:
    """Each with what is allowed and what to write instead, for the command line to end with 2."""
    with pytest.raises(InputError, match="Write instead: ") as refused:
        shown(*(part.format(folder=tmp_path) for part in argv))
    assert phrase in str(refused.value)


def test_the_table_of_the_zero_paper() -> None:
    """Rows of 7.5 billion parameters have the digits of the paper; as JSON they are bytes."""
    said = predicted("--zero-table", "7.5e9")
    cells = [line.strip("│").split("│") for line in said.splitlines() if "7.5e+09" in line]
    rows = {row[0]: row[1:] for row in ([word.strip() for word in row[1:]] for row in cells)}
    assert rows["64"] == ["31.4", "16.6", "1.88"]
    assert rows["1024"] == ["30.1", "15.1", "0.12"]
    found = json.loads(predicted("--zero-table", "1e9", "--json"))
    assert found["k_bytes"] == 12
    assert found["zero_table"][1] == {
        "parameters": 1e9,
        "ranks": 4,
        "zero1": 7e9,
        "zero2": 5.5e9,
        "zero3": 4e9,
    }


def test_the_moments_of_a_step(tmp_path: Path) -> None:
    """A step ends with what is between steps; its peak and where it is; the picture is an SVG."""
    file = tmp_path / "step.svg"
    said = json.loads(predicted("dp2 zero3", "--rank", "1", "--timeline", str(file), "--json"))
    *_, end = said["predicted"]["events"]
    assert said["rank"] == 1 and "measured" not in said
    assert end["by_category"] == said["memory"] | {"gathered": 0, "kept": 0}
    totals = [sum(event["by_category"].values()) for event in said["predicted"]["events"]]
    assert said["predicted"]["peak"]["bytes"] == max(totals)
    assert "<svg" in file.read_text() and "forward embed" in predicted(
        "dp2 zero3", "--timeline", str(file)
    )


@pytest.mark.full
@pytest.mark.cases(1)
@pytest.mark.parametrize("plan", ["dp2 zero3", "pp2 zb-h1:2 recompute:full fp32"])
def test_a_measurement_beside_the_prediction(plan: str) -> None:
    """Local ranks measure each event; only temporary bytes are not in the prediction."""
    model = Path(small.__file__)
    said = json.loads(predicted(plan, "--measure", "--json", "--model", f"{model}:build"))
    measured = said["measured"]["events"]
    assert measured[-1]["by_category"]["parameters"] == said["memory"]["parameters"]
    peak = max(event["peak"] for event in measured)
    assert len(said["first_fit"]) == 2
    for one in said["first_fit"].values():
        assert one["needed_bytes"] >= one["peak_bytes"] >= said["measured"]["peak"]["bytes"]
        assert one["peak_bytes"] <= peak and 0 <= one["fragmentation"] < 1
    if "pp2" in plan:
        assert "predicted" not in said
        return
    for event in measured:
        del event["by_category"]["temporary"], event["peak"]
    assert measured == [_without(e) for e in said["predicted"]["events"]]


def _without(event: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key != "temporary_most"}


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--zero-table", "many"), "--zero-table many.*7.5e9"),
        (("--zero-table", "nan"), "--zero-table nan"),
        (("--zero-table", "1e300"), "--zero-table 1e300.*1e\\+18"),
        (("--zero-table", "0"), "--zero-table 0"),
        (("dp2 zero3", "--rank", "2"), "--rank 2.*0 to 1"),
        (("dp2", "--timeline", "/no/such/folder/x.svg"), "a picture that cannot be written"),
        (("dp2", "--timeline", "x.doc"), r"a picture that cannot be written.*\.svg or \.png"),
        (
            ("dp2 activations:host", "--timeline", "x.svg"),
            "with activations:host is not.*--measure",
        ),
        (("dp2 zero3", "--measure", "--device", "gpu"), "--device"),
    ],
)
def test_what_predict_refuses(argv: tuple[str, ...], text: str) -> None:
    """Numbers that are none, and unknown optimizers: one paragraph each."""
    with pytest.raises(InputError, match=text):
        predicted(*argv)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_allocator_of_a_gpu() -> None:
    """What PyTorch's allocator reserves holds what it has allocated."""
    said = json.loads(
        predicted("dp1 recompute:full arenas", "--measure", "--device", "cuda", "--json")
    )
    assert said["allocator"]["reserved_bytes"] >= said["allocator"]["allocated_bytes"] > 0
