"""Experts of transformers on the axis `ep`: the library's own module computes one rank's experts.

MixtralExperts and the experts of some seventy other models hold the weights of E experts stacked,
[E, ...], and share one signature:

    forward(rows [N, D], experts of each row [N, K], their weights [N, K]) -> [N, D]

Router, shared experts and losses are other modules, which do not change. Under `tp` a rank holds a
part of the hidden features of every expert (apply.py). Under `ep` a rank holds E / n of the
experts. It exchanges rows as dispatch.py does, calls the module's own forward with one expert of
weight 1 for each row it received, and applies the weights where the rows come from.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.techniques.expert.dispatch import Exchange
from shardwise.techniques.expert.moe_layer import ExpertPlace, require_finite
from shardwise.techniques.expert.routing import Routing, even_counts


def stacked_experts(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if _stacks(module)}


def _stacks(module: nn.Module) -> bool:
    experts, params = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    arguments = list(inspect.signature(type(module).forward).parameters)
    return (
        isinstance(experts, int)
        and len(params) > 1
        and all(p.dim() > 1 and len(p) == experts for p in params)
        and len(arguments) == 4
        and arguments[1] == "hidden_states"
        and choices_of(module) > 0
    )


def experts_of(module: nn.Module) -> int:
    return int(getattr(module, "num_experts", 0))


def choices_of(module: nn.Module) -> int:
    """How many experts a token has; 0 if the configuration does not say."""
    found = getattr(getattr(module, "config", None), "num_experts_per_tok", 0)
    return found if isinstance(found, int) else 0


def width_of(module: nn.Module) -> int:
    return int(getattr(getattr(module, "config", None), "hidden_size", 0))


class StackedOnRanks:
    """Replaces the forward of such a module, which has the weights of this rank's experts."""

    def __init__(self, module: nn.Module, place: ExpertPlace) -> None:
        self.place, self.experts = place, experts_of(module)
        own: Any = copy.copy(module)  # which shares its parameters
        own.num_experts = self.experts // place.ep.size
        self.own_experts, self.__wrapped__ = own, module.forward

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Rows [N, D] to [N, D]. Called by all ranks of the axis."""
        place, no_rows = self.place, self.place.has_no_rows()
        x_ND, weights_NK = place.enter(hidden_states), place.enter(top_k_weights)
        x_ND = x_ND[:0] if no_rows else x_ND
        experts_NK = top_k_index[:0] if no_rows else top_k_index
        loads = self._loads(experts_NK, weights_NK)
        routing = Routing(experts_NK, weights_NK, experts_NK, loads, loads.sum(0), 0)
        exchange = Exchange.of(routing, place.batch, place.ep, place.peers)
        token = exchange.choices // experts_NK.shape[1]
        rows = exchange.dispatch(x_ND.index_select(0, token))
        made = exchange.combine(self._run_experts(rows, exchange.rows_by_expert))
        weights = weights_NK.flatten()[exchange.choices].unsqueeze(-1)
        made = (made * weights).to(hidden_states.dtype)
        return place.leave(torch.zeros_like(hidden_states).index_add(0, token, made))

    def _loads(self, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """The choices of each expert on all ranks, [R, E] on the CPU; even ones on meta."""
        place, everyone = self.place, self.place.batch.gather
        if experts_NK.is_meta:
            everyone(experts_NK.new_empty(self.experts + 1))
            even = even_counts(experts_NK.numel(), self.experts)
            return even.expand(place.batch.ranks, -1)
        own = torch.bincount(experts_NK.flatten(), minlength=self.experts)
        # a stand-in's do not count
        finite = torch.isfinite(weights_NK.detach()).all() | place.has_no_rows()
        found = everyone(torch.cat([own, finite.long().view(1)])).cpu()
        if not (self.own_experts.training and place.skips()):  # the loss will not be finite
            require_finite(place.name, found[:, -1].tolist(), "ep rank")
        return found[:, :-1]

    def _run_experts(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Without rows the module would use no weight, and backward passes of others would wait."""
        if not len(rows):
            return rows + sum(p[:0].sum() for p in self.own_experts.parameters(recurse=False))
        sizes = torch.tensor(counts, dtype=torch.int64, device=rows.device)
        expert = torch.arange(len(counts), dtype=torch.int64, device=rows.device)
        expert = expert.repeat_interleave(sizes, output_size=len(rows)).view(-1, 1)
        forward: Callable[..., Tensor] = type(self.own_experts).forward
        return forward(self.own_experts, rows, expert, torch.ones_like(expert, dtype=rows.dtype))
