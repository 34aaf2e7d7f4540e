"""This rank's positions of a batch.

    {"inputs": [B, T], "targets": [B, T]}        dim 1
    {"x": [B, T, D], "y": [B, T, D]}             dim 1
    {"ids": [B, T], "mask": [B, 1, T, T]}        rows of the mask: attention needs all columns
    {"ids": [B, T], "label": [B]}                the label has no positions

For models of transformers labels are shifted before the cut, as `shift_labels`, and a mask of
padding is kept aside: the model would make of it a mask of this rank's positions alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwise.core.errors import bad
from shardwise.core.tools.tree import leaves, mapped
from shardwise.techniques.context.positions import SequenceCut
from shardwise.techniques.context.shards import shard

#: A label that a loss of transformers ignores.
IGNORED = -100


@dataclass
class Sequences:
    """The positions of one part of a batch that a rank has.

    cut       how the positions are divided
    rank      this one, on the axis `cp`
    marker    stands for the mask of padding in the model; None: the model has none
    padding   boolean [B, 1, 1, T], True where a key is no padding
    """

    cut: SequenceCut
    rank: int
    marker: Tensor | None = None
    padding: Tensor | None = None
    _positions: Tensor | None = None

    @cached_property
    def numel(self) -> int:
        """The number of positions of this rank. Every torch function of a forward pass reads it."""
        return self.cut.numel(self.rank)

    def stands_for_padding(self, mask: Tensor | None) -> bool:
        """Whether the mask is the marker, or a view of it."""
        if self.marker is None or mask is None:
            return False
        return mask.untyped_storage().data_ptr() == self.marker.untyped_storage().data_ptr()

    @property
    def starts(self) -> list[int]:
        """Where each run of neighbouring positions begins, of this rank's."""
        chunks = [(start, stop) for start, stop in self.cut.chunks(self.rank) if start < stop]
        sizes = [stop - start for start, stop in chunks]
        return [sum(sizes[:number]) for number in range(len(sizes))]

    def positions(self, device: torch.device) -> Tensor:
        """The positions of this rank, int64."""
        if self._positions is None or self._positions.device != device:
            chunks = self.cut.chunks(self.rank)
            own = [torch.arange(*each, dtype=torch.int64, device=device) for each in chunks]
            self._positions = torch.cat(own)
        return self._positions


def length_of(batch: Any) -> int:
    """The number of positions of the sequences in a batch: dim 1 of its first tensor with one.

    Such a tensor has two or three dims; images and masks have more. Token ids come before others.

    Raises InputError if there is none.
    """
    every = [x for x in leaves(batch, Tensor, objects=True) if x.dim() in (2, 3)]
    tensors = [x for x in every if x.dim() == 2 and not x.is_floating_point()] or every
    if not tensors:
        raise bad(
            "a batch under cp without a tensor [rows, positions, ...]",
            "a batch with a tensor of two or three dims, which has the positions in dim 1",
            '{"inputs": ids, "targets": ids}, each [rows, positions]',
        )
    return tensors[0].shape[1]


def cut_batch(batch: Any, cut: SequenceCut, rank: int, *, shifts: bool) -> tuple[Any, Sequences]:
    """The positions of a rank in every tensor of a batch; `shifts`: for a model of transformers."""
    of = Sequences(cut, rank)
    if shifts and isinstance(batch, Mapping):
        batch = _for_transformers(batch, of)
    return mapped(partial(_own, of), batch, Tensor, objects=True), of


def _own(of: Sequences, x: Tensor) -> Tensor:
    """This rank's positions of a tensor of the batch."""
    square = x.dim() > 2 and x.shape[-2:] == (of.cut.length, of.cut.length)
    dim = 1 if x.dim() > 1 and x.shape[1] == of.cut.length else x.dim() - 2 if square else None
    return x if dim is None or x is of.marker else shard(x, of.cut, of.rank, dim)


def _for_transformers(batch: Mapping[str, Any], of: Sequences) -> dict[str, Any]:
    found, mask, labels = dict(batch), batch.get("attention_mask"), batch.get("labels")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        of.padding = mask.bool()[:, None, None]
        of.marker = found["attention_mask"] = mask.new_ones(1, 1, 1, 1, dtype=torch.bool)
    if isinstance(labels, Tensor) and labels.dim() == 2 and "shift_labels" not in found:
        found["shift_labels"] = pad(labels[:, 1:], (0, 1), value=IGNORED)
    return found
