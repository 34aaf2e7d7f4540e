"""Values for buffers that a model made on the meta device does not have yet."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.core.applied import Fill
from shardwise.core.errors import bad
from shardwise.engine.default_fill import initialiser
from shardwise.techniques.data.buffers import renew_buffers


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
