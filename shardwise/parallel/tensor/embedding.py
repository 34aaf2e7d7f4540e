"""The embedding whose rows are cut: every rank looks up the words that it holds.

    ids       3  0  7  5            rank 0 holds rows 0..3        rank 1 holds rows 4..7
    here                            3  0  .  .                    .  .  3  1       (. is row 0)
    out                             w3 w0 0  0                    0  0  w7 w5      P: summed later

The lookup itself is the module's own.  One hook turns ids into rows of this rank, another clears
what was looked up for words that are elsewhere; what makes the partial sums whole (P -> I), or
shards of the sequence (P -> S), is the caller's.  (Shoeybi et al., "Megatron-LM", arXiv 1909.08053,
section 3.)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.comm.world import Axis
from shardwise.core.errors import bad
from shardwise.core.uneven import Cut


def embed(module: nn.Embedding, axis: Axis, cut: Cut, finish: Callable[[Tensor], Tensor]) -> None:
    """Hook `module`, whose weight is this rank's rows by `cut`, so that it returns `finish(out)`.

    `out` [..., D] is P: this rank's rows for the ids [...] that it holds, zeros for the others.  A
    rank may hold no row at all.  The module's `padding_idx` becomes the row on the rank that holds
    it, and None elsewhere.  Called before the weight is cut or after.

    Raises:
        InputError: the module renormalises or counts the rows it looks up, or has sparse gradients.
        IndexError: (when called) an id that is no row of the whole, as torch's own lookup says.
    """
    _refuse_what_needs_all_rows(module)
    ((start, stop),) = cut.ranges[axis.rank]
    if module.padding_idx is not None:
        held = start <= module.padding_idx < stop
        module.padding_idx = module.padding_idx - start if held else None
    # Keyed by the very tensor that goes through the module, so that uses may be nested, and one
    # that ends in an error leaves nothing behind.
    elsewhere = WeakIdKeyDictionary()

    def enter(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """From ids to rows of this rank; others become row 0, and are remembered."""
        ids: Tensor = args[0] if args else kwargs["input"]
        _check(ids, cut.whole)
        here = ids - start
        away = (here < 0) | (here >= stop - start)
        # where there is no row, nothing is looked up
        here = here.masked_fill_(away, 0) if start < stop else here.new_empty(0)
        elsewhere[here] = away
        return (here,), {}

    def leave(_: nn.Module, args: Any, __: dict[str, Any], out: Tensor) -> Tensor:
        away: Tensor = elsewhere.pop(args[0])
        if start == stop:  # zeros, but zeros of which the weight has a gradient
            return finish(out.sum(0).expand(*away.shape, -1).contiguous())
        return finish(out.masked_fill_(away.unsqueeze(-1), 0))

    module.register_forward_pre_hook(enter, with_kwargs=True)
    # first of its kind, so that other hooks see the whole result
    module.register_forward_hook(leave, with_kwargs=True, prepend=True)


def _check(ids: Tensor, whole: int) -> None:
    """An id that no rank holds would be a silent zero."""
    if ids.is_meta or not ids.numel():
        return
    good = ((ids >= 0) & (ids < whole)).all()
    if ids.device.type != "cpu":
        # checked without waiting for it
        torch.ops.aten._assert_async.msg(good, f"an id outside the vocabulary of {whole}")
    elif not good:
        raise IndexError(
            f"index out of range: ids {ids.min()} to {ids.max()}, rows 0 to {whole - 1}"
        )


def _refuse_what_needs_all_rows(module: nn.Embedding) -> None:
    for word, default in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
        if (value := getattr(module, word)) != default:
            raise bad(
                f"an embedding with {word}={value}, whose rows are to be cut over several ranks",
                f"{word}={default}",
                f"nn.Embedding({module.num_embeddings}, {module.embedding_dim})",
            )
