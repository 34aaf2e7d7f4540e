"""Initial weights of a model on the meta device, if the user gives no `fill`.

Each module's own initialisation runs on real memory, one module at a time: the `_init_weights` of
the model around it (a convention of transformers and of nanoGPT), else its `reset_parameters`.  The
random state is made from the seed and the module's name, so all plans begin with the same weights.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from shardwise.core.errors import bad
from shardwise.techniques.data.flat.flat_parameter import Fill


@dataclass(frozen=True)
class _Owner:
    """A module with parameters of its own: their full shapes, and what initialises such a module.

    Later, its parameters are shards.
    """

    prefix: str
    module: nn.Module
    shapes: dict[str, torch.Size]
    around: Callable[[nn.Module], Any] | None


def default_fill(model: nn.Module, seed: int) -> Fill:
    """Initial weights by the modules' own functions.

    It raises InputError for a parameter that they do not write.
    """
    owners: dict[str, _Owner] = {}
    for prefix, module in model.named_modules():
        shapes = {name: p.shape for name, p in module.named_parameters(recurse=False)}
        owner = _Owner(prefix, module, shapes, initialiser(model, prefix))
        owners |= {f"{prefix}.{name}" if prefix else name: owner for name in shapes}

    def fill(name: str, tensor: Tensor) -> None:
        tensor.copy_(_initial(owners[name], name, seed))

    return fill


def initialiser(model: nn.Module, prefix: str) -> Callable[[nn.Module], Any] | None:
    """The `_init_weights` of the innermost module around `prefix` that has one."""
    parts = prefix.split(".") if prefix else []
    for count in range(len(parts), -1, -1):
        around = model.get_submodule(".".join(parts[:count]))
        found = getattr(around, "_init_weights", None)
        if callable(found) and _takes_module(found):
            return torch.no_grad()(found)
    return None


def _takes_module(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind("module")
    except (TypeError, ValueError):
        return False
    return True


def _initial(owner: _Owner, name: str, seed: int) -> Tensor:
    """The initial values of one parameter of the module, in fp32."""
    key = name.rpartition(".")[2]
    for initialise in _ways(owner):
        made = {
            k: nn.Parameter(torch.full(shape, math.nan, dtype=torch.float32, device="cpu"))
            for k, shape in owner.shapes.items()
        }
        twin = _twin(owner.module, made)
        with torch.random.fork_rng(devices=[]):
            # not torch.manual_seed, which would seed the GPUs' generators too, for good
            torch.default_generator.manual_seed(crc32(f"{seed}/{owner.prefix}".encode()))
            initialise(twin)
        now = twin._parameters[key]
        values = made[key].detach() if now is None else now.detach()
        if not values.isnan().any():
            return values
    kind = type(owner.module).__name__
    raise bad(
        f"parameter {name} on the meta device, which no function of its {kind} initialises",
        f"a method reset_parameters of {kind}, an _init_weights(module) of the model, real weights "
        "on rank 0, or sw.parallelize with fill=",
        f"def reset_parameters(self): self.{key}.data.normal_(0, 0.02)",
    )


def _ways(owner: _Owner) -> Iterator[Callable[[nn.Module], Any]]:
    if owner.around is not None:
        yield owner.around
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(owner.module, name, None)):
            yield lambda twin, name=name: getattr(twin, name)()


def _twin(module: nn.Module, parameters: dict[str, nn.Parameter]) -> nn.Module:
    """A copy of the module with these parameters, and buffers that may be written to."""
    twin = type(module).__new__(type(module))
    twin.__dict__ = dict(module.__dict__)
    twin._parameters = {key: parameters.get(key) for key in module._parameters}
    twin._buffers = {key: None if b is None else b.clone() for key, b in module._buffers.items()}
    return twin
