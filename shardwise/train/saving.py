"""The state of a run in its checkpoints: saved, found again, and the oldest removed.

A checkpoint holds whole named tensors and a few numbers: the engine's, the step, the sequences
consumed, and what those sequences were cut from. None of it depends on the plan, so a run goes on
under another row and another number of ranks.
"""

from dataclasses import dataclass

from shardwise.checkpoint.engines import fill, write
from shardwise.checkpoint.folder import CHECKPOINTS, prune
from shardwise.checkpoint.open_checkpoint import OpenCheckpoint
from shardwise.core.errors import bad
from shardwise.engine.engine import Engine
from shardwise.train.prepare import Prepared


@dataclass(frozen=True)
class Position:
    """Where a run is: steps taken, and sequences consumed by them."""

    step: int = 0
    consumed: int = 0


def save_run(prepared: Prepared, engine: Engine, at: Position) -> None:
    """Publish a checkpoint of this moment; then keep only the newest. Called by all ranks."""
    folder = prepared.config.folder / CHECKPOINTS
    scalars = {
        "step": at.step,
        "consumed": at.consumed,
        "data": prepared.data_mark,
        "plan": str(prepared.plan),  # to be told, and not to be kept to
        "engine": engine.scalars(),
    }
    write(engine, folder, scalars)
    if engine.world.rank == 0:
        prune(folder, prepared.config.train.keep)


def load_run(prepared: Prepared, engine: Engine) -> Position:
    """Bring the engine to the latest checkpoint. Called by all ranks.

    Raises InputError where the data or the model is another than the checkpoint's, or where a file
    is damaged; the engine is as it was then.
    """

    def check(opened: OpenCheckpoint) -> None:
        """Raise InputError unless a run saved it, on this data."""
        missing = [name for name in ("step", "consumed", "data") if name not in opened.scalars]
        if missing:
            raise bad(
                f"a checkpoint in '{folder}' without {', '.join(missing)}",
                "a checkpoint that a run has saved, which says where in its data it was",
                "--overwrite for a new run",
            )
        _check_data(opened.scalars["data"], prepared.data_mark)

    folder = prepared.config.folder / CHECKPOINTS
    scalars = fill(engine, folder, check)
    return Position(int(scalars["step"]), int(scalars["consumed"]))


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
            "the same data, sequence length, validation share and seed: the run's place in the "
            "data means nothing without them",
            "the configuration in the run's folder, or --overwrite for a new run",
        )
