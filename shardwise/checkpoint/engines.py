"""Checkpoints of an engine: everything that training needs to continue, under any plan.

save    parameters, optimizer state, the engine's counters, and the user's `extra`
load    the same into an engine of any plan, on any number of ranks
"""

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import load as reading
from shardwise.checkpoint import save as writing
from shardwise.checkpoint.contents import MODEL
from shardwise.checkpoint.description import described
from shardwise.checkpoint.folder import all_in, as_path, find, is_whole, passed_over, prune
from shardwise.checkpoint.open_checkpoint import IMPORTED, OpenCheckpoint, open_checkpoint
from shardwise.checkpoint.pages import Pages
from shardwise.checkpoint.plans import PIECE_BYTES, split_block
from shardwise.checkpoint.storage import Check
from shardwise.comm.move import broadcast
from shardwise.core.arguments import integer
from shardwise.core.errors import InputError, bad
from shardwise.engine import validate
from shardwise.engine.box import Box, block
from shardwise.engine.engine import Engine


def save(
    engine: Engine,
    folder: str | os.PathLike[str],
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Save a checkpoint of `engine` in `folder`, which all ranks must see.  Returns its path.

    All ranks must call it.  `extra` is a JSON object to save along, the same on every rank: the
    epoch, the position in the data.  `keep` removes all but that many of the newest checkpoints.
    The checkpoint appears in one step: if saving fails, older checkpoints are unchanged.
    Independent experts have a folder each, `folder/expert0` and so on; its ranks alone save there.

    Raises:
        InputError: `extra` cannot be written as JSON; `keep` is below one.
        RunError: a rank could not write; a weight or the optimizer's state is not finite.
    """
    if extra is not None and not isinstance(extra, Mapping):
        raise bad(f"extra={extra!r}", "a dict that JSON can hold", 'extra={"epoch": 3}')
    if keep is not None:
        integer("keep", keep, 1, 2)
    scalars = {"step": engine.steps, "engine": engine.scalars(), "extra": dict(extra or {})}
    path = write(engine, folder, scalars)
    if keep is not None and engine.world.rank == 0:
        prune(path.parent, keep)
    return path


def write(engine: Engine, folder: str | os.PathLike[str], scalars: dict[str, Any]) -> Path:
    """Save the engine's state with these scalars; returns the path.  Raises like `save`."""
    boxes = engine.boxes()
    name = _first_not_finite(engine, boxes)
    scalars = scalars | {"model": described(engine)}
    refusal = (
        f"The weights of step {engine.steps} are not saved: {name} is not finite. The older "
        "checkpoints are unchanged; resume from the newest."
    )
    folder = _of_expert(engine, as_path(folder))
    refusal = refusal if name else ""
    return writing.save(folder, boxes, scalars, engine.world, refusal, _pages(engine))


def _pages(engine: Engine) -> Pages:
    """The pages of the engine's states on a disk; none elsewhere."""
    states = engine.optimizer.disk
    return Pages() if states is None else Pages(states.disk.drop)


def _of_expert(engine: Engine, folder: Path) -> Path:
    """The folder of an independent expert; `folder` for a model of all ranks."""
    expert = engine.world.expert
    return folder if expert is None else folder / f"expert{expert}"


@torch.no_grad()
def _first_not_finite(engine: Engine, boxes: Sequence[Box]) -> str:
    """The first trained weight (fp32 master) or optimizer state with a non-finite value; or ""."""
    trained = {name for flat in engine.flats if flat.trained for name in flat.names}
    pages = _pages(engine)
    for box in boxes:
        kind, _, name = box.name.partition("/")
        checked = kind == "optim" or (kind == "model" and name in trained)
        if checked and not all(map(pages.finite, _pieces(box.tensor))):
            key, _, of = name.partition("/")
            return f"the optimizer's {key} of {of}" if kind == "optim" else name
    return ""


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Parts of a tensor: its finite elements are found in a few times the memory of one."""
    numel = PIECE_BYTES // tensor.element_size()
    for offsets, sizes in split_block((0,) * tensor.dim(), tuple(tensor.shape), numel):
        yield block(tensor, offsets, sizes)


def load(
    engine: Engine, folder: str | os.PathLike[str], *, missing_ok: bool = False
) -> dict[str, Any]:
    """Load the newest checkpoint in `folder` (or `folder` itself) into `engine`; returns its extra.

    All ranks must call it, with an engine of the same model and class of optimizer, under any plan.
    With `missing_ok`, it returns {} if rank 0 finds no checkpoint, so that a restarted program can
    start or continue with the same line.  Every file's hash, and names, shapes and dtypes are
    checked on all ranks before anything is written, so a load that fails leaves every engine
    unchanged.  The one exception: a disk that fails, or a file that changes, after the check.

    Raises:
        InputError: there is no checkpoint; it is of another model or optimizer; it is damaged, or
            contains a file of another checkpoint.
        RunError: files could not be read after the check; the engine is partly loaded: load again,
            or build a new one.
    """
    folder = as_path(folder)
    folder = folder if is_whole(folder) else _of_expert(engine, folder)
    if missing_ok:
        found = is_whole(folder) or bool(all_in(folder))
        told = torch.tensor([float(found)], device=engine.world.device)
        if not broadcast(told, engine.world.everyone).item():
            return {}
    if over := passed_over(folder):
        warnings.warn(over, stacklevel=2)
    return fill(engine, folder, partial(_require_all, engine)).get("extra", {})


def fill(engine: Engine, folder: Path, check: Check) -> dict[str, Any]:
    """Load a checkpoint that passes `check` into the engine; returns its scalars.

    From imported weights (export.py) it loads the weights, in the engine's dtypes.  Raises like
    `load`.
    """
    opened = _peek(folder)
    if opened is not None and IMPORTED in opened.scalars:
        boxes = _of_weights(engine, set(opened.metadata.state_dict_metadata))
        saved = reading.load(folder, boxes, engine.world, check, True, _pages(engine))
        engine.loaded()
        return saved

    def checked(opened: OpenCheckpoint) -> None:
        """Raise InputError unless it is an engine's checkpoint and passes `check`."""
        if "engine" not in opened.scalars:
            raise bad(
                f"a checkpoint in '{opened.path}' without an engine's state",
                "one written by sw.save or shardwise train",
                "sw.save(engine, folder)",
            )
        validate.scalars(opened.scalars["engine"])
        check(opened)

    boxes = _incoming(engine, opened)
    saved = reading.load(folder, boxes, engine.world, checked, pages=_pages(engine))
    engine.load_scalars(saved["engine"])
    engine.loaded()
    return saved


def _incoming(engine: Engine, opened: OpenCheckpoint | None) -> list[Box]:
    """The boxes to fill; none where `checked` refuses the checkpoint on every rank."""
    if opened is None or not isinstance(said := opened.scalars.get("engine"), dict):
        return []
    return engine.loading(opened.tensors, said)


def _peek(folder: Path) -> OpenCheckpoint | None:
    """The checkpoint's small files; None for a damaged one, of which loading tells every rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loading shows them
        try:
            return open_checkpoint(find(folder))
        except InputError:
            return None


def _of_weights(engine: Engine, names: set[str]) -> list[Box]:
    """The engine's weights and buffers, under their names in imported weights."""
    tied = {name: group for group in described(engine)["tied"] for name in group}
    transient = set(described(engine)["transient"])
    found: list[Box] = []
    for box in engine.boxes():
        kind, _, name = box.name.partition("/")
        if kind == "optim" or (kind == "buffer" and name in transient):
            continue
        also = [f"{MODEL}{other}" for other in tied.get(name, (name,))]
        found.append(replace(box, name=next((n for n in also if n in names), also[0])))
    return found


def _require_all(engine: Engine, opened: OpenCheckpoint) -> None:
    """Raise InputError for a checkpoint with tensors that the model does not have."""
    if engine.staging:  # each rank knows only its own stages
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
            "the model that it was saved from; load_state_dict copies parts into another model",
        )
