"""Flat parameters: several tensors stored end to end, gathered and reduced as one.

Six tensors, all one-dimensional (n ranks on the shard axis, m on the replicate axis):

    full    the parameters end to end, padded to n equal blocks
    shard   this rank's block of `full`; a view of it where the row keeps parameters R
    grad    the gradients that this rank has made, in the layout of `full`
    gsum    their sum over the ranks, where the row reduces after each backward pass: all of it (R)
            or this rank's block (S)
    gshard  this rank's block of the sum, from which the update is made: of `grad` or of `gsum`
    p       the user's own parameter; its `data` is a view of one of the first two

and the equations between them:

    UNSHARDED    p.data is a view of `full`, in its own shape: the model computes with it
    UNSHARDING   as SHARDED, while an all-gather writes `full`
    SHARDED      p.data is this rank's piece of p, a view of `shard`, and p.grad the same piece of
                 `gshard`: an elementwise optimizer works on these.  A piece has as many dimensions
                 as p: k elements of a matrix are [k, 1], so that a choice by p.ndim is the same

                unshard               reshard / to_sharded
    SHARDED ---------------> UNSHARDED -------------------> SHARDED

Under zero3 `full` has memory only while UNSHARDED; `reshard` gives it back.

    backward:  p.grad --copy--> grad --reduce--> gshard --P -> R on replicate--> gshard

The moves are those of the row (row_moves.py): `begin_unshard` carries out `gather`, `begin_reduce`
`reduce`, and `begin_further` the sums over `replicas` and over the axes of `sums` (LocalLayout).
Where the update is made in host memory, `begin_offload` copies `gshard` there when all sums are
complete, and frees the gradients on the device: from then on `gshard` is `host_grad`.

`full` keeps one storage (its size goes to 0 and back), because autograd remembers views of it
between forward and backward; where weights have several versions at once, each has its own
(`renew`).  With n = 1 every block is the whole: nothing is ever gathered, and p.data keeps its
shape; that is a row that shards nothing (`ddp`), and any row on one rank.
"""

from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import Tensor, nn

from shardwise.comm.move import start
from shardwise.comm.tiers import begin_copy
from shardwise.comm.transport import Pending
from shardwise.comm.world import Axis
from shardwise.core.flatten import flatten
from shardwise.core.layout import P, Placement, R
from shardwise.parallel.data.initial_weights import Fill, initialize
from shardwise.parallel.data.local_layout import LocalLayout
from shardwise.parallel.data.mean import mean_with_graph
from shardwise.parallel.data.row_moves import row_moves

#: out, left, right, beta, alpha: out becomes beta out + alpha left right; of beta 0 it is not read.
AddProduct = Callable[[Tensor, Tensor, Tensor, float, float], object]  # matmul.py


class State(Enum):
    """Which of the tensors exist, and what p.data is a view of."""

    SHARDED = "p.data in shard"
    UNSHARDING = "p.data in shard, full being written"
    UNSHARDED = "p.data in full"


class Flat:
    """Parameters of one dtype, all trained or all frozen, that are gathered and reduced at once."""

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter]],
        local: LocalLayout,
        fill: Fill | None,
        device: torch.device,
        add_to: AddProduct,
    ) -> None:
        self.local, self.tiers, self.layouts = local, local.tiers, list(local.layouts)
        row, shard, replicate = self.layouts[0].row, local.shard, local.replicate
        self.add_to = add_to
        self.names = [name for name, _ in params]
        self.params = [p for _, p in params]
        self.shapes = [p.shape for p in self.params]
        self.shard_axis, self.replicate_axis = shard, replicate
        first = self.params[0]
        self.trained, self.dtype = first.requires_grad, first.dtype
        # what is neither trained nor kept S is the same everywhere, for good
        self.split = shard.size > 1 and (self.trained or row.param.kind == "S")
        self.reshards = self.split and row.param.kind == "S"  # `full` has no memory between uses
        self.rank, ranks = (shard.rank, shard.size) if self.split else (0, 1)
        self.moves = row_moves(row, shard, replicate, trained=self.trained)
        self.further = [*self.moves.replicas, *local.sums]
        self.plan = flatten([s.numel() for s in self.shapes], first.element_size(), ranks)
        self.pieces = [self.plan.piece(i, self.rank) for i in range(len(self.params))]
        self.full = torch.zeros(self.plan.padded, dtype=self.dtype, device=device)
        named = zip(self.names, self.params, strict=True)
        initialize(self.full, list(named), self.views(self.full), fill, (shard, replicate))
        self.shard = self._block(self.full).clone() if self.reshards else self._block(self.full)
        self.full_views = self.views(self.full)
        self.grad: Tensor | None = None
        self.grad_views: list[Tensor] = []
        self.gsum: Tensor | None = None
        self.gshard: Tensor | None = None
        self.host_grad: Tensor | None = None
        none = [False] * len(self.params)
        self.filled = list(none)  # grad holds something of parameter i
        self.valid = list(none)  # gsum holds something of parameter i
        self.has_grad = list(none)  # this rank has had a gradient for parameter i since `clear`
        self.used = list(none)  # and so has any rank, as far as has been heard
        self.grads_attached = False  # the pieces of gshard are on the parameters
        self.graphs: dict[int, Tensor] = {}  # gradients with a graph (create_graph)
        self.coming, self.going = Pending(), Pending()
        self.state = State.UNSHARDED
        self.point_at(self.full)
        if self.reshards:
            self.reshard()

    # --- the parameters -----------------------------------------------------------------------

    def _block(self, flat: Tensor) -> Tensor:
        if self.plan.ranks == 1:
            return flat
        return flat.view(self.plan.ranks, self.plan.share)[self.rank]

    def piece(self, index: int, block: Tensor) -> Tensor:
        """The part of parameter `index` in this rank's `block`: [k, 1, ..., 1], with as many dims.

        A 0-d parameter stays 0-d on the rank that holds its element, and is [0] elsewhere.
        """
        (low, high), dims = self.pieces[index], len(self.shapes[index])
        if dims == 0 and high > low:
            return block[low]
        return block[low:high].view(high - low, *[1] * (dims - 1))

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's place in `flat`, in its own shape."""
        return [self.view(flat, index) for index in range(len(self.params))]

    def view(self, flat: Tensor, index: int) -> Tensor:
        """The place of parameter `index` in `flat`, in its own shape."""
        offset, shape = self.plan.offsets[index], self.shapes[index]
        return flat[offset : offset + shape.numel()].view(shape)

    def point_at(self, full: Tensor) -> None:
        """Make the parameters views of `full`, a tensor with the offsets of `self.full`."""
        views = self.full_views if full is self.full else self.views(full)
        for p, view in zip(self.params, views, strict=True):
            p.data = view

    def renew(self) -> None:
        """Copy `full` to a new buffer and continue there; the old buffer keeps its values.

        For parameters that are kept whole: `shard` is a view of `full`.
        """
        assert not self.reshards
        self.full = self.full.clone()
        self.shard = self._block(self.full)
        self.full_views = self.views(self.full)
        self.point_at(self.full)

    def begin_unshard(self) -> None:
        """Start to gather `full` while computation goes on."""
        if self.state is not State.SHARDED:
            return
        if self.reshards:
            self.full.untyped_storage().resize_(self.plan.padded * self.full.element_size())
        move = self.moves.gather
        assert move is not None
        self.coming = start(self.shard, move.axis, move.src, move.dst, self.full)
        self.state = State.UNSHARDING

    def unshard(self) -> None:
        """Gather `full`, and let the parameters be its views."""
        if self.state is State.UNSHARDED:
            return
        self.begin_unshard()
        self.coming.wait()
        self.point_at(self.full)
        self.state = State.UNSHARDED

    def to_sharded(self) -> None:
        """Let the parameters be this rank's pieces, on which the optimizer works."""
        if not self.split:
            return
        if self.state is State.UNSHARDING:
            self.coming.wait()
        for i, p in enumerate(self.params):
            p.data = self.piece(i, self.shard)
        self.state = State.SHARDED

    def reshard(self) -> None:
        """Free `full` where the row keeps parameters S; other rows do nothing."""
        if self.reshards and self.state is not State.SHARDED:
            self.to_sharded()
            self.full.untyped_storage().resize_(0)

    def set_placeholders(self) -> None:
        """Give p.data its own shape without memory: a gradient arrives, but no node reads p."""
        if self.state is State.SHARDED:
            for p, shape in zip(self.params, self.shapes, strict=True):
                p.data = self.shard[:1].expand(shape)

    def keep_block(self) -> None:
        """Copy this rank's block from `full`, after a write to `full`."""
        if self.reshards:
            self.shard.copy_(self._block(self.full))

    @property
    def is_sharded(self) -> bool:
        """Whether p.data is this rank's piece."""
        return self.state is State.SHARDED

    # --- the gradients ------------------------------------------------------------------------

    def collect(self, index: int, scale: float) -> None:
        """Take the gradient autograd has just left on parameter `index`, times `scale`."""
        p = self.params[index]
        if p.grad is None:
            return
        view, filled = self._fill(index)
        gradient, p.grad = p.grad, None
        if gradient.requires_grad:  # under create_graph=True
            before = self.graphs.get(index)
            self.graphs[index] = gradient if before is None else before + gradient
            gradient = gradient.detach()
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if filled:
            view.add_(gradient, alpha=scale)
        elif scale == 1.0:
            view.copy_(gradient)
        else:
            torch.mul(gradient, scale, out=view)

    def add_product(self, index: int, left: Tensor, right: Tensor, scale: float) -> None:
        """Add left^T right, of left [N, out] and right [N, in], to the gradient of a weight."""
        view, filled = self._fill(index)
        self.add_to(view, left.t(), right, float(filled), scale)  # times 0: not read at all

    def add_rows(self, index: int, ids: Tensor, grad: Tensor, scale: float) -> None:
        """Add grad [N, D] to the rows `ids` of the gradient of a table."""
        view, filled = self._fill(index)
        if not filled:
            view.zero_()
        view.index_add_(0, ids, grad, alpha=scale)

    def _fill(self, index: int) -> tuple[Tensor, bool]:
        """The place of a gradient about to be written, and whether it holds something already."""
        if self.grad is None:
            self.begin_grad()
        filled = self.filled[index]
        self.filled[index] = self.has_grad[index] = True
        return self.grad_views[index], filled

    def begin_grad(self) -> None:
        """Make room for gradients in the layout of `full`."""
        again = self.gsum is not None and self.gsum.numel() == self.plan.padded
        if again and not any(self.valid):  # memory of the step before
            self.grad = self.gsum
        else:
            self.grad = self.shard.new_empty(self.plan.padded)
        assert self.grad is not None
        self.grad_views = self.views(self.grad)
        used = 0
        for offset, numel in zip(self.plan.offsets, self.plan.numels, strict=True):
            self.grad[used:offset].zero_()  # padding is summed like the rest: it must be a number
            used = offset + numel
        self.grad[used:].zero_()
        if not self.moves.each_backward:
            self.gshard = self._block(self.grad)

    def begin_reduce(self) -> None:
        """Start the sum of `grad` over the row's axis; a missing gradient counts as zero."""
        if self.grad is None:
            self.begin_grad()
        assert self.grad is not None
        self._zero_unfilled()
        move = self.moves.reduce
        if move is None:
            return
        if not self.moves.each_backward:
            assert self.gshard is not None
            self.going = start(self.grad, move.axis, P, move.dst, self.gshard, behind=True)
            return
        sent, self.grad, self.grad_views = self.grad, None, []
        self.filled = [False] * len(self.params)
        out = self._room(sent, move.dst)
        arriving = start(sent, move.axis, P, move.dst, out, behind=True)
        self.going = Pending([arriving.wait, lambda: self._arrived(out, sent)])

    def _room(self, sent: Tensor, dst: Placement) -> Tensor:
        """Where the sum of `sent` is written: to `gsum` if that holds nothing yet, or in place."""
        fresh = not any(self.valid)
        if dst == R or not fresh:
            out = sent if dst == R else self._block(sent)
        else:
            out = torch.empty_like(self.shard) if self.gsum is None else self.gsum
        if fresh:
            self.gsum, self.valid = out, [True] * len(self.params)
            self.gshard = out if dst != R else self._block(out)
        return out

    def _zero_unfilled(self) -> None:
        for view, filled in zip(self.grad_views, self.filled, strict=True):
            if not filled:
                view.zero_()

    def _arrived(self, out: Tensor, sent: Tensor) -> None:
        """The sum is in `out`: add it where gsum holds something.  `sent` lived until now."""
        gsum = self.gsum
        assert gsum is not None
        if out is not gsum:
            whole = gsum.numel() == self.plan.padded
            parts = self.views(gsum) if whole else [gsum[low:high] for low, high in self.pieces]
            for part, valid in zip(parts, self.valid, strict=True):
                if not valid:
                    part.zero_()
            gsum.add_(out)
        self.valid = [True] * len(self.params)

    def end_reduce(self) -> None:
        """Wait for the sum that `begin_reduce` or `begin_further` started."""
        self.going.wait()

    def begin_further(self) -> None:
        """Start the sum of `gshard` over replicas of this shard, then where it is still partial."""
        self.going = self._sum_over(self.further)

    def _sum_over(self, axes: Sequence[Axis]) -> Pending:
        if not axes or self.gshard is None:
            return Pending()
        first, *others = axes
        going = start(self.gshard, first, P, R, self.gshard, behind=True)
        return Pending([going.wait, lambda: self._sum_over(others).wait()]) if others else going

    def begin_offload(self) -> None:
        """Start to copy `gshard` to the host, where the update is made, and free it here."""
        if not self.moves.host_update or self.gshard is None:
            return
        if self.host_grad is None:
            self.host_grad = self.tiers.empty_like(self.gshard, "host")
        self.going = begin_copy(self.gshard, self.tiers, "device", "host", self.host_grad)
        self.grad, self.grad_views, self.gsum, self.gshard = None, [], None, self.host_grad

    def gradient(self, index: int) -> Tensor | None:
        """The piece of `gshard` for parameter `index`; None if no rank had a gradient for it."""
        return self._sharded_grad(index) if self.used[index] else None

    def attach_grads(self) -> None:
        """Set each p.grad to its piece of `gshard`, unless that is not where p is."""
        for i, p in enumerate(self.params if not self.moves.host_update else ()):
            p.grad = self.gradient(i)
            if i in self.graphs and p.grad is not None:
                p.grad = mean_with_graph(self.graphs.pop(i), p.grad)
        self.grads_attached = True

    def _sharded_grad(self, index: int) -> Tensor:
        """The piece of `gshard` that is the gradient of parameter `index`."""
        assert self.gshard is not None
        return self.piece(index, self.gshard) if self.split else self.view(self.gshard, index)

    def detach_grads(self) -> None:
        """Before a backward pass: take each p.grad back, unless the user has set it to None.

        Autograd would add to p.grad in place, which has the shape of a piece and not of p.
        Gradients already summed over the replicas are divided: the next sum counts them once.
        """
        if not self.grads_attached:
            return
        self.grads_attached = False
        kept = [p.grad is not None for p in self.params]
        for i, p in enumerate(self.params):
            piece = self._sharded_grad(i)
            if p.grad is not None and p.grad.data_ptr() != piece.data_ptr():
                piece.copy_(p.grad.detach())  # the user has put another there
            if p.grad is not None and p.grad.requires_grad and torch.is_grad_enabled():
                self.graphs[i] = p.grad
            p.grad = None
        self.has_grad = list(kept)
        assert self.gshard is not None
        if any(kept) and self.replicate_axis.size > 1:
            self.gshard.div_(self.replicate_axis.size)
        if self.moves.each_backward:
            self.valid = kept
            return
        self.filled = kept
        if self.split and self.grad is not None:  # beyond the block lie remains of what was sent
            block = self.gshard.clone()
            self.grad.zero_()
            self.gshard.copy_(block)

    def clear(self) -> None:
        """Drop the gradients; their memory stays for the next step."""
        none = [False] * len(self.params)
        self.filled, self.valid, self.has_grad = list(none), list(none), list(none)
        self.grads_attached = False
        self.graphs.clear()
        for p in self.params:
            p.grad = None
