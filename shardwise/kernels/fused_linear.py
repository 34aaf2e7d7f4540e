"""Layers that are computed by nodes of ours: linear, embeddings, norms.

    linear      forward     x, W, b ---> y      matmul.py says by which library
                backward    gy, W -----> gx     the same
                            gy, x -----> gW     the same: new, for autograd; or, if there is a sink,
                                    '--> sink   written or added where gradients are kept
    embedding   backward    gy, ids ---> sink   added to the N rows that were looked up
                                                (autograd: to a table of zeros, which is added)
    RMSNorm     both        x, w ------> y      one node, rms_norm.py

Of 33M parameters the sink saves 130 MB to write and to read for each microbatch (by a library that
adds in place): it is for steps of several (of one, the node costs what the copy does); of an
embedding it pays in any step.  Autograd still counts the uses: the weight's own node comes last,
with nothing to add where all of it has been written, and calls its hooks all the same (torch 2.8
and newer).  ("Gradient accumulation fusion" in Megatron-LM.)

A layer keeps its class, its forward and its hooks.  The input of a linear layer or a norm is marked
before it computes, and the function that meets the mark is ours; behind an embedding a node of ours
takes the place of autograd's, which is dropped.  Autocast, tracing, compilers and transforms of
functions go autograd's way, as do small norms and matrices; of matrices one whose gradient somebody
else looks at too, `torch.autograd.grad`, and gradients that are differentiated in turn.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle

from shardwise.core.hook import Hook
from shardwise.kernels.matmul import Products
from shardwise.kernels.rms_norm import Norm

#: Elements of a table, or of what is normalised, from which on it is worth it: below, the node
#: costs more than it saves.
LEAST = 2**16


class Sink(Protocol):
    """The owner of the gradients."""

    def require_copyable(self) -> None: ...

    def product(self, p: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Add left^T right, of left [N, out] and right [N, in], to the gradient of `p`."""
        ...

    def put_off(self, p: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """The same for later, where this half of a backward pass is for others than `p`."""
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

    Large is a linear layer's from `products.least` elements on, of a dtype that the library takes.

    `norm`: how norms are computed, if not as torch does.  `several`: steps have several
    microbatches, and linear layers' gradients go to the sink too.  The handles remove the hooks.
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
    """Whether layers are computed, and by autograd alone: not traced, compiled or transformed."""
    return not (
        torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
        or torch.compiler.is_compiling()
        or forward_ad._current_level >= 0
    )


def _watched(weight: nn.Parameter) -> bool:
    """Whether somebody else waits for its gradient."""
    return bool(weight._backward_hooks or len(weight._post_accumulate_grad_hooks or ()) > 1)


# --- inputs on their way into a layer --------------------------------------------------------


class _Layer(Protocol):
    """A layer whose inputs are marked."""

    def answer(
        self, func: Any, x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """What `func` of `x` and what else it is given is, by us; None: it is not ours."""
        ...


class _Marked(Tensor):
    """An input on its way into its layer; to all but what that layer computes a tensor like others.

    Who looks at it once the layer has computed (a hook of the user's) finds the values and no mark.
    """

    of_layer: _Layer | None = None
    plain: Tensor | None = None  # None: it is this one that goes in, of whose gradient hooks hear

    @staticmethod
    def of(x: Tensor, layer: _Layer, module: nn.Module) -> "_Marked":
        """`x`, marked as an input of `layer`, which is computed by `module`."""
        marked = x.as_subclass(_Marked)
        marked.of_layer, marked.plain = layer, None if _shown(module) else x
        return marked

    def answer(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """What the layer makes of it, if it is asked for that; the mark is gone then."""
        if self.of_layer is None:
            return None
        x = self.as_subclass(Tensor) if self.plain is None else self.plain
        found = self.of_layer.answer(func, x, args, kwargs)
        if found is not None:
            self.of_layer = self.plain = None
        return found

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
                found = args[0].answer(func, args[1:], kwargs)
                if found is not None:
                    return found
            return func(*args, **kwargs)


def _shown(module: nn.Module) -> bool:
    """Whether hooks other than ours are given what goes in."""
    others = len(module._forward_pre_hooks) > 1 or module._forward_hooks
    return bool(others or modules._global_forward_pre_hooks or modules._global_forward_hooks)


def _usual(module: nn.Module, weight: nn.Parameter, x: Tensor) -> bool:
    """Whether a layer is about to compute as torch does, with its own weight."""
    if torch.compiler.is_compiling() or module._parameters.get("weight") is not weight:
        return False
    if x.dtype != weight.dtype or x.layout != torch.strided or x.is_nested or not _ordinary():
        return False
    kept = not x.is_inference() or not torch.is_grad_enabled()
    return kept and not torch._C._is_any_autocast_enabled()


# --- norms -----------------------------------------------------------------------------------


class _Norm:
    """A root-mean-square norm with a weight."""

    def __init__(self, weight: nn.Parameter, norm: Norm) -> None:
        self.weight, self.norm = weight, norm

    def mark(self, module: nn.Module, args: Any) -> Any:
        """The hook: the input marked, where the norm is to be ours."""
        x, shape = args[0] if len(args) == 1 else None, self.weight.shape
        if type(x) is not Tensor or x.numel() < LEAST or not _usual(module, self.weight, x):
            return None
        able = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
        return (_Marked.of(x, self, module),) if able and x.shape[-len(shape) :] == shape else None

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
    """A linear layer that is taken over."""

    def __init__(self, weight: nn.Parameter, products: Products, sink: Sink | None) -> None:
        self.weight, self.products, self.sink = weight, products, sink

    def mark(self, module: nn.Module, args: Any) -> Any:
        """The hook: the input marked, where the product is to be ours."""
        x = args[0] if len(args) == 1 else None
        if type(x) is not Tensor or not _usual(module, self.weight, x):
            return None
        gains = self._takes() is not None or x.dtype == torch.float32
        return (_Marked.of(x, self, module),) if gains else None

    def _takes(self) -> Sink | None:
        """Who takes the weight's gradient, if not autograd."""
        trained = self.weight.requires_grad and torch.is_grad_enabled()
        return self.sink if trained and not _watched(self.weight) else None

    def answer(
        self, func: Any, x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """The product, of shapes [..., in], [out, in] and [out]."""
        if func is not functional.linear or len(args) != 2 or args[0] is not self.weight:
            return None
        return _Linear.apply(x, *args, self.products, self._takes())


class _Linear(torch.autograd.Function):
    """A linear layer's product, and on the way back the gradients of what it was made from."""

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
        ctx.parameter = weight  # what is saved may come back as another tensor
        ctx.products, ctx.sink = products, sink
        # which of its edges leads to what can be put off, and whether it is (backward.py)
        ctx.can_put_off, ctx.puts_off = None if sink is None else 1, False
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return products.linear(x, weight, bias).detach()  # no view: its reader may work in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """The input's first; nothing by autograd for a weight whose gradient the sink takes."""
        if grad is None:
            return None, None, None, None, None
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias, *_ = ctx.needs_input_grad
        in_turn = torch.is_grad_enabled()  # to be differentiated in turn
        linear = functional.linear if in_turn else ctx.products.linear
        left, right = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = linear(left, weight.t(), None).view(x.shape) if to_x else None
        dbias = left.sum(0) if to_bias else None
        taken = to_weight and not in_turn and _handed_over(ctx, left, right)
        multiply = torch.mm if in_turn else ctx.products.multiply
        dweight = multiply(left.t(), right) if to_weight and not taken else None
        return dx, dweight, dbias, None, None


def _handed_over(ctx: Any, left: Tensor, right: Tensor) -> bool:
    """Whether the sink has taken the weight's gradient, or nobody wants it in this pass."""
    if ctx.sink is None:
        return False
    kept = _kept(ctx.next_functions[1][0])
    if kept is None or (kept and _watched(ctx.parameter)):
        return False
    if kept:
        ctx.sink.product(ctx.parameter, left, right)
    elif ctx.puts_off:
        ctx.sink.put_off(ctx.parameter, left, right)
    return True


def _kept(end: Any) -> bool | None:
    """Whether this pass leaves a gradient on the parameter that is the end; None: it is asked for.

    As it is by torch.autograd.grad.
    """
    try:
        return torch._C._will_engine_execute_node(end)
    except RuntimeError:
        return None


# --- embeddings ------------------------------------------------------------------------------


class _Lookup:
    """An embedding with a large table."""

    def __init__(self, table: nn.Parameter, sink: Sink) -> None:
        self.table, self.sink = table, sink
        self.hook = -1

    def after(self, module: nn.Embedding, args: Any, y: Tensor) -> Tensor | None:
        """The hook, before all others: `y` as it is, but that its gradient goes through our node.

        Not in 16 bits, where each addition would round, nor on GPUs, which add in any order.
        """
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return None
        if not (args and self._untouched(module)):
            return None
        ids, options = args[0], (module.max_norm, module.scale_grad_by_freq, module.sparse)
        plain = type(ids) is type(y) is Tensor and options == (None, False, False)
        if not plain or y.device.type != "cpu" or y.dtype not in (torch.float32, torch.float64):
            return None
        return _Rows.apply(y.detach(), self.table, ids, module.padding_idx, self.sink)

    def _untouched(self, module: nn.Module) -> bool:
        """Whether the layer is as it was, and nobody else waits for its table's gradient."""
        table = self.table
        if module._parameters.get("weight") is not table or not table.requires_grad:
            return False
        first = next(iter(module._forward_hooks)) == self.hook and not modules._global_forward_hooks
        return first and not _watched(table) and _ordinary() and "forward" not in vars(module)


class _Rows(torch.autograd.Function):
    """`y`, which was looked up in a table; on the way back the table's gradient."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, table: Tensor, ids: Tensor, padding: int | None, sink: Sink
    ) -> Tensor:
        """The same memory, but no view: its reader may work in place."""
        ctx.parameter, ctx.sink = table, sink
        ctx.count, ctx.padding = len(table), -1 if padding is None else padding % len(table)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Nothing by autograd for a table whose gradient the sink takes."""
        if grad is None:
            return None, None, None, None, None
        (ids,) = ctx.saved_tensors
        kept = _kept(ctx.next_functions[1][0])
        if kept is None or torch.is_grad_enabled() or _watched(ctx.parameter):
            dense = torch.ops.aten.embedding_dense_backward
            return None, dense(grad, ids, ctx.count, ctx.padding, False), None, None, None
        if kept:
            if ctx.padding >= 0:
                grad = grad.masked_fill((ids == ctx.padding).unsqueeze(-1), 0)
            ctx.sink.rows(ctx.parameter, ids.reshape(-1), grad.reshape(-1, grad.shape[-1]))
        return None, None, None, None, None
