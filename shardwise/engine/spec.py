"""The shapes of an engine's model and optimizer, for the formulas of bytes and memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.model_spec import BufferShape, ModelShape, ParamShape, UnitShape
from shardwise.engine.optimizer import HALF
from shardwise.engine.optimizer_spec import OptimizerSpec
from shardwise.parallel.data.flat_parameter import Flat
from shardwise.prediction.memory import OptimizerShape


def model_shape(engine: Any) -> ModelShape:
    """The units in the order in which they are used, and the buffers.

    The order, and how often each is called, are learnt in the first training pass; until then they
    are taken to be used once, in the order in which they are defined.
    """
    units: list[UnitShape] = []
    trained_before = False  # whether the backward pass gets as far as here
    for unit in engine.data.units.order:
        trained_before = trained_before or bool(unit.trained)
        params = _params(unit.groups)
        if engine.staging is not None:
            uses, again = engine.passes.gathers(unit)
        else:
            uses, again = engine.data.uses(unit)
            again *= trained_before
        units.append(UnitShape(unit.name, params, uses, again))
    return ModelShape(tuple(units), buffer_shapes(engine.model))


def _params(groups: Sequence[Flat]) -> tuple[ParamShape, ...]:
    return tuple(
        ParamShape(name, tuple(shape), dtype_name(flat.dtype), flat.trained, layout)
        for flat in groups
        for name, shape, layout in zip(flat.names, flat.shapes, flat.layouts, strict=True)
    )


def buffer_shapes(model: nn.Module) -> tuple[BufferShape, ...]:
    """The shapes of all buffers of `model`, real or on meta."""
    return tuple(
        BufferShape(name, tuple(b.shape), dtype_name(b.dtype)) for name, b in model.named_buffers()
    )


def optimizer_shape(recipe: OptimizerSpec, dtype: torch.dtype) -> OptimizerShape:
    """What the optimizer keeps of weights of `dtype`, learnt from one parameter of two elements.

    So any class is known, with its options. (Options of single groups are taken to keep alike.)
    """
    probe = nn.Parameter(torch.zeros(2, dtype=torch.float32 if dtype in HALF else dtype))
    optimizer = recipe.build([("", probe)])
    probe.grad = torch.ones_like(probe)
    optimizer.step()
    kept = [value for value in optimizer.state[probe].values() if isinstance(value, Tensor)]
    scalars = [value for value in kept if value.dim() == 0]
    return OptimizerShape(len(kept) - len(scalars), sum(value.nbytes for value in scalars))


def dtype_name(dtype: torch.dtype) -> str:
    """The name as shapes have it, such as "float32"."""
    return str(dtype).removeprefix("torch.")
