"""this file is an engine's checkpoint: all that training needs to go on, under any plan.

save    parameters, the optimizer's state, the numbers of the run, and what else it is given
load    the same into an engine of any plan, on any number of ranks
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.checkpoint import load as reading
from shardwise.checkpoint import save as writing
from shardwise.checkpoint.contents import MODEL
from shardwise.checkpoint.folder import as_path, find, prune
from shardwise.checkpoint.storage import read_metadata, read_scalars
from shardwise.core.errors import bad
from shardwise.engine import given
from shardwise.engine.engine import Engine


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
        RunError: a rank could not write.
    """
    if extra is not None and not isinstance(extra, Mapping):
        raise bad(f"extra={extra!r}", "a dict of what JSON takes", 'extra={"epoch": 3}')
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise bad(f"keep={keep!r}", "one checkpoint or more, or None for all", "keep=2")
    scalars = {"step": engine.steps, "engine": engine.scalars(), "extra": dict(extra or {})}
    path = writing.save(folder, engine.boxes(), scalars, engine.world)
    if keep is not None and engine.world.rank == 0:
        prune(folder, keep)
    return path


def load(engine: Engine, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Go on from the newest checkpoint in `folder`, or from the one that it is; its `extra`.

    Called by all ranks, with an engine of the same model and kind of optimizer under any plan.
    Until every rank has found that all fits, the parameters are left alone.

    Raises:
        InputError: there is no checkpoint; it is of another model or optimizer; it is damaged.
    """
    path = find(as_path(folder))
    saved = read_scalars(path)["scalars"]
    if "engine" not in saved:
        raise bad(
            f"a checkpoint in '{path}' that has tensors and no state of an engine",
            "one that sw.save or shardwise train has written",
            "sw.save(engine, folder)",
        )
    given.scalars(saved["engine"])
    _require_all(engine, path)
    engine.prepare()
    reading.load(path, engine.boxes(), engine.world)
    engine.load_scalars(saved["engine"])
    engine.loaded()
    return saved.get("extra", {})


def _require_all(engine: Engine, path: Path) -> None:
    """Raise InputError for a checkpoint of a model that has more; of stages each knows its own."""
    if engine.staging:
        return
    model = engine.model
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    known = {f"{MODEL}{name}" for name, _ in tensors}
    saved = [name for name in read_metadata(path).state_dict_metadata if name.startswith(MODEL)]
    more = [name.removeprefix(MODEL) for name in saved if name not in known]
    if more:
        raise bad(
            f"a checkpoint in '{path}' with {', '.join(more[:5])}, which the model does not have",
            "a checkpoint of the same model",
            "the model that it was saved from, then its parts into another by load_state_dict",
        )
