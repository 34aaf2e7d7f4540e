"""What users have in their scripts: commands, options, plan words, keys, public names.

    python -m tests.surface      writes tests/surface.txt from the program

A change of that file is a change of what people have written. `test_surface` compares the two.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import shardwise as sw
from shardwise.cli import main as cli
from shardwise.core.plan.plan import WORDS
from shardwise.train.config import Config

FILE = Path(__file__).parent / "surface.txt"


def command(name: str) -> Any:
    found: Any = typer.main.get_command(cli.application(name.split()))
    for word in name.split():
        found = found.commands[word]
    return found


def commands() -> list[str]:
    group: Any = typer.main.get_command(cli.application())
    return [
        f"{name} {inner}".strip()
        for name, each in sorted(group.commands.items())
        for inner in sorted(getattr(each, "commands", [""]))
    ]


def parameters(name: str) -> Iterator[str]:
    """The arguments of a command, and its options by name."""
    for param in command(name).params:
        argument = param.param_type_name == "argument"
        yield str(param.metavar or param.name.upper()) if argument else param.opts[-1]


def arguments(public: Any) -> Iterator[str]:
    """The arguments of a function or a class that is called, in their order. Of a protocol its
    methods.
    """
    if getattr(public, "_is_protocol", False):
        yield from (name for name in vars(public) if not name.startswith("_"))
    elif callable(public) and not (isinstance(public, type) and issubclass(public, Exception)):
        yield from inspect.signature(public).parameters


def lines() -> Iterator[str]:
    """Every name, one a line, under its heading."""
    for name in commands():
        yield f"shardwise {name}"
        yield from (f"    {text}" for text in sorted(parameters(name)))
    yield "plan words"
    yield from (f"    {word.form}" for word in WORDS)
    yield "configuration"
    for section, keys in Config().model_dump().items():
        yield from (f"    {section}.{key}" for key in keys)
    yield "python"
    for name in sorted(sw.__all__):
        yield from public_lines(f"sw.{name}", getattr(sw, name))


def public_lines(name: str, public: Any) -> Iterator[str]:
    """A public name and its arguments; of a module, also the names in it."""
    yield f"    {name}"
    yield from (f"        {argument}" for argument in arguments(public))
    for inner in getattr(public, "__all__", ()):
        yield from public_lines(f"{name}.{inner}", getattr(public, inner))


def text() -> str:
    """The content of the file."""
    return "\n".join([*lines(), ""])


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
