"""The shapes of buffers and of the optimizer's state, for the formulas of memory."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from shardwise.core.model_spec import BufferShape, ParamShape
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from shardwise.prediction.stored_bytes import HALF, PLAIN, OptimizerShape


def buffer_shapes(model: nn.Module) -> tuple[BufferShape, ...]:
    """The shapes of all buffers of `model`, real or on meta."""
    return tuple(
        BufferShape(name, tuple(b.shape), dtype_name(b.dtype)) for name, b in model.named_buffers()
    )


def optimizer_shape(spec: OptimizerSpec, params: Sequence[ParamShape]) -> OptimizerShape:
    """The states of the optimizer for trained parameters of `params`.

    This works for any class and options. (Assumes that groups of one class keep the same.)
    """
    if not params:
        return PLAIN
    members, default = spec.members, params[0].dtype

    def shape_of(number: int) -> OptimizerShape:
        first = next(k for k, member in enumerate(members) if member[1] is members[number][1])
        found = _shape(spec, first, default, whole=not members[number][1].by_element)
        return replace(found, group=number)

    own = {p.name: spec.number(p.name, len(p.shape)) for p in params}
    shapes = {number: shape_of(number) for number in {0, *own.values()}}
    others = {name: shapes[n] for name, n in own.items() if shapes[n] != shapes[0]}
    return replace(shapes[0], others=tuple(others.items()))


def _shape(spec: OptimizerSpec, group: int, dtype: str, *, whole: bool) -> OptimizerShape:
    """The states of a group's class, from one step on a matrix [2, 3] of that type."""
    wide = torch.float32 if dtype in HALF else getattr(torch, dtype)
    probe = nn.Parameter(torch.zeros(2, 3, dtype=wide, device="cpu"))
    optimizer = spec.alone(group, probe)
    probe.grad = torch.ones_like(probe)
    optimizer.step()
    kept = [value for value in optimizer.state[probe].values() if isinstance(value, Tensor)]
    scalars = [value for value in kept if value.dim() == 0]
    like = [value for value in kept if value.shape == probe.shape]
    factored = len(like) + len(scalars) < len(kept)
    return OptimizerShape(len(like), sum(value.nbytes for value in scalars), factored, whole)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in a shape, such as "float32"."""
    return str(dtype).removeprefix("torch.")
