"""Whole tensors for optimizers that need them: each is updated by one rank, its owner.

Ranks of the shard axis hold pieces of a parameter and of its gradient.  For the update each sends
its pieces to the parameter's owner, which holds the optimizer's state of the whole:

    rank r    gradient, weight: pieces  ---all-to-all--->  owner    gradient, weight: whole
                                                                    torch's step on the whole
              weight: pieces            <--all-to-all----           weight: whole

The weight is the fp32 master of a 16-bit parameter; a gradient has the weight's dtype.  With N
elements on n ranks, a rank sends N (n-1)/n^2 of each of the three if owners have equally much.
Owners are chosen by the number of elements (core/layouts/uneven.py), so the state of a rank exceeds
1/n of all by less than the largest tensor.  Between updates the owner's parameter has its shape,
without memory.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.comm.move import begin_all_to_all
from shardwise.comm.transport import Pending
from shardwise.core.layouts.uneven import owners
from shardwise.flat.flat_parameter import Flat
from shardwise.techniques.data.unit_hooks import Data

#: A parameter: its flat group, and its index there.
Place = tuple[Flat, int]


class Owners:
    """The owners of the whole tensors among the parameters of `flats`: `is_whole(name, dims)`.

    rank_of    the owner of each: its rank on the shard axis of the flat group
    targets    what torch's optimizer steps on: here without elements if another rank is the owner
    """

    def __init__(self, is_whole: Callable[[str, int], bool], flats: Sequence[Flat]) -> None:
        by_axis: dict[str, dict[str, Place]] = {}
        for flat in flats:
            for i, (name, shape) in enumerate(zip(flat.names, flat.shapes, strict=True)):
                if flat.split and is_whole(name, len(shape)):
                    by_axis.setdefault(flat.shard_axis.name, {})[name] = flat, i
        self.rank_of: dict[Place, int] = {}
        for places in by_axis.values():
            numels = {name: flat.shapes[i].numel() for name, (flat, i) in places.items()}
            axis = next(iter(places.values()))[0].shard_axis
            found = owners(numels, axis.size)
            self.rank_of |= {place: found[name] for name, place in places.items()}
        every = ((flat, i) for flat in flats for i in range(len(flat.names)))
        self.targets = {place: self._target(*place) for place in every if place in self.rank_of}
        self.resting = {place: target.data for place, target in self.targets.items()}

    def is_here(self, flat: Flat, i: int) -> bool:
        return self.rank_of[flat, i] == flat.shard_axis.rank

    def _target(self, flat: Flat, i: int) -> nn.Parameter:
        shape, like = flat.shapes[i], flat.shard
        wide = torch.promote_types(like.dtype, torch.float32)
        if self.is_here(flat, i):
            return nn.Parameter(like.new_zeros((), dtype=wide).expand(shape))
        return nn.Parameter(like.new_zeros([0] * len(shape), dtype=wide))

    @torch.no_grad()
    def collect(
        self,
        weights: Mapping[Flat, Tensor],
        gradients: Mapping[Flat, Tensor | None],
        factor: Tensor | float,
    ) -> None:
        """Give this rank's targets their weights and gradients, from the blocks of the flat groups.
        16-bit gradients are multiplied by `factor`.
        """
        blocks = {flat: x for flat, x in gradients.items() if x is not None}
        for places in self._messages(weights):
            coming = PieceExchange(self, places).begin(weights)
            graded = [place for place in places if place[0] in blocks]
            arrived = PieceExchange(self, graded).begin(blocks).wait() if graded else {}
            for (flat, i), whole in coming.wait().items():
                target, shape = self.targets[flat, i], flat.shapes[i]
                target.data = whole.view(shape)
                if flat.grads.used[i] and (flat, i) in arrived:
                    own = arrived[flat, i].view(shape)
                    half = own.dtype != whole.dtype
                    target.grad = own.to(whole.dtype).mul_(factor) if half else own

    @torch.no_grad()
    def give(self, weights: Mapping[Flat, Tensor]) -> None:
        """Send the updated weights of this rank's targets to the ranks that hold their pieces."""
        for exchange in (PieceExchange(self, places) for places in self._messages(weights)):
            exchange.end([self.targets[place] for place in exchange.own], weights)
            for place in exchange.own:
                self.targets[place].grad = None
                self.targets[place].data = self.resting[place]

    def _messages(self, weights: Mapping[Flat, Tensor]) -> list[list[Place]]:
        found: dict[object, list[Place]] = {}
        for flat, i in (place for place in self.targets if place[0] in weights):
            found.setdefault((flat.shard_axis.name, flat.dtype), []).append((flat, i))
        return list(found.values())


class PieceExchange:
    """One message to the owners of `places`, or back from them.

    own      the places of which this rank is the owner
    pieces   what this rank holds of all, by owner: flat group, first and last element in its block
    parts    by rank, what it holds of each of `own`: first element and number
    """

    def __init__(self, owners: Owners, places: Sequence[Place]) -> None:
        rank_of = owners.rank_of
        self.axis = places[0][0].shard_axis
        self.own = [place for place in places if owners.is_here(*place)]
        by_owner = sorted(places, key=rank_of.__getitem__)
        self.pieces = [(flat, *flat.pieces[i]) for flat, i in by_owner]
        self.parts = [
            [_part(flat, i, rank) for flat, i in self.own] for rank in range(self.axis.size)
        ]
        self.sent = [0] * self.axis.size
        for place, (_, low, high) in zip(by_owner, self.pieces, strict=True):
            self.sent[rank_of[place]] += high - low
        self.received = [sum(numel for _, numel in parts) for parts in self.parts]

    def begin(self, blocks: Mapping[Flat, Tensor]) -> Pending[dict[Place, Tensor]]:
        """Begin to send pieces of flat blocks to their owners; the whole tensors of this rank."""
        pieces = torch.cat([blocks[flat][low:high] for flat, low, high in self.pieces])
        arriving = begin_all_to_all(pieces, self.axis, self.received, self.sent)

        def wholes() -> dict[Place, Tensor]:
            found = arriving.wait().split([numel for parts in self.parts for _, numel in parts])
            return {p: torch.cat(found[n :: len(self.own)]) for n, p in enumerate(self.own)}

        return Pending([wholes])

    def end(self, wholes: Sequence[Tensor], blocks: Mapping[Flat, Tensor]) -> None:
        """Send the whole tensors of this rank; write the pieces of all to their blocks."""
        ends = [whole.detach().reshape(-1) for whole in wholes]
        sent = [
            whole[first : first + numel]
            for parts in self.parts
            for whole, (first, numel) in zip(ends, parts, strict=True)
        ]
        none = blocks[self.pieces[0][0]].new_empty(0)
        arriving = begin_all_to_all(torch.cat([none, *sent]), self.axis, self.sent, self.received)
        arrived = arriving.wait().split([high - low for _, low, high in self.pieces])
        for (flat, low, high), piece in zip(self.pieces, arrived, strict=True):
            blocks[flat][low:high] = piece


def _part(flat: Flat, i: int, rank: int) -> tuple[int, int]:
    low, high = flat.plan.piece(i, rank)
    return flat.plan.origin(i, rank), high - low


# --- in a loop of the program's own ---------------------------------------------------------------

#: Classes of torch.optim that update each tensor alone, and need it whole.
WHOLE = "Muon", "Adafactor"


def needs_whole(optimizer: Optimizer) -> bool:
    """Whether it needs whole tensors: by its class, or by `optim.elementwise = False`."""
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim") and kind.__name__ in WHOLE
    return not getattr(optimizer, "elementwise", not known)


class WholeSteps:
    """The steps of `optimizer` over the parameters of one sharded module: within a step they are
    whole on their owners, elsewhere without elements.  `owned` has their identities, and whether
    this rank is the owner.
    """

    def __init__(self, optimizer: Optimizer, data: Data) -> None:
        own = {p for group in optimizer.param_groups for p in group["params"]}
        names = {flat.names[i] for p, (_, flat, i) in data.places.items() if p in own}
        self.owners = Owners(lambda name, _: name in names, data.trained)
        self.places = {(flat, i): flat.params[i] for flat, i in self.owners.targets}
        self.owned = {id(p): self.owners.is_here(*place) for place, p in self.places.items()}
        self.pieces: list[tuple[nn.Parameter, Tensor, Tensor | None, int]] = []

    def begin(self) -> None:
        """Before a step: parameters and gradients become whole, or nothing."""
        for (flat, i), p in self.places.items():
            grads = flat.grads
            if p.grad is not None and grads.gshard is not None and grads.is_replaced(p.grad):
                flat.views.part(i, grads.gshard).copy_(p.grad)
        weights = self._weights()
        self.owners.collect(weights, {flat: flat.grads.gshard for flat in weights}, 1.0)
        for place, p in self.places.items():
            target = self.owners.targets[place]
            self.pieces.append((p, p.data, p.grad, p._version))
            target.grad = None if p.grad is None else target.grad
            p.grad, p.data = None, target.data
            p.grad = target.grad

    def end(self) -> None:
        """After a step: they become pieces again."""
        for place, p in self.places.items():
            self.owners.targets[place].data = p.data
        self.owners.give(self._weights())
        torch_c: Any = torch._C
        for p, data, grad, version in self.pieces:
            p.grad, p.data = None, data
            p.grad = grad
            torch_c._autograd._unsafe_set_version_counter((p,), (version + 1,))  # on all ranks
        self.pieces.clear()

    def _weights(self) -> dict[Flat, Tensor]:
        return {flat: flat.shard for flat, _ in self.places}
