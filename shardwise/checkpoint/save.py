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
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.folder import LITTLE_BYTES, free_bytes, reason
from shardwise.checkpoint.lock import SAVING_LOCK, only_writer
from shardwise.checkpoint.save_plans import BoxSavePlanner, Pages
from shardwise.checkpoint.storage import Publisher, Written, together
from shardwise.comm.world import World
from shardwise.core.errors import RunError
from shardwise.core.tools.arguments import MOST_COUNT, integer
from shardwise.engine.engine import Engine
from shardwise.engine.state.box import Box
from shardwise.engine.state.full import entries, is_extra, plain_key, plain_of
from shardwise.wrap.plain_loop import PlainLoop


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
        self.publisher = Publisher(folder, step, json.loads(json.dumps(scalars)))
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
        self.plan = self.publisher.files.prepare_global_plan(plans)[self.world.rank]

    def _begin(self, locks: Sequence[Path]) -> SavePlan:
        """This rank's pieces; rank 0 also locks the folder, and makes one for unfinished files."""
        if self.world.rank == 0:
            for file in (*locks, self.folder / SAVING_LOCK):
                self.held.enter_context(only_writer(self.folder, file))
            self.held.callback(shutil.rmtree, self.publisher.path, ignore_errors=True)
            folders.clear(self.publisher.path)
        return self.planner.create_local_plan()

    def reason(self, failures: Mapping[int, BaseException]) -> BaseException:
        """The error for the failures of ranks, with the free space, if it is little."""
        what = f"The checkpoint of step {self.step} could not be saved in '{self.folder}'"
        free = free_bytes(self.folder)
        room = f", where only {free:.0f} bytes are free" if free < LITTLE_BYTES else ""
        return reason(failures, what + room)

    def write(self) -> Written:
        """Raises OSError, and RunError for a value that is not finite."""
        return self.publisher.write(self.plan, self.planner)

    def publish(self, every: Sequence[Written]) -> None:
        """Publish what all ranks have written, and remove old checkpoints. Rank 0 calls it."""
        self.publisher.publish(self.metadata, every)
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
    own = trained.model if isinstance(trained, Engine) else trained.module
    return {
        "config": config_of(own),
        "generation": generation_of(own),
        "tied": [group for group in names.values() if len(group) > 1],
        "transient": [name for name in buffers if name not in known],
    }


def generation_of(model: nn.Module) -> dict[str, Any] | None:
    """The `generation_config` of a model of transformers as a JSON object; None without one."""
    config: Any = getattr(model, "generation_config", None)
    try:
        return json.loads(config.to_json_string()) if hasattr(config, "to_json_string") else None
    except (TypeError, ValueError):  # a field that JSON cannot hold
        return None


def config_of(model: nn.Module) -> dict[str, Any] | None:
    """The model's `config` as a JSON object; None if it has none that JSON can hold."""
    config: Any = getattr(model, "config", None)
    try:
        if hasattr(config, "to_json_string"):
            found = json.loads(config.to_json_string())
            return found | {"architectures": [type(model).__name__]}
        if is_dataclass(config) and not isinstance(config, type):
            return json.loads(json.dumps(asdict(config)))
    except (TypeError, ValueError):  # a field that JSON cannot hold
        return None
    return None


def save(
    folder: str | os.PathLike[str], boxes: Sequence[Box], scalars: dict[str, Any], world: World
) -> Path:
    """Save a checkpoint; its path. Called by all ranks. Raises like PlannedSave, and `finish`."""
    return PlannedSave(folder, boxes, scalars, world).finish()
