"""Flat parameters: several tensors stored end to end, gathered and reduced as one.

Three tensors, the first two one-dimensional (n ranks on the shard axis):

    full    the parameters end to end, padded to n equal blocks
    shard   this rank's block of `full`; a view of it where the row keeps parameters R
    p       the user's own parameter; its `data` is a view of one of the two

and the equations between them:

    UNSHARDED    p.data is a view of `full`, in its own shape: the model computes with it
    UNSHARDING   as SHARDED, while an all-gather writes `full`
    SHARDED      p.data is this rank's piece of p (local_layout.py), a view of `shard`, and p.grad
                 the same piece of the reduced gradient: an elementwise optimizer works on these

                unshard               reshard / to_sharded
    SHARDED ---------------> UNSHARDED -------------------> SHARDED

Under zero3, and where parameters rest in host memory, `full` has memory only while UNSHARDED. On
the host `shard` is updated in place; `begin_unshard` copies it into its block of `full` and gathers
the others. On a disk `shard` is the map of a file: `begin_unshard` begins to read it, and `unshard`
gathers the other blocks when it is there.

The moves are the row's (core/zero.py): `fetch` and `gather` here, others in flat_gradient.py.

A program may write to parameters: in place, or by `p.data = ...`. `take_assigned` takes over what
was assigned before p.data is set again, and `keep_writes` copies what a forward pass has written to
`full` into `shard`. After `looked`, and after writes that leave a trace, fp32 masters must follow.

`full` keeps one storage (its size goes to 0 and back), because autograd remembers views of it
between forward and backward; where weights have several versions at once, each has its own
(`renew`). With n = 1 nothing is gathered, and p.data keeps its shape. With a dtype for computation
`shard` has the parameters' own dtype; `begin_unshard` casts this rank's block to that of `full`.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial

import torch
from torch import Tensor, nn

from shardwise.comm.move import broadcast, start
from shardwise.comm.parameter import become
from shardwise.comm.tiers.tiers import begin_copy
from shardwise.comm.transport import Pending
from shardwise.comm.world import Axis
from shardwise.core.applied import Fill
from shardwise.core.errors import bad
from shardwise.core.zero import RowMove
from shardwise.flat.flat_gradient import FlatGradient
from shardwise.flat.local_layout import FlatViews, LocalLayout


class State(Enum):
    """The tensors that exist, and the one that p.data views."""

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
    ) -> None:
        self.local, self.layouts = local, list(local.layouts)
        row, shard, replicate = self.layouts[0].row, local.shard, local.replicate
        self.names = [name for name, _ in params]
        self.params = [p for _, p in params]
        self.shard_axis, self.replicate_axis = shard, replicate
        first = self.params[0]
        self.trained, self.dtype = first.requires_grad, first.dtype
        self.moves = row.moves(shard.size, replicate.size, trained=self.trained)
        # what is neither trained nor kept S is the same everywhere, for good
        self.split = self.moves.split
        self.rank, ranks = (shard.rank, shard.size) if self.split else (0, 1)
        # `full` has no memory between uses
        self.reshards = self.moves.reshards
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
        self.grads = FlatGradient(params, self.views, self.moves, local, like)
        self.coming = Pending()
        self.full_in_own_dtype: Tensor | None = None  # of `unshard_in_own_dtype`
        self.state = State.UNSHARDED
        self.data: list[Tensor] = []  # what was last set as the data of each parameter
        self.set_at: tuple[list[int], list[torch.Size]] = [], []  # its addresses and shapes
        self.versions: list[int] = []  # of the parameters, when they became views of `full`
        self.looked = False  # whether the program may have written since masters followed
        self.assignments = 0
        self.point_at(self.full)
        if self.reshards:
            self.reshard()

    def _rest(self) -> Tensor:
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
        self._set(self.full_views if full is self.full else self.views.every(full))
        self._has_new_versions()

    def _set(self, data: Sequence[Tensor]) -> None:
        for p, tensor in zip(self.params, data, strict=True):
            p.data = tensor
        self.data = list(data)
        self.set_at = _addresses(data)

    def renew(self) -> None:
        """Copy `full`, which `shard` views, to a new buffer; the old one keeps its values."""
        assert not self.reshards
        self.full = self.full.clone()
        self.shard = self.views.block(self.full)
        self.full_views = self.views.every(self.full)
        self.point_at(self.full)

    def begin_unshard(self) -> None:
        """Start to gather `full` while computation goes on."""
        if self.state is not State.SHARDED:
            return
        self.take_assigned()
        self._has_new_versions()
        if self.reshards:
            self.tiers.resize(self.full, self.plan.padded * self.full.element_size())
        self.coming = self._gather()
        self.state = State.UNSHARDING

    def _gather(self) -> Pending:
        move, block, tier = self.moves.gather, self.shard, self.moves.fetch
        if tier is not None:
            block = self.views.block(self.full)
            fetched = begin_copy(self.shard, self.tiers, tier, "device", block)
            if move is None:
                return fetched
            if tier == "disk":  # gathered when it is there, so that reads go on meanwhile
                gather = partial(self._start, move, block, self.full)
                return Pending([fetched.wait, lambda: gather().wait()])
            with self.tiers.following("device"):
                fetched.wait()
                return self._start(move, block, self.full)
        if self.compute is not None:
            block = self.views.block(self.full).copy_(self.shard)
        return Pending() if move is None else self._start(move, block, self.full)

    def _start(self, move: RowMove, block: Tensor, full: Tensor) -> Pending[Tensor]:
        return start(block, self.local.axis(move), move.src, move.dst, full)

    def unshard(self) -> None:
        """Gather `full`, and let the parameters be its views."""
        if self.state is State.UNSHARDED:
            return
        self.begin_unshard()
        self.coming.wait()
        if self.take_assigned() or self._has_new_versions():  # since the gather began
            self.state = State.SHARDED
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
        self.take_assigned()
        self._set([self.views.part(i, self.shard) for i in range(len(self.params))])
        self.state, self.full_in_own_dtype = State.SHARDED, None

    def reshard(self) -> None:
        """Free `full` where the row keeps parameters S; other rows do nothing."""
        if self.reshards and self.state is not State.SHARDED:
            self.to_sharded()
            self.tiers.resize(self.full, 0)

    def rest(self) -> None:
        self.reshard()
        if self.full_in_own_dtype is not None:
            self.to_sharded()

    def set_placeholders(self) -> None:
        """Give p.data its own shape without memory: a gradient arrives, but no node reads p."""
        if self.state is State.SHARDED:
            # on the device, where the gradient is: `shard` may be on the host
            first = self.shard[:1]
            expanded = [first.expand(shape) for shape in self.shapes]
            self._set(self.full_views if self.moves.fetch or self.compute else expanded)

    def unshard_in_own_dtype(self) -> None:
        """As `unshard`, but without the rounding to the dtype of computation."""
        if self.compute is None:
            self.unshard()
            return
        if self.full_in_own_dtype is not None:
            return
        self.to_sharded()
        if not self.split:
            return
        whole, move = self.shard.new_empty(self.plan.padded), self.moves.gather
        assert move is not None
        block = self.views.block(whole).copy_(self.shard)
        self._start(move, block, whole).wait()
        self.point_at(whole)
        self.full_in_own_dtype, self.state = whole, State.UNSHARDED

    def keep_block(self) -> None:
        """Copy this rank's block from `full`, after a write to `full`."""
        if self.full_in_own_dtype is not None:
            self.shard.copy_(self.views.block(self.full_in_own_dtype))
            return
        if (tier := self.moves.fetch) is not None:
            block = self.views.block(self.full)
            begin_copy(block, self.tiers, "device", tier, self.shard).wait()
        elif self.compute:  # only what was written: the rest is rounded there
            block = self.views.block(self.full)
            written = block != self.shard.to(self.compute)
            self.shard.copy_(torch.where(written, block.to(self.dtype), self.shard))
        elif self.reshards:
            self.shard.copy_(self.views.block(self.full))

    # --- what the program writes ----------------------------------------------------------------

    @torch.no_grad()
    def take_assigned(self) -> bool:
        """Take over the tensors of `p.data = ...`; returns whether there were any.

        A program that swaps weights keeps the tensor that it replaces, which is a view of ours: the
        values go to new memory, and that tensor keeps its own.

        Raises:
            InputError: a tensor of another shape, dtype or device than the parameter or its piece;
                parameters that are updated on another tier than they rest on.
        """
        now = _addresses(self.params)
        # an empty piece has no address
        if now == self.set_at and (0 not in now[0] or self.shard.is_meta):
            return False
        pairs = enumerate(zip(self.params, self.data, strict=True))
        changed = {i: p.data for i, (p, own) in pairs if not _is_view_of_ours(p, own)}
        if not changed:
            return False
        for i, value in changed.items():
            self._require_assignable(i, value)
        if self.state is State.UNSHARDED and (self.reshards or self.compute):
            full = self.full_in_own_dtype
            views = self.full_views if full is None else self.views.every(full)
            for i, value in changed.items():  # in place: autograd remembers views of `full`
                views[i].copy_(value)
                if self.moves.fetch is None:
                    self._copy_own(i, value)
            if self.moves.fetch:
                self.keep_block()
            self._set(views)
        else:
            self._renew_with(changed)
        self.looked = True
        self.assignments += len(changed)
        return True

    def _renew_with(self, changed: Mapping[int, Tensor]) -> None:
        """Copy what p.data is a view of to new memory, with the values of `changed`."""
        if self.moves.fetch:
            self.shard = self.tiers.empty_like(self.shard, "host").copy_(self.shard)
        elif self.reshards or self.compute:
            self.shard = self.shard.clone()
        else:
            self.full = self.full.clone()
            self.shard, self.full_views = self.views.block(self.full), self.views.every(self.full)
        if self.state is State.UNSHARDED:
            self._set(self.full_views)
            for i, value in changed.items():
                self.full_views[i].copy_(value)
            return
        self._set([self.views.part(i, self.shard) for i in range(len(self.params))])
        self.state = State.SHARDED
        for i, value in changed.items():
            self._copy_own(i, value)

    def _copy_own(self, index: int, value: Tensor) -> None:
        """Copy `value`, a piece or full, to this rank's piece of a parameter."""
        piece = self.views.part(index, self.shard)
        if value.shape != piece.shape:
            low = self.plan.origin(index, self.rank)
            value = value.reshape(-1)[low : low + piece.numel()]
        piece.copy_(value.view_as(piece))

    def _require_assignable(self, index: int, value: Tensor) -> None:
        name, like = self.names[index], self.data[index]
        shapes, dtypes = (like.shape, self.shapes[index]), (self.dtype, like.dtype)
        if self.moves.publish is not None:
            raise bad(
                f"{name}.data = ..., where the update is made from masters on another tier",
                "values that were there before sw.parallelize, or that sw.load reads",
                "the same plan without offload, or the values before sw.parallelize",
            )
        if value.shape in shapes and value.dtype in dtypes and value.device == like.device:
            return
        raise bad(
            f"{name}.data = a tensor {list(value.shape)} of {value.dtype} on {value.device}",
            f"{' or '.join(str(list(s)) for s in dict.fromkeys(shapes))} of {like.dtype} on "
            f"{like.device}, as the parameter is sharded",
            "sw.unwrap(module) before .to(), .half() or another shape, and wrap it again",
        )

    @torch.no_grad()
    def keep_writes(self, *, of_forward: bool = True) -> None:
        """Keep in `shard` what a forward of training, or the program, has written to `full`."""
        if not (self.reshards or self.compute) or self.state is not State.UNSHARDED:
            return
        versions = [p._version for p in self.params]
        written = [i for i, old in enumerate(self.versions) if versions[i] != old]
        tier = self.moves.fetch
        if written and (tier == "disk" or (tier and of_forward)):
            raise bad(
                f"a write to {self.names[written[0]]}, which rests on the {tier}, "
                + ("in a forward pass" if of_forward else "through model.NAME"),
                "writes between the passes, to this rank's piece in model.parameters()",
                "the write after the update of a step; or the plan without offload of parameters",
            )
        if tier is None or not of_forward:  # always: a write to p.data leaves no trace
            self.keep_block()
        self.looked |= bool(written) or not of_forward
        self.versions = versions

    def was_written(self) -> bool:
        """Whether the program may have written to the parameters since the last call."""
        self._has_new_versions()
        written, self.looked = self.looked, False
        return written

    def _has_new_versions(self) -> bool:
        """Whether a write to a parameter has left a trace since the last call."""
        versions = [p._version for p in self.params]
        written, self.versions = versions != self.versions, versions
        self.looked |= written
        return written

    @property
    def is_sharded(self) -> bool:
        return self.state is State.SHARDED


def _addresses(tensors: Sequence[Tensor]) -> tuple[list[int], list[torch.Size]]:
    return [*map(Tensor.data_ptr, tensors)], [each.shape for each in tensors]


def _is_view_of_ours(p: Tensor, own: Tensor) -> bool:
    """Whether the data of `p` is still `own`; for an empty piece only the storage tells."""
    if p.data_ptr() != own.data_ptr() or p.shape != own.shape:
        return False
    return bool(own.numel()) or (p.untyped_storage().data_ptr() == own.untyped_storage().data_ptr())


@torch.no_grad()
def initialize(
    full: Tensor,
    params: Sequence[tuple[str, nn.Parameter]],
    views: Sequence[Tensor],
    fill: Fill | None,
    axes: Sequence[Axis],
) -> None:
    """Write the weights of `params` to `views`, parts of `full`, the same on all data ranks.
    Parameters on the meta device are filled by name, and become real. If any has data, rank 0 of
    each of `axes` sends all of `full` to the others.
    """
    given = [not p.is_meta for _, p in params]
    for (name, p), view in zip(params, views, strict=True):
        if not p.is_meta:
            view.copy_(p.detach())
            continue
        if fill is not None:
            fill(name, view)
        # not with a view of full: autograd would count every write to full as one to the parameter
        become(p, torch.empty(0, dtype=full.dtype, device=full.device))
    for axis in axes if any(given) else ():
        broadcast(full, axis)
