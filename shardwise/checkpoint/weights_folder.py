"""A folder of weights as Hugging Face writes it: safetensors, and an index if there are several.

A folder is written beside its place, and gets its name when it is complete.

.writing-weights/        written now, or left by a killed writer
.replaced-weights/       the folder that --overwrite replaces, until the new one has its name
"""

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.checkpoint.folder import as_path, swap_in
from shardwise.checkpoint.lock import locked
from shardwise.core.errors import InputError, RunError, bad, read_text
from shardwise.core.tools.arguments import beside, suggest

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"


@dataclass(frozen=True)
class WeightsFolder:
    """The tensors of a folder: the file of each, by name. Nothing is read before it is used."""

    path: Path
    files: Mapping[str, str]

    @property
    def config(self) -> dict[str, Any] | None:
        """None without a config.json. Raises InputError for a broken one."""
        file = self.path / CONFIG
        return _json(file) if file.is_file() else None

    @cached_property
    def _opened(self) -> dict[str, Any]:
        return {name: _open(self.path / name) for name in sorted({*self.files.values()})}

    def tensor(self, name: str) -> Tensor:
        """On the CPU. Raises InputError if there is none, with the nearest name."""
        if name not in self.files:
            raise bad(
                f"the weight {name}, which is not in '{self.path}'",
                "a folder with every weight of the model",
                f"the model that it was written from; near: {suggest(name, self.files)}",
            )
        try:
            return self._opened[self.files[name]].get_tensor(name)
        except SafetensorError as error:
            raise _broken(self.path / self.files[name], str(error)) from None

    @property
    def names(self) -> Collection[str]:
        return self.files.keys()

    def __call__(self, name: str, tensor: Tensor) -> None:
        """Copy the weight `name` into `tensor`, in its dtype. Raises InputError for another shape.
        As `fill=` of parallelize it loads a model on the meta device unit by unit.
        """
        saved = self.tensor(name)
        if saved.shape != tensor.shape:
            raise bad(
                f"the weight {name} of shape {tuple(tensor.shape)}",
                f"the shape that it has in '{self.path}', {tuple(saved.shape)}",
                "the configuration that the folder was written with",
            )
        tensor.copy_(saved)


def open_weights(folder: object) -> WeightsFolder:
    """Raises InputError if the folder has no weights, or lacks a file of its index."""
    path = as_path(folder)
    if os.path.isfile(path / INDEX):  # noqa: PTH113 (Path.is_file raises for a name too long)
        found = WeightsFolder(path, _weight_map(path / INDEX))
    elif os.path.isfile(path / SINGLE):  # noqa: PTH113
        found = WeightsFolder(path, dict.fromkeys(_open(path / SINGLE).keys(), SINGLE))
    else:
        raise _none(path, "no weights in it")
    missing = [name for name in {*found.files.values()} if not (path / name).is_file()]
    if missing:
        raise _none(path, f"without {min(missing)}, which its index names")
    return found


def open_model(folder: object) -> WeightsFolder:
    """The folder of weights, or one of a configuration alone, which has no tensors."""
    path = as_path(folder)
    weights = any((path / name).exists() for name in (INDEX, SINGLE))
    if not weights and (path / CONFIG).is_file():
        return WeightsFolder(path, {})
    return open_weights(path)


def fill_from(folder: object) -> WeightsFolder:
    """A `fill` for parallelize that reads weights from a folder of safetensors.

        with torch.device("meta"):
            model = Model()
        engine = sw.parallelize(model, plan, world, fill=sw.fill_from("weights"))

    Each unit is read when it is built, so no rank holds the full model. Names are those of
    `named_parameters()` and, for buffers that the folder holds, of `named_buffers()`. Raises
    InputError if the folder has no weights; `fill` raises it for a weight that is missing or has
    another shape.
    """
    return open_weights(folder)


@contextmanager
def new_folder(to: Path, allowed: Sequence[str], *, overwrite: bool) -> Iterator[Path]:
    """A folder to write to, renamed to `to` at the end without an error, else removed."""
    if to.name in ("", ".."):  # "." and "/" too
        allowed = "a new folder, with a name of its own"
        raise bad(f"the folder '{to}', which exists", allowed, f"--to {beside(to)}")
    unfinished, replaced = (to.with_name(f".{kind}-{to.name}") for kind in ("writing", "replaced"))
    with writing(to, to.with_name(f".writing-{to.name}.lock")):
        _require_free(to, allowed, overwrite=overwrite)
        shutil.rmtree(unfinished, ignore_errors=True)  # of a killed writer
        try:
            unfinished.mkdir()
            yield unfinished
            if to.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            swap_in(unfinished, to, replaced)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def _require_free(to: Path, allowed: Sequence[str], *, overwrite: bool) -> None:
    if not (to.exists() or to.is_symlink()):
        return
    if to.is_symlink() or not to.is_dir():
        raise bad(f"'{to}', which is no folder", "a new folder", f"--to {to}-weights")
    if not overwrite:
        raise bad(
            f"the folder '{to}', which exists",
            "a new folder, or --overwrite to replace it",
            f"--to {beside(to)}",
        )
    other = [p.name for p in to.iterdir() if not any(map(p.match, allowed)) or p.is_dir()]
    if other:
        raise bad(
            f"--overwrite of '{to}', which has other files ({', '.join(sorted(other)[:3])})",
            "a folder that holds only exported weights",
            f"--to {to / 'weights'}",
        )


def _weight_map(file: Path) -> dict[str, str]:
    found = _json(file).get("weight_map")
    names = found.items() if isinstance(found, dict) else ()
    if not names or any(not isinstance(n, str) or Path(n).name != n for _, n in names):
        raise _broken(file, "it has no weight_map from names to files beside it")
    return dict(names)


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_text(file, 2**26))
    except (OSError, ValueError, RecursionError) as error:
        raise _broken(file, str(error)) from None
    if not isinstance(found, dict):
        raise _broken(file, "it is no JSON object")
    return found


def _open(file: Path) -> Any:
    try:
        return safe_open(file, "pt")
    except (OSError, SafetensorError) as error:
        raise _broken(file, str(error)) from None


def _none(path: Path, what: str) -> InputError:
    return bad(
        f"the folder of weights '{path}' ({what})",
        f"a folder with {SINGLE}, or with {INDEX} and its files",
        "the path of a folder written by save_pretrained or 'shardwise checkpoint export'",
    )


def _broken(file: Path, why: str) -> InputError:
    return bad(
        f"'{file}', which is damaged ({' '.join(why.split())[:200]})",
        "a complete file of safetensors or JSON",
        "the folder copied or exported again",
    )


@contextmanager
def writing(path: Path, lock: Path) -> Iterator[None]:
    """Hold the lock on a folder that a command writes."""
    with ExitStack() as held:
        try:
            held.enter_context(locked(lock, folder=path))
        except OSError as error:
            raise bad(
                f"the folder '{path}', which cannot be written ({error.strerror})",
                "a folder that this user may write to, on a disk with free space",
                f"--to /tmp/{path.name}",
            ) from None
        try:
            yield
        except (OSError, SafetensorError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise RunError(
                f"'{path}' could not be written: {why}. What was there before is unchanged."
            ) from None
