"""Row-parallel linear layers, and hooks that gather or shard inputs and outputs of modules.

A row-parallel layer has sharded inputs: each rank computes a partial sum without the bias, and the
bias is added once, to the sum over the ranks.  As in linear.py, hooks do this, before the user's
own hooks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.layouts.uneven import Cut
from shardwise.techniques.tensor.linear import Stream


def rows(module: nn.Module, stream: Stream, fresh: bool) -> None:
    """Hook a row-parallel layer: sum its outputs over the ranks, then add the bias once.

    `fresh`: the layer does not read its output again, so the output may be overwritten.
    """
    holder = _Bias()
    module.register_forward_pre_hook(holder.remove)
    after = partial(_after_rows, stream, holder, fresh)
    module.register_forward_hook(after, prepend=True, always_call=True)


class _Bias:
    """The bias of a layer, removed while each rank computes its partial sum."""

    def __init__(self) -> None:
        self.bias: nn.Parameter | None = None

    def remove(self, module: nn.Module, args: Any) -> None:
        """Pre-hook: the layer computes without its bias."""
        bias = module._parameters.get("bias")
        if bias is None:
            return
        self.bias = bias
        # other classes may add the bias themselves (transformers' Conv1D)
        zeros = None if type(module) is nn.Linear else torch.zeros_like(bias.detach())
        module._parameters["bias"] = zeros  # pyright: ignore[reportArgumentType]

    def put_back(self, module: nn.Module) -> nn.Parameter | None:
        bias, self.bias = self.bias, None
        if bias is not None:
            module._parameters["bias"] = bias
        return bias


def _after_rows(
    stream: Stream, holder: _Bias, fresh: bool, module: nn.Module, _: Any, y: Tensor | None
) -> Tensor | None:
    bias = holder.put_back(module)
    if y is None:  # the layer raised an error
        return None
    y = stream.leave(y, fresh)
    return y if bias is None else y + bias.to(y.dtype)  # 16 bits under autocast


def gather_output(module: nn.Module, stream: Stream, cut: Cut) -> None:
    """Hook a layer so that its output is gathered, equal on all ranks; call before `columns`."""

    def after(_: nn.Module, __: Any, y: Tensor) -> Tensor:
        return stream.join(y, cut)

    module.register_forward_hook(after, prepend=True)


def split_input(module: nn.Module, stream: Stream, cut: Cut) -> None:
    """Hook a row-parallel layer so that it takes its shard of a replicated input."""
    change_input(module, partial(stream.take, cut=cut))


def change_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Hook a module so that `change` is applied to its first tensor argument."""

    def before(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = next(k for k, value in kwargs.items() if isinstance(value, Tensor))
        return args, kwargs | {name: change(kwargs[name])}

    module.register_forward_pre_hook(before, with_kwargs=True)


def gather_input(module: nn.Module, stream: Stream) -> None:
    """Hook a module so that its first tensor argument is gathered along the sequence.

    Its other arguments are replicated.  Each rank computes a part of their gradients, which are
    summed over the ranks.
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
