"""The run's folder: what is in it, and who may write there.

    runs/NAME/
      config.toml      the configuration that ran
      metrics.jsonl    one object a step            tensorboard/   the same numbers
      checkpoints/     step-000100/, ..., latest    plots/         loss, memory, bytes
      report.md        the summary                  sample.txt     generated at the end
      trace.json       with run.trace               timeline.svg   measured beside predicted

A run that is there is never written over by accident: it is continued with --resume, replaced with
--overwrite, refused otherwise.
"""

import shutil
from pathlib import Path

from shardwise.checkpoint.folder import all_in
from shardwise.core.errors import InputError, bad
from shardwise.train.config import Config, dump, read
from shardwise.train.packed import make_folder, publish, unwritable

CONFIG = "config.toml"
CHECKPOINTS = "checkpoints"
PLOTS = "plots"
# what a run writes, which is all that --overwrite removes
OWN = (
    CONFIG,
    "metrics.jsonl",
    "tensorboard",
    CHECKPOINTS,
    PLOTS,
    "report.md",
    "sample.txt",
    "trace.json",
    "timeline.svg",
)


def check(folder: Path, resume: bool, overwrite: bool) -> None:
    """Raise InputError unless a run can start in the folder in this way. Writes nothing lasting."""
    if resume and overwrite:
        raise bad("both --resume and --overwrite", "one of the two", "--resume")
    try:
        taken = [name for name in OWN if (folder / name).exists()]
        saved = all_in(folder / CHECKPOINTS)
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise unwritable(folder, "run.folder", error) from None
    if resume and not saved:
        raise bad(
            f"--resume with run.folder = '{folder}', where no checkpoint is",
            "a folder in which a run has saved one",
            "--overwrite to start that run again" if taken else "the same without --resume",
        )
    if taken and not (resume or overwrite):
        raise bad(
            f"run.folder = '{folder}', where a run is already",
            "a new folder, or --resume to continue that run, or --overwrite to replace it",
            f"--set run.folder={folder}-2",
        )
    make_folder(folder, "run.folder")


def claim(config: Config, overwrite: bool) -> None:
    """Make the folder ready and leave the configuration there. For one rank, after `check`."""
    if overwrite:
        clear(config.folder)
    (config.folder / PLOTS).mkdir(parents=True, exist_ok=True)
    text = dump(config)
    publish(config.folder / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))


def configured(folder: Path) -> Config | None:
    """The configuration of the run in a folder; None where there is none that can be read."""
    try:
        return read(folder / CONFIG)
    except InputError:
        return None


def clear(folder: Path) -> None:
    """Remove what a run writes, and nothing else."""
    for name in OWN:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
