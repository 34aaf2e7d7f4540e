"""Weights that rank 0 alone has: sent to the ranks that hold a part, one parameter at a time.

Rank 0 has real weights, as from_pretrained loads them, the other ranks the same model on the meta
device.  `take` puts the parameters on meta on rank 0 too, which keeps their values apart; the model
is sharded as any model on meta; `deliver` broadcasts one parameter after another, of which each
rank keeps its part.  No other rank has more than one whole parameter at a time, beside a unit that
it writes.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shardwise.comm.move import all_reduce, broadcast
from shardwise.comm.parameter import become
from shardwise.comm.world import Axis, World
from shardwise.core.applied import Fill
from shardwise.core.errors import bad
from shardwise.engine.precision import param_dtypes
from shardwise.flat.flat_parameter import Flat


@dataclass(frozen=True)
class _Place:
    """A parameter of this rank: the index in its flat parameter, and what cuts the full tensor."""

    flat: Flat
    index: int
    name: str
    fill: Fill


@dataclass
class RankZeroWeights:
    """The parameters that rank 0 has and some other rank has not; usually none.

    like      by name, a tensor on meta
    values    the same with their values; on rank 0 alone
    places    by name, where this rank holds them
    """

    axis: Axis = field(default_factory=lambda: Axis("none"))
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    like: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    values: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    places: dict[str, list[_Place]] = field(default_factory=lambda: defaultdict(list))
    arrived: tuple[str, Tensor] | None = None  # while it is delivered

    @classmethod
    def take(
        cls,
        model: nn.Module,
        missing: Iterable[str],
        world: World,
        dtype: torch.dtype | None = None,
    ) -> "RankZeroWeights":
        """Put the parameters among `missing` on meta; all ranks call it.  Buffers arrive at once.
        They are sent in the dtypes that the precision `dtype` gives them (precision.py).
        """
        weights = cls(world.everyone, world.device)
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        dtypes = {} if dtype is None else dict(param_dtypes(model, dtype))
        for name in missing:
            if name in buffers:
                _send_buffer(model, name, buffers[name], world)
                continue
            p = parameters[name]
            if not world.rank:
                weights.values[name] = p.data
            weights.like[name] = torch.empty(p.shape, dtype=dtypes.get(p, p.dtype), device="meta")
            become(p, torch.empty_like(p.data, device="meta"))
        return weights

    def fill(self, before: Fill | None) -> Fill:
        """Fill a parameter with the values that have arrived; before they have, leave it."""

        def fill(name: str, tensor: Tensor) -> None:
            if self.arrived is not None and self.arrived[0] == name:
                tensor.copy_(self.arrived[1])
            elif name not in self.like and before is not None:
                before(name, tensor)

        return fill

    def expect(self, flat: Flat, names: Sequence[str], fill: Fill) -> None:
        """`flat` holds the parameters of these names; `fill` fills its views of them."""
        for index, (name, full) in enumerate(zip(names, flat.names, strict=True)):
            if full in self.like:
                self.places[full].append(_Place(flat, index, name, fill))

    @torch.no_grad()
    def deliver(self) -> None:
        """Write the weights to the flat parameters; all ranks call it."""
        left = defaultdict[Flat, int](int)
        for place in (place for places in self.places.values() for place in places):
            left[place.flat] += 1
        for name, whole in self.broadcasts():
            self.arrived = name, whole
            for place in self.places.pop(name, ()):
                flat = place.flat
                flat.unshard_in_own_dtype()
                place.fill(place.name, flat.params[place.index].data)
                left[flat] -= 1
                if not left[flat]:
                    flat.keep_block()
                    flat.rest()
            self.arrived = None

    def broadcasts(self) -> Iterator[tuple[str, Tensor]]:
        """The name and the values of one parameter after another, in the model's order."""
        for name, like in self.like.items():
            if self.axis.rank:
                whole = torch.empty_like(like, device=self.device)
            else:
                whole = self.values.pop(name).to(self.device, like.dtype).contiguous()
            broadcast(whole, self.axis)
            yield name, whole


def _send_buffer(model: nn.Module, name: str, b: Tensor, world: World) -> None:
    values = torch.empty_like(b, device=world.device) if b.is_meta else b.to(world.device)
    values = values.contiguous()
    broadcast(values, world.everyone)
    prefix, _, key = name.rpartition(".")
    model.get_submodule(prefix)._buffers[key] = values


def missing_weights(model: nn.Module, world: World) -> tuple[str, ...]:
    """The names of tensors that rank 0 has and another rank has not; all ranks call it.
    Raises InputError on every rank for a tensor that is on meta on rank 0 and not elsewhere.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    if world.size == 1 or not named:
        return ()
    flags = [t.is_meta for _, t in named]
    meta = torch.tensor(flags, dtype=torch.bool, device=world.device)
    # over all ranks: on meta somewhere, real somewhere; on meta on rank 0
    flags = all_reduce(torch.stack([meta, ~meta]).int(), world.everyone, "max")
    first = broadcast(meta.int(), world.everyone)
    table = torch.stack([*flags, first]).bool().t().tolist()
    placements = [(name, *row) for (name, _), row in zip(named, table, strict=True)]
    wrong = [name for name, _, real, on_first in placements if real and on_first]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise bad(
            f"{wrong[0]}{more} on the meta device on rank 0, and not on other ranks",
            "a model that is on the meta device on all ranks, on all but rank 0, or on none",
            "from_pretrained on rank 0, and the same model under torch.device('meta') on others",
        )
    return tuple(name for name, on_meta, _, on_first in placements if on_meta and not on_first)
