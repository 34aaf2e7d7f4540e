"""The run's folder: its contents, and the rules for starting a run in it.

    runs/NAME/
      config.toml      the configuration that ran
      metrics.jsonl    one object a step            tensorboard/   the same numbers (wandb/, too)
      checkpoints/     step-000100/, ..., latest    plots/         loss, memory, bytes
      report.html      the report, for a browser    report.md      the same, as Markdown
      timeline.svg     of a pipeline                step_time.json with run.cluster
      trace.json       with run.trace
      tokenizer/       the tokenizer, unless tokens are bytes (tokenizer_files.py)
      run.lock         held by the run that writes here (run_lock.py)

A run is never overwritten by accident: --resume continues it, --overwrite replaces it, and without
either the start is refused. --resume auto continues a run that has a checkpoint and starts one
otherwise, so that one command serves the first start and every restart; it never replaces a run
whose checkpoints lack files. A folder with other files and no run is always refused. A start that
is refused, or ends before its first step, leaves no files.
"""

import json
import re
import shutil
import tempfile
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from shardwise.checkpoint.folder import (
    CHECKPOINTS,
    LATEST,
    METADATA,
    SCALARS,
    TOKENIZER,
    TOKENIZER_FILES,
    all_in,
    best_in,
    find,
    is_named_by_step,
    step_of,
)
from shardwise.checkpoint.lock import RUN_LOCK, SAVING_LOCK
from shardwise.core.errors import InputError, bad
from shardwise.core.tools.suggest import beside, setting
from shardwise.train.config import Config, dump, read
from shardwise.train.data.packed import PROBE, unwritable_folder
from shardwise.train.publish import publish

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
PLOTS = "plots"
REPORT, PAGE = "report.md", "report.html"
PICTURES: Final = (f"{PLOTS}/loss.png", f"{PLOTS}/memory.png", f"{PLOTS}/bytes.png")
#: The files that a run writes, and its folders with patterns of names; --overwrite removes these.
FILES: Final = (
    *(CONFIG, METRICS, REPORT, PAGE),
    *("trace.json", "timeline.svg", "step_time.json"),
)
FOLDERS: Final = {
    "tensorboard": re.compile(r"events\.out\.tfevents\..+"),
    "wandb": re.compile(r"(offline-)?run-.+|latest-run|debug(-internal)?\.log"),
    CHECKPOINTS: re.compile(
        rf"(\.saving-|\.removing-)?step-\d+(\.again)?|\.?latest|{re.escape(SAVING_LOCK)}"
    ),
    TOKENIZER: re.compile(rf"\.?({'|'.join(map(re.escape, TOKENIZER_FILES))})(\.\d+)?"),
    PLOTS: re.compile(r"(loss|memory|bytes|step|experts)\.png"),
}
#: Tokenised data, if its folder is the run's own (packed.py).
TOKENS: Final = re.compile(
    r"[0-9a-f]{24,32}(-bpe\d+)?\.(tokens|json|lock|tokenizer\.json|hashes\.json)"
)
#: Temporary files of other ranks and network file systems, and the lock.
PASSING: Final = (PROBE, ".nfs", RUN_LOCK)
#: What a killed process leaves of a file that it was writing (packed.publish).
UNPUBLISHED: Final = re.compile(rf"\.({'|'.join(map(re.escape, FILES))})\.\d+")


def check(config: Config, resume: bool, overwrite: bool) -> None:
    """Raise InputError unless a run can start in its folder in this way. Leaves no file."""
    folder = config.folder
    if resume and overwrite:
        raise bad("both --resume and --overwrite", "one of the two", "--resume")
    try:
        found = _entries(config)
        run = bool(found) and is_run(folder)
        saved = all_in(checkpoints_of(config))
    except OSError as error:  # a name that is too long; no permission to read the folder
        raise unwritable_folder(folder, "run.folder", error) from None
    if found and not run:
        raise _foreign(folder, found)
    if resume and not saved:
        if damaged := unreadable_checkpoints(config):
            raise _incomplete(folder / CHECKPOINTS, damaged)
        raise bad(
            f"--resume with run.folder = '{folder}', where no checkpoint is",
            "the folder of a run that has saved a checkpoint",
            "--overwrite to start that run again" if run else "the same without --resume",
        )
    if run and not (resume or overwrite):
        raise bad(
            f"run.folder = '{folder}', where a run is already",
            "a new folder, --resume to continue that run (--resume auto: only if there is one), "
            "or --overwrite to replace it",
            setting("run.folder", beside(folder)),
        )
    _try_to_write(folder, "run.folder")


def checkpoints_of(config: Config) -> Path:
    """The folder of a run's checkpoints."""
    return config.folder / CHECKPOINTS


def newest(config: Config) -> Path:
    """The newest whole checkpoint of a run. Raises InputError if there is none."""
    return find(checkpoints_of(config))


def best_name(config: Config) -> str:
    """The name of the checkpoint with the lowest validation loss; "" unless it is kept."""
    best = best_in(checkpoints_of(config)) if config.train.keep_best else None
    return "" if best is None else best.name


def is_run(folder: Path) -> bool:
    """Whether the folder has a run's configuration, metrics or checkpoint."""
    checkpoints = folder / CHECKPOINTS
    return _is_dump(folder / CONFIG) or _is_record(folder / METRICS) or bool(all_in(checkpoints))


def has_checkpoint(config: Config) -> bool:
    """Whether a run has saved a checkpoint. Raises InputError for a folder that cannot be read."""
    try:
        return bool(all_in(checkpoints_of(config)))
    except OSError as error:
        raise unwritable_folder(config.folder, "run.folder", error) from None


def unreadable_checkpoints(config: Config) -> list[Path]:
    """Checkpoints that lack a file, and `latest` without any checkpoint; empty if one is whole.

    A save is renamed to its name when it is complete, so these have lost a file.
    """
    checkpoints = config.folder / CHECKPOINTS
    if has_checkpoint(config) or not checkpoints.is_dir():
        return []
    return sorted(p for p in checkpoints.iterdir() if is_named_by_step(p) or p.name == LATEST)


def claim(config: Config, overwrite: bool) -> None:
    """Prepare the folder and write the configuration. One rank calls it, after `check`."""
    try:
        if overwrite:
            clear(config.folder)
        for name in (REPORT, PAGE):  # of fewer steps
            (config.folder / name).unlink(missing_ok=True)
        (config.folder / PLOTS).mkdir(parents=True, exist_ok=True)
        publish_config(config)
    except OSError as error:
        raise unwritable_folder(config.folder, "run.folder", error) from None


def publish_config(config: Config) -> None:
    """Write the configuration, which makes the folder a run's."""
    text = dump(config)
    publish(config.folder / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))


def config_of(folder: Path) -> Config | None:
    """The configuration of the run in a folder; None if there is no readable one."""
    try:
        return read(folder / CONFIG)
    except InputError:
        return None


def finished_message(config: Config) -> str:
    """The message for --resume of a run that has finished and has its report; else "".

    Call it after `check`. It reads only the name of the checkpoint.
    """
    latest = newest(config)
    step, steps = step_of(latest), config.train.steps
    without = "" if _is_record(config.folder / METRICS) else f", without its {METRICS}, or a report"
    if step < steps or not (has_report(config.folder) or without):
        return ""
    return (
        f"the run in {config.folder} is finished: step {step} of {steps}{without}. Nothing was "
        f"changed; to train on: --resume --set train.steps={step + max(1, min(step, steps))}"
    )


def has_report(folder: Path) -> bool:
    """Whether a run has its report, with the pictures that every report shows."""
    return all((folder / name).is_file() for name in (REPORT, PAGE, *PICTURES))


def clear(folder: Path) -> None:
    """Remove the files that a run writes, and the folders that are then empty; nothing else.

    A symbolic link is removed, not followed.
    """
    left = [path for path in folder.glob(".*") if UNPUBLISHED.fullmatch(path.name)]
    for path in [*left, *(folder / name for name in (*FILES, *FOLDERS))]:
        if path.is_symlink() or path.is_file():
            path.unlink()
    for name, ours in FOLDERS.items():
        inside = list((folder / name).iterdir()) if (folder / name).is_dir() else []
        for path in inside:
            if not ours.fullmatch(path.name):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        _remove_if_empty(folder / name)


def forget(config: Config) -> None:
    """Remove a run without any recorded or saved step, so that its command can be repeated.

    If the user's own files are beside it, its configuration stays: the folder is still a run's.
    Raises nothing: it follows an error, which may be that the folder cannot be written.
    """
    with suppress(OSError):
        _forget(config)


def _forget(config: Config) -> None:
    record = config.folder / METRICS
    if all_in(config.folder / CHECKPOINTS) or (record.exists() and record.stat().st_size):
        return
    clear(config.folder)
    if _entries(config):
        publish_config(config)
    elif config.folder.is_dir():
        (config.folder / RUN_LOCK).unlink(missing_ok=True)
        _remove_if_empty(config.folder)


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _entries(config: Config) -> list[str]:
    """The names in the folder, without tokenised data; empty if it does not exist."""
    try:
        names = sorted(path.name for path in config.folder.iterdir())
    except FileNotFoundError:
        return []
    folder, cache = config.folder.resolve(), config.cache.resolve()
    if cache == folder:
        names = [name for name in names if not TOKENS.fullmatch(name)]
    elif cache.is_relative_to(folder):
        names = [name for name in names if name != cache.relative_to(folder).parts[0]]
    return [n for n in names if not n.startswith(PASSING) and not UNPUBLISHED.fullmatch(n)]


def _is_dump(file: Path) -> bool:
    """Whether it is a configuration written by a run: it has every section."""
    try:
        return set(tomllib.loads(file.read_text(encoding="utf-8-sig"))) == set(Config.model_fields)
    except (OSError, ValueError, RecursionError):
        return False


def _is_record(file: Path) -> bool:
    """Whether it is a metrics file: its first line is the record of a step."""
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            first = json.loads(lines.readline())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and {"step", "consumed", "loss"} <= first.keys()


def _foreign(folder: Path, found: Sequence[str]) -> InputError:
    named = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    return bad(
        f"run.folder = '{folder}', a folder with other files ({named}) and no run",
        "a new or empty folder, or a run's folder; --overwrite replaces only runs",
        setting("run.folder", folder / "run"),
    )


def _incomplete(checkpoints: Path, damaged: Sequence[Path]) -> InputError:
    newest = damaged[-1]
    lacks = [name for name in (METADATA, SCALARS) if not (newest / name).is_file()]
    what = f"{newest.name} lacks {' and '.join(lacks)}" if newest.is_dir() else "no checkpoint"
    return bad(
        f"--resume with '{checkpoints}', where no checkpoint is complete ({what})",
        "the folder of a run with a complete checkpoint; --resume auto does not replace this run",
        "the missing files from a copy, or --overwrite to start that run again",
    )


def _try_to_write(folder: Path, key: str) -> None:
    """Raise InputError if the folder is not writable. Does not create it."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there, prefix=PROBE):
            pass
    except OSError as error:
        raise unwritable_folder(folder, key, error) from None
