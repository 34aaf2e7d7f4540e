"""`shardwise predict --timeline`, `--measure` and `--zero-table`: what they print and refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from shardwise.cli.predict import predict_command
from shardwise.core.errors import InputError


def shown(*argv: str) -> str:
    app = typer.Typer()
    app.command()(predict_command)
    result = CliRunner().invoke(app, argv)
    if isinstance(result.exception, InputError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_table_of_the_zero_paper() -> None:
    """Rows of 7.5 billion parameters have the digits of the paper; as JSON they are bytes."""
    said = shown("--zero-table", "7.5e9")
    cells = [line.strip("│").split("│") for line in said.splitlines() if "7.5e+09" in line]
    rows = {row[0]: row[1:] for row in ([word.strip() for word in row[1:]] for row in cells)}
    assert rows["64"] == ["31.4", "16.6", "1.88"]
    assert rows["1024"] == ["30.1", "15.1", "0.12"]
    found = json.loads(shown("--zero-table", "1e9", "--json"))
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
    said = json.loads(shown("dp2 zero3", "--rank", "1", "--timeline", str(file), "--json"))
    *_, end = said["predicted"]["events"]
    assert said["rank"] == 1 and "measured" not in said
    assert end["by_category"] == said["memory"] | {"gathered": 0, "kept": 0}
    totals = [sum(event["by_category"].values()) for event in said["predicted"]["events"]]
    assert said["predicted"]["peak"]["bytes"] == max(totals)
    assert "<svg" in file.read_text() and "forward embed" in shown(
        "dp2 zero3", "--timeline", str(file)
    )


@pytest.mark.full
@pytest.mark.cases(1)
@pytest.mark.parametrize("plan", ["dp2 zero3", "pp2 zb-h1:2 recompute:full fp32"])
def test_a_measurement_beside_the_prediction(plan: str) -> None:
    """Local ranks measure each event; only temporary bytes are not in the prediction."""
    said = json.loads(shown(plan, "--measure", "--json"))
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
        (("dp2 offload:optim", "--timeline", "x.svg"), "with offload is not predicted.*--measure"),
        (("dp2 zero3", "--measure", "--device", "gpu"), "--device"),
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
