"""Checkpoints: everything that training needs to continue, under any plan.

A module of sw.DDP, sw.FSDP or sw.Pipe with its optimizer is saved and loaded in the same format.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint import load as reading
from shardwise.checkpoint.folder import (
    CHECKPOINTS,
    MANIFEST,
    all_in,
    as_path,
    damaged,
    find,
    is_checkpoint,
    passed_over,
    require_snapshots,
    step_of,
)
from shardwise.checkpoint.folder import prune as remove_old
from shardwise.checkpoint.load import Check
from shardwise.checkpoint.lock import RUN_LOCK
from shardwise.checkpoint.open_checkpoint import (
    IMPORTED,
    MODEL,
    OpenCheckpoint,
    open_checkpoint,
)
from shardwise.checkpoint.pending import PendingCheckpoint
from shardwise.checkpoint.save import PlannedSave, described
from shardwise.checkpoint.save_plans import Pages
from shardwise.comm.move import on_rank_zero
from shardwise.comm.world import World
from shardwise.core.errors import InputError, bad
from shardwise.core.tools.arguments import MOST_COUNT, flag, integer
from shardwise.engine.checks import validate
from shardwise.engine.checks.consistency import require_same
from shardwise.engine.engine import Engine
from shardwise.engine.state.box import Box
from shardwise.engine.state.full import entries, plain_key, plain_of
from shardwise.engine.state.json_values import ALLOWED, pack, unpack
from shardwise.wrap.plain_loop import PlainLoop

#: The scalar of a loop of the program's own: what `engine` is for an engine.
LOOP: Final = "loop"
#: The prefix of the names of tensors in the program's `extra`.
GIVEN: Final = "given/"


def save(
    engine_or_module: Engine | nn.Module,
    folder: str | os.PathLike[str],
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    *,
    optimizer: Optimizer | None = None,
    step: int | None = None,
) -> Path:
    """Save a checkpoint in `folder`, which all ranks must see. Returns its path.

    All ranks must call it, with an engine, or with a module wrapped by sw.DDP, sw.FSDP or sw.Pipe
    and the optimizer that trains it. `extra` is a dict to save along, the same on every rank: the
    epoch, the state of a scheduler. It comes back with the types that it had (tensors on the
    processor), or is refused. `keep` removes all but that many of the newest checkpoints. `step`
    numbers a module's checkpoint, else it is one more than the newest there. The checkpoint appears
    in one step: if saving fails, older checkpoints are unchanged.

    Raises:
        InputError: `extra` has a value that would not come back as it is; `keep` is below one; the
            module is not wrapped; a value in the optimizer's state or a module's extra state cannot
            be saved; another process is writing in the folder.
        RunError: a rank could not write; a weight or the optimizer's state is not finite.
    """
    trained = _trained(engine_or_module, optimizer, "sw.save")
    return _asked(trained, folder, extra, keep, step, "sw.save").finish()


def async_save(
    engine_or_module: Engine | nn.Module,
    folder: str | os.PathLike[str],
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    *,
    optimizer: Optimizer | None = None,
    step: int | None = None,
) -> PendingCheckpoint:
    """Save a checkpoint in `folder` while training goes on. Returns a handle.

    `handle.done()` says whether this rank's part has ended, `handle.wait()` waits for that, and
    `handle.result()`, called by all ranks, waits for the whole checkpoint and returns its path.

    It has the arguments and files of `save`. All ranks must call it. It returns when the values of
    this moment are on their way to host memory, where each rank needs room for what it writes
    (pinned, on CUDA); a thread writes them. It first waits for the previous save in this folder.

    The threads send no messages: rank 0 publishes when a file in the folder reports the end of
    every rank's part. If a rank fails, nothing is published, and training goes on: a warning says
    which rank and why, at the next step, save, load or `world.close()`. `handle.result()` raises
    instead. The end of the program, and `world.close()`, wait for the threads.

    The snapshot and the write beside training follow CheckFreq (Mohan, Phanishayee and Chidambaram,
    FAST 2021, section 4) and torch.distributed.checkpoint.async_save.

    Raises:
        InputError: as `save`; and for states on a disk (`offload:optim@disk`).
    """
    trained = _trained(engine_or_module, optimizer, "sw.async_save")
    if isinstance(trained, Engine):
        require_snapshots(trained.plan)
    return PendingCheckpoint(_asked(trained, folder, extra, keep, step, "sw.async_save"))


def _asked(
    trained: Engine | PlainLoop,
    folder: str | os.PathLike[str],
    extra: Mapping[str, Any] | None,
    keep: int | None,
    step: int | None,
    caller: str,
) -> PlannedSave:
    if extra is not None and not isinstance(extra, Mapping):
        raise bad(f"extra={extra!r}", "a dict", 'extra={"epoch": 3}')
    tensors: dict[str, Tensor] = {}
    try:
        packed = pack(dict(extra or {}), "extra=", "extra", tensors)
    except RecursionError:
        raise bad("extra= with an object inside of itself", ALLOWED, 'extra={"epoch": 3}') from None
    if keep is not None:
        integer("keep", keep, 1, 2)
    if step is not None:
        integer("step", step, 0, 100, MOST_COUNT)
    folder = as_path(folder)
    given = {"folder": str(folder.absolute()), "keep": keep, "step": step}
    _require_same_call(trained, caller, given | {"extra": (packed, tensors)})
    trained.world.background.settle(folder)
    if isinstance(trained, Engine):
        scalars = {"step": trained.steps, "engine": trained.scalars()}
    else:
        if step is None:
            step = 1 + on_rank_zero(lambda: max([0, *map(step_of, all_in(folder))]), trained.world)
        scalars = {"step": step, LOOP: trained.scalars()}
    scalars["values"] = packed
    boxes = _of_extra(tensors, trained.world)
    prune = None if keep is None else partial(remove_old, folder, keep)
    lock = folder.parent / RUN_LOCK
    locks = [lock] if folder.name == CHECKPOINTS and lock.exists() else []
    return planned_save(trained, folder, scalars, prune, locks, boxes)


def _of_extra(tensors: Mapping[str, Tensor], world: World) -> list[Box]:
    return [Box.full(f"{GIVEN}{name}", t.detach(), world.rank) for name, t in tensors.items()]


def _require_same_call(
    trained: Engine | PlainLoop, caller: str, given: Mapping[str, object]
) -> None:
    """Raise InputError on all ranks if they call another function, or with other arguments."""
    found = {**given, "optimizer": type(trained.optimizer).__name__}
    named = {f"the argument {name} of {caller}": value for name, value in found.items()}
    require_same(trained.world, named, f"the same call of {caller} on all ranks")


def _trained(given: Any, optimizer: Any, caller: str) -> Engine | PlainLoop:
    if not isinstance(given, Engine):
        return PlainLoop(given, optimizer, caller)
    if optimizer is not None:
        raise bad(
            f"{caller} of an engine with optimizer=",
            "an engine alone, which has its optimizer",
            f"{caller}(engine, folder)",
        )
    return given


def planned_save(
    trained: Engine | PlainLoop,
    folder: Path,
    scalars: dict[str, Any],
    prune: Callable[[], object] | None = None,
    locks: Sequence[Path] = (),
    further: Sequence[Box] = (),
    *,
    frozen: bool = True,
) -> PlannedSave:
    """The save of the state; without the `frozen` weights, if the caller can make them again."""
    trained.world.background.settle(folder)
    if isinstance(trained, Engine):
        trained.wait()
        trained.consensus.meet()
    else:
        trained.compare_ranks()
    boxes = [*trained.boxes(), *further]
    checked = _checked(trained, boxes, scalars["step"])
    if not frozen:
        boxes = [box for box in boxes if not box.name.startswith(MODEL) or box.name in checked]
    scalars = scalars | {"model": described(trained), "frozen": frozen}
    world, pages = trained.world, _pages(trained)
    return PlannedSave(
        folder, boxes, scalars, world, checked=checked, pages=pages, prune=prune, locks=locks
    )


def _pages(trained: Engine | PlainLoop) -> Pages:
    disk = trained.disk if isinstance(trained, Engine) else None
    return Pages() if disk is None else Pages(disk.drop)


def _checked(trained: Engine | PlainLoop, boxes: Sequence[Box], step: int) -> dict[str, str]:
    """The trained weights (fp32 masters) and optimizer states, with the error if not finite."""
    names = {*trained.optimizer.names} if isinstance(trained, Engine) else trained.trained
    found: dict[str, str] = {}
    for box in boxes:
        kind, _, name = box.name.partition("/")
        key, _, of = name.partition("/")
        if kind == "optim" or (kind == "model" and name in names):
            what = f"the optimizer's {key} of {of}" if kind == "optim" else name
            found[box.name] = (
                f"The weights of step {step} are not saved: {what} is not finite. The older "
                "checkpoints are unchanged; resume from the newest."
            )
    return found


def load(
    engine_or_module: Engine | nn.Module,
    folder: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    missing_ok: bool = False,
) -> dict[str, Any]:
    """Load the newest checkpoint in `folder` (or `folder` itself); returns its extra.

    All ranks must call it, with an engine of the same model and class of optimizer, under any plan,
    or with a module wrapped by sw.DDP, sw.FSDP or sw.Pipe, on any number of ranks, and the
    optimizer that trains it (None: the weights alone).
    With `missing_ok`, it returns {} if rank 0 finds no checkpoint, so that a restarted program can
    start or continue with the same line. Every file's hash, and names, shapes and dtypes are
    checked on all ranks before anything is written, so a load that fails leaves every engine
    unchanged. The one exception: a disk that fails, or a file that changes, after the check.

    Raises:
        InputError: there is no checkpoint; it is of another model or optimizer; it is damaged, or
            contains a file of another checkpoint.
        RunError: files could not be read after the check; the engine is partly loaded: load again,
            or build a new one.
    """
    flag("missing_ok", missing_ok)
    trained = _trained(engine_or_module, optimizer, "sw.load")
    folder = as_path(folder)
    given = {"folder": str(folder.absolute()), "missing_ok": missing_ok}
    _require_same_call(trained, "sw.load", given)
    trained.world.background.settle()
    world = trained.world
    if missing_ok and not on_rank_zero(lambda: is_checkpoint(folder) or all_in(folder), world):
        return {}
    if over := passed_over(folder):
        warnings.warn(over, stacklevel=2)
    return fill(trained, folder, partial(_require_all, trained)).get("extra", {})


def fill(trained: Engine | PlainLoop, folder: Path, check: Check) -> dict[str, Any]:
    """Load a checkpoint that passes `check`; returns its scalars. Raises like `load`."""
    opened = _peek(folder)
    world, pages = trained.world, _pages(trained)
    if opened is not None and IMPORTED in opened.scalars and isinstance(trained, Engine):
        return fill_weights(trained, folder, check)
    kind = "engine" if isinstance(trained, Engine) else LOOP

    def checked(opened: OpenCheckpoint) -> None:
        """Raise InputError unless it is a checkpoint of the same kind and passes `check`."""
        if kind not in opened.scalars:
            other = "a module" if kind == LOOP else "an engine"
            raise bad(
                f"a checkpoint in '{opened.path}' without {other}'s state",
                "an engine's (or shardwise train's) for an engine, a module's for a module",
                "shardwise checkpoint export, for the weights alone",
            )
        if kind == "engine":
            validate.scalars(opened.scalars[kind])
        check(opened)

    # none where `checked` refuses the checkpoint on every rank
    said = None if opened is None else opened.scalars.get(kind)
    boxes = _boxes(trained, opened, said) if opened and isinstance(said, dict) else []
    boxes = _saved(boxes, opened)
    given = {
        name.removeprefix(GIVEN): torch.zeros(shape, dtype=dtype, device="cpu")
        for name, (shape, dtype) in (opened.tensors.items() if boxes and opened else ())
        if name.startswith(GIVEN)
    }
    saved = reading.load(folder, boxes + _of_extra(given, world), world, checked, pages=pages)
    if "values" in saved:
        saved["extra"] = unpack(saved["values"], given)
    if isinstance(trained, Engine):
        trained.load_scalars(saved[kind])
    trained.loaded()
    return saved


def _saved(boxes: list[Box], opened: OpenCheckpoint | None) -> list[Box]:
    """Those that are in a checkpoint, if it was saved without frozen weights."""
    if opened is None or opened.scalars.get("frozen", True):
        return boxes
    return [box for box in boxes if box.name in opened.tensors]


def fill_weights(engine: Engine, folder: Path, check: Check | None = None) -> dict[str, Any]:
    """Load the weights and buffers alone; returns the checkpoint's scalars. Raises like `load`."""
    opened = _peek(folder)
    boxes = _of_weights(engine, set(opened.metadata.state_dict_metadata if opened else ()))
    boxes = _saved(boxes, opened)
    saved = reading.load(folder, boxes, engine.world, check, True, _pages(engine))
    engine.loaded()
    return saved


def _boxes(trained: Engine | PlainLoop, opened: OpenCheckpoint, said: dict[str, Any]) -> list[Box]:
    """The boxes to fill. Raises InputError for values of another form than `scalars()` returns."""
    try:
        return trained.loading(opened.tensors, said)
    except InputError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise damaged(opened.path / MANIFEST, f"{type(error).__name__}: {error}") from error


def _peek(folder: Path) -> OpenCheckpoint | None:
    """The small files; None for a damaged checkpoint, whose error `load` raises on every rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loading shows them
        try:
            return open_checkpoint(find(folder))
        except InputError:
            return None


def _of_weights(engine: Engine, names: set[str]) -> list[Box]:
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


def _require_all(trained: Engine | PlainLoop, opened: OpenCheckpoint) -> None:
    model = plain_of(trained) if isinstance(trained, Engine) else trained.plain
    named = (*entries(model), *model.named_buffers())
    known = {f"{MODEL}{plain_key(name)}" for name, _ in named}
    saved = [name for name in opened.metadata.state_dict_metadata if name.startswith(MODEL)]
    more = [name.removeprefix(MODEL) for name in saved if name not in known]
    if more:
        raise bad(
            f"a checkpoint in '{opened.path}' with {', '.join(more[:5])}, which the model lacks",
            "a checkpoint of the same model",
            "the model that it was saved from; load_state_dict copies parts into another model",
        )
