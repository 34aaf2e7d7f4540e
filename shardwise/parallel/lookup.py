"""this file is the gradient of a large embedding, added to the rows that were looked up.

    autograd    gy [N, D], ids --> dW [V, D], zeros but for N rows --> copied or added where
                gradients are kept [V, D]
    here        gy [N, D], ids --> added to N rows there

A model of 8192 tokens and width 512 has 16.8 MB that are not made, cleared and added for each
microbatch.  A hook behind the layer puts a node of ours in the place of autograd's, which is
dropped.  Small tables, 16 bits, GPUs (where rows would be added in any order), a table whose
gradient somebody else looks at, and `torch.autograd.grad` go autograd's way.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

#: Elements from which on a table is worth it.
LEAST = 2**16


class Sink(Protocol):
    """The owner of the gradients."""

    def rows(self, p: nn.Parameter, ids: Tensor, grad: Tensor) -> None:
        """Add grad [N, D] to the rows ids [N] of the gradient of `p`."""
        ...


def add_rows_directly(model: nn.Module, sink: Sink, sizes: Mapping[nn.Parameter, int]) -> None:
    """Hook the embeddings of `model` whose tables are in `sizes`, with enough elements.

    The hook comes before all others, which go on with what the layer gives.
    """
    for module in model.modules():
        table = module._parameters.get("weight")
        if type(module) is nn.Embedding and table is not None and sizes.get(table, 0) >= LEAST:
            layer = _Layer(table, sink)
            layer.hook = module.register_forward_hook(layer.after, prepend=True).id


class _Layer:
    """A layer with such a table."""

    def __init__(self, table: nn.Parameter, sink: Sink) -> None:
        self.table, self.sink = table, sink
        self.hook = -1

    def after(self, module: nn.Embedding, args: Any, y: Tensor) -> Tensor | None:
        """The hook: `y` as it is, but that its gradient goes through our node."""
        if not (torch.is_grad_enabled() and args and self._untouched(module)):
            return None
        ids, options = args[0], (module.max_norm, module.scale_grad_by_freq, module.sparse)
        plain = type(ids) is type(y) is Tensor and options == (None, False, False)
        if not plain or y.device.type != "cpu" or y.dtype not in (torch.float32, torch.float64):
            return None
        return _Rows.apply(y.detach(), self.table, ids, module.padding_idx, self.sink)

    def _untouched(self, module: nn.Module) -> bool:
        """Whether the layer is as it was, and nobody else waits for its table's gradient."""
        table = self.table
        if module._parameters["weight"] is not table or not table.requires_grad:
            return False
        first = next(iter(module._forward_hooks)) == self.hook and not modules._global_forward_hooks
        watched = table._backward_hooks or len(table._post_accumulate_grad_hooks or ()) > 1
        transformed = torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling()
        return first and not watched and not transformed and "forward" not in vars(module)


class _Rows(torch.autograd.Function):
    """`y`, which was looked up in a table; on the way back the table's gradient."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, table: Tensor, ids: Tensor, padding: int | None, sink: Sink
    ) -> Tensor:
        """The same memory, but no view: its reader may work in place."""
        ctx.parameter, ctx.sink = table, sink
        ctx.count, ctx.padding = len(table), -1 if padding is None else padding
        ctx.save_for_backward(ids)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Nothing by autograd for a table whose gradient the sink takes."""
        (ids,) = ctx.saved_tensors
        try:
            own = torch._C._will_engine_execute_node(ctx.next_functions[1][0])
        except RuntimeError:  # it is asked for, by torch.autograd.grad
            own = None
        if own is None or torch.is_grad_enabled():  # or is to be differentiated in turn
            dense = torch.ops.aten.embedding_dense_backward
            return None, dense(grad, ids, ctx.count, ctx.padding, False), None, None, None
        if own:
            if ctx.padding >= 0:
                grad = grad.masked_fill((ids == ctx.padding).unsqueeze(-1), 0)
            ctx.sink.rows(ctx.parameter, ids.reshape(-1), grad.reshape(-1, grad.shape[-1]))
        return None, None, None, None, None
