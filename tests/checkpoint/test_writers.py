"""Writers of folders: killed at any moment, on full disks, two at once."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.checkpoint import export as exporting
from shardwise.checkpoint.export import export, import_weights
from shardwise.checkpoint.folder import find
from shardwise.checkpoint.save import save
from shardwise.checkpoint.storage import Publisher
from shardwise.checkpoint.writer import only_writer
from shardwise.comm.world import alone
from shardwise.core.errors import InputError
from shardwise.engine.box import Box
from tests.checkpoint.test_folder import die_at, loaded


def run_of(folder: Path, value: float, step: int = 7) -> Path:
    """A run with a checkpoint of one weight `w` of this value."""
    save(
        folder / "checkpoints",
        [Box.full("model/w", torch.full((4,), value))],
        {"step": step, "value": value},
        alone(),
    )
    return folder


def weights_of(folder: Path, value: float) -> Path:
    folder.mkdir()
    save_file({"w": torch.full((4,), value)}, folder / "model.safetensors")
    return folder


def value_in(folder: Path) -> float:
    """The value in a folder of weights, or in the newest checkpoint of a run."""
    if (folder / "model.safetensors").is_file():
        return load_file(folder / "model.safetensors")["w"][0].item()
    tensor = torch.empty(4)
    exporting.open_checkpoint(find(folder / "checkpoints"))
    from shardwise.checkpoint.load import load

    load(folder / "checkpoints", [Box.full("model/w", tensor)], alone())
    return tensor[0].item()


def export_over(place: Path) -> tuple[Path, Callable[[], object]]:
    """A folder of weights 1, and what replaces them by those of a run with 2."""
    run, to = run_of(place / "run", 2.0), weights_of(place / "to", 1.0)
    return to, lambda: export(run, to, overwrite=True)


def import_over(place: Path) -> tuple[Path, Callable[[], object]]:
    """A run with two checkpoints of 1, and what replaces them by weights of 2."""
    folder, to = weights_of(place / "weights", 2.0), run_of(place / "to", 1.0)
    run_of(to, 1.0, step=0)
    return to, lambda: import_weights(folder, to, overwrite=True)


BOTH = pytest.mark.parametrize("over", [export_over, import_over])
