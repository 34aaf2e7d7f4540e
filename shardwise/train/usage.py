"""Errors of the command line, as a paragraph like any other InputError.

Errors of the command line library (an unknown option, a wrong value, a missing or extra argument)
are converted to what was given, what is allowed, and what to write instead.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

import typer

from shardwise.core.errors import Problem
from shardwise.core.suggest import suggest

#: The library's error of this kind; typer brings its own click or uses the one that is installed.
UsageError: Final[type[Exception]] = typer.BadParameter.__mro__[1]

#: A line that works, for each command.
EXAMPLES: Final[Mapping[str, str]] = {
    "doctor": "shardwise doctor --nproc 2",
    "table": "shardwise table gpt --tp 2",
    "train": "shardwise train examples/quickstart.toml",
    "verify": 'shardwise verify "dp2 zero3"',
    "predict": 'shardwise predict "dp64 zero3 bf16"',
    "bench": "shardwise bench data",
    "plan": 'shardwise plan "dp2 zero3"',
    "schedule": "shardwise schedule 1f1b --stages 4 --microbatches 8",
    "checkpoint": "shardwise checkpoint inspect runs/default/checkpoints",
    "inspect": "shardwise checkpoint inspect runs/default/checkpoints",
    "export": "shardwise checkpoint export runs/default --to weights",
    "import": "shardwise checkpoint import weights --to runs/tuned",
}
#: A value that works, for each option that takes one.
VALUES: Final[Mapping[str, str]] = {
    "--to": "FOLDER",
    "--dtype": "bf16",
    "--disk": ".",
    "--cluster": "cluster.toml",
    "--from": "ds_config.json",
    "--mesh": '"dp2 tp2"',
    "--save": "cluster.toml",
    "--plan": '"dp2 zero3"',
    "--nproc": "2",
    "--resume": "auto",
    "--set": "train.steps=100",
    "--model": "gpt",
    "--table": "styles.toml",
    "--batch": "8",
    "--sequence": "128",
    "--rank": "0",
    "--size": "tiny",
    "--tp": "2",
    "--repeats": "5",
    "--link": "1gbit",
    "--device": "cpu",
    "--device-memory": "80GiB",
    "--stages": "4",
    "--microbatches": "8",
    "--chunks": "2",
    "--batches": "2",
    "--costs": "F=1,I=1,W=1",
    "--svg": "pipeline.svg",
    "--timeline": "step.svg",
    "--zero-table": "7.5e9",
    "--config": "examples/quickstart.toml",
}
LONGEST: Final = 120  # of a command line that is quoted


def answer(error: Any, group: Any, given: Sequence[str]) -> str:
    """The paragraph for a UsageError of the command line `given`; `group` has all commands.

    For an empty command line, the help, unless the library has shown it.
    """
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(error.format_message())
    path, command = _command_in(group, given)
    line = " ".join(shlex.join(["shardwise", *given]).split())
    line = line if len(line) < LONGEST else line[:LONGEST] + "..."
    instead = _instead(error, path, command)
    return str(Problem(f"{line} ({_what(error)})", _allowed(path, command), instead))


def _command_in(group: Any, given: Sequence[str]) -> tuple[str, Any]:
    """The command in `given`, and its full name."""
    path, command = "shardwise", group
    for word in given:
        if word in getattr(command, "commands", {}):
            path, command = f"{path} {word}", command.commands[word]
    return path, command


def _what(error: Any) -> str:
    """The library's message as part of a sentence."""
    message = " ".join(str(error.format_message()).split()).rstrip(".")
    message = re.sub(r": Input should be ([^,]*).*", r", which should be \1", message)
    message = re.sub(r"(\. Did you mean .*|\(Possible options: .*\))$", "", message).strip()
    return message[:1].lower() + message[1:]


def _allowed(path: str, command: Any) -> str:
    commands = getattr(command, "commands", {})
    if commands:
        return f"{path} and one of {', '.join(commands)}"
    arguments = [p.metavar or p.name for p in command.params if p.param_type_name == "argument"]
    return f"{' '.join([path, *arguments])}, with {', '.join(_options(command))}"


def _options(command: Any) -> list[str]:
    named = [p.opts[-1] for p in command.params if p.param_type_name == "option"]
    return [*named, "--help"]


def _instead(error: Any, path: str, command: Any) -> str:
    """The nearest valid option or value."""
    message = str(error.format_message())
    if option := getattr(error, "option_name", None):
        known = {name.lstrip("-"): name for name in _options(command)}
        if close := suggest(option.lstrip("-"), known, 0.5):
            return f"{known[close]} {VALUES.get(known[close], '')}".rstrip()
        return f"{path} --help, to see what each option does"
    if found := re.match(r"No such command '(.*?)'", message):
        close = suggest(found[1], command.commands, 0.5)
        return EXAMPLES[close] if close else f"{path} --help, to see what each command does"
    if "unexpected extra argument" in message:
        return f"{_example(path)}; put an argument with spaces in quotes"
    param = getattr(error, "param", None)
    if param is not None and param.param_type_name == "option":
        return f"{param.opts[-1]} {VALUES.get(param.opts[-1], '')}".rstrip()
    return _example(path)


def _example(path: str) -> str:
    return EXAMPLES.get(path.rpartition(" ")[2], EXAMPLES["train"])
