"""Checkpoints of a run, which do not depend on its plan: saving, loading, removing the oldest."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shardwise.checkpoint.engines import fill, planned_save
from shardwise.checkpoint.folder import SCALARS, damaged, find, prune, step_of
from shardwise.checkpoint.open_checkpoint import IMPORTED, OpenCheckpoint
from shardwise.checkpoint.pending import FAILED_S, PendingCheckpoint
from shardwise.checkpoint.save import PlannedSave
from shardwise.comm.move import on_rank_zero
from shardwise.core.errors import RunError, bad
from shardwise.core.tools.arguments import is_count
from shardwise.engine.engine import Engine
from shardwise.train.prepare import PreparedRun
from shardwise.train.run_folder import checkpoints_of
from shardwise.train.summary import SaveCosts


@dataclass(frozen=True)
class Position:
    """Steps done, and sequences consumed by them."""

    step: int = 0
    consumed: int = 0


class RunSaves:
    """The checkpoints that a run saves: at most one is being written."""

    def __init__(
        self, prepared: PreparedRun, engine: Engine, saved: Callable[[int, Path], object]
    ) -> None:
        """`saved` is called on all ranks with the step and the path of what was published."""
        self.prepared, self.engine, self.saved = prepared, engine, saved
        self.pending: PendingCheckpoint | None = None
        self.costs = SaveCosts()

    @property
    def written(self) -> bool:
        return self.pending is None or self.pending.done()

    @property
    def lost(self) -> bool:
        return self.pending is not None and self.pending.failed

    def save(self, at: Position, validation: float | None, *, wait: bool) -> str:
        """Save a checkpoint, and remove old ones. Called by all ranks.
        Without `wait`, a thread may write it, and the return value says what failed. With `wait`,
        raises RunError, since no step follows that could save again.
        """
        said, began_s = self.settle(), time.perf_counter()
        train, folder = self.prepared.config.train, checkpoints_of(self.prepared.config)
        scalars = {
            "step": at.step,
            "consumed": at.consumed,
            "data": self.prepared.data_mark,
            "plan": str(self.prepared.plan),  # for information; another plan can load it
            "engine": self.engine.scalars(),
        } | ({} if validation is None else {"validation": validation})
        keep = partial(prune, folder, train.keep, best=train.keep_best)
        planned = planned_save(self.engine, folder, scalars, keep)
        if train.async_save and not wait:
            self.pending = PendingCheckpoint(planned)
        else:
            said += self._finished(planned, wait=wait)
        held_s = time.perf_counter() - began_s
        self.costs = replace(self.costs, held_s=self.costs.held_s + held_s)
        return said

    def _finished(self, planned: PlannedSave, *, wait: bool) -> str:
        try:
            path = planned.finish()
        except RunError as error:
            if wait:
                raise
            return _goes_on(error)
        self._published(planned.step, path)
        return ""

    def settle(self) -> str:
        """Wait for the pending checkpoint; returns what failed. Called by all ranks."""
        pending, self.pending = self.pending, None
        if pending is None:
            return ""
        try:
            path = pending.result()
        except RunError as error:
            return _goes_on(error)
        self.costs = replace(self.costs, write_s=self.costs.write_s + pending.write_s)
        self._published(step_of(path), path)
        return ""

    def close(self, *, failed: bool = False) -> None:
        """Wait for what this rank writes, but not for long if the run has failed."""
        if self.pending is not None:
            self.pending.wait(FAILED_S if failed else None)

    def _published(self, step: int, path: Path) -> None:
        self.costs = replace(self.costs, saves=self.costs.saves + 1)
        self.saved(step, path)


def _goes_on(error: RunError) -> str:
    return f"{str(error).removesuffix('.')}. Training goes on without this checkpoint"


def load_run(prepared: PreparedRun, engine: Engine) -> Position:
    """Load the latest checkpoint into the engine, unless its data or model differs."""

    def check(opened: OpenCheckpoint) -> None:
        """Raise InputError unless a run on the same data saved it, or it has weights alone."""
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

    folder = on_rank_zero(lambda: find(checkpoints_of(prepared.config)), engine.world)
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
