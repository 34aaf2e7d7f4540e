"""The command line.

    shardwise train CONFIG     train a model                 exit code
    shardwise run SCRIPT       a script on several ranks     0  success
    shardwise verify PLAN      prove a plan
    shardwise predict PLAN     memory and traffic            1  the proof or the run failed
    shardwise doctor           devices, collectives, links   2  bad input: one paragraph says what
    shardwise plan             the words of plans
    shardwise search           the fastest plans
    shardwise table MODEL      derive a table of tensor parallelism
    shardwise schedule NAME    draw a pipeline schedule
    shardwise checkpoint       look into checkpoints, export and import weights

Torch, and the modules of `ELSEWHERE`, are imported only when they are used, so help and errors of
input are fast.
"""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from errno import ENOSPC
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TextIO

import typer

import shardwise
from shardwise.core.errors import InputError, RankError, RunError, bad
from shardwise.core.plan.plan import Plan
from shardwise.core.tools.arguments import suggest

if TYPE_CHECKING:
    from shardwise.comm.start.worker import StopSignal
    from shardwise.train.config import Config
    from shardwise.train.prepare import RunStart

# the values of --resume
ALWAYS, AUTO = "always", "auto"

# command: the module of its function, and its line in the help
ELSEWHERE = {
    "run": ("run_command", "Run a script on several ranks of this machine."),
    "verify": ("verify", "Prove a plan: parity, bytes, memory."),
    "predict": ("predict_command", "What a rank will hold and send."),
    "doctor": ("doctor", "Check devices and collectives, and measure links."),
    "plan": ("plan_command", "Check a plan, or convert a configuration."),
    "search": ("search_command", "Find the fastest plans of a cluster."),
    "table": ("plan_command", "Derive a table of tensor parallelism."),
    "schedule": ("schedule_command", "Draw and price a schedule."),
}
CHECKPOINTS = {
    "inspect": ("checkpoints", "What a checkpoint holds."),
    "export": ("checkpoints", "Write weights as safetensors."),
    "import": ("checkpoints", "Begin a run with safetensors."),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program. Always raises SystemExit, with the exit codes above."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        if given[:1] in (["verify"], ["predict"]):  # before they import torch
            for plan in given[1:2]:
                Plan.parse("" if plan.startswith("-") else plan)
        app = application(given)
    except InputError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # while torch is imported
        raise SystemExit(130) from None
    run_app(app, given, "shardwise")


def run_app(app: typer.Typer, given: Sequence[str], program: str) -> None:
    """Run a command of `app`. Always raises SystemExit."""
    try:
        code = app(with_resume_value(given), standalone_mode=False, prog_name=program)
    except UsageError as error:
        print(answer(error, program), file=sys.stderr)
        code = 2
    except typer.Abort:
        code = 130
    except InputError as error:
        print(error, file=sys.stderr)
        code = 2
    except (RunError, RankError) as error:
        print(error, file=sys.stderr)
        code = 1
    except OSError as error:
        if error.errno != ENOSPC or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is buffered, at the exit
        print(f"The output cannot be written ({error.strerror}).", file=sys.stderr)
        code = 1
    raise SystemExit(code or 0)


def with_resume_value(given: Sequence[str]) -> list[str]:
    """Give `--resume` a value, since the command line library has no optional values."""
    words, result = list(given), list[str]()
    while words:
        word = words.pop(0)
        if word == "--resume" and given[0] != "run":
            auto = words[:1] == [AUTO]
            word, words = f"--resume={AUTO if auto else ALWAYS}", words[auto:]
        result.append(word)
    return result


def known_resume(resume: str | None) -> str | None:
    if resume not in (None, ALWAYS, AUTO):
        raise typer.BadParameter(f"it takes {AUTO} or nothing")
    return resume


def application(given: Sequence[str] = ()) -> typer.Typer:
    """All commands. The modules of commands that are not in `given` are not imported."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # whose help calls every flag a <bool>
        help="Train one PyTorch model on many devices, and prove what it computes and sends.",
    )
    app.callback()(options)
    app.command("train")(train)
    for name in ELSEWHERE:  # what stands after a script is the script's
        last = {"allow_interspersed_args": name != "run"}
        app.command(name, context_settings=last)(command(name, given))
    checkpoint = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Look into checkpoints; weights to and from safetensors.",
    )
    checkpoint.callback()(lambda: None)
    for name in CHECKPOINTS:
        checkpoint.command(name)(command(name, given))
    app.add_typer(checkpoint, name="checkpoint")
    return app


def command(name: str, given: Sequence[str]) -> Callable[..., Any]:
    """The function of a command in another module, or a placeholder if only the help is needed."""
    module, line = (ELSEWHERE | CHECKPOINTS)[name]
    if name in given:
        return getattr(import_module(f"shardwise.cli.{module}"), f"{name}_command")

    def placeholder() -> None:
        return None

    placeholder.__doc__ = line
    return placeholder


def print_version(asked: bool) -> None:
    """An eager option, since typer would otherwise ask for a command."""
    if asked:
        print(f"shardwise {shardwise.__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Options before a command."""


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file.")],
    *,
    plan: Annotated[str | None, typer.Option(help="The plan, instead of the file's.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The model, instead of the file's: gpt:small, hf:./FOLDER or file.py:build."
        ),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Styles of tensor parallelism (shardwise table)."),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes to start here; without it, the fewest on which the plan runs."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Replace a value, e.g. train.steps=100. Can be given several times.",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="[auto]",
            callback=known_resume,
            help="Continue the run in run.folder from its checkpoint; with auto, begin it if there "
            "is none.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin a new run; the old one moves to FOLDER.old.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and predict; start nothing.")
    ] = False,
) -> None:
    """Train a model; also under torchrun and Slurm."""
    if not os.path.exists(config):  # noqa: PTH110 (a name may be too long); torch is not imported
        given = f"the configuration {config}, a file that does not exist"
        raise bad(given, "a TOML file", EXAMPLES["train"])
    Plan.parse(plan or "")  # before torch is imported
    overrides = [*(set_ or ()), *([] if plan is None else [f"plan.text={plan}"])]
    overrides += [] if model is None else [f"model.name={model}"]
    overrides += [] if table is None else [f"plan.table={table.resolve()}"]
    raise typer.Exit(_started(config, overrides, resume, nproc, overwrite, dry_run))


def _started(
    config: Path,
    overrides: Sequence[str],
    resume: str | None,
    nproc: int | None,
    overwrite: bool,
    dry_run: bool,
) -> int:
    from shardwise.comm.start.rendezvous import environment, launched
    from shardwise.comm.start.worker import NOTHING, StopSignal
    from shardwise.train.prepare import RunStart

    started = environment()
    if nproc is not None and started is not None and not launched():
        raise bad(
            f"--nproc {nproc} in one of {started.size} processes that torchrun or Slurm started",
            "the number of processes in the command of torchrun or Slurm alone",
            f"torchrun --nproc-per-node {nproc} -m shardwise train {config}",
        )
    sys.stdout, sys.stderr = LossyStream(sys.stdout), LossyStream(sys.stderr)
    # a single process may exit at a signal; one of several ranks may not
    with StopSignal(leaving=started is None, until_end=started is not None) as stop:
        try:
            start = RunStart(resume == ALWAYS, overwrite, resume == AUTO)
            return _train(config, overrides, start, nproc, stop, dry=dry_run)
        except KeyboardInterrupt:
            if not stop.leaving:  # asked a second time
                raise
            print(NOTHING)
            return 0


def _train(
    config: Path,
    overrides: Sequence[str],
    start: "RunStart",
    nproc: int | None,
    stop: "StopSignal",
    *,
    dry: bool,
) -> int:
    """Train in this process, start the ranks, or only check and predict; returns the exit code."""
    from shardwise.comm.start.rendezvous import environment, launched, require_local
    from shardwise.train.config import read
    from shardwise.train.prepare import hold_folder, prepare
    from shardwise.train.run_folder import finished_message

    settings, started = read(config, overrides), environment()
    if started is not None and not dry:  # our launcher holds the lock for its ranks
        return _train_here(settings, start, stop, locked=launched())
    ranks = started.size if started else nproc or Plan.parse(settings.plan.text).size
    if started is None:
        require_local(ranks)
    if dry:
        from shardwise.cli.dry_run import dry_run

        if started is None or started.rank == 0:
            dry_run(settings, ranks, start)
        return 0
    with hold_folder(settings, start) as settled:
        prepare(settings, ranks, settled)
        if nproc is None:
            require_local(ranks, settings.plan.text)
        if settled.resume and (done := finished_message(settings)):
            print(done)
            return 0
        if ranks == 1:
            return _train_here(settings, settled, stop, locked=True)
        return _launch(config, overrides, start, ranks)


def _train_here(settings: "Config", start: "RunStart", stop: "StopSignal", *, locked: bool) -> int:
    from shardwise.comm.world import init
    from shardwise.train.loop import train as run

    world = init(None if settings.run.device == "auto" else settings.run.device)
    try:
        run(settings, world, start, stop=stop, locked=locked)
    finally:
        world.close()
    return stop.code


def _launch(config: Path, overrides: Sequence[str], start: "RunStart", ranks: int) -> int:
    from shardwise.comm.start.launch import launch

    argv = ["train", str(config)]
    argv += [part for override in overrides for part in ("--set", override)]
    argv += ["--resume"] * (start.resume or start.auto) + ["auto"] * start.auto
    argv += ["--overwrite"] * start.overwrite
    return launch(argv, ranks)


class LossyStream:
    """Drops everything after a failed write, and says so once on stderr, so that a run outlives its
    log: its reader may close (`shardwise train ... | head`), or its disk may be full.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop(self, error: OSError) -> None:
        """Point the descriptor at /dev/null, so that no later write and no exit fails."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        if self._stream.fileno() != 2:
            why = error.strerror or str(error)
            with suppress(OSError):
                print(
                    f"shardwise: the output cannot be written ({why}) and is dropped from here on; "
                    "the run goes on",
                    file=sys.stderr,
                    flush=True,
                )


#: The library's error of this kind; typer brings its own click or uses the one that is installed.
UsageError: Final[type[Exception]] = typer.BadParameter.__mro__[1]

#: A line that works, for each command.
EXAMPLES: Final[Mapping[str, str]] = {
    "doctor": "shardwise doctor --nproc 2",
    "table": "shardwise table gpt --tp 2",
    "train": "shardwise train examples/quickstart.toml",
    "run": "shardwise run --nproc 2 script.py",
    "verify": 'shardwise verify "dp2 zero3"',
    "predict": 'shardwise predict "dp64 zero3 bf16"',
    "plan": 'shardwise plan "dp2 zero3"',
    "search": "shardwise search --model gpt --cluster h100-sxm --ranks 2",
    "schedule": "shardwise schedule 1f1b --stages 4 --microbatches 8",
    "checkpoint": "shardwise checkpoint inspect runs/default/checkpoints",
    "inspect": "shardwise checkpoint inspect runs/default/checkpoints",
    "export": "shardwise checkpoint export runs/default --to weights",
    "import": "shardwise checkpoint import weights --to runs/tuned",
    "python -m benchmarks": "python -m benchmarks data",
}


def answer(error: Any, program: str) -> str:
    """What is wrong in the command line, and a line that works; for an empty one, the help."""
    message = " ".join(str(error.format_message()).split())
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(error.format_message())
    context = error.ctx.command_path if error.ctx is not None else program
    named = [EXAMPLES[word] for word in context.split() if word in EXAMPLES]
    if unknown := re.match(r"No such command '(.*?)'", message):
        near = suggest(unknown[1], EXAMPLES)
        message, named = unknown[0], [EXAMPLES[near]] * (near is not None)
    example = EXAMPLES.get(program) or [EXAMPLES["train"], *named][-1]
    return f"{message.rstrip('.?')}. Write instead: {example}. {context} --help lists all options."


if __name__ == "__main__":
    main()
