"""This rank's positions of a batch.

    {"inputs": [B, T], "targets": [B, T]}        dim 1
    {"x": [B, T, D], "y": [B, T, D]}             dim 1
    {"ids": [B, T], "mask": [B, 1, T, T]}        rows of the mask: attention needs all columns
    {"ids": [B, T], "label": [B]}                the label has no positions

For models of transformers labels are shifted before the cut, as `shift_labels`, and a mask of
padding is kept aside: the model would turn it into a mask of this rank's positions alone. The same
holds for `position_ids` that begin anew, where several documents are packed into one row.
"""

from collections import UserDict
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwise.comm.move import part
from shardwise.core.errors import bad
from shardwise.core.tools.tree import leaves, mapped
from shardwise.techniques.context.positions import SequenceCut

#: A label that a loss of transformers ignores.
IGNORED = -100


@dataclass
class Sequences:
    """The positions of one part of a batch that a rank has.

    cut       how the positions are divided
    rank      this one, on the axis `cp`
    marker    stands for the mask of padding in the model; None: the model has none
    padding   boolean [B, 1, 1, T], True where a key is no padding; or `same_document()`
    ids       the batch's `position_ids` [B, T], in which packed documents begin anew; None: none,
              or a mask of padding, with which a model of transformers does not look for documents
    own_ids   of this rank's positions
    transformers   the model is a decoder of transformers
    """

    cut: SequenceCut
    rank: int
    marker: Tensor | None = None
    padding: Tensor | None = None
    ids: Tensor | None = None
    own_ids: Tensor | None = None
    transformers: bool = False
    _positions: Tensor | None = None

    @cached_property
    def numel(self) -> int:
        """The number of positions of this rank. Every torch function of a forward pass reads it."""
        return self.cut.numel(self.rank)

    def stands_for_padding(self, mask: Tensor | None) -> bool:
        return _same_storage(self.marker, mask)

    def in_copy(self, part: Any) -> "Sequences":
        """The same of a copy of the part, to which a forward may write."""
        marker = None if self.marker is None else part["attention_mask"]
        ids = None if self.own_ids is None else part["position_ids"]
        return replace(self, marker=marker, own_ids=ids)

    def is_packed(self, own: Tensor) -> Tensor:
        """Whether a row has several documents, by its position ids, of which `own` are here. If
        they are not the batch's, starts are unknown, and a mask made of them is refused.
        """
        if self.ids is None or not _same_storage(own, self.own_ids):
            return (own != self.positions(own.device)).any()
        return (_documents(self.ids)[:, -1] != 0).any()

    def same_document(self) -> Tensor:
        """[B, 1, t, T]: query and key are in one document. Rows: all of the Ulysses group."""
        assert self.ids is not None
        number = _documents(self.ids)
        chunks = self.cut.ring.chunks(self.rank // self.cut.ulysses)
        rows = torch.cat([number[:, start:stop] for start, stop in chunks], 1)
        return (rows[:, :, None] == number[:, None])[:, None]

    def positions(self, device: torch.device) -> Tensor:
        if self._positions is None or self._positions.device != device:
            chunks = self.cut.chunks(self.rank)
            own = [torch.arange(*each, dtype=torch.int64, device=device) for each in chunks]
            self._positions = torch.cat(own)
        return self._positions


def length_of(batch: Any) -> int:
    """The positions of sequences: dim 1 of the first tensor of 2 or 3 dims, of token ids first."""
    every = [x for x in leaves(batch, Tensor, objects=True) if x.dim() in (2, 3)]
    tensors = [x for x in every if x.dim() == 2 and not x.is_floating_point()] or every
    if not tensors:
        raise bad(
            "a batch under cp without a tensor [rows, positions, ...]",
            "a batch with a tensor of two or three dims, which has the positions in dim 1",
            '{"inputs": ids, "targets": ids}, each [rows, positions]',
        )
    return tensors[0].shape[1]


def shard(x: Tensor, cut: SequenceCut, rank: int, dim: int) -> Tensor:
    return part(x, cut.on(dim), rank)


def cut_batch(batch: Any, cut: SequenceCut, rank: int, *, shifts: bool) -> tuple[Any, Sequences]:
    """The positions of a rank in every tensor of a batch; `shifts`: for a model of transformers."""
    of = Sequences(cut, rank, transformers=shifts)
    if shifts and isinstance(batch, Mapping):
        batch = _for_transformers(batch, of)
    own = mapped(partial(_own, of), batch, Tensor, objects=True)
    of.own_ids = None if of.ids is None else own["position_ids"]
    return own, of


def _own(of: Sequences, x: Tensor) -> Tensor:
    square = x.dim() > 2 and x.shape[-2:] == (of.cut.length, of.cut.length)
    dim = 1 if x.dim() > 1 and x.shape[1] == of.cut.length else x.dim() - 2 if square else None
    return x if dim is None or x is of.marker else shard(x, of.cut, of.rank, dim)


def _same_storage(x: Tensor | None, y: Tensor | None) -> bool:
    if x is None or y is None:
        return False
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def _documents(ids: Tensor) -> Tensor:
    """The number of the document of each position [B, T]: ids that are not the next begin one."""
    return (torch.diff(ids, prepend=ids[:, :1] - 1) != 1).cumsum(-1)


def _for_transformers(batch: Mapping[str, Any], of: Sequences) -> Any:
    found: Any = copy(batch) if isinstance(batch, dict | UserDict) else dict(batch)
    mask, labels, ids = (batch.get(name) for name in ("attention_mask", "labels", "position_ids"))
    if mask is None and isinstance(ids, Tensor) and ids.shape[1:] == (of.cut.length,):
        of.ids = ids
    if isinstance(mask, Tensor) and mask.dim() == 2:
        of.padding = mask.bool()[:, None, None]
        of.marker = found["attention_mask"] = mask.new_ones(1, 1, 1, 1, dtype=torch.bool)
    if isinstance(labels, Tensor) and labels.dim() == 2 and "shift_labels" not in found:
        found["shift_labels"] = pad(labels[:, 1:], (0, 1), value=IGNORED)
    return found
