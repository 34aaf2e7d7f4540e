"""`shardwise run`: a Python script on several ranks of this machine."""

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwise.comm.start.launch import launch
from shardwise.core.errors import bad


def run_command(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python file.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="...", help="What the script finds in sys.argv.")
    ] = None,
    *,
    nproc: Annotated[int, typer.Option(help="Ranks, each a process of one thread.")] = 2,
) -> int:
    """Run a script on several ranks of this machine, in which sw.init() gives the world.

    As torchrun on one host, but the error of the rank that failed first is shown once, and ends the
    others. Options stand before the script.
    """
    if not script.is_file():
        raise bad(
            f"the script '{script}', which is no file",
            "a Python file; options such as --nproc stand before it",
            "shardwise run --nproc 2 train.py",
        )
    return launch([str(script), *(arguments or ())], nproc, __name__)


def main() -> None:
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
