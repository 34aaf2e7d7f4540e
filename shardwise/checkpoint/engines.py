"""An engine's checkpoint: all that training needs to go on, under any plan.

save    parameters, the optimizer's state, the numbers of the run, and what else it is given
load    the same into an engine of any plan, on any number of ranks
"""

import os
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import load as reading
from shardwise.checkpoint import save as writing
from shardwise.checkpoint.contents import MODEL
from shardwise.checkpoint.folder import all_in, as_path, is_whole, passed_over, prune
from shardwise.checkpoint.open_checkpoint import OpenCheckpoint
from shardwise.checkpoint.storage import Check
from shardwise.comm.move import broadcast
from shardwise.core.errors import bad
from shardwise.engine import validate
from shardwise.engine.engine import Engine
from shardwise.engine.guard import first_not_finite


def save(
    engine: Engine,
    folder: str | os.PathLike[str],
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Publish a checkpoint of `engine` in `folder`, which all ranks see; its path.

    Called by all ranks.  `extra` is what else is to be had back, as JSON takes it and the same on
    every rank: the epoch, the place in the data.  `keep`: so many of the newest stay, the others
    are removed.  Until this returns, and if it fails, what was there before is what there is.

    Raises:
        InputError: `extra` is none that JSON can hold; `keep` is below one.
        RunError: a rank could not write; a weight is not finite, which would replace a good one.
    """
    if extra is not None and not isinstance(extra, Mapping):
        raise bad(f"extra={extra!r}", "a dict of what JSON takes", 'extra={"epoch": 3}')
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise bad(f"keep={keep!r}", "one checkpoint or more, or None for all", "keep=2")
    scalars = {"step": engine.steps, "engine": engine.scalars(), "extra": dict(extra or {})}
    path = write(engine, folder, scalars)
    if keep is not None and engine.world.rank == 0:
        prune(folder, keep)
    return path


def write(engine: Engine, folder: str | os.PathLike[str], scalars: dict[str, Any]) -> Path:
    """Publish the engine's state with these scalars; its path. Raises as `save` does."""
    spoilt = first_not_finite((flat, flat.shard) for flat in engine.flats if flat.trained)
    refusal = (
        f"The weights of step {engine.steps} are not saved: {spoilt} is not finite. The "
        "checkpoints of before stay; go on from the newest."
    )
    boxes = engine.boxes()
    return writing.save(folder, boxes, scalars, engine.world, refusal if spoilt else "")


def load(
    engine: Engine, folder: str | os.PathLike[str], *, missing_ok: bool = False
) -> dict[str, Any]:
    """Go on from the newest checkpoint in `folder`, or from the one that it is; its `extra`.

    Called by all ranks, with an engine of the same model and kind of optimizer under any plan.
    With `missing_ok`, where rank 0 finds no checkpoint, nothing is done and the answer is {}: so a
    program that is restarted begins or continues by the same line.
    Everything is checked before anything is written, on all ranks: the hash of every file, names,
    shapes, dtypes, numbers.  A load that fails leaves every rank's engine as it was, but for one
    case that cannot be undone: a disk that fails, or a file that changes, after it was checked.

    Raises:
        InputError: there is no checkpoint; it is of another model or optimizer; it is damaged, or
            has a file of another checkpoint in it.
        RunError: files could not be read again after they had been checked; the engine is partly
            loaded: load again, or make it anew.
    """
    folder = as_path(folder)
    if missing_ok:
        found = is_whole(folder) or bool(all_in(folder))
        told = torch.tensor([float(found)], device=engine.world.device)
        if not broadcast(told, engine.world.everyone).item():
            return {}
    if over := passed_over(folder):
        warnings.warn(over, stacklevel=2)
    return fill(engine, folder, partial(_require_all, engine)).get("extra", {})


def fill(engine: Engine, folder: Path, check: Check) -> dict[str, Any]:
    """Bring the engine to a checkpoint that `check` has nothing against; its scalars.

    Raises as `load` does.
    """

    def checked(opened: OpenCheckpoint) -> None:
        """Raise InputError unless it is an engine's checkpoint, to the caller's liking."""
        if "engine" not in opened.scalars:
            raise bad(
                f"a checkpoint in '{opened.path}' that has tensors and no state of an engine",
                "one that sw.save or shardwise train has written",
                "sw.save(engine, folder)",
            )
        validate.scalars(opened.scalars["engine"])
        check(opened)

    idle = set(engine.optimizer.idle)
    engine.prepare()
    try:
        saved = reading.load(folder, engine.boxes(), engine.world, checked)
    except BaseException:
        engine.optimizer.unprepare(engine.optimizer.idle - idle)
        raise
    engine.load_scalars(saved["engine"])
    engine.loaded()
    return saved


def _require_all(engine: Engine, opened: OpenCheckpoint) -> None:
    """Raise InputError for a checkpoint of a model that has more; of stages each knows its own."""
    if engine.staging:
        return
    model = engine.model
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    known = {f"{MODEL}{name}" for name, _ in tensors}
    saved = [name for name in opened.metadata.state_dict_metadata if name.startswith(MODEL)]
    more = [name.removeprefix(MODEL) for name in saved if name not in known]
    if more:
        raise bad(
            f"a checkpoint in '{opened.path}' with {', '.join(more[:5])}, which the model does "
            "not have",
            "a checkpoint of the same model",
            "the model that it was saved from, then its parts into another by load_state_dict",
        )
