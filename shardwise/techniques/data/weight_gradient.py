"""The weight gradient of a linear layer as a product of its own, added to the flat gradient.

    forward     x, W, b ---> y
    backward    gy, W -----> gx
                gy, x -----> sink     gW = gy^T x, added in place; under zero bubble, in W

Autograd makes a new tensor for each weight gradient, which is then added to the flat gradient. For
33M parameters the sink saves writing and reading 130 MB for each microbatch after the first, so it
is used in steps of several microbatches. Autograd still counts the uses of a weight: its
AccumulateGrad node runs last, gets nothing if the sink has everything, and calls its hooks.
("Gradient accumulation fusion" in Megatron-LM.)

A layer keeps its class, its forward and its hooks: a function mode, which is on while the layer's
forward runs, replaces the product with its weight by our node. Autograd computes the layer itself
under autocast, tracing, compilers and function transforms, for small matrices, for a weight with a
user's gradient hook, for `torch.autograd.grad`, and for gradients that are differentiated again.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwise.core.tools.hook import Hook, others_after
from shardwise.techniques.data.unit_hooks import Data

#: The least elements of a weight: for fewer the node costs more than it saves.
LEAST: Final = 2**16


def take_over(model: nn.Module, sink: Data, sizes: Mapping[nn.Parameter, int]) -> None:
    """Hook the linear layers of `model` whose weights have `LEAST` elements or more by `sizes`."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or type(module) is not nn.Linear or not weight.requires_grad:
            continue
        if sizes.get(weight, 0) >= LEAST:
            product = _Product(weight, sink)
            before, after = Hook(sink, product.enter), Hook(sink, product.leave)
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after, always_call=True)


class _Product:
    """A linear layer that our node computes."""

    def __init__(self, weight: nn.Parameter, sink: Data) -> None:
        self.weight, self.sink = weight, sink
        self.entered: list[_OwnNode] = []

    def enter(self, *_: object) -> None:
        if torch.is_grad_enabled() and _ordinary():
            self.entered.append(_OwnNode(self))
            self.entered[-1].__enter__()

    def leave(self, *_: object) -> None:
        if self.entered:
            self.entered.pop().__exit__(None, None, None)

    def answer(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """The product, of shapes [..., in], [out, in] and [out]; None if autograd computes it."""
        ours = weight is self.weight and type(x) is Tensor and x.dtype == weight.dtype
        if not ours or x.layout != torch.strided or x.is_nested or not _ordinary():
            return None
        if not torch.is_grad_enabled() or x.is_inference() or _watched(self.weight):
            return None
        return _Linear.apply(x, weight, bias, self.sink)


class _OwnNode(TorchFunctionMode):
    def __init__(self, layer: _Product) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        y = self.layer.answer(*args, **kwargs) if func is functional.linear else None
        return func(*args, **kwargs) if y is None else y


def _ordinary() -> bool:
    """Whether autograd alone is active: no autocast, tracing, compiler, or function transform."""
    return not (
        torch._C._is_any_autocast_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
        or torch.compiler.is_compiling()
        or forward_ad._current_level >= 0
    )


def _watched(weight: nn.Parameter) -> bool:
    return bool(weight._backward_hooks or others_after(weight))


class _Linear(torch.autograd.Function):
    """A linear layer's product; backward computes the gradients of its inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: Data) -> Tensor:
        """Of x [..., in], weight [out, in] and bias [out]: [..., out]."""
        ctx.parameter = weight  # saved tensors may be unpacked as other objects
        ctx.sink = sink
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        # not a view: the next layer may work in place
        return functional.linear(x, weight, bias).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """The input's gradient first; None for a weight whose gradient goes to the sink."""
        if grad is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias, *_ = ctx.needs_input_grad
        twice = torch.is_grad_enabled()  # the gradient will be differentiated again
        left, right = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = torch.mm(left, weight).view(x.shape) if to_x else None
        dbias = left.sum(0) if to_bias else None
        in_sink = to_weight and not twice and _to_sink(ctx, left, right)
        dweight = torch.mm(left.t(), right) if to_weight and not in_sink else None
        return dx, dweight, dbias, None


def _to_sink(ctx: Any, left: Tensor, right: Tensor) -> bool:
    """Give the weight's gradient to the sink; True if autograd need not compute it."""
    accumulated = _is_accumulated(ctx.next_functions[1][0])
    if accumulated is None or (accumulated and _watched(ctx.parameter)):
        return False
    if accumulated:
        ctx.sink.product(ctx.parameter, left, right)
    return True


def _is_accumulated(node: Any) -> bool | None:
    """Whether this pass runs the AccumulateGrad `node`; None under torch.autograd.grad."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return None
