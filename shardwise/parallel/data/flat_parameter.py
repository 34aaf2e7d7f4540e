"""Flat parameters: several tensors stored end to end, gathered and reduced as one.

Three tensors, the first two one-dimensional (n ranks on the shard axis):

    full    the parameters end to end, padded to n equal blocks
    shard   this rank's block of `full`; a view of it where the row keeps parameters R
    p       the user's own parameter; its `data` is a view of one of the two

and the equations between them:

    UNSHARDED    p.data is a view of `full`, in its own shape: the model computes with it
    UNSHARDING   as SHARDED, while an all-gather writes `full`
    SHARDED      p.data is this rank's piece of p (flat_views.py), a view of `shard`, and p.grad the
                 same piece of the reduced gradient: an elementwise optimizer works on these

                unshard               reshard / to_sharded
    SHARDED ---------------> UNSHARDED -------------------> SHARDED

Under zero3 `full` has memory only while UNSHARDED; `reshard` gives it back.  So it has where
parameters rest in host memory: there `shard` is, and an update is made in place; `begin_unshard`
copies it into its block of `full`, on the device, and gathers the other blocks.  On a disk `shard`
is the map of a file, which training never touches: `begin_unshard` begins to read it, and
`unshard` gathers the other blocks when it is there.

The moves are those of the row (row_moves.py): `begin_unshard` carries out `fetch` and `gather`.
Those of the gradients are in `grads` (flat_gradient.py).

`full` keeps one storage (its size goes to 0 and back), because autograd remembers views of it
between forward and backward; where weights have several versions at once, each has its own
(`renew`).  With n = 1 every block is the whole: nothing is ever gathered, and p.data keeps its
shape; that is a row that shards nothing (`ddp`), and any row on one rank.  Only on the host it is
then in another memory while SHARDED.  So it is with a dtype for computation: `shard` has the
parameters' own dtype, `full` that one; `begin_unshard` casts this rank's block and gathers it.
"""

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor, nn

from shardwise.comm.move import start
from shardwise.comm.tiers import begin_copy
from shardwise.comm.transport import Pending
from shardwise.parallel.data.flat_gradient import AddProduct, FlatGradient
from shardwise.parallel.data.flat_views import FlatViews
from shardwise.parallel.data.initial_weights import Fill, initialize
from shardwise.parallel.data.local_layout import LocalLayout
from shardwise.parallel.data.row_moves import row_moves


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
        self.local, self.layouts = local, list(local.layouts)
        row, shard, replicate = self.layouts[0].row, local.shard, local.replicate
        self.names = [name for name, _ in params]
        self.params = [p for _, p in params]
        self.shard_axis, self.replicate_axis = shard, replicate
        first = self.params[0]
        self.trained, self.dtype = first.requires_grad, first.dtype
        # what is neither trained nor kept S is the same everywhere, for good
        self.split = shard.size > 1 and (self.trained or row.param.kind == "S")
        self.rank, ranks = (shard.rank, shard.size) if self.split else (0, 1)
        self.moves = row_moves(row, shard, replicate, trained=self.trained)
        # `full` has no memory between uses
        self.reshards = self.moves.fetch is not None or (self.split and row.param.kind == "S")
        shapes = [p.shape for p in self.params]
        self.views = FlatViews(shapes, first.element_size(), ranks, self.rank)
        self.shapes, self.plan, self.pieces = shapes, self.views.plan, self.views.pieces
        self.full = torch.zeros(self.plan.padded, dtype=self.dtype, device=device)
        named = zip(self.names, self.params, strict=True)
        initialize(self.full, list(named), self.views.every(self.full), fill, (shard, replicate))
        self.tiers, self.compute = local.tiers, local.compute
        # whether parameters are in another memory while SHARDED
        self.moves_to_rest = self.split or self.reshards or self.compute is not None
        self.shard = self._rest()
        if self.compute is not None:
            self.full = self.full.to(self.compute)
        self.full_views = self.views.every(self.full)
        # not `full` itself, which `renew` replaces
        like = self.full.new_empty(0, dtype=self.dtype)
        self.grads = FlatGradient(params, self.views, self.moves, local, like, add_to)
        self.coming = Pending()
        self.whole: Tensor | None = None  # of `unshard_in_own_dtype`
        self.state = State.UNSHARDED
        self.point_at(self.full)
        if self.reshards:
            self.reshard()

    def _rest(self) -> Tensor:
        """This rank's block of `full`, where it rests between uses."""
        block = self.views.block(self.full)
        if self.moves.fetch == "disk":
            assert self.local.disk is not None
            extent = self.local.disk.allocate(
                f"weight of {self.names[0]}", block.numel(), self.dtype
            )
            rests = self.tiers.on_disk(extent)
            return begin_copy(block, self.tiers, "device", "disk", rests).wait()
        if self.moves.fetch:
            return begin_copy(block, self.tiers, "device", "host").wait()
        return block.clone() if self.reshards or self.compute is not None else block

    def point_at(self, full: Tensor) -> None:
        """Make the parameters views of `full`, a tensor with the offsets of `self.full`."""
        views = self.full_views if full is self.full else self.views.every(full)
        for p, view in zip(self.params, views, strict=True):
            p.data = view

    def renew(self) -> None:
        """Copy `full` to a new buffer and continue there; the old buffer keeps its values.

        For parameters that are kept whole: `shard` is a view of `full`.
        """
        assert not self.reshards
        self.full = self.full.clone()
        self.shard = self.views.block(self.full)
        self.full_views = self.views.every(self.full)
        self.point_at(self.full)

    def begin_unshard(self) -> None:
        """Start to gather `full` while computation goes on."""
        if self.state is not State.SHARDED:
            return
        if self.reshards:
            self.full.untyped_storage().resize_(self.plan.padded * self.full.element_size())
        self.coming = self._gather()
        self.state = State.UNSHARDING

    def _gather(self) -> Pending:
        """Start to write `full`, after a copy of this rank's block from the host if it is there."""
        move, block, tier = self.moves.gather, self.shard, self.moves.fetch
        if tier is not None:
            block = self.views.block(self.full)
            fetched = begin_copy(self.shard, self.tiers, tier, "device", block)
            if move is None:
                return fetched
            if tier == "disk":  # gathered when it is there, so that reads go on meanwhile
                axes = move.axis, move.src, move.dst, self.full
                return Pending([fetched.wait, lambda: start(block, *axes).wait()])
            with self.tiers.following("device"):
                fetched.wait()
                return start(block, move.axis, move.src, move.dst, self.full)
        if self.compute is not None:
            block = self.views.block(self.full).copy_(self.shard)
        if move is None:
            return Pending()
        return start(block, move.axis, move.src, move.dst, self.full)

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
        if not self.moves_to_rest:
            return
        if self.state is State.UNSHARDING:
            self.coming.wait()
        for i, p in enumerate(self.params):
            p.data = self.views.part(i, self.shard)
        self.state, self.whole = State.SHARDED, None

    def reshard(self) -> None:
        """Free `full` where the row keeps parameters S; other rows do nothing."""
        if self.reshards and self.state is not State.SHARDED:
            self.to_sharded()
            self.full.untyped_storage().resize_(0)

    def set_placeholders(self) -> None:
        """Give p.data its own shape without memory: a gradient arrives, but no node reads p."""
        if self.state is State.SHARDED:
            for p, view, shape in zip(self.params, self.full_views, self.shapes, strict=True):
                # on the device, where the gradient is: `shard` may be on the host
                p.data = view if self.moves.fetch or self.compute else self.shard[:1].expand(shape)

    def unshard_in_own_dtype(self) -> None:
        """As `unshard`, but without the rounding to the dtype of computation."""
        if self.compute is None:
            self.unshard()
            return
        self.to_sharded()
        if not self.split:
            return
        whole, move = self.shard.new_empty(self.plan.padded), self.moves.gather
        assert move is not None
        block = self.views.block(whole).copy_(self.shard)
        start(block, move.axis, move.src, move.dst, whole).wait()
        self.point_at(whole)
        self.whole, self.state = whole, State.UNSHARDED

    def keep_block(self) -> None:
        """Copy this rank's block from `full`, after a write to `full`."""
        if self.whole is not None:
            self.shard.copy_(self.views.block(self.whole))
            return
        if (tier := self.moves.fetch) is not None:
            block = self.views.block(self.full)
            begin_copy(block, self.tiers, "device", tier, self.shard).wait()
        elif self.reshards:
            self.shard.copy_(self.views.block(self.full))

    @property
    def is_sharded(self) -> bool:
        """Whether p.data is this rank's piece."""
        return self.state is State.SHARDED
