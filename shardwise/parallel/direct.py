"""this file is the gradient of a linear layer's weight, computed where it is kept.

    autograd    gy, x --> dW, new --> weight.grad --> copied or added to the flat gradient
    here        gy, x --> the flat gradient: one product that writes it, or adds to it

Of 33M parameters that is 130 MB less to write and to read for each microbatch: for steps of several
(of one, the node costs what the copy does).  A hook behind the layer puts a node of ours in the
place of autograd's, which is dropped.  Autograd still counts the uses: the weight's own node comes
last, with nothing to add where all of it has been written, and calls its hooks all the same (torch
2.8 and newer).

Small weights, a weight whose gradient somebody else looks at, autocast, `torch.autograd.grad` and
gradients that are differentiated in turn go autograd's way.  ("Gradient accumulation fusion" in
Megatron-LM.)
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules import module as modules

#: Elements from which on a weight is worth it: below, the node costs more than the copy.
LEAST = 2**16


class Sink(Protocol):
    """The owner of the gradients."""

    def product(self, p: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Add left^T right, of left [N, out] and right [N, in], to the gradient of `p`."""
        ...

    def put_off(self, p: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """The same where the pass is for others than `p`: for later, if there is a later."""
        ...


def write_directly(model: nn.Module, sink: Sink, sizes: Mapping[nn.Parameter, int]) -> None:
    """Hook the linear layers of `model` whose weights are in `sizes`, with enough elements.

    The hook comes before all others, which go on with what the layer gives.
    """
    for module in model.modules():
        weight = module._parameters.get("weight")
        if type(module) is nn.Linear and weight is not None and sizes.get(weight, 0) >= LEAST:
            layer = _Layer(weight, sink)
            layer.hook = module.register_forward_hook(layer.after, prepend=True).id


class _Layer:
    """A layer with such a weight."""

    def __init__(self, weight: nn.Parameter, sink: Sink) -> None:
        self.weight, self.sink = weight, sink
        self.hook = -1

    def after(self, module: nn.Module, args: Any, y: Tensor) -> Tensor | None:
        """The hook: `y` as it is, but that its gradient goes through our node."""
        if not (torch.is_grad_enabled() and args and self._untouched(module)):
            return None
        x, bias = args[0], module._parameters["bias"]
        if not type(x) is type(y) is Tensor or not x.dtype == y.dtype == self.weight.dtype:
            return None
        return _Linear.apply(y.detach(), x, self.weight, bias, self.sink)

    def _untouched(self, module: nn.Module) -> bool:
        """Whether the layer is as it was, and nobody else waits for its weight's gradient."""
        weight = self.weight
        if module._parameters["weight"] is not weight or not weight.requires_grad:
            return False
        first = next(iter(module._forward_hooks)) == self.hook and not modules._global_forward_hooks
        watched = weight._backward_hooks or len(weight._post_accumulate_grad_hooks or ()) > 1
        return first and not watched and "forward" not in vars(module)


class _Linear(torch.autograd.Function):
    """`y`, which a linear layer made from `x`; on the way back its gradients."""

    puts_off = 2  # which of its edges leads to what is put off (backward.py)

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, sink: Sink
    ) -> Tensor:
        """The same memory, but no view: its reader may work in place."""
        del bias  # which has been added, and is here for its gradient
        ctx.parameter, ctx.sink = weight, sink  # what is saved may come back as another tensor
        ctx.save_for_backward(x, weight)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The input's first; nothing by autograd for a weight whose gradient the sink takes."""
        x, weight = ctx.saved_tensors
        _, to_x, to_weight, to_bias, _ = ctx.needs_input_grad
        left, right = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = (left @ weight).view(x.shape) if to_x else None
        dbias = left.sum(0) if to_bias else None
        if to_weight and torch.is_grad_enabled():  # to be differentiated in turn
            return None, dx, left.t() @ right, dbias, None
        try:
            kept = torch._C._will_engine_execute_node(get_gradient_edge(ctx.parameter).node)
        except RuntimeError:  # it is asked for, by torch.autograd.grad
            return None, dx, left.t() @ right, dbias, None
        if to_weight:
            (ctx.sink.product if kept else ctx.sink.put_off)(ctx.parameter, left, right)
        return None, dx, None, dbias, None
