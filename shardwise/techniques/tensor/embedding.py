"""Vocabulary-parallel embedding: each rank looks up the ids whose rows it holds.

    ids       3  0  7  5            rank 0 holds rows 0..3        rank 1 holds rows 4..7
    local ids                       3  0  .  .                    .  .  3  1       (. is row 0)
    out                             w3 w0 0  0                    0  0  w7 w5      P: summed later

The module performs the lookup.  One hook converts ids to this rank's rows, another writes zeros for
ids whose rows other ranks hold.  The caller sums the results over the ranks (P -> I), or
reduce-scatters them along the sequence (P -> S).  (Shoeybi et al., "Megatron-LM", arXiv 1909.08053,
section 3.)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.comm.world import Axis
from shardwise.core.errors import bad
from shardwise.core.layouts.uneven import Cut


def embed(module: nn.Embedding, axis: Axis, cut: Cut, finish: Callable[[Tensor], Tensor]) -> None:
    """Hook `module`, whose weight has this rank's rows by `cut`, so that it returns `finish(out)`.

    `out` [..., D] is P: the rows of the ids [...] that this rank holds, and zeros for other ids.  A
    rank may hold no rows.  The module's `padding_idx` becomes a local row on the rank that holds
    it, and None on other ranks.  May be called before or after the weight is sharded.

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
        """Convert ids to local rows; ids of other ranks become row 0, and are masked."""
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
