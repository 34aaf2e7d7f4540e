"""Layers of rows, and what is changed on the way into a module or out of it.

A layer of rows takes cut inputs; each rank computes a part of the sum, without the bias, which is
added once, to the whole.  As in linear.py, hooks do it, ahead of the user's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.uneven import Cut
from shardwise.parallel.tensor.linear import Stream


def rows(module: nn.Module, stream: Stream, fresh: bool) -> None:
    """Hook a layer whose inputs are cut: its outputs are summed, then the bias is added, once.

    `fresh`: it does not look at its outputs again.
    """
    held = _Bias()
    module.register_forward_pre_hook(held.put_aside)
    after = partial(_after_rows, stream, held, fresh)
    module.register_forward_hook(after, prepend=True, always_call=True)


class _Bias:
    """A layer's bias, replaced by nothing while each rank computes a part of the sum."""

    def __init__(self) -> None:
        self.bias: nn.Parameter | None = None

    def put_aside(self, module: nn.Module, args: Any) -> None:
        """Before the layer: it computes without its bias."""
        bias = module._parameters.get("bias")
        if bias is None:
            return
        self.bias = bias
        # other classes of layers may add it themselves (transformers' Conv1D)
        nothing = None if type(module) is nn.Linear else torch.zeros_like(bias.detach())
        module._parameters["bias"] = nothing  # pyright: ignore[reportArgumentType]

    def put_back(self, module: nn.Module) -> nn.Parameter | None:
        bias, self.bias = self.bias, None
        if bias is not None:
            module._parameters["bias"] = bias
        return bias


def _after_rows(
    stream: Stream, held: _Bias, fresh: bool, module: nn.Module, _: Any, y: Tensor | None
) -> Tensor | None:
    bias = held.put_back(module)
    if y is None:  # it raised
        return None
    y = stream.leave(y, fresh)
    return y if bias is None else y + bias


def gather_output(module: nn.Module, stream: Stream, cut: Cut) -> None:
    """Hook a layer so that its outputs are whole again, alike on every rank; before `columns`."""

    def after(_: nn.Module, __: Any, y: Tensor) -> Tensor:
        return stream.join(y, cut)

    module.register_forward_hook(after, prepend=True)


def split_input(module: nn.Module, stream: Stream, cut: Cut) -> None:
    """Hook a layer of rows so that it takes its part of inputs that are whole on every rank."""
    change_input(module, partial(stream.take, cut=cut))


def change_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Hook a module so that `change` is made to its first tensor argument."""

    def before(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = next(k for k, value in kwargs.items() if isinstance(value, Tensor))
        return args, kwargs | {name: change(kwargs[name])}

    module.register_forward_pre_hook(before, with_kwargs=True)


def gather_input(module: nn.Module, stream: Stream) -> None:
    """Hook a module so that its first tensor argument, a shard, is the whole sequence.

    The others are whole on every rank.  What is learnt of them here each rank learns in part: their
    gradients are summed.
    """

    def others(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        spread = [_spread(stream, x) for x in args[1:]]
        first = None if args else next(k for k, x in kwargs.items() if isinstance(x, Tensor))
        named = {k: x if k == first else _spread(stream, x) for k, x in kwargs.items()}
        return (*args[:1], *spread), named

    module.register_forward_pre_hook(others, with_kwargs=True)
    change_input(module, stream.gather)


def _spread(stream: Stream, x: Any) -> Any:
    return stream.spread(x) if isinstance(x, Tensor) and x.requires_grad else x
