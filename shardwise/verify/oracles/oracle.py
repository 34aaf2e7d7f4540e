"""The oracle: training in one process on the global batch, in plain PyTorch.

    loss = loss(model, batch)                  the mean over the tokens of the global batch
    (loss * share * scale).backward()          share = parts / 2^k, between 1 and 2
    gradient = gradient / (share * scale)
    clip_grad_norm_(parameters, clip)
    optimizer.step()                           a class of torch.optim

It imports nothing of the package, so it cannot share a mistake with the engine.

Losses and capacities of a layer of experts are functions of all tokens of a microbatch, on all data
ranks. A model with such layers is trained on the same microbatches, one after the other, and their
gradients are summed (`Microbatches`). In 16 bits other models are trained on the microbatches of
each rank alone: where their gradients nearly cancel, rounding each of them is the largest error.

A 16-bit model computes in 16 bits and has fp32 masters: gradients are converted to fp32 before they
are unscaled and clipped, the optimizer updates the masters, and the weights are the masters rounded
to 16 bits (Micikevicius et al., arXiv 1710.03740, section 3). The parameters of norms over the
batch stay in fp32. Layers lower wider inputs; the batch itself is not rounded. With fp64 weights,
buffers and the batch become fp64 too.

A model that computes in fp32 inside of fp64 rounds differently when its loss is scaled, unless the
scales differ by a power of two. The run weighs the loss of a token by (all parts / all tokens) of
the global batch; here the loss is multiplied by `share`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Task:
    """A training task.

    loss       loss(model, batch) is the mean over the batch's tokens
    tokens     tokens(batch) is their number
    optimizer  makes a torch optimizer from parameters by name
    start      initial weights are first rounded to this dtype; None: no rounding
    narrow     of fp64: "fp32" once a value that is differentiated was in fp32
    """

    loss: Callable[[nn.Module, Any], Tensor]
    tokens: Callable[[Any], float]
    optimizer: Callable[[Mapping[str, nn.Parameter]], Optimizer]
    start: torch.dtype | None = None
    narrow: set[str] = field(default_factory=set[str])

    def loss_of(self, model: nn.Module, batch: Any, dtype: torch.dtype) -> Tensor:
        """The loss of `model` in a dtype. The batch's floats may become wider, never narrower."""

        def converted(x: Tensor) -> Tensor:
            wider = x.is_floating_point() and torch.promote_types(x.dtype, dtype) == dtype
            return x.to(dtype if wider else x.dtype, copy=True)  # a forward may write to it

        recurrent = [m for m in model.modules() if isinstance(m, nn.RNNBase)]
        handles = [m.register_forward_pre_hook(_as_weights) for m in recurrent]
        try:
            with Lowered(dtype, self.narrow):
                return self.loss(model, tree_map_only(Tensor, converted, batch))
        finally:
            for handle in handles:
                handle.remove()


def _as_weights(module: nn.RNNBase, args: tuple[Any, ...]) -> Any:
    """Convert the inputs to the weights' dtype, before the module calls any function."""
    dtype = module.all_weights[0][0].dtype
    floats = (isinstance(x, Tensor) and x.is_floating_point() for x in args)
    return tuple(x.to(dtype) if wide else x for x, wide in zip(args, floats, strict=True))


#: Functions of a layer's input and its weights, which must have one dtype.
LAYERS = frozenset(
    (
        *("linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm"),
        *("baddbmm", "einsum", "conv1d", "conv2d", "conv3d", "conv_transpose1d"),
        *("conv_transpose2d", "conv_transpose3d", "layer_norm", "rms_norm", "group_norm", "prelu"),
        *("multi_head_attention_forward", "scaled_dot_product_attention", "lstm", "gru"),
        *("rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    )
)


class Lowered(TorchFunctionMode):
    """Layers whose inputs are wider than `dtype` compute in it, as under torch.autocast. A loss
    with a z-loss, which torch's function does not have, is computed by its formula.
    """

    def __init__(self, dtype: torch.dtype, narrow: set[str] | None = None) -> None:
        super().__init__()
        self.dtype, self.narrow = dtype, set[str]() if narrow is None else narrow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "z_loss" in kwargs:
            return _with_z_loss(*args, **kwargs)
        if getattr(func, "__name__", "") in LAYERS:
            floats = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            found = {x.dtype for x in floats if x.is_floating_point()}
            if len(found) > 1 and self.dtype in found:
                args, kwargs = tree_map_only(Tensor, self._lower, (args, kwargs))
        out = func(*args, **kwargs)
        if self.dtype is torch.float64 and isinstance(out, Tensor) and out.dtype is torch.float32:
            self.narrow |= {"fp32"} if out.requires_grad else set()
        return out

    def _lower(self, x: Tensor) -> Tensor:
        return x.to(self.dtype) if x.is_floating_point() else x


def backward(loss: Tensor, dtype: torch.dtype) -> None:
    """Run the backward pass in the same precision, also of what the model recomputes in it.
    `loss.backward()` would not do: torch disables the mode while it handles this call.
    """
    with Lowered(dtype):
        ones, found = torch.ones_like(loss), {"allow_unreachable": True, "accumulate_grad": True}
        _engine_run_backward((loss,), (ones,), False, False, (), **found)


def _with_z_loss(
    logits: Tensor, targets: Tensor, *, z_loss: float, reduction: str, **options: Any
) -> Tensor:
    """Cross-entropy of logits [..., V], and z log(sum exp)^2 (arXiv 2204.02311, section 5)."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    x, classes = logits.reshape(-1, logits.shape[-1]).to(wide), targets.reshape(-1).long()
    losses = functional.cross_entropy(x, classes, reduction="none", **options)
    counted = classes != options["ignore_index"]
    losses = losses + z_loss * x.logsumexp(-1).square() * counted
    if reduction == "none":
        return losses.view(targets.shape).to(logits.dtype)
    total = losses.sum() if reduction == "sum" else losses.sum() / counted.sum()
    return total.to(logits.dtype)


#: What one pass of an oracle computes.
Each = Literal["batch", "microbatch", "share"]


@dataclass(frozen=True)
class Microbatches:
    """How a plan divides a global batch, and what each pass computes of it.

    rows of the global batch    0 1 2 3 | 4 5 6            7 rows on 2 data ranks
    microbatch                  0 0 1 1 | 0 0 1            `number` = 2
    passes                      "batch"         all rows
                                "microbatch"    [0 1 4 5] [2 3 6]
                                "share"         [0 1] [2 3] [4 5] [6]
    """

    data_ranks: int = 1
    number: int = 1
    each: Each = "microbatch"

    def passes(self, ranks: int) -> list[list[tuple[int, int]]]:
        """For each pass, the (data rank, microbatch) pairs that it computes."""
        every = [(rank, k) for rank in range(ranks) for k in range(self.number)]
        if self.each == "microbatch":
            return [[(rank, k) for rank in range(ranks)] for k in range(self.number)]
        return [every] if self.each == "batch" else [[one] for one in every]

    def of(self, batch: Any, idle: int = 0) -> list[Any]:
        """The rows of each pass, the first data rank's first; the last `idle` ones have none."""
        passes = self.passes(ranks := self.data_ranks - idle)
        if len(passes) == 1:
            return [batch]
        leaves, spec = tree_flatten(batch)
        cut = [self._rows(x, ranks) if _has_rows(x) else None for x in leaves]
        return [
            tree_unflatten(
                [
                    x if parts is None else torch.cat([parts[rank][k] for rank, k in own])
                    for x, parts in zip(leaves, cut, strict=True)
                ],
                spec,
            )
            for own in passes
        ]

    def count(self, batch: Any, idle: int = 0) -> int:
        shares = self._rows(torch.empty(rows_of(batch)), self.data_ranks - idle)
        return sum(len(part) > 0 for own in shares for part in own)

    def _rows(self, x: Tensor, ranks: int) -> list[list[Tensor]]:
        return [[*own.tensor_split(self.number)] for own in x.tensor_split(ranks)]


WHOLE_BATCH: Final = Microbatches(each="batch")


def _has_rows(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0


def rows_of(batch: Any) -> int:
    return min((len(x) for x in tree_flatten(batch)[0] if _has_rows(x)), default=1)


class Weights:
    """A model's trained parameters in one dtype, and the optimizer that updates them. The optimizer
    updates `masters`: fp32 copies of 16-bit parameters, otherwise the parameters themselves. With
    `old` they are always copies, so that the model keeps its old values.
    """

    def __init__(self, model: nn.Module, task: Task, dtype: torch.dtype, old: bool = False) -> None:
        exact = {p for module in model.modules() for p in _beside_statistics(module)}
        for p in model.parameters():
            if p.is_floating_point() and p in exact:
                p.data = p.data.float() if dtype in HALF else p.data.to(dtype)
            elif p.is_floating_point():
                p.data = p.data.to(task.start or dtype).to(dtype)
        for b in model.buffers():
            if b.is_floating_point() and dtype is torch.float64:
                b.data = b.data.double()
        self.every = dict(model.named_parameters())
        self.params = {name: p for name, p in self.every.items() if p.requires_grad}
        self.masters = {
            name: nn.Parameter(p.detach().clone().to(_wide(p))) if old or p.dtype in HALF else p
            for name, p in self.params.items()
        }
        self.optimizer = task.optimizer(self.masters)
        self.used: dict[str, Tensor] = {}  # the gradients of the last update
        self.norm = 0.0  # of these before clipping

    def update(self, gradients: Mapping[str, Tensor | None], clip: float | None) -> None:
        """Clip the gradients and update."""
        for name, master in self.masters.items():
            master.grad = gradients[name]
        bound = math.inf if clip is None else clip
        self.norm = float(clip_grad_norm_(self.masters.values(), bound))
        self.optimizer.step()
        none = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self.used = none | {n: m.grad for n, m in self.masters.items() if m.grad is not None}
        for name, master in self.masters.items():
            master.grad = None
            if self.params[name] is not master:
                self.params[name].data = master.detach().clone().to(self.params[name].dtype)

    def rate(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group.setdefault("first_lr", group["lr"]) * factor

    def values(self) -> dict[str, Tensor]:
        return {name: self.masters.get(name, p).detach() for name, p in self.every.items()}

    def state(self) -> dict[str, Tensor]:
        """The optimizer's tensors, as "key/name"."""
        return {
            f"{key}/{name}": value
            for name, master in self.masters.items()
            for key, value in self.optimizer.state.get(master, {}).items()
            if isinstance(value, Tensor)
        }


def _beside_statistics(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a norm over the batch, which keep 32 bits."""
    norms = (nn.modules.batchnorm._NormBase,)
    known = any(name == "running_mean" for name, _ in module.named_buffers(recurse=False))
    return list(module.parameters(recurse=False)) if known or isinstance(module, norms) else []


def _wide(p: nn.Parameter) -> torch.dtype:
    return torch.float32 if p.dtype in HALF else p.dtype


class Oracle:
    """Training of `model`, in place. After `undelayed` steps (None: never) a step uses the weights
    before the last update, `evaluate` the newest (ZeRO-Offload, arXiv 2101.06840, section 5.2).
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        dtype: torch.dtype,
        loss_scale: float = 1.0,
        undelayed: int | None = None,
        microbatches: Microbatches = WHOLE_BATCH,
    ) -> None:
        self.model, self.task, self.dtype, self.loss_scale = model, task, dtype, loss_scale
        self.undelayed, self.steps, self.microbatches = undelayed, 0, microbatches
        self.pending = False  # whether the last update is delayed, and nothing has finished it
        self.weights = Weights(model, task, dtype, old=undelayed is not None)

    def gradients(self, batch: Any, idle: int = 0) -> tuple[float, dict[str, Tensor | None]]:
        """The mean loss of a global batch, and its gradients by name; nothing is updated."""
        parts = [part for part in self.microbatches.of(batch, idle) if rows_of(part)]
        total = float(self.task.tokens(batch))
        share = 2 * math.frexp(self.microbatches.count(batch, idle))[0]
        summed, scale = 0.0, share * self.loss_scale
        for part in parts:
            loss = self.task.loss_of(self.model, part, self.dtype)
            tokens = float(self.task.tokens(part))
            backward(loss * (tokens * share / total * self.loss_scale), self.dtype)
            summed += loss.item() * (tokens / total if len(parts) > 1 else 1.0)
        found = dict[str, Tensor | None]()
        for name, p in self.weights.params.items():
            wide = self.weights.masters[name].dtype
            found[name] = None if p.grad is None else p.grad.to(wide) / scale
            p.grad = None
        return summed, found

    def trial(self, batch: Any) -> dict[str, Tensor | None]:
        """The gradients of a pass that leaves no trace in the buffers, in which layers count."""
        before = [(b, b.detach().clone()) for b in self.model.buffers()]
        _, found = self.gradients(batch)
        for b, value in before:
            b.data.copy_(value)
        return found

    def step(self, batch: Any, clip: float | None = None, idle: int = 0) -> float:
        """Train on a global batch; its mean loss before the update."""
        loss, gradients = self.gradients(batch, idle)
        self.pending = self.undelayed is not None and self.steps >= self.undelayed
        before = {n: m.detach().clone() for n, m in self.weights.masters.items() if self.pending}
        self.weights.update(gradients, clip)
        self._show(before)
        self.steps += 1
        return loss

    def skip(self, batch: Any) -> None:
        """A step whose gradients overflow: it finishes a delayed update, and makes none."""
        self.finish()
        self.gradients(batch)
        self.steps += 1

    def finish(self) -> None:
        self.pending = False
        if self.undelayed is not None:
            self._show({n: m.clone() for n, m in self.weights.masters.items()})

    def _show(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            p = self.weights.params[name]
            p.data = weight.detach().to(p.dtype)

    def of_ranks(self, batch: Any, idle: int = 0) -> list[Any]:
        """The rows of a global batch that each pass of an evaluation computes."""
        passes = replace(self.microbatches, number=1).of(batch, idle)
        return [rows for rows in passes if rows_of(rows)]

    def evaluate(self, call: Callable[[nn.Module], Tensor]) -> Tensor:
        self.finish()
        with Lowered(self.dtype):
            return in_eval_mode(self.model, call)


@torch.no_grad()
def in_eval_mode(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> Tensor:
    """The result of `call(model)` in eval mode; every module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        return call(model)
    finally:
        for module, training in modes:
            module.training = training
