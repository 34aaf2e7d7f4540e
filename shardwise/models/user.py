"""The user's own model: `file.py:build`, a function in a Python file.

`build()` returns a module, or (module, loss, make_batch): `loss(model, batch)` is a scalar, the
mean over the batch's rows; `make_batch(rows, seed)` returns tensors whose dim 0 has `rows` entries.
For a module alone, whose first layer must be an `nn.Linear` or `nn.Embedding`, batches are random
inputs of that layer and the loss is the mean square of the output.  `tensor_table`, an attribute or
property of the module, is its table of styles.

A run trains the model on its text: {"inputs": [rows, positions], "targets": [rows, positions]},
token numbers, with the target -100 where there is none.  The loss is the one that `build` returns
with the model; a module alone returns the logits [rows, positions, vocabulary], and is trained with
cross-entropy.
"""

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.core.errors import InputError, bad, expanded
from shardwise.core.tools.arguments import short_repr, suggest
from shardwise.engine.options import own_loss
from shardwise.models import gpt
from shardwise.models.trainable import Loss, Trainable

RETURNS: Final = "a function that returns an nn.Module, or (module, loss, make_batch)"
GUESSED_POSITIONS: Final = 16
BATCHES: Final = (
    "make_batch(rows, seed), which returns dense tensors with `rows` entries in dim 0, that depend "
    "only on rows and seed"
)


def find(
    name: str, seed: int = 0, *, make_batch: Callable[[int, int], Any] | None = None
) -> Trainable:
    """The model of `path/to/file.py:function`, which is called without arguments.
    torch's generator is seeded before each call, so that the weights are the same each time.
    `make_batch` replaces its batches.  Raises InputError if the file or function fails.
    """
    return of_function(name, _function(name), seed, make_batch=make_batch)


def made_by(name: str, what: str, returns: str) -> Any:
    """What `path/to/file.py:function` returns. Raises InputError as `find`, about `what`."""
    make = _function(name, what, returns)
    with explained(name, "calling the function", what, returns):
        return make()


def of_function(
    name: str,
    build: Callable[[], Any],
    seed: int = 0,
    *,
    loss: Loss | None = None,
    make_batch: Callable[[int, int], Any] | None = None,
) -> Trainable:
    """The model that `build` returns, with its loss and batches, or with these."""
    _, found_loss, found_batch = _call(build, name, seed, make_batch)
    make = partial(_model, build, name, seed, make_batch)
    return Trainable(name, make, loss or found_loss, partial(_batch, found_batch, name))


def _batch(make_batch: Callable[[int, int], Any], name: str, rows: int, seed: int) -> Any:
    """A batch of a user's function. Raises InputError if that fails, or has other rows."""
    with explained(name, f"make_batch({rows}, {seed})", "the batches of the model", BATCHES):
        made = make_batch(rows, seed)
    tensors = [x for x in tree_leaves(made) if isinstance(x, Tensor)]
    odd = any(x.layout is not torch.strided or x.is_meta or x.is_nested for x in tensors)
    lengths = [] if odd else [len(x) for x in tensors if x.dim()]
    if rows not in lengths:
        raise bad(
            f'make_batch({rows}, {seed}) of the model "{name}", which returns '
            + (f"{lengths[0]} rows" if lengths else f"no tensor of rows, but {short_repr(made)}"),
            BATCHES,
            "torch.randn(rows, ..., generator=torch.Generator().manual_seed(seed))",
        )
    return made


def _model(
    build: Callable[[], Any], name: str, seed: int, make_batch: Callable[[int, int], Any] | None
) -> nn.Module:
    return _call(build, name, seed, make_batch)[0]


def _function(name: str, what: str = "the model", returns: str = RETURNS) -> Callable[[], Any]:
    path, function = _split(name, what)
    return _named(_load(path, name, what, returns), function, name, what)


def _split(name: str, what: str) -> tuple[Path, str]:
    path, _, function = expanded(name).rpartition(":")
    if not path.endswith(".py") or not function:
        file = name[: name.index(".py") + 3] if ".py" in name else "file.py"
        raise bad(f'{what} "{name}"', "a file and a function in it", f"{file}:build")
    if not os.path.isfile(path):  # noqa: PTH113 (which raises for a name that is too long)
        raise bad(
            f'{what} "{name}", whose file does not exist',
            "a path relative to the current folder, or an absolute one",
            f"/path/to/{Path(path).name}:{function}",
        )
    return Path(path), function


def _load(path: Path, name: str, what: str, returns: str) -> ModuleType:
    """Run the file as a module; it can import files of its folder, as with `python file.py`."""
    module_name = f"shardwise_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look up their module by name
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        with explained(name, "running the file", what, returns):
            spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module


def _named(module: ModuleType, function: str, name: str, what: str) -> Callable[[], Any]:
    build = getattr(module, function, None)
    if callable(build):
        return build
    own = (v for v in vars(module).values() if inspect.isfunction(v))
    there = [f.__name__ for f in own if f.__module__ == module.__name__ and f.__name__[0] != "_"]
    close = suggest(function, there)
    raise bad(
        f'{what} "{name}", whose file has no function "{function}"',
        f"one of its functions: {', '.join(there) or 'it has none'}",
        f"{name.rpartition(':')[0]}:{close}" if close else f"def {function}(): ... in that file",
    )


def _call(
    build: Callable[[], Any],
    name: str,
    seed: int,
    make_batch: Callable[[int, int], Any] | None = None,
) -> tuple[nn.Module, Loss, Callable[[int, int], Any]]:
    """The module, its loss and batches; with `make_batch`, a module alone returns its loss."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with explained(name, "calling the function"):
            made = build()
    if isinstance(made, nn.Module):
        if make_batch is not None:
            return made, own_loss, make_batch
        return made, mean_square, _guess(made, name)
    parts: tuple[Any, ...] = made if isinstance(made, tuple) else (made,)
    model, *functions = parts or (None,)
    if not isinstance(model, nn.Module) or len(functions) != 2 or not all(map(callable, functions)):
        kinds = ", ".join(type(part).__name__ for part in parts)
        given = f'the model "{name}", which returns {kinds}'
        raise bad(given, RETURNS, "return model, loss, make_batch")
    return model, functions[0], make_batch or functions[1]


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    """The loss of a model that has none. Raises InputError if the output is no tensor."""
    out = model(batch)
    if not isinstance(out, Tensor):
        raise bad(
            f"a {type(model).__name__} without a loss, whose forward returned a "
            f"{type(out).__name__}",
            "a module whose forward returns a tensor, or a module with its loss",
            "return model, loss, make_batch",
        )
    return out.square().mean()


def _guess(model: nn.Module, name: str) -> Callable[[int, int], Tensor]:
    leaves = [module for module in model.modules() if not list(module.children())]
    first = leaves[0]
    if not isinstance(first, (nn.Linear, nn.Embedding)):
        raise bad(
            f'the model "{name}", whose first layer is a {type(first).__name__}',
            "a module alone whose first layer is an nn.Linear or an nn.Embedding",
            "return model, loss, make_batch",
        )

    def make_batch(rows: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if isinstance(first, nn.Linear):
            return torch.randn(rows, first.in_features, generator=generator)
        shape = (rows, GUESSED_POSITIONS)
        return torch.randint(first.num_embeddings, shape, generator=generator)

    return make_batch


@contextmanager
def explained(
    name: str, doing: str, what: str = "the model", returns: str = RETURNS
) -> Generator[None]:
    """Any error of the user's code is an InputError, with the line of the file that raised it."""
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        place = place_of(error, name)
        raise bad(
            f'{what} "{name}"; {doing} gives {type(error).__name__}: {error} ({place})',
            returns,
            f"the same command, once {place.partition(',')[0]} is corrected",
        ) from error


def place_of(error: BaseException, name: str) -> str:
    """The last line of the user's file that the error passed; if it has none, the file alone."""
    frames = traceback.extract_tb(error.__traceback__)
    file = Path(name.rpartition(":")[0]).name
    own = [frame for frame in frames if Path(frame.filename).name == file]
    if file.endswith(".py") and not own:  # it does not parse, or `build` wants arguments
        return file
    last = (own or frames)[-1]
    return f"{Path(last.filename).name}, line {last.lineno}"


# --- a user's model in a run ----------------------------------------------------------------------

ROWS = 2  # of the batch that is tried; batch normalisation needs more than one


@dataclass(frozen=True)
class UserConfig:
    """A user's model, and its sizes.

    vocabulary  numbers of tokens: of its logits, or else of the run's text
    sequence    positions of a training sequence
    parameters  a shared one counts once
    multiplied  parameters outside of embeddings
    layers      at least
    """

    name: str
    seed: int
    vocabulary: int
    sequence: int
    parameters: int
    multiplied: int
    layers: int = 1

    @property
    def loss(self) -> Loss:
        return partial(_loss, self.name, self.seed)

    @property
    def numbers(self) -> dict[str, Any]:
        """The sizes by the keys of the configuration's section [model]."""
        hidden = ("multiplied", "name", "seed")
        return {k: v for k, v in asdict(self).items() if k not in hidden}

    def build(self) -> nn.Module:
        """The model with its weights, on the CPU: nobody knows whether it can be made without."""
        with torch.device("cpu"):
            return _found(self.name, self.seed).make()

    def fill(self, seed: int) -> None:
        """None: the model is made with its weights."""

    @property
    def flops_per_token(self) -> int:
        return 6 * self.multiplied


def read(name: str, sequence: int, vocabulary: int, seed: int) -> UserConfig:
    """The sizes of the model, which is tried on a batch of text, or raises InputError."""
    found = _found(name, seed)
    model, batch = found.build(), gpt.random_text(ROWS, sequence, vocabulary, seed)
    doing = f"its loss of text [{ROWS}, {sequence}] with numbers below {vocabulary:,}"
    with torch.no_grad():
        with explained(name, doing):
            found.loss(model, batch)
        size = _logits_size(model, batch["inputs"])
    multiplied = {
        p: p.numel()
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for p in module.parameters(recurse=False)
    }
    count = sum(p.numel() for p in model.parameters())
    return UserConfig(name, seed, size or vocabulary, sequence, count, sum(multiplied.values()))


@cache
def _found(name: str, seed: int) -> Trainable:
    found = find(name, seed, make_batch=lambda *_: None)  # a run has its own
    return replace(found, loss=gpt.loss) if found.loss is own_loss else found


def _loss(name: str, seed: int, model: nn.Module, batch: Any) -> Tensor:
    return _found(name, seed).loss(model, batch)


def _logits_size(model: nn.Module, tokens_BT: Tensor) -> int:
    """The vocabulary of the model's logits; 0 for a model that returns something else."""
    for inputs in (tokens_BT[:, :1], tokens_BT):
        try:
            out = model(inputs)
        except Exception:  # noqa: BLE001  a model that needs more than tokens
            return 0
        logits = getattr(out, "logits", out)
        if not isinstance(logits, Tensor) or logits.shape[:-1] != inputs.shape:
            return 0
    return logits.shape[-1]
