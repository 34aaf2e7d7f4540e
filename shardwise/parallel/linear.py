"""this file is large linear layers: their products by the library that is faster, and in place.

    forward     x, weight, bias ---> y       products.py says by which library
    backward    gy, weight --------> gx      the same
                gy, x -------------> gW      new, for autograd; or, where there is a sink,
                        '----------> sink    written or added where gradients are kept

Of 33M parameters the sink saves 130 MB to write and to read for each microbatch: it is for steps of
several (of one, the node costs what the copy does).  Autograd still counts the uses: the weight's
own node comes last, with nothing to add where all of it has been written, and calls its hooks all
the same (torch 2.8 and newer).  ("Gradient accumulation fusion" in Megatron-LM.)

A layer keeps its class, its forward and its hooks: before it computes, its input is marked, and the
product that meets the mark is ours.  Small weights, a weight whose gradient somebody else looks at,
autocast, function transforms, `torch.autograd.grad` and gradients that are differentiated in turn
go autograd's way.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Elements from which on a weight is worth it: below, the node costs more than the copy.
LEAST = 2**16

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # products.py


class Sink(Protocol):
    """The owner of the gradients."""

    def product(self, p: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Add left^T right, of left [N, out] and right [N, in], to the gradient of `p`."""
        ...

    def put_off(self, p: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """The same where the pass is for others than `p`: for later, if there is a later."""
        ...


def take_over(
    model: nn.Module, linear: Linear, sink: Sink | None, sizes: Mapping[nn.Parameter, int]
) -> None:
    """Hook the linear layers of `model` whose weights are in `sizes`, with enough elements.

    Without a sink gradients are autograd's, and nothing is hooked unless `linear` is another
    product than torch's.
    """
    if sink is None and linear is functional.linear:
        return
    for module in model.modules():
        weight = module._parameters.get("weight")
        if type(module) is nn.Linear and weight is not None and sizes.get(weight, 0) >= LEAST:
            module.register_forward_pre_hook(_Layer(weight, linear, sink).mark)


class _Layer:
    """A layer with such a weight."""

    def __init__(self, weight: nn.Parameter, linear: Linear, sink: Sink | None) -> None:
        self.weight, self.linear, self.sink = weight, linear, sink

    def mark(self, module: nn.Module, args: Any) -> Any:
        """The hook: the input marked, where the product is to be ours."""
        x = args[0] if len(args) == 1 else None
        return (_Marked.of(x, self),) if type(x) is Tensor and self._ours(module, x) else None

    def _ours(self, module: nn.Module, x: Tensor) -> bool:
        """Whether the layer is as it was, and nobody else waits for its weight's gradient."""
        weight = self.weight
        if module._parameters.get("weight") is not weight or x.dtype != weight.dtype:
            return False
        transformed = torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling()
        if transformed or torch._C._is_any_autocast_enabled():
            return False
        if self.sink is None:
            return weight.dtype == torch.float32
        trained = weight.requires_grad and torch.is_grad_enabled()
        watched = weight._backward_hooks or len(weight._post_accumulate_grad_hooks or ()) > 1
        return trained and not watched

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Of shapes [..., in], [out, in] and [out]."""
        return _Linear.apply(x, weight, bias, self.linear, self.sink)


class _Marked(Tensor):
    """An input on its way into its layer; to all but that layer's product a tensor like others."""

    layer: _Layer
    plain: Tensor

    @staticmethod
    def of(x: Tensor, layer: _Layer) -> "_Marked":
        """`x`, marked as an input of `layer`."""
        marked = x.as_subclass(_Marked)
        marked.layer, marked.plain = layer, x
        return marked

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is functional.linear and len(args) == 3 and type(args[0]) is _Marked:
                x = args[0]
                if args[1] is x.layer.weight:
                    return x.layer.product(x.plain, args[1], args[2])
            return func(*args, **kwargs or {})


class _Linear(torch.autograd.Function):
    """A linear layer's product, and on the way back the gradients of what it was made from."""

    puts_off = 1  # which of its edges leads to what is put off (backward.py)

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear, sink: Sink | None
    ) -> Tensor:
        """X [..., in], weight [out, in] and bias [out] -> [..., out]."""
        ctx.parameter = weight  # what is saved may come back as another tensor
        ctx.linear, ctx.sink = linear, sink
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias).detach()  # no view: its reader may work in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The input's first; nothing by autograd for a weight whose gradient the sink takes."""
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias, *_ = ctx.needs_input_grad
        in_turn = torch.is_grad_enabled()  # to be differentiated in turn
        linear = functional.linear if in_turn else ctx.linear
        left, right = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = linear(left, weight.t(), None).view(x.shape) if to_x else None
        dbias = left.sum(0) if to_bias else None
        take = None if in_turn or not to_weight else _taker(ctx.sink, ctx.next_functions[1][0])
        if take is not None:
            take(ctx.parameter, left, right)
        dweight = left.t() @ right if to_weight and take is None else None
        return dx, dweight, dbias, None, None


def _taker(sink: Sink | None, end: Any) -> Callable[..., None] | None:
    """What takes the gradient whose end in this backward pass is that node, if not autograd."""
    if sink is None:
        return None
    try:
        kept = torch._C._will_engine_execute_node(end)
    except RuntimeError:  # it is asked for, by torch.autograd.grad
        return None
    return sink.product if kept else sink.put_off
