"""The run's folder: its contents, and the rules for starting a run in it.

    runs/NAME/
      .shardwise-run   says that the folder is a run's
      config.toml      the configuration that ran
      metrics.jsonl    one object a step            tensorboard/   the same numbers (wandb/, too)
      checkpoints/     step-000100/, ..., latest    plots/         loss, memory, bytes
      report.html      the report, for a browser    report.md      the same, as Markdown
      timeline.svg     of a pipeline                step_time.json with run.cluster
      profile/         with run.profile             run.lock       held by the run that writes here
      tokenizer/       the tokenizer, unless tokens are bytes

A run is never overwritten by accident: --resume continues it, --overwrite puts a run that has saved
aside in NAME.old and starts anew, and without either the start is refused once a step is recorded.
--resume auto continues a run that has a checkpoint and starts one otherwise; it never replaces a
run whose checkpoints lack files. A folder with other files and no run is always refused.
"""

import json
import shutil
from pathlib import Path
from typing import Final

from shardwise.checkpoint.folder import (
    CHECKPOINTS,
    LATEST,
    MANIFEST,
    METADATA,
    TOKENIZER,
    TOKENIZER_FILES,
    all_in,
    best_in,
    find,
    is_named_by_step,
    step_of,
    write_file,
)
from shardwise.checkpoint.lock import RUN_LOCK
from shardwise.core.errors import InputError, bad
from shardwise.core.tools.arguments import beside, setting
from shardwise.train.config import Config, dump, read
from shardwise.train.data.packed import PROBE, probe, using_folder
from shardwise.train.data.tokens import TokenizerVocabulary, Vocabulary

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
PLOTS = "plots"
TOKENIZER_FILE, ABOUT_TOKENIZER = "tokenizer.json", "tokenizer_config.json"
REPORT, PAGE = "report.md", "report.html"
#: In every folder of a run, from its start.
MARKER: Final = ".shardwise-run"
#: Temporary files of other ranks and network file systems, and the lock.
PASSING: Final = (PROBE, ".nfs", RUN_LOCK)


def check(config: Config, resume: bool, overwrite: bool) -> None:
    """Raise InputError unless a run can start in its folder in this way. Leaves no file."""
    folder = config.folder
    if resume and overwrite:
        raise bad("both --resume and --overwrite", "one of the two", "--resume")
    with using_folder(folder, "run.folder"):  # a name that is too long; no permission to read it
        found = _entries(config)
        run = bool(found) and is_run(folder)
        saved = all_in(checkpoints_of(config))
    if found and not run and config.cache.resolve() != folder.resolve():
        names = ", ".join(found[:3])
        raise bad(
            f"run.folder = '{folder}', a folder with other files ({names}) and no run",
            "a new or empty folder, or a run's folder; --overwrite replaces only runs",
            setting("run.folder", folder / "run"),
        )
    if resume and not saved:
        raise bad(
            f"--resume with run.folder = '{folder}', where no checkpoint is{_lacking(config)}",
            "the folder of a run that has saved a checkpoint",
            "--overwrite to start that run again" if run else "the same without --resume",
        )
    if (_has_steps(folder) or _has_saves(folder)) and not (resume or overwrite):
        raise bad(
            f"run.folder = '{folder}', where a run is already",
            "a new folder, --resume to continue that run, or --overwrite to replace it",
            setting("run.folder", beside(folder)),
        )
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    with using_folder(folder, "run.folder"):
        probe(there)


def checkpoints_of(config: Config) -> Path:
    return config.folder / CHECKPOINTS


def first_weights(config: Config) -> Path | None:
    """The checkpoint in `train.init_from`, if it is set; raises InputError if there is none."""
    if config.train.init_from is None:
        return None
    folder = Path(config.train.init_from)
    return find(folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder)


def best_name(config: Config) -> str:
    best = best_in(checkpoints_of(config)) if config.train.keep_best else None
    return "" if best is None else best.name


def is_run(folder: Path) -> bool:
    return (folder / MARKER).is_file() or bool(all_in(folder / CHECKPOINTS))


def _has_steps(folder: Path) -> bool:
    file = folder / METRICS
    return file.is_file() and file.stat().st_size > 0


def _has_saves(folder: Path) -> bool:
    return any((folder / CHECKPOINTS).glob("*"))


def has_checkpoint(config: Config) -> bool:
    """Raises InputError for a folder that cannot be read."""
    with using_folder(config.folder, "run.folder"):
        return bool(all_in(checkpoints_of(config)))


def unreadable_checkpoints(config: Config) -> list[Path]:
    """Checkpoints that have lost a file, and a dangling `latest`; empty if one is whole."""
    checkpoints = checkpoints_of(config)
    if has_checkpoint(config) or not checkpoints.is_dir():
        return []
    return sorted(p for p in checkpoints.iterdir() if is_named_by_step(p) or p.name == LATEST)


def claim(config: Config, overwrite: bool, vocabulary: Vocabulary | None = None) -> None:
    """Prepare the folder, configuration and tokenizer. One rank calls it after `check`."""
    with using_folder(config.folder, "run.folder"):
        if overwrite and _has_saves(config.folder):
            put_aside(config)
        for name in (REPORT, PAGE):  # of fewer steps
            (config.folder / name).unlink(missing_ok=True)
        config.folder.mkdir(parents=True, exist_ok=True)
        (config.folder / MARKER).touch()
        (config.folder / PLOTS).mkdir(exist_ok=True)
        publish_config(config)
        if isinstance(vocabulary, TokenizerVocabulary):
            _keep_tokenizer(config, vocabulary)


def publish_config(config: Config) -> None:
    text = dump(config)
    write_file(config.folder / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))


def config_of(folder: Path) -> Config | None:
    """The configuration of the run in a folder; None if there is no readable one."""
    try:
        return read(folder / CONFIG)
    except InputError:
        return None


def finished_message(config: Config) -> str:
    """The message for --resume of a run that has finished and has its report; else ""."""
    step, steps = step_of(find(checkpoints_of(config))), config.train.steps
    without = "" if _has_steps(config.folder) else f", without its {METRICS}, or a report"
    if step < steps or not (has_report(config.folder) or without):
        return ""
    return (
        f"the run in {config.folder} is finished: step {step} of {steps}{without}. Nothing was "
        f"changed; to train on: --resume --set train.steps={step + max(1, min(step, steps))}"
    )


def has_report(folder: Path) -> bool:
    return all((folder / name).is_file() for name in (REPORT, PAGE))


def put_aside(config: Config) -> Path:
    """Move the run's files, without its lock and a cache, to the next free NAME.old."""
    folder, number = config.folder.resolve(), 1
    while (aside := folder.with_name(f"{folder.name}.old{'' if number == 1 else number}")).exists():
        number += 1
    aside.mkdir()
    for name in _entries(config):
        shutil.move(folder / name, aside / name)
    return aside


def _entries(config: Config) -> list[str]:
    """The names in the folder, without its lock and the cache; empty if it does not exist."""
    try:
        names = sorted(path.name for path in config.folder.iterdir())
    except FileNotFoundError:
        return []
    folder, cache = config.folder.resolve(), config.cache.resolve()
    inside = cache.is_relative_to(folder) and cache != folder
    kept = {cache.relative_to(folder).parts[0]} if inside else set[str]()
    return [name for name in names if name not in kept and not name.startswith(PASSING)]


def _lacking(config: Config) -> str:
    """What the newest checkpoint lacks, if none is complete; "" without any."""
    newest = [path for path in unreadable_checkpoints(config) if path.is_dir()][-1:]
    lacks = [name for at in newest for name in (METADATA, MANIFEST) if not (at / name).is_file()]
    return f" complete ({newest[0].name} lacks {' and '.join(lacks)})" if lacks else ""


def _keep_tokenizer(config: Config, vocabulary: TokenizerVocabulary) -> None:
    to, beside = config.folder / TOKENIZER, Path(config.data.tokens).expanduser().parent
    to.mkdir(exist_ok=True)
    write_file(to / TOKENIZER_FILE, vocabulary.save)
    trained = config.data.tokens.startswith("bpe:")
    for name in TOKENIZER_FILES if not trained else ():
        if name != TOKENIZER_FILE and (beside / name).is_file():
            write_file(to / name, lambda path, name=name: shutil.copyfile(beside / name, path))
    if not (to / ABOUT_TOKENIZER).exists():
        about = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": vocabulary.separator_text,
            "clean_up_tokenization_spaces": False,
        }
        text = json.dumps(about, indent=2)
        write_file(to / ABOUT_TOKENIZER, lambda path: path.write_text(text, encoding="utf-8"))
