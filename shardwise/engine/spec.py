"""The shapes of buffers and of the optimizer's state, for the formulas of memory."""

import torch
from torch import Tensor, nn

from shardwise.core.model_spec import BufferShape
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from shardwise.engine.precision import HALF
from shardwise.prediction.stored_bytes import OptimizerShape


def buffer_shapes(model: nn.Module) -> tuple[BufferShape, ...]:
    """The shapes of all buffers of `model`, real or on meta."""
    return tuple(
        BufferShape(name, tuple(b.shape), dtype_name(b.dtype)) for name, b in model.named_buffers()
    )


def optimizer_shape(spec: OptimizerSpec, dtype: torch.dtype) -> OptimizerShape:
    """The states of the optimizer for weights of `dtype`, from one step on a matrix [2, 3].

    This works for any class and options. (Assumes that groups with other options keep the same.)
    """
    probe = nn.Parameter(torch.zeros(2, 3, dtype=torch.float32 if dtype in HALF else dtype))
    optimizer = spec.build([("", probe)])
    probe.grad = torch.ones_like(probe)
    optimizer.step()
    kept = [value for value in optimizer.state[probe].values() if isinstance(value, Tensor)]
    scalars = [value for value in kept if value.dim() == 0]
    like = [value for value in kept if value.shape == probe.shape]
    factored = len(like) + len(scalars) < len(kept)
    return OptimizerShape(len(like), sum(value.nbytes for value in scalars), factored)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in a shape, such as "float32"."""
    return str(dtype).removeprefix("torch.")
