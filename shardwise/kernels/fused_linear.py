"""Autograd nodes for linear layers, embeddings and norms.

    linear      forward     x, W, b ---> y      by the library that matmul.py chooses
                backward    gy, W -----> gx     the same
                            gy, x -----> gW     the same: a new tensor for autograd, or with a sink
                                    '--> sink   added to the flat gradient
    embedding   backward    gy, ids ---> sink   added to the N rows that were looked up
                                                (autograd adds a table of zeros with these rows)
    RMSNorm     both        x, w ------> y      one node, rms_norm.py

For 33M parameters the sink saves writing and reading 130 MB for each microbatch, if the library can
add in place.  It is used for linear layers in steps of several microbatches (for one, the node
costs as much as the copy), and for embeddings in every step.  Autograd still counts the uses of a
weight: its AccumulateGrad node runs last, gets nothing if the sink has everything, and calls its
hooks (torch 2.8 and newer).  ("Gradient accumulation fusion" in Megatron-LM.)

A layer keeps its class, its forward and its hooks.  A pre-hook marks the input of a linear layer or
a norm; the torch function that gets the marked input is replaced by our node.  After an embedding,
our node replaces autograd's.  Autograd computes the layer itself under autocast, tracing, compilers
and function transforms, for small norms and matrices, for a weight with a user's gradient hook, for
`torch.autograd.grad`, and for gradients that are differentiated again.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle

from shardwise.core.hook import Driver, Hook, others_after
from shardwise.kernels.input_cast import InputCast
from shardwise.kernels.matmul import BY_TORCH, Products
from shardwise.kernels.rms_norm import Norm

#: The least elements of a table, or of the input of a norm: for fewer the node costs more than it
#: saves.
LEAST = 2**16
#: The most numbers of rows for which a layer uses another library than torch: the first of passes
#: with gradients.  OneDNN keeps some 300 KiB of code for each shape, up to 1,024 shapes, and
#: generated text has a new one for each token.
MOST_LENGTHS = 16


class Sink(Driver, Protocol):
    """The owner of the gradients and of the hooks."""

    def product(self, p: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Add left^T right, of left [N, out] and right [N, in], to the gradient of `p`."""
        ...

    def put_off(self, p: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """The same, postponed: this half of the backward pass computes no gradient of `p`."""
        ...

    def rows(self, p: nn.Parameter, ids: Tensor, grad: Tensor) -> None:
        """Add grad [N, D] to the rows ids [N] of the gradient of `p`."""
        ...


def take_over(
    model: nn.Module,
    products: Products,
    norm: Norm | None,
    sink: Sink,
    sizes: Mapping[nn.Parameter, int],
    several: bool = False,
) -> list[RemovableHandle]:
    """Hook the layers of `model` whose weights are in `sizes`: norms, and large matrices.

    A linear layer is large if its weight has `products.least` elements, or `LEAST` elements in a
    dtype other than fp32.

    `norm`: the function that computes norms, if not torch.  `several`: steps have several
    microbatches, so gradients of linear layers go to the sink too.  The handles remove the hooks.
    """
    handles: list[RemovableHandle] = []
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or weight not in sizes:
            continue
        if type(module) is nn.RMSNorm and norm is not None:
            hook = Hook(sink, _Norm(weight, norm).mark)
            handles.append(module.register_forward_pre_hook(hook))
        elif type(module) is nn.Linear and sizes[weight] >= _least(weight, products):
            own = sink if several and weight.requires_grad else None
            if several or products.linear is not functional.linear:
                hook = Hook(sink, _Product(weight, products, own).mark)
                handles.append(module.register_forward_pre_hook(hook))
        elif type(module) is nn.Embedding and weight.requires_grad and sizes[weight] >= LEAST:
            lookup = _Lookup(weight, sink)
            handle = module.register_forward_hook(Hook(sink, lookup.after), prepend=True)
            lookup.hook = handle.id
            handles.append(handle)
    return handles


def _least(weight: Tensor, products: Products) -> int:
    return products.least if weight.dtype == torch.float32 else LEAST


def _ordinary() -> bool:
    """Whether autograd alone is active: no tracing, compiler, or function transform."""
    return not (
        torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
        or torch.compiler.is_compiling()
        or forward_ad._current_level >= 0
    )


def _watched(weight: nn.Parameter) -> bool:
    """Whether the weight has gradient hooks besides ours."""
    return bool(weight._backward_hooks or others_after(weight))


# --- marked inputs ---------------------------------------------------------------------------


class _Layer(Protocol):
    """A layer whose inputs are marked."""

    def answer(
        self, func: Any, x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """The result of `func(x, *args, **kwargs)` by our node; None if `func` is another one."""
        ...


class _Marked(Tensor):
    """The input of a layer, which recognises the layer's own function; otherwise a plain tensor.

    The mark is removed when the layer has computed, so a user's hook sees the values only.
    """

    of_layer: _Layer | None = None
    # None: the layer uses this tensor itself, so that hooks see its gradient
    plain: Tensor | None = None

    @staticmethod
    def of(x: Tensor, layer: _Layer, module: nn.Module) -> "_Marked":
        """`x`, marked as the input of `layer`, which `module` computes."""
        marked = x.as_subclass(_Marked)
        marked.of_layer, marked.plain = layer, None if _has_other_hooks(module) else x
        return marked

    def answer(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """The layer's result if `func` is its function, which removes the mark; else None."""
        if self.of_layer is None:
            return None
        x = self.as_subclass(Tensor) if self.plain is None else self.plain
        result = self.of_layer.answer(func, x, args, kwargs)
        if result is not None:
            self.of_layer = self.plain = None
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.as_subclass(Tensor).__deepcopy__(memo)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if args and type(args[0]) is _Marked:
                result = args[0].answer(func, args[1:], kwargs)
                if result is not None:
                    return result
            return func(*args, **kwargs)


def _has_other_hooks(module: nn.Module) -> bool:
    """Whether hooks other than ours get the input."""
    before = [h for h in module._forward_pre_hooks.values() if not isinstance(h, InputCast)]
    others = len(before) > 1 or module._forward_hooks
    return bool(others or modules._global_forward_pre_hooks or modules._global_forward_hooks)


def _usual(module: nn.Module, weight: nn.Parameter, x: Tensor) -> bool:
    """Whether the layer will call torch's function with its own weight, without autocast."""
    if torch.compiler.is_compiling() or module._parameters.get("weight") is not weight:
        return False
    if x.dtype != weight.dtype or x.layout != torch.strided or x.is_nested or not _ordinary():
        return False
    recorded = not x.is_inference() or not torch.is_grad_enabled()
    return recorded and not torch._C._is_any_autocast_enabled()


# --- norms -----------------------------------------------------------------------------------


class _Norm:
    """A root-mean-square norm with a weight."""

    def __init__(self, weight: nn.Parameter, norm: Norm) -> None:
        self.weight, self.norm = weight, norm

    def mark(self, module: nn.Module, args: Any) -> Any:
        """The pre-hook: the marked input if our node computes the norm."""
        x, shape = args[0] if len(args) == 1 else None, self.weight.shape
        if type(x) is not Tensor or x.numel() < LEAST or not _usual(module, self.weight, x):
            return None
        fits = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
        return (_Marked.of(x, self, module),) if fits and x.shape[-len(shape) :] == shape else None

    def answer(
        self, func: Any, x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """The norm, of the shape of `x`."""
        if func is not functional.rms_norm or kwargs.get("weight") is not self.weight:
            return None
        if tuple(args[0]) != self.weight.shape:
            return None
        eps = kwargs.get("eps")
        return self.norm(x, self.weight, torch.finfo(x.dtype).eps if eps is None else eps)


# --- linear layers ---------------------------------------------------------------------------


class _Product:
    """A linear layer that our node computes."""

    def __init__(self, weight: nn.Parameter, products: Products, sink: Sink | None) -> None:
        self.weight, self.products, self.sink = weight, products, sink
        self.lengths: set[int] = set()

    def mark(self, module: nn.Module, args: Any) -> Any:
        """The pre-hook: the marked input if our node computes the product."""
        x = args[0] if len(args) == 1 else None
        if type(x) is not Tensor or not _usual(module, self.weight, x):
            return None
        gains = self._weight_sink() is not None or x.dtype == torch.float32
        return (_Marked.of(x, self, module),) if gains else None

    def _weight_sink(self) -> Sink | None:
        """The sink of the weight's gradient; None for autograd."""
        trained = self.weight.requires_grad and torch.is_grad_enabled()
        return self.sink if trained and not _watched(self.weight) else None

    def answer(
        self, func: Any, x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """The product, of shapes [..., in], [out, in] and [out]."""
        if func is not functional.linear or len(args) != 2 or args[0] is not self.weight:
            return None
        rows = x.shape[:-1].numel()
        if torch.is_grad_enabled() and len(self.lengths) < MOST_LENGTHS:
            self.lengths.add(rows)
        products = self.products if rows in self.lengths else BY_TORCH
        return _Linear.apply(x, *args, products, self._weight_sink())


class _Linear(torch.autograd.Function):
    """A linear layer's product; backward computes the gradients of its inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        products: Products,
        sink: Sink | None,
    ) -> Tensor:
        """Of x [..., in], weight [out, in] and bias [out]: [..., out]."""
        ctx.parameter = weight  # saved tensors may be unpacked as other objects
        ctx.products, ctx.sink = products, sink
        # the edge whose gradient can be postponed, and whether it is (pipeline/backward.py)
        ctx.can_put_off, ctx.puts_off = None if sink is None else 1, False
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        # not a view: the next layer may work in place
        return products.linear(x, weight, bias).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """The input's gradient first; None for a weight whose gradient goes to the sink."""
        if grad is None:
            return None, None, None, None, None
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias, *_ = ctx.needs_input_grad
        twice = torch.is_grad_enabled()  # the gradient will be differentiated again
        linear = functional.linear if twice else ctx.products.linear
        left, right = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = linear(left, weight.t(), None).view(x.shape) if to_x else None
        dbias = left.sum(0) if to_bias else None
        in_sink = to_weight and not twice and _to_sink(ctx, left, right)
        multiply = torch.mm if twice else ctx.products.multiply
        dweight = multiply(left.t(), right) if to_weight and not in_sink else None
        return dx, dweight, dbias, None, None


def _to_sink(ctx: Any, left: Tensor, right: Tensor) -> bool:
    """Give the weight's gradient to the sink; True if autograd need not compute it."""
    if ctx.sink is None:
        return False
    accumulated = _is_accumulated(ctx.next_functions[1][0])
    if accumulated is None or (accumulated and _watched(ctx.parameter)):
        return False
    if accumulated:
        ctx.sink.product(ctx.parameter, left, right)
    elif ctx.puts_off:
        ctx.sink.put_off(ctx.parameter, left, right)
    return True


def _is_accumulated(node: Any) -> bool | None:
    """Whether this pass runs the AccumulateGrad `node`; None under torch.autograd.grad."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return None


# --- embeddings ------------------------------------------------------------------------------


class _Lookup:
    """An embedding with a large table."""

    def __init__(self, table: nn.Parameter, sink: Sink) -> None:
        self.table, self.sink = table, sink
        self.hook = -1

    def after(self, module: nn.Embedding, args: Any, y: Tensor) -> Tensor | None:
        """The first forward hook: `y` with our node instead of autograd's.

        Not in 16 bits, where each addition would round, nor on GPUs, where the order varies.
        """
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return None
        if not (args and self._is_plain(module)):
            return None
        ids, options = args[0], (module.max_norm, module.scale_grad_by_freq, module.sparse)
        plain = type(ids) is type(y) is Tensor and options == (None, False, False)
        if not plain or y.device.type != "cpu" or y.dtype not in (torch.float32, torch.float64):
            return None
        return _Rows.apply(y.detach(), self.table, ids, module.padding_idx, self.sink)

    def _is_plain(self, module: nn.Module) -> bool:
        """Whether the layer is unchanged, and its table has no gradient hooks besides ours."""
        table = self.table
        if module._parameters.get("weight") is not table or not table.requires_grad:
            return False
        first = next(iter(module._forward_hooks)) == self.hook and not modules._global_forward_hooks
        return first and not _watched(table) and _ordinary() and "forward" not in vars(module)


class _Rows(torch.autograd.Function):
    """`y`, looked up in a table; backward computes the table's gradient."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, table: Tensor, ids: Tensor, padding: int | None, sink: Sink
    ) -> Tensor:
        """The same memory, but not a view: the next layer may work in place."""
        ctx.parameter, ctx.sink = table, sink
        ctx.count, ctx.padding = len(table), -1 if padding is None else padding % len(table)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """None for a table whose gradient goes to the sink."""
        if grad is None:
            return None, None, None, None, None
        (ids,) = ctx.saved_tensors
        accumulated = _is_accumulated(ctx.next_functions[1][0])
        if accumulated is None or torch.is_grad_enabled() or _watched(ctx.parameter):
            dense = torch.ops.aten.embedding_dense_backward
            return None, dense(grad, ids, ctx.count, ctx.padding, False), None, None, None
        if accumulated:
            if ctx.padding >= 0:
                grad = grad.masked_fill((ids == ctx.padding).unsqueeze(-1), 0)
            ctx.sink.rows(ctx.parameter, ids.reshape(-1), grad.reshape(-1, grad.shape[-1]))
        return None, None, None, None, None
