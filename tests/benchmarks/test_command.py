"""`python -m benchmarks`: bad input is one paragraph and exit code 2."""

import shlex
import tomllib
from pathlib import Path

import pytest
import typer

from benchmarks.__main__ import bench_command
from benchmarks.contenders.roster import SUITES
from shardwise.core.errors import InputError
from tests.programs import run_program

PROGRAM = "python -m benchmarks "


@pytest.mark.parametrize(
    ("words", "options", "phrase"),
    [
        (["nothing"], {}, "Write instead: python -m benchmarks data"),
        (["data", "nobody"], {}, "torch DDP"),
        (["data"], {"nproc": 0}, "Write instead: --nproc 2"),
        (["data"], {"link": "3parsec"}, "Write instead: --link 1gbit"),
        (["data"], {"device": "tpu"}, "Write instead: --device cpu"),
        (["data", "zero3"], {"device": "cuda"}, "python -m benchmarks data --device cuda"),
        (["data"], {"size": ["tiny"], "device": "cuda"}, "one rank on its own models"),
        (["foresight"], {"nproc": 4}, "one size, on two ranks of this machine"),
        (["foresight", "dp4"], {}, "Write instead: python -m benchmarks foresight dp2"),
    ],
)
def test_bad_input_is_refused(words: list[str], options: dict, phrase: str) -> None:
    """The paragraph says what is wrong and what to write instead."""
    with pytest.raises(InputError, match=phrase):
        bench_command(words, **options)


def test_the_program_ends_with_2() -> None:
    """As a process: one paragraph on the error output."""
    done = run_program(["-m", "benchmarks", "data", "--nproc", "x"])
    assert (done.returncode, done.stdout) == (2, "")
    assert "--nproc" in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_commands_of_the_results_are_those_of_the_program() -> None:
    """Each suite exists, and each option is accepted by the parser."""
    app = typer.Typer()
    app.command()(bench_command)
    parser = typer.main.get_command(app)
    files = Path(__file__).parents[2].joinpath("benchmarks/results").glob("*.toml")
    runs = [run for file in files for run in tomllib.loads(file.read_text()).get("run", ())]
    commands = [line.strip() for run in runs for line in run["command"].split(";")]
    lines = [line for line in commands if line.startswith(PROGRAM)]
    assert len(lines) > 20
    for line in lines:
        argv = shlex.split(line.removeprefix(PROGRAM))
        assert argv[0] in {*SUITES, "update", "disk", "save", "foresight"}, line
        parser.make_context("benchmarks", argv)
