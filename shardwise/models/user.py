"""This file is the door to the user's own model: `file.py:build`, a function in a file of theirs.

`build()` returns a module, or the three things a proof needs:

    def build():
        def loss(model, batch): ...        # a scalar, the mean over the batch's rows
        def make_batch(rows, seed): ...    # tensors whose dim 0 has `rows` entries
        return model, loss, make_batch

For a module alone whose first layer is an `nn.Linear` or an `nn.Embedding`, the batch is random
input for that layer and the loss is the mean square of the output.

For tensor parallelism the module carries its table of styles, as an attribute or a property:

    model.tensor_table = sw.Table.of({"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
"""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.core.errors import InputError, bad
from shardwise.core.suggest import suggest
from shardwise.models.trainable import Loss, Trainable

RETURNS: Final = "a function that returns an nn.Module, or (module, loss, make_batch)"
GUESSED_POSITIONS: Final = 16


def find(name: str, seed: int = 0) -> Trainable:
    """The model of `path/to/file.py:function`; the function is called with no arguments.

    Torch's generator is seeded before each call, so that `build` gives the same weights each time.
    Raises InputError when the file or the function is not there, fails, or returns something else.
    """
    path, function = _split(name)
    build = _function(_load(path, name), function, name)
    _, loss, make_batch = _call(build, name, seed)

    def make() -> nn.Module:
        return _call(build, name, seed)[0]

    return Trainable(name, make, loss, make_batch)


def _split(name: str) -> tuple[Path, str]:
    path, _, function = name.rpartition(":")
    if not path.endswith(".py") or not function:
        file = name[: name.index(".py") + 3]
        raise bad(f'the model "{name}"', "a file and a function in it", f"{file}:build")
    try:
        there = Path(path).is_file()
    except OSError:  # a name that is too long
        there = False
    if not there:
        raise bad(
            f'the model "{name}", whose file does not exist',
            "a Python file, its path from the folder you are in",
            f"{Path(path).name}:{function} in the folder that has it",
        )
    return Path(path), function


def _load(path: Path, name: str) -> ModuleType:
    """Runs the file as a module of its own; imports beside it work, as for `python file.py`."""
    module_name = f"shardwise_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their own module up by name
    with _beside(path):
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[module_name]
            raise _failed(name, "running the file", error) from error
    return module


@contextmanager
def _beside(path: Path) -> Iterator[None]:
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _function(module: ModuleType, function: str, name: str) -> Callable[[], Any]:
    build = getattr(module, function, None)
    if callable(build):
        return build
    there = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
    close = suggest(function, there)
    raise bad(
        f'the model "{name}", whose file has no function "{function}"',
        f"one of its functions: {', '.join(there) or 'it has none'}",
        f"{name.rpartition(':')[0]}:{close}" if close else "def build(): ... in that file",
    )


def _call(
    build: Callable[[], Any], name: str, seed: int
) -> tuple[nn.Module, Loss, Callable[[int, int], Any]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            made = build()
        except InputError:
            raise
        except (Exception, SystemExit) as error:
            raise _failed(name, "calling the function", error) from error
    if isinstance(made, nn.Module):
        return made, mean_square, _guess(made, name)
    if not isinstance(made, tuple):
        given = f'the model "{name}", which returns a {type(made).__name__}'
        raise bad(given, RETURNS, "return model")
    if wrong := _wrong(made):
        given = f'the model "{name}", which returns a tuple {wrong}'
        raise bad(given, RETURNS, "return model, loss, make_batch")
    return made


def _wrong(made: tuple[Any, ...]) -> str:
    """What is not as it should be in the tuple that a function returned; "" where it will do."""
    parts = ("model", "loss", "make_batch")
    if len(made) != len(parts):
        missing = " and ".join(parts[len(made) :])
        return f"without {missing}" if missing else f"of {len(made)}"
    if not isinstance(made[0], nn.Module):
        return f"whose model is a {type(made[0]).__name__}"
    for part, value in zip(parts[1:], made[1:], strict=True):
        if not callable(value):
            return f"whose {part} is a {type(value).__name__} and no function"
    return ""


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean square of the output: a loss for a model that came without one.

    Raises InputError for an output that is no tensor.
    """
    out = model(batch)
    if not isinstance(out, Tensor):
        raise bad(
            f"a {type(model).__name__} whose forward returned a {type(out).__name__} where a "
            "tensor was needed: it came without a loss, so its output is squared",
            "a module alone whose forward returns a tensor",
            "return model, loss, make_batch",
        )
    return out.square().mean()


def _guess(model: nn.Module, name: str) -> Callable[[int, int], Tensor]:
    """Random input for the model's first layer, where its class says what it takes."""
    leaves = [module for module in model.modules() if not list(module.children())]
    first = leaves[0]
    if not isinstance(first, (nn.Linear, nn.Embedding)):
        raise bad(
            f'the model "{name}", whose first layer is a {type(first).__name__}',
            "a module alone where the first layer is an nn.Linear or an nn.Embedding",
            "return model, loss, make_batch",
        )
    try:
        inspect.signature(model.forward).bind("batch")
    except TypeError as error:
        raise bad(
            f'the model "{name}", whose forward takes more or less than one input ({error})',
            "a module alone whose forward is called with one tensor",
            "return model, loss, make_batch",
        ) from None
    except ValueError:  # one in C may have no signature to look at
        pass

    def make_batch(rows: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if isinstance(first, nn.Linear):
            return torch.randn(rows, first.in_features, generator=generator)
        shape = (rows, GUESSED_POSITIONS)
        return torch.randint(first.num_embeddings, shape, generator=generator)

    return make_batch


def _failed(name: str, doing: str, error: BaseException) -> InputError:
    """The user's own error, with the line of their file that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return bad(
        f'the model "{name}"; {doing} gives {type(error).__name__}: {error} '
        f"({Path(last.filename).name}, line {last.lineno})",
        RETURNS,
        "the same command, once the function runs on its own",
    )
