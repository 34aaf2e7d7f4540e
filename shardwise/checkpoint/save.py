"""Saving: every rank writes its boxes, and the checkpoint appears at once or not at all.

The ranks plan, write and publish, and meet after each. After the plan, a thread can do the others
beside the next steps (pending.py).
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.folder import LITTLE_BYTES, free_bytes, reason, unwritten
from shardwise.checkpoint.lock import SAVING_LOCK, locked
from shardwise.checkpoint.open_checkpoint import Manifest, Seal, seal, write_manifest
from shardwise.checkpoint.save_plans import BoxSavePlanner, Pages
from shardwise.comm.move import all_gather_object
from shardwise.comm.world import World
from shardwise.core.errors import RunError
from shardwise.core.tools.arguments import MOST_COUNT, integer
from shardwise.engine.engine import Engine
from shardwise.engine.state.box import Box
from shardwise.engine.state.full import entries, is_extra, plain_key, plain_of
from shardwise.wrap.plain_loop import PlainLoop

T = TypeVar("T")


def together(
    act: Callable[[], T],
    world: World,
    failed: Callable[[Mapping[int, BaseException]], BaseException],
) -> list[T]:
    """The results of all ranks; raises on each what `failed` returns for the failures by rank."""
    own: tuple[T | None, BaseException | None]
    try:
        own = act(), None
    except BaseException as error:  # noqa: BLE001  the others wait for this rank
        own = None, error
    every: list[Any] = all_gather_object(own, world)
    if failures := {rank: error for rank, (_, error) in enumerate(every) if error is not None}:
        raise failed(failures) from None
    return [result for result, _ in every]


@dataclass(frozen=True)
class Written:
    """One rank's files, and (tensor, offsets, file, first byte, bytes) of each piece."""

    pieces: list[tuple[str, list[int], str, int, int]]
    files: dict[str, Seal]

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        values = json.loads(text)
        return cls(values["pieces"], {n: Seal(**seal) for n, seal in values["files"].items()})


def write_pieces(files: FileSystemWriter, plan: SavePlan, planner: SavePlanner) -> Written:
    """Write a rank's pieces, and hash their files. Raises OSError and RunError."""
    path = Path(files.path)
    try:
        results = files.write_data(plan, planner).wait()
        names = {result.storage_data.relative_path for result in results}
        seals = {name: seal(path / name) for name in names}
    except RunError:
        raise
    except (OSError, RuntimeError) as error:
        raise unwritten(error, path) from None
    places = [(result.index, result.storage_data) for result in results]
    pieces = [
        (index.fqn, [*(index.offset or ())], at.relative_path, at.offset, at.length)
        for index, at in places
    ]
    return Written(pieces, seals)


def publish(
    files: FileSystemWriter, scalars: dict[str, Any], metadata: Metadata, every: Sequence[Written]
) -> None:
    """Write the index and the manifest, and publish. Rank 0 calls it, when all have written."""
    path = Path(files.path)
    results = [[_result(*piece) for piece in written.pieces] for written in every]
    sealed = {name: each for written in every for name, each in written.files.items()}
    try:
        files.finish(metadata, results)
        sealed[folders.METADATA] = seal(path / folders.METADATA)
        write_manifest(path, Manifest(uuid4().hex, len(every), scalars, sealed))
        folders.publish(path, scalars["step"])
    except (OSError, RuntimeError) as error:
        raise unwritten(error, path) from None


def _result(name: str, offsets: Sequence[int], file: str, first: int, size: int) -> WriteResult:
    place = _StorageInfo(file, first, size)
    return WriteResult(MetadataIndex(name, torch.Size(offsets)), size, place)


class PlannedSave:
    """The save of a checkpoint; every rank knows what it writes.
    Rank 0 holds the lock of the folder until `held` ends, which removes what a failed save leaves.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        boxes: Sequence[Box],
        scalars: dict[str, Any],
        world: World,
        *,
        checked: Mapping[str, str] | None = None,
        pages: Pages | None = None,
        prune: Callable[[], object] | None = None,
        locks: Sequence[Path] = (),
    ) -> None:
        """Plan a checkpoint in `folder`, which all ranks must see. All ranks must call it.
        The boxes with `replica` 0 of all ranks must cover each element of their tensors once; a box
        that several ranks hold is written by the one with the least to write. `scalars` is a JSON
        object, the same on every rank, with the "step" that names the checkpoint. `checked` has the
        tensors that must be finite, each with the text of the error. `pages` releases the pages of
        boxes in mapped files. At the end rank 0 calls `prune`; if that fails, a warning says so.
        Rank 0 also holds further `locks`.
        Raises InputError without a step, or if another process writes there. Other errors become
        `failure`.
        """
        folder = folders.as_path(folder)
        step: Any = scalars.get("step")
        integer("step", step, 0, 100, MOST_COUNT)
        self.folder, self.world, self.prune = folder, world, prune
        self.path, self.step = folder / folders.name_of(step), step
        self.held = ExitStack()
        self.scalars = json.loads(json.dumps(scalars))  # of this moment
        self.files = FileSystemWriter(folders.unfinished(folder, step))
        self.planner = BoxSavePlanner(boxes, checked=checked, pages=pages)
        self.plan, self.metadata = SavePlan([]), Metadata({})
        self.failure: RunError | None = None  # the same on all ranks
        try:
            self._agree(locks)
        except BaseException as error:
            self.held.close()
            if not isinstance(error, RunError):
                raise
            self.failure = error
        self.planner.keep(self.plan)

    def _agree(self, locks: Sequence[Path]) -> None:
        every = together(partial(self._begin, locks), self.world, self.reason)
        try:
            plans, self.metadata = self.planner.create_global_plan(every)
        except ValueError as error:  # the same on all ranks
            raise self.reason({0: error}) from None
        self.plan = self.files.prepare_global_plan(plans)[self.world.rank]

    def _begin(self, locks: Sequence[Path]) -> SavePlan:
        """This rank's pieces; rank 0 also locks the folder, and makes one for unfinished files."""
        if self.world.rank == 0:
            for file in (*locks, self.folder / SAVING_LOCK):
                self.held.enter_context(locked(file))
            self.held.callback(shutil.rmtree, self.files.path, ignore_errors=True)
            folders.clear(Path(self.files.path))
        return self.planner.create_local_plan()

    def reason(self, failures: Mapping[int, BaseException]) -> BaseException:
        """The error for the failures of ranks, with the free space, if it is little."""
        what = f"The checkpoint of step {self.step} could not be saved in '{self.folder}'"
        free = free_bytes(self.folder)
        room = f", where only {free:.0f} bytes are free" if free < LITTLE_BYTES else ""
        return reason(failures, what + room)

    def write(self) -> Written:
        """Raises OSError, and RunError for a value that is not finite."""
        return write_pieces(self.files, self.plan, self.planner)

    def publish(self, every: Sequence[Written]) -> None:
        """Publish what all ranks have written, and remove old checkpoints. Rank 0 calls it."""
        publish(self.files, self.scalars, self.metadata, every)
        try:
            if self.prune is not None:
                self.prune()
        except OSError as error:
            warnings.warn(
                f"old checkpoints in '{self.folder}' could not be removed ({error}); the new one "
                "is saved",
                stacklevel=2,
            )

    def finish(self) -> Path:
        """Write and publish; the path. All ranks call it, and raise the first failure of a rank."""
        if self.failure is not None:
            raise self.failure
        with self.held:
            every = together(self.write, self.world, self.reason)
            publish = partial(self.publish, every) if self.world.rank == 0 else lambda: None
            together(publish, self.world, self.reason)
        return self.path


def described(trained: Engine | PlainLoop) -> dict[str, Any]:
    """The description of the model, the same on every rank."""
    model = plain_of(trained) if isinstance(trained, Engine) else trained.plain
    names: dict[int, list[str]] = {}
    for key, value in entries(model):
        if isinstance(value, Tensor) and not is_extra(key):
            names.setdefault(id(value), []).append(plain_key(key))
    known = {name for group in names.values() for name in group}
    buffers = (plain_key(name) for name, _ in model.named_buffers())
    own: Any = trained.model if isinstance(trained, Engine) else trained.module
    config = _plain(getattr(own, "config", None))
    named = config and hasattr(own.config, "to_json_string")
    adapters = getattr(own, "peft_config", {}).get("default")
    architectures = {"architectures": [type(own).__name__]} if named else {}
    return {
        "config": config | architectures if config else None,
        "generation": _plain(getattr(own, "generation_config", None)),
        "adapters": adapters and json.loads(json.dumps(adapters.to_dict(), default=sorted)),
        "tied": [group for group in names.values() if len(group) > 1],
        "transient": [name for name in buffers if name not in known],
    }


def _plain(config: Any) -> dict[str, Any] | None:
    """A configuration of transformers, or a dataclass, as a JSON object; None if it is no JSON."""
    try:
        if hasattr(config, "to_json_string"):
            return json.loads(config.to_json_string())
        if is_dataclass(config) and not isinstance(config, type):
            return json.loads(json.dumps(asdict(config)))
    except (TypeError, ValueError):
        return None
    return None


def save(
    folder: str | os.PathLike[str], boxes: Sequence[Box], scalars: dict[str, Any], world: World
) -> Path:
    """Save a checkpoint; its path. Called by all ranks. Raises like PlannedSave, and `finish`."""
    return PlannedSave(folder, boxes, scalars, world).finish()
