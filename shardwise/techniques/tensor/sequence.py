"""Row-parallel linear layers, the vocabulary-parallel embedding, and hooks that gather or shard.

A row-parallel layer has sharded inputs: each rank computes a partial sum without the bias, and the
bias is added once, to the sum over the ranks.

An embedding looks up on each rank the ids whose rows the rank holds:

    ids       3  0  7  5            rank 0 holds rows 0..3        rank 1 holds rows 4..7
    local ids                       3  0  .  .                    .  .  3  1       (. is row 0)
    out                             w3 w0 0  0                    0  0  w7 w5      P: summed later

One hook converts ids to this rank's rows, another writes zeros for ids of other ranks. The caller
sums the results over the ranks (P -> I), or reduce-scatters them along the sequence (P -> S).
(Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3.)

If one weight packs queries, keys and values, ranks may share a part of it. Here 4 query heads and
one key head are on 2 ranks, and each rank computes the gradient of k and v from its own queries:

    rank 0    q0 q1 | k | v
    rank 1    q2 q3 | k | v
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.comm.move import start
from shardwise.comm.world import Axis
from shardwise.core.errors import bad
from shardwise.core.layouts.layout import P, R
from shardwise.core.layouts.uneven import Cut
from shardwise.techniques.tensor.linear import Stream


def rows(module: nn.Module, stream: Stream, fresh: bool) -> None:
    """Sum a row-parallel layer's outputs, then add the bias once; `fresh` ones are overwritten."""
    removed: list[nn.Parameter] = []

    def after(module: nn.Module, _: Any, y: Tensor | None) -> Tensor | None:
        """Put the bias back, and add it; without `y` the layer raised an error."""
        bias = removed.pop() if removed else None
        if bias is not None:
            module._parameters["bias"] = bias
        if y is None:
            return None
        y = stream.leave(y, fresh)
        return y if bias is None else y + bias.to(y.dtype)  # 16 bits under autocast

    module.register_forward_pre_hook(partial(_without_bias, removed))
    module.register_forward_hook(after, prepend=True, always_call=True)


def _without_bias(removed: list[nn.Parameter], module: nn.Module, _: Any) -> None:
    bias = module._parameters.get("bias")
    if bias is not None:
        removed.append(bias)
        # other classes may add the bias themselves (transformers' Conv1D)
        zeros = None if type(module) is nn.Linear else torch.zeros_like(bias.detach())
        module._parameters["bias"] = zeros  # pyright: ignore[reportArgumentType]


def change_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Hook a module so that `change` is applied to its output; call before `columns`."""

    def after(_: nn.Module, __: Any, y: Tensor) -> Tensor:
        return change(y)

    module.register_forward_hook(after, prepend=True)


def change_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Hook a module so that `change` is applied to its first tensor argument."""

    def before(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = next(k for k, value in kwargs.items() if isinstance(value, Tensor))
        return args, kwargs | {name: change(kwargs[name])}

    module.register_forward_pre_hook(before, with_kwargs=True)


def gather_input(module: nn.Module, stream: Stream) -> None:
    """Gather a module's first tensor along the sequence; sum other arguments' gradients."""

    def others(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        spread = [_spread(stream, x) for x in args[1:]]
        first = None if args else next(k for k, x in kwargs.items() if isinstance(x, Tensor))
        named = {k: x if k == first else _spread(stream, x) for k, x in kwargs.items()}
        return (*args[:1], *spread), named

    module.register_forward_pre_hook(others, with_kwargs=True)
    change_input(module, stream.gather)


def _spread(stream: Stream, x: Any) -> Any:
    return stream.spread(x) if isinstance(x, Tensor) and x.requires_grad else x


# --- the embedding ------------------------------------------------------------------------------


def embed(module: nn.Embedding, axis: Axis, cut: Cut, finish: Callable[[Tensor], Tensor]) -> None:
    """Hook `module`, whose weight has this rank's rows by `cut`, so that it returns `finish(out)`.

    `out` [..., D] is P: the rows of the ids [...] that this rank holds, and zeros for other ids. A
    rank may hold no rows. The module's `padding_idx` becomes a local row on the rank that holds it,
    and None on other ranks. May be called before or after the weight is sharded.

    Raises:
        InputError: the module has max_norm, scale_grad_by_freq or sparse gradients.
        IndexError: (in the forward pass) an id is outside the vocabulary.
    """
    _require_shardable(module)
    ((start, stop),) = cut.ranges[axis.rank]
    if module.padding_idx is not None:
        is_local = start <= module.padding_idx < stop
        module.padding_idx = module.padding_idx - start if is_local else None
    # Keyed by the tensor of local ids, so calls may be nested, and a call that raises leaves no
    # entry behind.
    masks = WeakIdKeyDictionary()

    def enter(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Ids of other ranks become row 0, and are masked."""
        ids: Tensor = args[0] if args else kwargs["input"]
        _check(ids, cut.whole)
        local = ids - start
        mask = (local < 0) | (local >= stop - start)
        # a rank without rows looks up nothing
        local = local.masked_fill_(mask, 0) if start < stop else local.new_empty(0)
        masks[local] = mask
        return (local,), {}

    def leave(_: nn.Module, args: Any, __: dict[str, Any], out: Tensor) -> Tensor:
        mask: Tensor = masks.pop(args[0])
        if start == stop:  # zeros that depend on the weight, so it gets a gradient
            return finish(out.sum(0).expand(*mask.shape, -1).contiguous())
        return finish(out.masked_fill_(mask.unsqueeze(-1), 0))

    module.register_forward_pre_hook(enter, with_kwargs=True)
    # before other hooks, so that they see the complete result
    module.register_forward_hook(leave, with_kwargs=True, prepend=True)


def _check(ids: Tensor, whole: int) -> None:
    """Raise for an id that no rank holds; without this check its embedding would be zero."""
    if ids.is_meta or not ids.numel():
        return
    good = ((ids >= 0) & (ids < whole)).all()
    if ids.device.type != "cpu":
        # does not synchronise with the device
        torch.ops.aten._assert_async.msg(good, f"an id outside the vocabulary of {whole}")
    elif not good:
        raise IndexError(
            f"index out of range: ids {ids.min()} to {ids.max()}, rows 0 to {whole - 1}"
        )


def _require_shardable(module: nn.Embedding) -> None:
    for word, default in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
        if (value := getattr(module, word)) != default:
            raise bad(
                f"an embedding with {word}={value}, whose rows would be sharded over several ranks",
                f"{word}={default}",
                f"nn.Embedding({module.num_embeddings}, {module.embedding_dim})",
            )


# --- packed weights -----------------------------------------------------------------------------


def sum_spans(dim: int, spans: Sequence[tuple[int, int]], line: Axis, grad: Tensor) -> Tensor:
    """Sum the spans (start, length) of `dim` that the ranks of `line` share."""
    sizes = [length for _, length in spans]
    parts = torch.cat([grad.narrow(dim, *span) for span in spans], dim).contiguous()
    start(parts.view(-1), line, P, R, parts.view(-1)).wait()
    whole = grad.clone()
    for span, part in zip(spans, parts.split(sizes, dim), strict=True):
        whole.narrow(dim, *span).copy_(part)
    return whole
