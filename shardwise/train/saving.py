"""Checkpoints of a run: saving, loading, and removing the oldest.

A checkpoint holds full named tensors and a few numbers: the engine's counters, the step, the
sequences consumed, and the identity of the data. Nothing in it depends on the plan, so a run can
resume under another plan and on another number of ranks.
"""

from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.engines import fill, write
from shardwise.checkpoint.failure import damaged
from shardwise.checkpoint.folder import CHECKPOINTS, SCALARS
from shardwise.checkpoint.open_checkpoint import IMPORTED, OpenCheckpoint
from shardwise.core.arguments import is_count
from shardwise.core.errors import bad
from shardwise.engine.engine import Engine
from shardwise.train.prepare import PreparedRun


@dataclass(frozen=True)
class Position:
    """The position of a run: steps done, and sequences consumed by them."""

    step: int = 0
    consumed: int = 0


def save_run(prepared: PreparedRun, engine: Engine, at: Position) -> Path:
    """Save a checkpoint, and remove all but the newest; its path. All ranks must call it."""
    folder = prepared.config.folder / CHECKPOINTS
    scalars = {
        "step": at.step,
        "consumed": at.consumed,
        "data": prepared.data_mark,
        "plan": str(prepared.plan),  # for information; another plan can load it
        "engine": engine.scalars(),
    }
    return write(engine, folder, scalars, prepared.config.train.keep)


def load_run(prepared: PreparedRun, engine: Engine) -> Position:
    """Load the latest checkpoint into the engine. All ranks must call it.

    Raises InputError if the data or the model differs from the checkpoint's, or a file is damaged;
    the engine is then unchanged.
    """

    def check(opened: OpenCheckpoint) -> None:
        """Raise InputError unless it was saved by a run on the same data, or has weights alone."""
        if IMPORTED in opened.scalars:
            return
        missing = [name for name in ("step", "consumed", "data") if name not in opened.scalars]
        if missing:
            raise bad(
                f"a checkpoint in '{folder}' without {', '.join(missing)}",
                "a checkpoint saved by shardwise train, with its position in the data",
                "--overwrite for a new run",
            )
        consumed, data = opened.scalars["consumed"], opened.scalars["data"]
        if not is_count(consumed) or not isinstance(data, dict):
            raise damaged(opened.path / SCALARS, "its position in the data is not one of a run")
        _check_data(data, prepared.data_mark)

    folder = prepared.config.folder / CHECKPOINTS
    scalars = fill(engine, folder, check)
    return Position(scalars["step"], 0 if IMPORTED in scalars else scalars["consumed"])


def _check_data(saved: dict[str, object], here: dict[str, object]) -> None:
    names = {
        "tokens": "the data or its tokens",
        "sequence": "model.sequence",
        "validation": "data.validation",
        "seed": "train.seed",
    }
    other = [name for name in names if saved.get(name) != here[name]]
    if other:
        raise bad(
            "a checkpoint to resume from that was trained with "
            + ", ".join(f"{names[n]} = {saved.get(n)} (now {here[n]})" for n in other),
            "the same data, sequence length, validation share and seed, which define the position "
            "in the data",
            "the configuration in the run's folder, or --overwrite for a new run",
        )
