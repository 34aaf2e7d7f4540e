"""Initial weights of a model on the meta device without `fill`, its buffers, and the cut of
parameters to layouts.

Each module's own initialisation runs on real memory, one module at a time: the `_init_weights` of
the model around it (a convention of transformers and of nanoGPT), else its `reset_parameters`.  The
random state is made from the seed and the module's name, so all plans begin with the same weights.

Parameters that another rank of the pipeline holds are dropped with the layers of its stages
(techniques/pipeline/trace/placeholders.py).
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from shardwise.comm.move import broadcast, part
from shardwise.comm.unchanged import renew_buffers
from shardwise.comm.world import Axis, World
from shardwise.core.applied import Fill
from shardwise.core.errors import bad
from shardwise.core.layouts.param_layout import AxisLayout, Groups, Layout


@dataclass(frozen=True)
class _Owner:
    """A module with full shapes, for its parameters will be shards, and its initialiser."""

    prefix: str
    module: nn.Module
    shapes: dict[str, torch.Size]
    around: Callable[[nn.Module], Any] | None


def default_fill(model: nn.Module, seed: int) -> Fill:
    """The modules' own functions. Raises InputError for a parameter that they do not write."""
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
    twin = type(module).__new__(type(module))
    twin.__dict__ = dict(module.__dict__)
    twin._parameters = {key: parameters.get(key) for key in module._parameters}
    twin._buffers = {key: None if b is None else b.clone() for key, b in module._buffers.items()}
    return twin


# --- the cut of parameters to their layouts -------------------------------------------------------


def agree(tensors: Iterable[Tensor], axis: Axis, device: torch.device) -> None:
    """Broadcast the values of the axis's first rank, one tensor after another on `device`."""
    for t in tensors if axis.size > 1 else ():
        if not t.is_meta and t.numel():
            together = t.data.to(device).contiguous()
            broadcast(together, axis)
            t.data.copy_(together)


def cut_to(model: nn.Module, layouts: Mapping[str, AxisLayout], axis: Axis) -> None:
    """Keep this rank's part of each parameter, by the layouts on one axis."""
    params = dict(model.named_parameters())
    for name, on in layouts.items():
        p = params[name]
        if on.cut is None:
            continue
        if p.is_meta:
            shape = on.cut.shape(p.shape, axis.rank)
            p.data = torch.empty(shape, dtype=p.dtype, device="meta")
        else:
            p.data = part(p.data, on.cut, axis.rank)


def fill_part(
    fill: Fill, name: str, layout: Layout, here: Mapping[str, int], tensor: Tensor
) -> None:
    """Fill this rank's part of the parameter `name` with a function that fills all of it."""
    cuts = layout.cuts(here)
    whole = tensor.new_empty(layout.full_shape(tensor.shape)) if cuts else tensor
    fill(name, whole)
    for cut, rank in cuts:
        whole = part(whole, cut, rank)
    if cuts:
        tensor.copy_(whole)


def open_sums(world: World, axis: str, every: Iterable[Groups]) -> dict[Groups, Axis]:
    """The axis over which each of these groups of ranks of `axis` sums; called by all ranks."""
    ranks = range(world.axis(axis).size)
    found: dict[Groups, Axis] = {}
    for groups in sorted({*every}):
        inside = {rank for group in groups for rank in group}
        alone = [(rank,) for rank in ranks if rank not in inside]
        found[groups] = world.within(axis, [*groups, *alone])
    return found


# --- buffers --------------------------------------------------------------------------------------


def materialise(model: nn.Module, device: torch.device, fill: Fill | None = None) -> None:
    """Give buffers that are on the meta device memory on `device` and their values.
    The value comes from `fill`, if its attribute `names` has the buffer's name (sw.fill_from), else
    from the module's own `reset_buffers` or `reset_running_stats`, else, in a model of
    `transformers`, from the `_init_weights` of the module around it.  Buffers that were made under
    inference mode become normal tensors.  Raises InputError for a buffer that none of them sets.
    """
    renew_buffers(model.modules())
    for prefix, module in model.named_modules():
        meta = {name: b for name, b in module.named_buffers(recurse=False) if b.is_meta}
        if not meta:
            continue
        made = {name: torch.zeros_like(b, device=device) for name, b in meta.items()}
        for name, fresh in made.items():
            module.register_buffer(name, fresh, name not in module._non_persistent_buffers_set)
        began = {name: fresh._version for name, fresh in made.items()}
        if (reset := _reset_of(model, prefix, module)) is not None:
            reset()
        for name, fresh in made.items():
            full, now = f"{prefix}.{name}" if prefix else name, getattr(module, name)
            if fill is not None and full in getattr(fill, "names", ()):
                fill(full, now)
            elif now is fresh and fresh._version == began[name]:
                raise _valueless(full, module)


def _reset_of(model: nn.Module, prefix: str, module: nn.Module) -> Callable[[], Any] | None:
    for name in ("reset_buffers", "reset_running_stats"):
        if callable(reset := getattr(module, name, None)):
            return reset
    if not all(p.is_meta for p in module.parameters(recurse=False)):
        return None  # _init_weights would overwrite them
    around = initialiser(model, prefix)
    return None if around is None else partial(around, module)


def _valueless(name: str, module: nn.Module) -> Exception:
    kind = type(module).__name__
    return bad(
        f"the buffer {name} on the meta device, whose {kind} has nothing that sets its value",
        f"a method reset_buffers of {kind}, or weights that hold it (sw.fill_from)",
        f"def reset_buffers(self): self.{name.rpartition('.')[2]}.copy_(...)",
    )
