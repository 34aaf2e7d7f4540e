"""Errors of the command line (an unknown option, a wrong value), as a paragraph like any other."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import typer

from shardwise.core.tools.arguments import suggest

#: The library's error of this kind; typer brings its own click or uses the one that is installed.
UsageError: Final[type[Exception]] = typer.BadParameter.__mro__[1]

#: A line that works, for each command.
EXAMPLES: Final[Mapping[str, str]] = {
    "doctor": "shardwise doctor --nproc 2",
    "table": "shardwise table gpt --tp 2",
    "train": "shardwise train examples/quickstart.toml",
    "verify": 'shardwise verify "dp2 zero3"',
    "predict": 'shardwise predict "dp64 zero3 bf16"',
    "plan": 'shardwise plan "dp2 zero3"',
    "schedule": "shardwise schedule 1f1b --stages 4 --microbatches 8",
    "checkpoint": "shardwise checkpoint inspect runs/default/checkpoints",
    "inspect": "shardwise checkpoint inspect runs/default/checkpoints",
    "export": "shardwise checkpoint export runs/default --to weights",
    "import": "shardwise checkpoint import weights --to runs/tuned",
    "python -m benchmarks": "python -m benchmarks data",
}


def answer(error: Any, program: str, given: Sequence[str]) -> str:
    """What is wrong in the command line `given` of `program`, and a line that works.

    For an empty command line, the help, unless the library has shown it.
    """
    message = " ".join(str(error.format_message()).split())
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(error.format_message())
    named = [EXAMPLES[word] for word in given if word in EXAMPLES]
    if unknown := re.match(r"No such command '(.*?)'", message):
        near = suggest(unknown[1], EXAMPLES)
        message, named = unknown[0], [EXAMPLES[near]] * (near is not None)
    example = EXAMPLES.get(program) or [EXAMPLES["train"], *named][-1]
    context = error.ctx.command_path if error.ctx is not None else program
    return f"{message.rstrip('.?')}. Write instead: {example}. {context} --help lists all options."
