"""`shardwise memory`: what it prints and refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from shardwise.core.errors import InputError
from shardwise.train.memory_command import memory_command


def shown(*argv: str) -> str:
    app = typer.Typer()
    app.command()(memory_command)
    result = CliRunner().invoke(app, argv)
    if isinstance(result.exception, InputError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_table_of_the_zero_paper() -> None:
    """Each printed row of 7.5 billion parameters has the digits of the paper."""
    said = shown("--table", "--params", "7.5e9", "--ranks", "1,64,1024")
    cells = [line.strip("│").split("│") for line in said.splitlines() if "7.5e+09" in line]
    assert [[word.strip() for word in row[1:]] for row in cells] == [
        ["1", "120", "120", "120"],
        ["64", "31.4", "16.6", "1.88"],
        ["1024", "30.1", "15.1", "0.12"],
    ]


def test_the_table_as_json() -> None:
    """Bytes, not rounded: Lion's K is 8, so 4 + 8 / 4 bytes under zero1."""
    said = json.loads(
        shown("--table", "--params", "1e9", "--ranks", "4", "--optimizer", "lion", "--json")
    )
    assert said["k_bytes"] == 8
    assert said["table"] == [
        {"parameters": 1e9, "ranks": 4, "zero1": 6e9, "zero2": 4.5e9, "zero3": 3e9}
    ]


def test_the_moments_of_a_step(tmp_path: Path) -> None:
    """A step ends with what is between steps; its peak and where it is; the picture is an SVG."""
    file = tmp_path / "step.svg"
    said = json.loads(shown("dp2 zero3", "--rank", "1", "--svg", str(file), "--json"))
    *_, end = said["predicted"]["events"]
    assert said["rank"] == 1 and "measured" not in said
    assert end["by_category"] == said["between_steps"] | {"gathered": 0, "kept": 0}
    totals = [sum(event["by_category"].values()) for event in said["predicted"]["events"]]
    assert said["predicted"]["peak"]["bytes"] == max(totals)
    assert "<svg" in file.read_text() and "parameters" in shown("dp2 zero3")


@pytest.mark.full
@pytest.mark.cases(1)
@pytest.mark.parametrize("plan", ["dp2 zero3", "pp2 zb-h1:2 recompute:full fp32"])
def test_a_measurement_beside_the_prediction(plan: str) -> None:
    """Local ranks measure each event; only temporary bytes are not in the prediction."""
    said = json.loads(shown(plan, "--measure", "--json"))
    measured = said["measured"]["events"]
    assert measured[-1]["by_category"]["parameters"] == said["between_steps"]["parameters"]
    peak = max(event["peak"] for event in measured)
    assert len(said["first_fit"]) == 2
    for one in said["first_fit"].values():
        assert one["needed_bytes"] >= one["peak_bytes"] >= said["measured"]["peak"]["bytes"]
        assert one["peak_bytes"] <= peak and 0 <= one["fragmentation"] < 1
    if "pp2" in plan:
        (note,) = said["notes"]
        assert note.startswith("the timeline of a step with pp is not predicted; its peak on the")
        return
    for event in measured:
        del event["by_category"]["temporary"], event["peak"]
    assert measured == [_without(e) for e in said["predicted"]["events"]]


def _without(event: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key != "temporary_most"}


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--table", "--params", "many"), "--params many.*7.5e9"),
        (("--table", "--params", "nan"), "--params nan"),
        (("--table", "--ranks", "0"), "--ranks 0.*--ranks 1,64"),
        (("--table", "--ranks", "1.5"), "--ranks 1.5.*whole numbers"),
        (("--table", "--optimizer", "adan"), "'adan'.*Write instead: adam"),
        ((), "without a plan.*a plan, or --table"),
        (("dp2 zero3", "--rank", "2"), "--rank 2.*0 to 1"),
        (("dp2", "--svg", "/no/such/folder/x.svg"), "a picture that cannot be written"),
        (("dp2 offload:optim", "--svg", "x.svg"), "with offload is not predicted.*--measure"),
        (("--table", "--params", "1e300"), "--params 1e300.*1e\\+18"),
        (("dp2", "--png", "x.doc"), r"a picture that cannot be written.*\.svg or \.png"),
    ],
)
def test_what_is_refused(argv: tuple[str, ...], text: str) -> None:
    """Numbers that are none, and unknown optimizers: one paragraph each."""
    with pytest.raises(InputError, match=text):
        shown(*argv)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_allocator_of_a_gpu() -> None:
    """What PyTorch's allocator reserves holds what it has allocated."""
    said = json.loads(shown("dp1 recompute:full arenas", "--measure", "--device", "cuda", "--json"))
    assert said["allocator"]["reserved_bytes"] >= said["allocator"]["allocated_bytes"] > 0


def test_a_device_that_is_none() -> None:
    """Named, with the devices that there are."""
    with pytest.raises(InputError, match="--device"):
        shown("dp2 zero3", "--measure", "--device", "gpu")
