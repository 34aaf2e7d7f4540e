"""The gradient of a flat parameter: collected in the backward pass, then reduced over the ranks.

    grad    the gradients that this rank has made, in the layout of the whole flat parameter
    gsum    their sum over the ranks, where the row reduces after each backward pass: all of it (R)
            or this rank's block (S)
    gshard  this rank's block of the sum, from which the update is made: of `grad` or of `gsum`

    p.grad --collect--> grad --reduce--> gshard --P -> R on replicate--> gshard --attach--> p.grad

The moves are the row's (core/zero.py): `begin_reduce` carries out the first of `sums`, and
`begin_further` those over replicas and over other axes. Then `begin_offload` carries out `offload`:
it copies `gshard` to another tier and frees the gradients on the device. From then on `gshard` is
`host_grad`. If that still holds gradients of an earlier backward pass, which a user's loop has not
dropped, the copy is added. Where updates are made one step late, two take turns (`swap`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.move import begin_sum, start
from shardwise.comm.tiers.arena import NO_ARENA
from shardwise.comm.tiers.tiers import begin_copy
from shardwise.comm.transport import Pending
from shardwise.comm.world import Axis
from shardwise.core.errors import bad
from shardwise.core.layouts.layout import P, Placement, R
from shardwise.core.tools.hook import in_backward, others_after
from shardwise.core.zero import RowMoves
from shardwise.flat.local_layout import FlatViews, LocalLayout


class FlatGradient:
    """The gradients of parameters that are reduced at once; `like` is a tensor of their dtype."""

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter]],
        views: FlatViews,
        moves: RowMoves,
        local: LocalLayout,
        like: Tensor,
    ) -> None:
        self.names, self.params = [name for name, _ in params], [p for _, p in params]
        self.views, self.moves, self.local = views, moves, local
        self.replicate_axis, self.tiers, self.like = local.replicate, local.tiers, like
        self.further = [*map(local.axis, moves.sums[1:]), *local.sums]
        self.grad: Tensor | None = None
        self.grad_views: list[Tensor] = []
        self.gsum: Tensor | None = None
        self.gshard: Tensor | None = None
        self.host_grad: Tensor | None = None
        self.late, self.other_host_grad = local.late, self.host_grad
        none = [False] * len(params)
        self.filled = list(none)  # grad holds something of parameter i
        self.valid = list(none)  # gsum holds something of parameter i
        self.resting = list(none)  # host_grad holds something of an earlier backward pass
        self.shown = list(none)  # p.grad has what grad held of parameter i
        self.has_grad = list(none)  # this rank has had a gradient for parameter i since `clear`
        self.used = list(none)  # and so has any rank, as far as has been heard
        self.attached = False  # the pieces of gshard are on the parameters
        self.hidden: list[Tensor | None] = []  # those pieces, while a forward is compiled
        #: rows of lookups with sparse gradients: 1 where one of this step has arrived on any rank
        self.touched: dict[int, Tensor] = {}
        self.graphs: dict[int, Tensor] = {}  # gradients with a graph (create_graph)
        self.scale = 1.0  # of every gradient that is collected
        self.going = Pending()

    # --- in the backward pass -----------------------------------------------------------------

    def collect(self, indices: Sequence[int], *, mute: bool = False) -> None:
        """Copy the gradients that autograd has just left on these parameters to `grad`, times
        `scale`, or add them to what is there; `mute`: drop them.

        Raises InputError for the gradient of a piece, and for one that a hook has dropped.
        """
        new: tuple[list[Tensor], list[Tensor]] = ([], [])
        more: tuple[list[Tensor], list[Tensor]] = ([], [])
        shapes = self.views.shapes
        for i in indices:
            p = self.params[i]
            gradient = p.grad
            if gradient is None:
                if others_after(p):
                    raise in_backward(f"a hook that drops the gradient of {self.names[i]}, as")
                continue
            p.grad = None
            if gradient.shape != shapes[i]:
                raise bad(
                    f"a loss that was computed from this rank's piece of {self.names[i]}",
                    "losses of what model(x) and model.NAME give; of model.parameters() after "
                    "model(x)",
                    "loss = model(x).mean(), then "
                    "loss += sum(p.norm() for p in model.parameters())",
                )
            if mute:
                continue
            if self.touched or gradient.requires_grad or gradient.is_sparse:
                gradient = self._plain(i, gradient)
            if self.grad is None:
                self.begin()
            to, of = more if self.filled[i] else new
            to.append(self.grad_views[i])
            of.append(gradient)
            self.filled[i] = self.has_grad[i] = True
        if new[0]:
            torch._foreach_copy_(*new)  # pyright: ignore[reportPrivateImportUsage]
            if self.scale != 1.0:
                torch._foreach_mul_(new[0], self.scale)  # pyright: ignore[reportPrivateImportUsage]
        if more[0]:
            torch._foreach_add_(*more, alpha=self.scale)  # pyright: ignore[reportPrivateImportUsage]

    def _plain(self, index: int, gradient: Tensor) -> Tensor:
        """The values of a gradient that is sparse or has a graph, which are noted."""
        if gradient.requires_grad:  # under create_graph=True
            before = self.graphs.get(index)
            self.graphs[index] = gradient if before is None else before + gradient
            gradient = gradient.detach()
        if index in self.touched:
            rows = gradient._indices()[0] if gradient.is_sparse else slice(None)
            self.touched[index][rows] = 1
        return gradient.to_dense() if gradient.is_sparse else gradient

    def add_product(self, index: int, left: Tensor, right: Tensor) -> None:
        """Add left^T right, of left [N, out] and right [N, in], to the gradient of a weight."""
        if self.grad is None:
            self.begin()
        view, beta = self.grad_views[index], float(self.filled[index])  # 0: not read
        torch.addmm(view, left.t(), right, beta=beta, alpha=self.scale, out=view)
        self.filled[index] = self.has_grad[index] = True

    def show(self) -> None:
        """Put what this rank has accumulated on each parameter with the user's own hooks.

        As under torch's DDP, hooks after accumulation see and may change the sum of all backward
        passes since the gradients were dropped.  Where sums are sharded after each pass, they see
        the gradient of that pass.
        """
        for i, p in enumerate(self.params):
            # p.grad is there already if the pass has begun with this parameter
            if self.filled[i] and p.grad is None and others_after(p):
                p.grad = self.grad_views[i] / self.scale
                self.filled[i], self.shown[i] = False, True

    def unshow(self) -> None:
        """After the pass: take back what was shown and had no gradient in it."""
        left = [i for i, shown in enumerate(self.shown) if shown and not self.filled[i]]
        self.collect([i for i in left if self.params[i].grad is not None])
        self.shown = [False] * len(self.params)

    def begin(self) -> None:
        """Make room for gradients in the layout of the whole flat parameter."""
        plan = self.views.plan
        again = self.gsum is not None and self.gsum.numel() == plan.padded
        if again and not any(self.valid):  # memory of the step before
            self.grad = self.gsum
        else:
            arena = self.local.arena if self.moves.shards_gradient else NO_ARENA  # else they stay
            self.grad = arena.empty((plan.padded,), self.like)
        assert self.grad is not None
        self.grad_views = self.views.every(self.grad)
        for low, high in self.views.gaps:  # they are summed like the rest: they must be numbers
            self.grad[low:high].zero_()
        if not self.moves.each_backward:
            self.gshard = self.views.block(self.grad)

    # --- between ranks and tiers --------------------------------------------------------------

    def begin_reduce(self) -> None:
        """Start the sum of `grad` over the row's axis; a missing gradient counts as zero."""
        if self.grad is None:
            self.begin()
        assert self.grad is not None
        self._zero_unfilled()
        if not self.moves.sums:
            return
        move = self.moves.sums[0]
        axis = self.local.axis(move)
        if not self.moves.each_backward:
            assert self.gshard is not None
            self.going = start(self.grad, axis, P, move.dst, self.gshard, behind=True)
            return
        sent, self.grad, self.grad_views = self.grad, None, []
        self.filled = [False] * len(self.params)
        out = self._room(sent, move.dst)
        arriving = start(sent, axis, P, move.dst, out, behind=True)
        self.going = Pending([arriving.wait, lambda: self._arrived(out, sent)])

    def _room(self, sent: Tensor, dst: Placement) -> Tensor:
        """The place of the sum of `sent`: `gsum` if that holds nothing yet, or `sent` itself."""
        fresh = not any(self.valid)
        if dst == R or not fresh:
            out = sent if dst == R else self.views.block(sent)
        else:
            out = sent.new_empty(self.views.plan.share) if self.gsum is None else self.gsum
        if fresh:
            self.gsum, self.valid = out, [True] * len(self.params)
            self.gshard = out if dst != R else self.views.block(out)
        return out

    def _zero_unfilled(self) -> None:
        for view, filled in zip(self.grad_views, self.filled, strict=True):
            if not filled:
                view.zero_()

    def _arrived(self, out: Tensor, sent: Tensor) -> None:
        """The sum is in `out`: add it where gsum holds something. `sent` lived until now."""
        gsum = self.gsum
        assert gsum is not None
        if out is not gsum:
            whole = gsum.numel() == self.views.plan.padded
            pieces = self.views.pieces
            parts = self.views.every(gsum) if whole else [gsum[low:high] for low, high in pieces]
            for part, valid in zip(parts, self.valid, strict=True):
                if not valid:
                    part.zero_()
            gsum.add_(out)
        self.valid = [True] * len(self.params)

    def end_reduce(self) -> None:
        self.going.wait()

    def begin_further(self) -> None:
        """Start the sum of `gshard` over replicas of this shard, then over the other axes."""
        self.going = self._sum_over(self.further)

    def _sum_over(self, axes: Sequence[Axis]) -> Pending:
        if not axes or self.gshard is None:
            return Pending()
        first, *others = axes
        going = start(self.gshard, first, P, R, self.gshard, behind=True)
        return Pending([going.wait, lambda: self._sum_over(others).wait()]) if others else going

    def begin_offload(self) -> None:
        """Start to copy `gshard` to the tier of the update, and free it here."""
        tier = self.moves.offload
        if tier is None or self.gshard is None:
            return
        if self.host_grad is None:
            self.host_grad = self.tiers.empty_like(self.gshard, "host")
            if self.late:
                self.other_host_grad = self.tiers.empty_like(self.gshard, "host")
        if any(self.resting):
            arriving = begin_copy(self.gshard, self.tiers, "device", "host")
            self.going = Pending([lambda: self._add(arriving.wait())])
        else:
            self.going = begin_copy(self.gshard, self.tiers, "device", tier, self.host_grad)
        self.grad, self.grad_views, self.gsum, self.gshard = None, [], None, self.host_grad
        self.filled, self.valid = ([False] * len(self.params) for _ in range(2))

    def swap(self) -> None:
        """Let the gradients of the next step arrive beside those of this one."""
        self.host_grad, self.other_host_grad = self.other_host_grad, self.host_grad

    def _add(self, arrived: Tensor) -> None:
        assert self.host_grad is not None
        for (low, high), rests in zip(self.views.pieces, self.resting, strict=True):
            if not rests:
                self.host_grad[low:high].zero_()
        self.host_grad.add_(arrived)

    # --- on the parameters --------------------------------------------------------------------

    def attach(self) -> None:
        """Set each p.grad to its piece of `gshard`, unless the update is made elsewhere."""
        for i, p in enumerate(self.params if self.moves.publish is None else ()):
            p.grad = self._own(i) if self.used[i] else None
            if i in self.graphs and p.grad is not None:
                p.grad = mean_with_graph(self.graphs.pop(i), p.grad)
        for i, rows in self.touched.items():
            self.touched[i] = begin_sum(rows, self.replicate_axis).wait().clamp_(max=1)
        self.attached = True

    def hide(self) -> None:
        """Take pieces off full parameters: torch.compile reads no gradient of another shape."""
        if self.attached and self.views.plan.ranks > 1 and not self.hidden:
            self.hidden = [p.grad for p in self.params]
            for p in self.params:
                p.grad = None

    def unhide(self) -> None:
        for p, gradient in zip(self.params, self.hidden, strict=False):
            if gradient is not None:
                full, p.data = p.data, gradient.detach()  # of whose shape a gradient must be
                p.grad, p.data = gradient, full
        self.hidden = []

    def sparse(self, index: int) -> Tensor | None:
        """The gradient on a parameter as a sparse tensor of the rows that any rank looked up."""
        gradient = self.params[index].grad
        if index not in self.touched or gradient is None or gradient.is_sparse:
            return gradient
        rows = self.touched[index].nonzero()
        values, shape = gradient[rows[:, 0]], gradient.shape
        return torch.sparse_coo_tensor(rows.t(), values, shape, check_invariants=False)

    def is_replaced(self, gradient: Tensor) -> bool:
        """Whether the program has put this gradient in the place of a piece of ours."""
        ours = self.gshard
        return ours is not None and gradient._base is not (
            ours if ours._base is None else ours._base
        )

    def _own(self, index: int) -> Tensor:
        assert self.gshard is not None
        return self.views.part(index, self.gshard)

    def detach(self) -> None:
        """Before a backward pass: take each p.grad back, unless the user has set it to None.
        Autograd would add to p.grad in place, but that is a piece. Gradients already summed over
        the replicas are divided: the next sum counts them once.
        """
        if not self.attached:
            return
        self.attached = False
        kept = [p.grad is not None for p in self.params]
        for i, p in enumerate(self.params):
            piece = self._own(i)
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()
            if p.grad is None and i in self.touched:
                self.touched[i].zero_()
            if p.grad is not None and p.grad.data_ptr() != piece.data_ptr():
                piece.copy_(p.grad.detach())  # the user has put another there
            if p.grad is not None and p.grad.requires_grad and torch.is_grad_enabled():
                self.graphs[i] = p.grad
            p.grad = None
        self.has_grad = list(kept)
        if self.moves.offload:
            self.resting, self.gshard = kept, None
            return
        assert self.gshard is not None
        if any(kept) and self.replicate_axis.size > 1:
            self.gshard.div_(self.replicate_axis.size)
        if self.moves.each_backward:
            self.valid = kept
            return
        self.filled = kept
        # beyond the block lie remains of what was sent
        if self.views.plan.ranks > 1 and self.grad is not None:
            block = self.gshard.clone()
            self.grad.zero_()
            self.gshard.copy_(block)

    def free(self) -> None:
        """Free the memory of dropped gradients on the device, until backward makes others."""
        if self.moves.offload or (self.attached and any(p.grad is not None for p in self.params)):
            return
        if self.attached:
            self.detach()
        if not (any(self.filled) or any(self.valid)):
            self.grad, self.grad_views, self.gsum, self.gshard = None, [], None, None

    def clear(self) -> None:
        """Drop the gradients; their memory stays until the next step: `free`."""
        none = [False] * len(self.params)
        self.filled, self.valid, self.has_grad = list(none), list(none), list(none)
        self.resting = list(none)
        self.attached = False
        self.graphs.clear()
        for p in self.params:
            p.grad = None


def mean_with_graph(own: Tensor, mean: Tensor) -> Tensor:
    """The values of `mean` in new memory, with the graph of `own`, for `create_graph=True`. The
    mean's derivative goes to the rank's own gradient: data parallelism averages over ranks.
    """
    with torch.enable_grad():
        return _Mean.apply(own, mean)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, mean: Tensor) -> Tensor:  # noqa: ARG004
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None
